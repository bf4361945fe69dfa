/*
 * Waits until it is told that its device is lost: in ibv_get_async_event ("waits"), or while it polls a completion queue of a queue
 * pair that is connected to itself ("polls"). After that, all objects must be destroyed without errors and without using CPU time.
 * Usage: lost DEVICE waits|polls
 */
#include "ends.h"
#include <fcntl.h>
#include <poll.h>

static void connect_with_itself(struct end *end)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = end->pairs[0]->qp_num,
		.ah_attr = {.port_num = 1},
	};
	CHECK(!ibv_modify_qp(end->pairs[0], &attr,
			     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
}

static void take_event(struct end *end)
{
	struct ibv_async_event event;
	CHECK(!ibv_get_async_event(end->context, &event));
	CHECK(event.event_type == IBV_EVENT_DEVICE_FATAL);
	ibv_ack_async_event(&event);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	alarm(60);
	struct end end = {0};
	open_end(&end, argv[1], 1, 0, 1, 1, 4096);
	struct ibv_context *other = open_named(argv[1]);
	register_end(&end);
	make_pairs(&end, 1, 1);
	printf("ready\n");
	fflush(stdout);
	struct pollfd told = {.fd = end.context->async_fd, .events = POLLIN};
	if (!strcmp(argv[2], "polls")) {
		connect_with_itself(&end);
		struct ibv_wc wc;
		while (!poll(&told, 1, 0))
			CHECK(ibv_poll_cq(end.receives, 1, &wc) >= 0);
	}
	take_event(&end);
	/* Each context gets the event, one after the other, and only once. */
	struct pollfd other_told = {.fd = other->async_fd, .events = POLLIN};
	CHECK(poll(&other_told, 1, -1) == 1);
	CHECK(!poll(&told, 1, 0));
	printf("lost\n");
	fflush(stdout);
	wait_for_end();
	CHECK(!ibv_destroy_qp(end.pairs[0]) && !ibv_dereg_mr(end.mr));
	CHECK(!ibv_destroy_cq(end.sends) && !ibv_destroy_cq(end.receives) && !ibv_destroy_comp_channel(end.channel));
	CHECK(!ibv_dealloc_pd(end.pd) && !ibv_close_device(end.context) && !ibv_close_device(other));
	return 0;
}
