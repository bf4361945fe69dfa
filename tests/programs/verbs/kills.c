/*
 * Two ends that send to each other without end. The first one survives: when its peer has died, it waits until all its requests have
 * completed, prints a line, and connects to the next peer. The second one kills itself in a call: it executes the call once in single
 * steps to count the instructions, and dies at a random instruction of the next such call. Before that, it prints that it is at work.
 * With "none", another process kills it.
 *
 * Usage: kills DEVICE 0|1 own|shared post|poll|receive|register|deregister|none SEED [TIMEOUT]
 *
 * TIMEOUT is that of the queue pairs; the default is 16 (2 s in all).
 */
#define _GNU_SOURCE
#include "ends.h"
#include "steps.h"

#define SENDS 16
#define RECEIVES 32
#define LONGEST 256
/* Maximum number of seconds without a completion, or without the end of a connection. A process that steps through a call on a busy
 * machine takes long for one. */
#define STALL 300

#define BYTES ((SENDS + 3 * RECEIVES) * LONGEST)

static struct end end;
static int is_survivor, timeout = 16;

/* The call in which this process dies. */
static const char *fatal;
/* Whether it has received a message. */
static int is_at_work;
static unsigned before_steps;

/*
 * Returns whether to execute the call of this name in single steps. It is neither the first such call nor always the same one. It
 * does not happen before the other end exists, because that end would then have to wait until this one counts as unreachable.
 */
static int is_stepped(const char *name)
{
	if (!is_at_work || strcmp(name, fatal) || before_steps-- > 0)
		return 0;
	before_steps = below(8);
	return 1;
}

static volatile uint64_t calls;

#define CALL(name, call)                  \
	do {                              \
		calls++;                  \
		if (is_stepped(name))     \
			STEPPED(call);    \
		else                      \
			call;             \
	} while (0)

/* Send requests: all are signaled, and complete in order. */
static uint64_t posted, complete;
static int has_failed, sends_have_failed;
/* Receives that are posted. In a shared receive queue, they stay when a connection ends. */
static char is_posted[RECEIVES];
static unsigned receives;
static uint64_t received;

static void post_sends(void)
{
	while (posted - complete < SENDS && !has_failed) {
		unsigned length = below(2) ? below(33) : below(LONGEST + 1), what = below(8);
		uint64_t offset = (SENDS + RECEIVES + posted % RECEIVES) * LONGEST;
		struct ibv_sge sge = {(uintptr_t)end.bytes + posted % SENDS * LONGEST, length, end.mr->lkey};
		struct ibv_send_wr wr = {
			.wr_id = posted++,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = what < 4 ? IBV_WR_SEND : what < 7 ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_READ,
			.send_flags = IBV_SEND_SIGNALED | (what == 0 && length <= 64 ? IBV_SEND_INLINE : 0),
			.wr.rdma = {end.address + offset, end.key},
		}, *bad;
		int result;
		CALL("post", result = ibv_post_send(end.pairs[0], &wr, &bad));
		CHECK(!result);
	}
}

/* Each receive is used before any is posted again, so a lost one is noticed. */
static void post_receives(void)
{
	if (receives > 0 || has_failed)
		return;
	for (uint64_t i = 0; i < RECEIVES; i++) {
		struct ibv_sge sge = {(uintptr_t)end.bytes + (SENDS + i) * LONGEST, LONGEST, end.mr->lkey};
		struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
		int result;
		CHECK(!is_posted[i]);
		is_posted[i] = 1;
		receives++;
		CALL("receive", result = end.srq ? ibv_post_srq_recv(end.srq, &wr, &bad) : ibv_post_recv(end.pairs[0], &wr, &bad));
		CHECK(!result);
	}
}

static int poll_one(struct ibv_cq *cq, struct ibv_wc *wc)
{
	int found;
	CALL("poll", found = ibv_poll_cq(cq, 1, wc));
	CHECK(found >= 0);
	if (found)
		CHECK(wc->qp_num == end.pairs[0]->qp_num);
	return found;
}

static int take(void)
{
	struct ibv_wc wc;
	int found = 0;
	while (poll_one(end.sends, &wc)) {
		found++;
		CHECK(wc.wr_id == complete && complete < posted);
		complete++;
		/* Of the requests that fail, only the first may report the reason. */
		int is_fine = wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_RETRY_EXC_ERR ? !sends_have_failed
											       : wc.status == IBV_WC_WR_FLUSH_ERR;
		if (!is_fine)
			fprintf(stderr, "send %lu: status %d\n", wc.wr_id, wc.status);
		CHECK(is_fine);
		has_failed |= sends_have_failed |= wc.status != IBV_WC_SUCCESS;
	}
	while (poll_one(end.receives, &wc)) {
		found++;
		CHECK(wc.wr_id < RECEIVES && is_posted[wc.wr_id]);
		is_posted[wc.wr_id] = 0;
		receives--;
		CHECK(wc.status == IBV_WC_SUCCESS || (wc.status == IBV_WC_WR_FLUSH_ERR && !end.srq));
		has_failed |= wc.status != IBV_WC_SUCCESS;
		received++;
	}
	if (!is_survivor && !is_at_work && received > 0) {
		is_at_work = 1;
		puts("at work");
		fflush(stdout);
	}
	return found;
}

/* Registers and deregisters a region. */
static void register_another(void)
{
	static char bytes[3 * 4096] __attribute__((aligned(4096)));
	struct ibv_mr *mr;
	int result;
	CALL("register", mr = ibv_reg_mr(end.pd, bytes + below(4096), 4096, ALL_ACCESS));
	CHECK(mr);
	CALL("deregister", result = ibv_dereg_mr(mr));
	CHECK(!result);
}

static void sleep_for_one(void)
{
	CHECK(!ibv_req_notify_cq(end.sends, 0) && !ibv_req_notify_cq(end.receives, 0));
	if (take())
		return;
	struct ibv_cq *cq;
	void *context;
	CHECK(!ibv_get_cq_event(end.channel, &cq, &context));
	ibv_ack_cq_events(cq, 1);
}

/* Returns whether all requests of the connection have completed. */
static int is_over(void)
{
	return has_failed && complete == posted && (end.srq || receives == 0);
}

static void work(int sleeps)
{
	unsigned turn = 0;
	while (!is_over()) {
		post_sends();
		post_receives();
		if (turn++ % 16 == 0)
			register_another();
		if (take())
			alarm(STALL);
		else if (sleeps)
			sleep_for_one();
	}
}

static void connected(int sleeps)
{
	alarm(STALL);
	posted = complete = received = 0;
	has_failed = sends_have_failed = 0;
	make_pairs(&end, SENDS, RECEIVES);
	/* The receives that stay in a shared receive queue refer to its region. */
	if (!end.mr)
		register_end(&end);
	post_receives();
	/* The next peer may be a VM that has to boot first. */
	alarm(0);
	if (!connect_end(&end, timeout)) {
		puts("good");
		exit(0);
	}
	alarm(STALL);
	work(sleeps);
	CHECK(!ibv_destroy_qp(end.pairs[0]));
	if (!end.srq) {
		CHECK(receives == 0 && !ibv_dereg_mr(end.mr));
		end.mr = NULL;
	}
	printf("over after %lu messages\n", received);
	fflush(stdout);
}

static void stalled(int signal)
{
	(void)signal;
	fprintf(stderr, "no progress: %lu sends posted, %lu complete, %u receives posted, %lu received%s, %lu calls\n", posted, complete,
		receives, received, has_failed ? ", has failed" : "", calls);
	_exit(3);
}

int main(int count, char **arguments)
{
	CHECK(count == 6 || count == 7);
	if (count == 7)
		timeout = atoi(arguments[6]);
	is_survivor = !strcmp(arguments[2], "0");
	int shared = !strcmp(arguments[3], "shared");
	fatal = is_survivor ? "" : arguments[4];
	random_state = strtoul(arguments[5], NULL, 10);
	before_steps = 1 + below(200);
	prepare_steps();
	signal(SIGALRM, stalled);
	open_end(&end, arguments[1], 1, shared, SENDS, RECEIVES, BYTES);
	for (unsigned turn = 0;; turn++) {
		connected(is_survivor ? turn & 1 : 0);
		/* The survivor never dies. */
		CHECK(is_survivor);
	}
}
