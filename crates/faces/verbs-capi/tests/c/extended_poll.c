// The functions of the ibv_start_poll family, with two queue pairs of this process.
#include "loop.h"
#include <pthread.h>

#define READABLE                                                                                   \
    (IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP | \
     IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL | IBV_WC_EX_WITH_DLID_PATH_BITS)

static struct loop loop;
static struct ibv_cq_ex *cqs[2];

static struct ibv_cq_ex *queue(uint64_t wc_flags, uint32_t comp_mask, uint32_t flags) {
    struct ibv_cq_init_attr_ex init = {
        .cqe = 64,
        .cq_context = &loop,
        .wc_flags = wc_flags,
        .comp_mask = comp_mask,
        .flags = flags,
    };
    errno = 0;
    return ibv_create_cq_ex(loop.context, &init);
}

static void only_what_can_be_read_is_granted(void) {
    uint64_t refused[] = {
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
        IBV_WC_EX_WITH_CVLAN,
        IBV_WC_EX_WITH_FLOW_TAG,
        IBV_WC_EX_WITH_TM_INFO,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
        1ull << 40,
    };

    for (size_t i = 0; i < sizeof(refused) / sizeof(*refused); i++)
        CHECK(!queue(READABLE | refused[i], 0, 0) && errno == EOPNOTSUPP);
    CHECK(!queue(READABLE, IBV_CQ_INIT_ATTR_MASK_PD, 0) && errno == EOPNOTSUPP);
    CHECK(!queue(READABLE, IBV_CQ_INIT_ATTR_MASK_FLAGS, 1 << 10) && errno == EOPNOTSUPP);
    // A field whose bit is not in the mask is ignored.
    uint32_t harmless = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    struct ibv_cq_ex *one = queue(0, 0, 1 << 10), *two = queue(0, IBV_CQ_INIT_ATTR_MASK_FLAGS, harmless);
    CHECK(one && two && !ibv_destroy_cq(ibv_cq_ex_to_cq(one)) && !ibv_destroy_cq(ibv_cq_ex_to_cq(two)));
    struct ibv_cq_init_attr_ex init = {.cqe = 64, .comp_vector = 1000};
    CHECK(!ibv_create_cq_ex(loop.context, &init) && errno == EINVAL);
}

static int begin(struct ibv_cq_ex *cq) {
    struct ibv_poll_cq_attr attr = {0};
    return ibv_start_poll(cq, &attr);
}

// Sends messages without data, with these identifiers at both ends.
static void messages(uint64_t first, int count) {
    for (int i = 0; i < count; i++) {
        receive(&loop, 1, first + i, 8192);
        struct ibv_send_wr wr = {.wr_id = first + i, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
        CHECK(!ibv_post_send(loop.qps[0], &wr, &bad));
    }
}

static void completions_are_read(void) {
    struct ibv_poll_cq_attr newer = {.comp_mask = 1};
    CHECK(ibv_start_poll(cqs[0], &newer) == EINVAL);
    CHECK(begin(cqs[0]) == ENOENT);
    CHECK(begin(cqs[0]) == ENOENT);

    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(loop.qps[0]);
    receive(&loop, 1, 20, 8192);
    receive(&loop, 1, 21, 8192);
    ibv_wr_start(qp);
    qp->wr_id = 10;
    qp->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_send_imm(qp, htobe32(1234));
    ibv_wr_set_inline_data(qp, "four", 4);
    qp->wr_id = 11;
    ibv_wr_atomic_fetch_add(qp, loop.mr->rkey, (uintptr_t)loop.bytes, 1);
    ibv_wr_set_sge(qp, loop.mr->lkey, (uintptr_t)loop.bytes + 8, 8);
    qp->wr_id = 12;
    ibv_wr_rdma_write_imm(qp, loop.mr->rkey, (uintptr_t)loop.bytes + 16384, htobe32(5678));
    ibv_wr_set_sge(qp, loop.mr->lkey, (uintptr_t)loop.bytes, 100);
    CHECK(ibv_wr_complete(qp) == 0);

    enum ibv_wc_opcode opcodes[] = {IBV_WC_SEND, IBV_WC_FETCH_ADD, IBV_WC_RDMA_WRITE};
    for (int i = 0; i < 3; i++) {
        CHECK((i == 0 ? begin(cqs[0]) : ibv_next_poll(cqs[0])) == 0);
        CHECK(cqs[0]->wr_id == 10u + i && cqs[0]->status == IBV_WC_SUCCESS);
        CHECK(ibv_wc_read_opcode(cqs[0]) == opcodes[i]);
        CHECK(ibv_wc_read_qp_num(cqs[0]) == loop.qps[0]->qp_num);
        CHECK(ibv_wc_read_vendor_err(cqs[0]) == 0 && ibv_wc_read_wc_flags(cqs[0]) == 0);
    }
    CHECK(ibv_next_poll(cqs[0]) == ENOENT);
    ibv_end_poll(cqs[0]);

    CHECK(begin(cqs[1]) == 0);
    CHECK(cqs[1]->wr_id == 20 && cqs[1]->status == IBV_WC_SUCCESS && ibv_wc_read_byte_len(cqs[1]) == 4);
    CHECK(ibv_wc_read_opcode(cqs[1]) == IBV_WC_RECV && ibv_wc_read_wc_flags(cqs[1]) == IBV_WC_WITH_IMM);
    CHECK(be32toh(ibv_wc_read_imm_data(cqs[1])) == 1234 && !memcmp(loop.bytes + 8192, "four", 4));
    CHECK(ibv_next_poll(cqs[1]) == 0);
    CHECK(cqs[1]->wr_id == 21 && ibv_wc_read_opcode(cqs[1]) == IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(be32toh(ibv_wc_read_imm_data(cqs[1])) == 5678 && ibv_wc_read_byte_len(cqs[1]) == 100);
    CHECK(ibv_wc_read_qp_num(cqs[1]) == loop.qps[1]->qp_num);
    CHECK(ibv_wc_read_slid(cqs[1]) == 0 && ibv_wc_read_src_qp(cqs[1]) == 0);
    CHECK(ibv_wc_read_sl(cqs[1]) == 0 && ibv_wc_read_dlid_path_bits(cqs[1]) == 0);
    ibv_end_poll(cqs[1]);
    CHECK(is_empty(loop.cqs[0]) && is_empty(loop.cqs[1]));
}

// Each way of polling continues where the last one ended.
static void ways_of_polling_alternate(void) {
    for (int i = 0; i < 2; i++) {
        uint64_t expected = 0;
        messages(0, 40);
        for (int round = 0; expected < 40; round++) {
            if (round % 2) {
                CHECK(next(loop.cqs[i]).wr_id == expected++);
                continue;
            }
            // The batches have different lengths.
            int said = begin(cqs[i]);
            for (int left = round; said == 0; said = ibv_next_poll(cqs[i])) {
                CHECK(cqs[i]->wr_id == expected++ && cqs[i]->status == IBV_WC_SUCCESS);
                if (left-- == 0)
                    break;
            }
            CHECK(said == 0 || (said == ENOENT && expected == 40));
            ibv_end_poll(cqs[i]);
        }
        CHECK(expected == 40 && is_empty(loop.cqs[i]));
        // The completions of the other end.
        for (int j = 0; j < 40; j++)
            CHECK(next(loop.cqs[1 - i]).wr_id == (uint64_t)j);
    }
}

// Requests may be posted between the calls, and their completions are found.
static void programs_post_while_they_poll(void) {
    messages(0, 3);
    CHECK(begin(cqs[1]) == 0 && cqs[1]->wr_id == 0);
    CHECK(ibv_next_poll(cqs[1]) == 0 && cqs[1]->wr_id == 1);
    messages(3, 2);
    for (uint64_t i = 2; i < 5; i++)
        CHECK(ibv_next_poll(cqs[1]) == 0 && cqs[1]->wr_id == i);
    CHECK(ibv_next_poll(cqs[1]) == ENOENT);
    messages(5, 1);
    CHECK(ibv_next_poll(cqs[1]) == 0 && cqs[1]->wr_id == 5);
    ibv_end_poll(cqs[1]);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(next(loop.cqs[0]).wr_id == i);
    CHECK(is_empty(loop.cqs[0]) && is_empty(loop.cqs[1]));
}

static int sum;

static void *poll_some(void *plain) {
    int found = 0;
    uint64_t last = 0;
    time_t end = time(NULL) + 20;

    while (__atomic_load_n(&sum, __ATOMIC_SEQ_CST) < 2000) {
        CHECK(time(NULL) < end);
        if (plain) {
            struct ibv_wc wc;
            if (ibv_poll_cq(loop.cqs[1], 1, &wc) == 1) {
                CHECK(wc.wr_id > last);
                last = wc.wr_id;
                found++;
                __atomic_add_fetch(&sum, 1, __ATOMIC_SEQ_CST);
            }
            continue;
        }
        if (begin(cqs[1]))
            continue;
        int more = 3;
        do {
            CHECK(cqs[1]->wr_id > last);
            last = cqs[1]->wr_id;
            found++;
            __atomic_add_fetch(&sum, 1, __ATOMIC_SEQ_CST);
        } while (--more && ibv_next_poll(cqs[1]) == 0);
        ibv_end_poll(cqs[1]);
    }
    return (void *)(intptr_t)found;
}

// The completions of a queue pair that a thread sees are in order, and each completion is seen once.
static void threads_poll_one_queue(void) {
    pthread_t threads[3];
    intptr_t found = 0;

    for (intptr_t i = 0; i < 3; i++)
        CHECK(!pthread_create(&threads[i], NULL, poll_some, (void *)(i % 2)));
    for (int i = 0; i < 2000; i++) {
        while (__atomic_load_n(&sum, __ATOMIC_SEQ_CST) < i - 40)
            ;
        messages(i + 1, 1);
        CHECK(next(loop.cqs[0]).wr_id == i + 1u);
    }
    for (int i = 0; i < 3; i++) {
        void *result;
        CHECK(!pthread_join(threads[i], &result));
        found += (intptr_t)result;
    }
    CHECK(found == 2000 && is_empty(loop.cqs[1]));
}

// The completions of a destroyed queue pair are gone.
static void completions_end_with_their_queue_pair(void) {
    messages(0, 20);
    CHECK(begin(cqs[1]) == 0 && ibv_next_poll(cqs[1]) == 0);
    ibv_end_poll(cqs[1]);
    CHECK(!ibv_destroy_qp(loop.qps[1]));
    CHECK(begin(cqs[1]) == ENOENT && is_empty(loop.cqs[1]));
    struct ibv_qp_init_attr_ex init = attributes(&loop, 1, ALL_OPERATIONS);
    loop.qps[1] = ibv_create_qp_ex(loop.context, &init);
    CHECK(loop.qps[1]);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    loop.context = open_named(argv[1]);
    loop.pd = ibv_alloc_pd(loop.context);
    CHECK(loop.pd);
    only_what_can_be_read_is_granted();
    for (int i = 0; i < 2; i++) {
        cqs[i] = queue(READABLE, 0, 0);
        CHECK(cqs[i] && cqs[i]->cq_context == &loop && cqs[i]->cqe >= 64);
        loop.cqs[i] = ibv_cq_ex_to_cq(cqs[i]);
    }
    make_loop(&loop);

    completions_are_read();
    ways_of_polling_alternate();
    programs_post_while_they_poll();
    threads_poll_one_queue();
    completions_end_with_their_queue_pair();
    end_loop(&loop);
    return 0;
}
