/*
 * One end of the connections between two processes that run the same program. Each process prints a line with its address and reads
 * that of the other one; the test passes the lines on.
 */
#ifndef ENDS_H
#define ENDS_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                                  \
	do {                                                                                              \
		if (!(condition)) {                                                                       \
			fprintf(stderr, "line %d: not so: %s (errno %d)\n", __LINE__, #condition, errno); \
			exit(1);                                                                          \
		}                                                                                         \
	} while (0)

#define ALL_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)
#define MOST_PAIRS 4

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	/* The completion queues for sends and for receives. */
	struct ibv_cq *sends, *receives;
	/* The shared receive queue, unless each queue pair has its own. */
	struct ibv_srq *srq;
	struct ibv_qp *pairs[MOST_PAIRS];
	int count;
	/* The memory of this end. */
	struct ibv_mr *mr;
	char *bytes;
	size_t size;
	/* The memory of the other end. */
	uint64_t address;
	uint32_t key;
};

static inline struct ibv_context *open_named(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list);
	for (int i = 0; list[i]; i++) {
		if (!strcmp(ibv_get_device_name(list[i]), name)) {
			struct ibv_context *context = ibv_open_device(list[i]);
			CHECK(context);
			ibv_free_device_list(list);
			return context;
		}
	}
	CHECK(!"the device is there");
	return NULL;
}

/* Opens the device, creates completion queues with room for this many sends and receives of each queue pair, and allocates memory. */
static inline void open_end(struct end *end, const char *device, int pairs, int shared, int sends, int receives, size_t bytes)
{
	end->context = open_named(device);
	end->pd = ibv_alloc_pd(end->context);
	end->channel = ibv_create_comp_channel(end->context);
	CHECK(end->pd && end->channel);
	end->sends = ibv_create_cq(end->context, pairs * sends, NULL, end->channel, 0);
	end->receives = ibv_create_cq(end->context, pairs * receives, NULL, end->channel, 0);
	CHECK(end->sends && end->receives);
	if (shared) {
		struct ibv_srq_init_attr init = {.attr = {.max_wr = receives, .max_sge = 1}};
		end->srq = ibv_create_srq(end->pd, &init);
		CHECK(end->srq);
	}
	end->count = pairs;
	end->size = bytes;
	end->bytes = aligned_alloc(4096, bytes);
	CHECK(end->bytes);
	memset(end->bytes, 0, bytes);
}

static inline void register_end(struct end *end)
{
	end->mr = ibv_reg_mr(end->pd, end->bytes, end->size, ALL_ACCESS);
	CHECK(end->mr);
}

/* Creates the queue pairs, with room for this many sends and receives. */
static inline void make_pairs(struct end *end, int sends, int receives)
{
	for (int i = 0; i < end->count; i++) {
		struct ibv_qp_init_attr init = {
			.send_cq = end->sends,
			.recv_cq = end->receives,
			.srq = end->srq,
			.cap = {sends, end->srq ? 0 : receives, 1, 1, 64},
			.qp_type = IBV_QPT_RC,
		};
		end->pairs[i] = ibv_create_qp(end->pd, &init);
		CHECK(end->pairs[i]);
		struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS};
		CHECK(!ibv_modify_qp(end->pairs[i], &attr,
				     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	}
}

/*
 * Connects each queue pair to the one with the same index at the other end. Returns false if there is no other end any more. Requests
 * to an end that cannot be reached fail after eight times 4.096 us x 2^timeout.
 */
static inline int connect_end(struct end *end, int timeout)
{
	struct ibv_port_attr port;
	CHECK(!ibv_query_port(end->context, 1, &port));
	printf("at %lu %u %u", (unsigned long)(uintptr_t)end->bytes, end->mr->rkey, port.lid);
	for (int i = 0; i < end->count; i++)
		printf(" %u", end->pairs[i]->qp_num);
	printf("\n");
	fflush(stdout);
	unsigned long address;
	unsigned lid;
	if (scanf(" at %lu %u %u", &address, &end->key, &lid) != 3)
		return 0;
	end->address = address;
	for (int i = 0; i < end->count; i++) {
		unsigned number;
		CHECK(scanf("%u", &number) == 1);
		struct ibv_qp_attr attr = {
			.qp_state = IBV_QPS_RTR,
			.path_mtu = IBV_MTU_1024,
			.dest_qp_num = number,
			.max_dest_rd_atomic = 1,
			.min_rnr_timer = 12,
			.ah_attr = {.dlid = lid, .port_num = 1},
		};
		CHECK(!ibv_modify_qp(end->pairs[i], &attr,
				     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
		attr = (struct ibv_qp_attr){
			.qp_state = IBV_QPS_RTS, .timeout = timeout, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
		CHECK(!ibv_modify_qp(end->pairs[i], &attr,
				     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					     IBV_QP_MAX_QP_RD_ATOMIC));
	}
	return 1;
}

/* Returns the next pseudo-random number (SplitMix64). */
static inline uint64_t mix(uint64_t z)
{
	z += 0x9e3779b97f4a7c15;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

static uint64_t random_state;

static inline unsigned below(unsigned n)
{
	random_state += 0x9e3779b97f4a7c15;
	return mix(random_state) % n;
}

/* Waits until the test closes stdin, or writes a full stop. */
static inline void wait_for_end(void)
{
	for (int c = 0; c != EOF && c != '.'; c = getchar())
		;
}

#endif
