/*
 * Two ends. The first one sends three messages, and the second one posts receives only when it is told to continue.
 * Usage: waits DEVICE 0|1
 */
#include "ends.h"

#define COUNT 3
#define LENGTH 1000

static void take_all(struct ibv_cq *cq)
{
	for (int taken = 0; taken < COUNT;) {
		struct ibv_wc wc;
		int found = ibv_poll_cq(cq, 1, &wc);
		CHECK(found >= 0 && (!found || wc.status == IBV_WC_SUCCESS));
		taken += found;
	}
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	struct end end = {0};
	int sends = !atoi(argv[2]);
	open_end(&end, argv[1], 1, 0, COUNT, COUNT, 4096);
	register_end(&end);
	make_pairs(&end, COUNT, COUNT);
	CHECK(connect_end(&end, 14));
	struct ibv_sge sge = {(uintptr_t)end.bytes, LENGTH, end.mr->lkey};
	if (sends) {
		struct ibv_send_wr wr = {
			.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
		struct ibv_send_wr *bad;
		for (int i = 0; i < COUNT; i++)
			CHECK(!ibv_post_send(end.pairs[0], &wr, &bad));
	} else {
		struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1};
		struct ibv_recv_wr *bad;
		char word[8];
		CHECK(scanf("%7s", word) == 1);
		for (int i = 0; i < COUNT; i++)
			CHECK(!ibv_post_recv(end.pairs[0], &wr, &bad));
	}
	take_all(sends ? end.sends : end.receives);
	printf("done\n");
	fflush(stdout);
	/* The test looks at this state until it closes the input. */
	while (getchar() != EOF)
		;
	return 0;
}
