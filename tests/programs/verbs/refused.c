/* Calls for features that the device does not offer. Usage: refused DEVICE. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                                  \
	do {                                                                                              \
		if (!(condition)) {                                                                       \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #condition, errno);         \
			exit(1);                                                                          \
		}                                                                                         \
	} while (0)

static struct ibv_context *open_one(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list);
	for (int i = 0; list[i]; i++) {
		if (!strcmp(ibv_get_device_name(list[i]), name)) {
			struct ibv_context *context = ibv_open_device(list[i]);
			CHECK(context);
			return context;
		}
	}
	CHECK(!"the device is there");
	return NULL;
}

/* Closes a device and opens it again, as libraries do that first look at all devices. */
static void again(const char *name)
{
	static char bytes[8192];
	for (int turn = 0; turn < 3; turn++) {
		struct ibv_context *context = open_one(name);
		struct ibv_pd *pd = ibv_alloc_pd(context);
		struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
		CHECK(mr && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	}
	struct ibv_context *context = open_one(name);
	pid_t child = fork();
	if (!child) {
		/* The child has a device of its own. */
		struct ibv_context *own = open_one(name);
		struct ibv_cq *cq = ibv_create_cq(own, 1, NULL, NULL, 0);
		struct ibv_pd *pd = ibv_alloc_pd(own);
		struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_RC};
		struct ibv_qp *qp = ibv_create_qp(pd, &init);
		printf("child %#x\n", qp ? qp->qp_num : 0);
		fflush(stdout);
		_exit(!qp);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && !status);
	struct ibv_cq *cq = ibv_create_cq(context, 1, NULL, NULL, 0);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	CHECK(qp);
	printf("parent %#x\n", qp->qp_num);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	struct ibv_context *context = open_one(arguments[1]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, channel, 0);
	CHECK(pd && channel && cq);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	CHECK(qp);

	union ibv_gid gid = {0};
	struct ibv_ece ece = {0};
	char bytes[64];
	CHECK(ibv_attach_mcast(qp, &gid, 1) == EOPNOTSUPP && ibv_detach_mcast(qp, &gid, 1) == EOPNOTSUPP);
	CHECK(ibv_query_ece(qp, &ece) == EOPNOTSUPP && ibv_set_ece(qp, &ece) == EOPNOTSUPP);
	errno = 0;
	CHECK(!ibv_reg_dmabuf_mr(pd, 0, 4096, 0, 0, 0) && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(!ibv_import_pd(context, 1) && errno == EOPNOTSUPP);
	errno = 0;
	CHECK(!ibv_import_mr(pd, 1) && errno == EOPNOTSUPP);
	struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof bytes, 0);
	CHECK(mr && ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 1) && errno == EOPNOTSUPP);
	CHECK(!ibv_dereg_mr(mr));
	init.qp_type = IBV_QPT_XRC_SEND;
	errno = 0;
	CHECK(!ibv_create_qp(pd, &init) && errno == EOPNOTSUPP);
	CHECK(ibv_get_pkey_index(context, 1, 0xffff) == 0 && ibv_get_pkey_index(context, 1, 7) == -1);
	struct ibv_gid_entry entries[4];
	CHECK(ibv_query_gid_table(context, entries, 4, 0) == 1 && entries[0].gid.raw[0] == 0xfd);

	/* After a completion queue is destroyed, its channel has no event of it. */
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct ibv_recv_wr receive = {.wr_id = 1}, *bad;
	CHECK(!ibv_post_recv(qp, &receive, &bad));
	attr.qp_state = IBV_QPS_ERR;
	CHECK(!ibv_req_notify_cq(cq, 0) && !ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	struct pollfd readable = {.fd = channel->fd, .events = POLLIN};
	CHECK(poll(&readable, 1, 10000) == 1);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
	CHECK(poll(&readable, 1, 0) == 0);
	CHECK(!ibv_destroy_comp_channel(channel) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	again(arguments[1]);
	puts("good");
	return 0;
}
