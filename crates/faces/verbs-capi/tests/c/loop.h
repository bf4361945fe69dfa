// Two RC queue pairs of one process that are connected to each other, and some memory.
#ifndef LOOP_H
#define LOOP_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: not so: %s (errno: %s)\n", __FILE__, \
                __LINE__, #condition, strerror(errno)); \
            exit(1); \
        } \
    } while (0)

#define ALL_OPERATIONS \
    (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE | \
     IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | \
     IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)

#define ALL_ACCESS \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | \
     IBV_ACCESS_REMOTE_ATOMIC)

// Maximum number of waiting requests, of elements of a request, and of inline bytes.
#define MOST_SENDS 100
#define MOST_ELEMENTS 3
#define MOST_INLINE 64

struct loop {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cqs[2];
    struct ibv_qp *qps[2];
    struct ibv_mr *mr;
    char *bytes;
};

#define BYTES 65536

static inline struct ibv_context *open_named(const char *name) {
    int n;
    struct ibv_device **list = ibv_get_device_list(&n);
    struct ibv_context *context = NULL;
    CHECK(list);
    for (int i = 0; i < n; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name))
            context = ibv_open_device(list[i]);
    CHECK(context);
    ibv_free_device_list(list);
    return context;
}

static inline struct ibv_qp_init_attr_ex attributes(struct loop *loop, int i, uint64_t operations) {
    struct ibv_qp_init_attr_ex init = {
        .send_cq = loop->cqs[i],
        .recv_cq = loop->cqs[i],
        .cap = {.max_send_wr = MOST_SENDS,
            .max_recv_wr = 128,
            .max_send_sge = MOST_ELEMENTS,
            .max_recv_sge = 1,
            .max_inline_data = MOST_INLINE},
        .qp_type = IBV_QPT_RC,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = loop->pd,
        .send_ops_flags = operations,
    };
    return init;
}

static inline void connect_to(struct loop *loop, int i) {
    struct ibv_port_attr port;
    CHECK(!ibv_query_port(loop->context, 1, &port));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS};
    CHECK(!ibv_modify_qp(loop->qps[i], &attr,
                 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
                    .path_mtu = IBV_MTU_1024,
                    .dest_qp_num = loop->qps[1 - i]->qp_num,
                    .max_dest_rd_atomic = 1,
                    .min_rnr_timer = 12,
                    .ah_attr = {.dlid = port.lid, .port_num = 1}};
    CHECK(!ibv_modify_qp(loop->qps[i], &attr,
                 IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS,
                    .timeout = 14,
                    .retry_cnt = 7,
                    .rnr_retry = 7,
                    .max_rd_atomic = 1};
    CHECK(!ibv_modify_qp(loop->qps[i], &attr,
                 IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

// Creates the objects, for completion queues that exist.
static inline void make_loop(struct loop *loop) {
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr_ex init = attributes(loop, i, ALL_OPERATIONS);
        loop->qps[i] = ibv_create_qp_ex(loop->context, &init);
        CHECK(loop->qps[i] && init.cap.max_inline_data >= MOST_INLINE);
    }
    for (int i = 0; i < 2; i++)
        connect_to(loop, i);
    loop->bytes = aligned_alloc(4096, BYTES);
    memset(loop->bytes, 0, BYTES);
    loop->mr = ibv_reg_mr(loop->pd, loop->bytes, BYTES, ALL_ACCESS);
    CHECK(loop->mr);
}

static inline void end_loop(struct loop *loop) {
    for (int i = 0; i < 2; i++)
        CHECK(!ibv_destroy_qp(loop->qps[i]));
    for (int i = 0; i < 2; i++)
        CHECK(!ibv_destroy_cq(loop->cqs[i]));
    CHECK(!ibv_dereg_mr(loop->mr));
    CHECK(!ibv_dealloc_pd(loop->pd));
    CHECK(!ibv_close_device(loop->context));
}

// Posts a receive of 1000 bytes at this offset.
static inline void receive(struct loop *loop, int i, uint64_t id, size_t at) {
    struct ibv_sge sge = {.addr = (uintptr_t)loop->bytes + at, .length = 1000, .lkey = loop->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;
    CHECK(!ibv_post_recv(loop->qps[i], &wr, &bad));
}

// Returns the next completion, which must arrive soon.
static inline struct ibv_wc next(struct ibv_cq *cq) {
    struct ibv_wc wc;
    time_t end = time(NULL) + 20;
    while (ibv_poll_cq(cq, 1, &wc) == 0)
        CHECK(time(NULL) < end);
    return wc;
}

static inline int is_empty(struct ibv_cq *cq) {
    struct ibv_wc wc;
    return ibv_poll_cq(cq, 1, &wc) == 0;
}

#endif
