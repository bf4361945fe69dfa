// The functions of the ibv_wr_* family, with two queue pairs of this process.
#include "loop.h"
#include <pthread.h>

static struct loop loop;
static struct ibv_qp_ex *qp;

// Returns the address at this offset of the memory.
static uint64_t at(size_t offset) {
    return (uintptr_t)loop.bytes + offset;
}

static void begin(uint64_t id, unsigned int flags) {
    qp->wr_id = id;
    qp->wr_flags = flags;
}

// Checks that the next completion is that of this request.
static void completes(int i, uint64_t id, enum ibv_wc_opcode opcode) {
    struct ibv_wc wc = next(loop.cqs[i]);
    if (wc.wr_id != id || wc.status || wc.opcode != opcode) {
        fprintf(stderr, "completed: %llu, status %d, opcode %d; not %llu, %d\n",
            (unsigned long long)wc.wr_id, wc.status, wc.opcode, (unsigned long long)id, opcode);
        exit(1);
    }
}

static void nothing_has_happened(void) {
    CHECK(is_empty(loop.cqs[0]) && is_empty(loop.cqs[1]));
}

static void all_operations(void) {
    uint32_t key = loop.mr->lkey, rkey = loop.mr->rkey;
    uint64_t *words = (uint64_t *)loop.bytes;

    memset(loop.bytes, 0, BYTES);
    memset(loop.bytes + 4096, 'a', 100);
    memset(loop.bytes + 5000, 'b', 1000);
    words[0] = 5;
    words[1] = 7;
    for (int i = 0; i < 3; i++)
        receive(&loop, 1, 100 + i, 8192 + 1000 * i);

    ibv_wr_start(qp);
    // Only signaled requests have a completion.
    begin(1, 0);
    ibv_wr_rdma_write(qp, rkey, at(16384));
    ibv_wr_set_sge(qp, key, at(4096), 100);
    begin(2, IBV_SEND_SIGNALED);
    ibv_wr_rdma_write_imm(qp, rkey, at(16484), htobe32(22));
    struct ibv_sge list[] = {{at(5000), 10, key}, {at(4096), 0, key}, {at(4096), 5, key}};
    ibv_wr_set_sge_list(qp, 3, list);
    begin(3, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    ibv_wr_set_sge(qp, key, at(5000), 1000);
    begin(4, IBV_SEND_SIGNALED | IBV_SEND_SOLICITED);
    ibv_wr_send_imm(qp, htobe32(44));
    begin(5, IBV_SEND_SIGNALED | IBV_SEND_FENCE);
    ibv_wr_rdma_read(qp, rkey, at(5000));
    ibv_wr_set_sge(qp, key, at(20000), 1000);
    begin(6, IBV_SEND_SIGNALED);
    ibv_wr_atomic_cmp_swp(qp, rkey, at(0), 5, 50);
    ibv_wr_set_sge(qp, key, at(16), 8);
    begin(7, IBV_SEND_SIGNALED);
    ibv_wr_atomic_fetch_add(qp, rkey, at(8), 3);
    ibv_wr_set_sge(qp, key, at(24), 8);
    // Nothing is executed before ibv_wr_complete.
    nothing_has_happened();
    CHECK(words[0] == 5 && loop.bytes[16384] == 0);
    CHECK(ibv_wr_complete(qp) == 0);

    completes(0, 2, IBV_WC_RDMA_WRITE);
    completes(0, 3, IBV_WC_SEND);
    completes(0, 4, IBV_WC_SEND);
    completes(0, 5, IBV_WC_RDMA_READ);
    completes(0, 6, IBV_WC_COMP_SWAP);
    completes(0, 7, IBV_WC_FETCH_ADD);
    struct ibv_wc wc = next(loop.cqs[1]);
    CHECK(wc.wr_id == 100 && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && be32toh(wc.imm_data) == 22);
    CHECK(wc.byte_len == 15 && wc.wc_flags & IBV_WC_WITH_IMM);
    wc = next(loop.cqs[1]);
    CHECK(wc.wr_id == 101 && wc.opcode == IBV_WC_RECV && wc.byte_len == 1000);
    wc = next(loop.cqs[1]);
    CHECK(wc.wr_id == 102 && be32toh(wc.imm_data) == 44 && wc.byte_len == 0);
    CHECK(!memcmp(loop.bytes + 16384, loop.bytes + 4096, 100));
    CHECK(!memcmp(loop.bytes + 16484, "bbbbbbbbbbaaaaa", 16));
    CHECK(!memcmp(loop.bytes + 9192, loop.bytes + 5000, 1000));
    CHECK(!memcmp(loop.bytes + 20000, loop.bytes + 5000, 1000));
    CHECK(words[0] == 50 && words[2] == 5 && words[1] == 10 && words[3] == 7);
    nothing_has_happened();
}

static void inline_data_is_copied_at_once(void) {
    char one[MOST_INLINE], two[] = "efgh", long_one[MOST_INLINE];

    memset(loop.bytes, 0, BYTES);
    for (int i = 0; i < 4; i++)
        receive(&loop, 1, i, 8192 + 1000 * i);
    memset(long_one, 'x', sizeof(long_one));
    ibv_wr_start(qp);
    strcpy(one, "abcd");
    begin(1, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    struct ibv_data_buf list[] = {{one, 3}, {NULL, 0}, {two, 4}, {one, 1}};
    ibv_wr_set_inline_data_list(qp, 4, list);
    strcpy(one, "1234");
    strcpy(two, "5678");
    begin(2, IBV_SEND_SIGNALED);
    ibv_wr_send_imm(qp, 2);
    ibv_wr_set_inline_data(qp, long_one, sizeof(long_one));
    memset(long_one, 'y', sizeof(long_one));
    begin(3, IBV_SEND_SIGNALED);
    ibv_wr_rdma_write(qp, loop.mr->rkey, at(16384));
    ibv_wr_set_inline_data(qp, one, 4);
    begin(4, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, NULL, 0);
    begin(5, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data_list(qp, 0, NULL);
    memset(one, 'z', sizeof(one));
    CHECK(ibv_wr_complete(qp) == 0);
    completes(0, 1, IBV_WC_SEND);
    completes(0, 2, IBV_WC_SEND);
    completes(0, 3, IBV_WC_RDMA_WRITE);
    completes(0, 4, IBV_WC_SEND);
    completes(0, 5, IBV_WC_SEND);
    uint32_t lengths[] = {8, MOST_INLINE, 0, 0};
    for (int i = 0; i < 4; i++) {
        struct ibv_wc wc = next(loop.cqs[1]);
        CHECK(wc.wr_id == (uint64_t)i && wc.byte_len == lengths[i]);
    }
    CHECK(!strcmp(loop.bytes + 8192, "abcefgha"));
    CHECK(loop.bytes[9192] == 'x' && loop.bytes[9192 + MOST_INLINE - 1] == 'x');
    CHECK(!strcmp(loop.bytes + 16384, "1234"));
    nothing_has_happened();
}

// The inline data of a message that waits for its receive is kept with it.
static void inline_data_waits(void) {
    char word[] = "first";

    ibv_wr_start(qp);
    begin(1, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, word, sizeof(word));
    CHECK(ibv_wr_complete(qp) == 0);
    ibv_wr_start(qp);
    strcpy(word, "other");
    begin(2, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, word, sizeof(word));
    CHECK(ibv_wr_complete(qp) == 0);
    strcpy(word, "third");
    nothing_has_happened();
    receive(&loop, 1, 10, 8192);
    receive(&loop, 1, 11, 9192);
    completes(0, 1, IBV_WC_SEND);
    completes(0, 2, IBV_WC_SEND);
    completes(1, 10, IBV_WC_RECV);
    completes(1, 11, IBV_WC_RECV);
    CHECK(!strcmp(loop.bytes + 8192, "first") && !strcmp(loop.bytes + 9192, "other"));
}

static void nothing_of_an_aborted_batch_is_posted(void) {
    receive(&loop, 1, 10, 8192);
    loop.bytes[16384] = 0;
    ibv_wr_start(qp);
    begin(1, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, "no", 3);
    begin(2, IBV_SEND_SIGNALED);
    ibv_wr_rdma_write(qp, loop.mr->rkey, at(16384));
    ibv_wr_set_inline_data(qp, "no", 3);
    ibv_wr_abort(qp);
    nothing_has_happened();
    CHECK(loop.bytes[16384] == 0);
    // An error affects only its own batch.
    ibv_wr_start(qp);
    ibv_wr_set_inline_data(qp, "no", 3);
    ibv_wr_abort(qp);
    ibv_wr_start(qp);
    begin(3, IBV_SEND_SIGNALED);
    ibv_wr_send(qp);
    ibv_wr_set_inline_data(qp, "yes", 4);
    CHECK(ibv_wr_complete(qp) == 0);
    completes(0, 3, IBV_WC_SEND);
    completes(1, 10, IBV_WC_RECV);
    CHECK(!strcmp(loop.bytes + 8192, "yes"));
    // An empty batch is allowed.
    ibv_wr_start(qp);
    CHECK(ibv_wr_complete(qp) == 0);
    nothing_has_happened();
}

enum mistake {
    TWICE,
    TOO_MANY_ELEMENTS,
    TOO_MUCH,
    INLINE_TOO_LONG,
    INLINE_LIST_TOO_LONG,
    INLINE_READ,
    INVALIDATE,
    LOCAL_INVALIDATE,
    BIND,
    SEGMENTS,
    ADDRESS,
    SHARED,
    TOO_MANY,
    MISTAKES,
};

static void make(enum mistake mistake) {
    char bytes[MOST_INLINE * 20] = "";
    struct ibv_sge list[] = {{at(0), 1u << 30, 0}, {at(0), 1u << 30, 0}, {at(0), 1, 0}};
    struct ibv_sge small[MOST_ELEMENTS + 1] = {{0}};
    struct ibv_data_buf parts[] = {{bytes, sizeof(bytes) - 1}, {bytes, 2}};

    switch (mistake) {
    case TWICE:
        ibv_wr_set_sge(qp, loop.mr->lkey, at(0), 1);
        ibv_wr_set_sge(qp, loop.mr->lkey, at(0), 1);
        break;
    case TOO_MANY_ELEMENTS:
        ibv_wr_set_sge_list(qp, MOST_ELEMENTS + 1, small);
        break;
    case TOO_MUCH:
        ibv_wr_set_sge_list(qp, 3, list);
        break;
    case INLINE_TOO_LONG:
        ibv_wr_set_inline_data(qp, bytes, sizeof(bytes));
        break;
    case INLINE_LIST_TOO_LONG:
        ibv_wr_set_inline_data_list(qp, 2, parts);
        break;
    case INLINE_READ:
        ibv_wr_rdma_read(qp, loop.mr->rkey, at(0));
        ibv_wr_set_inline_data(qp, bytes, 1);
        break;
    case INVALIDATE:
        ibv_wr_send_inv(qp, 1);
        break;
    case LOCAL_INVALIDATE:
        ibv_wr_local_inv(qp, 1);
        break;
    case BIND:
        ibv_wr_bind_mw(qp, NULL, 1, NULL);
        break;
    case SEGMENTS:
        ibv_wr_send_tso(qp, NULL, 0, 0);
        break;
    case ADDRESS:
        ibv_wr_set_ud_addr(qp, NULL, 1, 2);
        break;
    case SHARED:
        ibv_wr_set_xrc_srqn(qp, 1);
        break;
    default:
        for (int i = 0; i < MOST_SENDS; i++)
            ibv_wr_send(qp);
    }
}

static void a_mistake_is_told_at_the_end(void) {
    loop.bytes[16384] = 0;
    for (enum mistake mistake = 0; mistake < MISTAKES; mistake++) {
        ibv_wr_start(qp);
        begin(1, IBV_SEND_SIGNALED);
        ibv_wr_rdma_write(qp, loop.mr->rkey, at(16384));
        ibv_wr_set_inline_data(qp, "no", 3);
        begin(2, IBV_SEND_SIGNALED);
        ibv_wr_send(qp);
        make(mistake);
        // The first error counts, and later calls do not clear it.
        begin(3, IBV_SEND_SIGNALED);
        ibv_wr_rdma_write(qp, loop.mr->rkey, at(16384));
        ibv_wr_set_sge(qp, loop.mr->lkey, at(0), 1);
        ibv_wr_set_sge(qp, loop.mr->lkey, at(0), 1);
        int expected = mistake == TOO_MANY ? ENOMEM : mistake < INVALIDATE ? EINVAL : EOPNOTSUPP;
        int said = ibv_wr_complete(qp);
        if (said != expected) {
            fprintf(stderr, "mistake %d: %d and not %d\n", mistake, said, expected);
            exit(1);
        }
        nothing_has_happened();
        CHECK(loop.bytes[16384] == 0);
    }
}

// Posts a batch of this many sends, for which there are no receives.
static int sends(uint64_t first, int count) {
    ibv_wr_start(qp);
    for (int i = 0; i < count; i++) {
        begin(first + i, IBV_SEND_SIGNALED);
        ibv_wr_send(qp);
        ibv_wr_set_sge(qp, loop.mr->lkey, at(0), 1);
    }
    return ibv_wr_complete(qp);
}

// Either all requests of a batch are posted, or none.
static void a_batch_waits_if_there_is_room_for_all(void) {
    CHECK(sends(0, MOST_SENDS - 3) == 0);
    CHECK(sends(100, 4) == ENOMEM);
    CHECK(sends(MOST_SENDS - 3, 3) == 0);
    CHECK(sends(200, 1) == ENOMEM);
    nothing_has_happened();
    for (int i = 0; i < MOST_SENDS; i++)
        receive(&loop, 1, i, 8192);
    for (int i = 0; i < MOST_SENDS; i++)
        completes(0, i, IBV_WC_SEND);
    for (int i = 0; i < MOST_SENDS; i++)
        completes(1, i, IBV_WC_RECV);
    nothing_has_happened();
}

// A batch initially has room for a few requests. A longer batch keeps the data of its requests.
static void a_long_batch_keeps_everything(void) {
    memset(loop.bytes, 0, BYTES);
    for (int round = 0; round < 2; round++) {
        ibv_wr_start(qp);
        for (int i = 0; i < MOST_SENDS; i++) {
            char text[16];
            int length = snprintf(text, sizeof(text), "%d, %d", round, i);
            begin(i, i == MOST_SENDS - 1 ? IBV_SEND_SIGNALED : 0);
            ibv_wr_rdma_write(qp, loop.mr->rkey, at(16384 + 16 * i));
            struct ibv_data_buf parts[] = {{text, 1}, {text + 1, length}};
            struct ibv_sge list[] = {{at(0), 3, loop.mr->lkey}, {at(8), 3, loop.mr->lkey}};
            if (i % 2)
                ibv_wr_set_inline_data_list(qp, 2, parts);
            else
                ibv_wr_set_sge_list(qp, 2, list);
        }
        strcpy(loop.bytes, round ? "list" : "LIST");
        strcpy(loop.bytes + 8, "of");
        CHECK(ibv_wr_complete(qp) == 0);
        completes(0, MOST_SENDS - 1, IBV_WC_RDMA_WRITE);
        for (int i = 0; i < MOST_SENDS; i++) {
            char text[16];
            snprintf(text, sizeof(text), "%d, %d", round, i);
            CHECK(!strcmp(loop.bytes + 16384 + 16 * i, i % 2 ? text : round ? "lisof" : "LISof"));
        }
    }
    nothing_has_happened();
}

static void *many(void *by) {
    int is_old = *(int *)by % 2;

    for (int i = 0; i < 2000; i++) {
        if (is_old) {
            struct ibv_sge sge = {at(0), 8, loop.mr->lkey};
            struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE}, *bad;
            wr.wr.rdma.remote_addr = at(16384);
            wr.wr.rdma.rkey = loop.mr->rkey;
            CHECK(!ibv_post_send(loop.qps[0], &wr, &bad));
            continue;
        }
        // If another thread's request came in between, it would change the key.
        ibv_wr_start(qp);
        for (int j = 0; j < 3; j++) {
            begin(*(int *)by, 0);
            ibv_wr_atomic_fetch_add(qp, loop.mr->rkey, at(32 + 8 * j), 1);
            ibv_wr_set_sge(qp, loop.mr->lkey, at(256 + 8 * *(int *)by), 8);
            CHECK(qp->wr_id == (uint64_t)*(int *)by);
        }
        if (i % 10 == 9)
            ibv_wr_abort(qp);
        else
            CHECK(ibv_wr_complete(qp) == 0);
    }
    return NULL;
}

static void threads_take_turns(void) {
    pthread_t threads[4];
    int numbers[4] = {0, 1, 2, 3};

    memset(loop.bytes, 0, BYTES);
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_create(&threads[i], NULL, many, &numbers[i]));
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_join(threads[i], NULL));
    nothing_has_happened();
    for (int j = 0; j < 3; j++)
        CHECK(((uint64_t *)loop.bytes)[4 + j] == 2 * 1800);
}

static void only_what_is_offered_is_granted(void) {
    uint64_t refused[] = {
        IBV_QP_EX_WITH_LOCAL_INV,
        IBV_QP_EX_WITH_BIND_MW,
        IBV_QP_EX_WITH_SEND_WITH_INV,
        IBV_QP_EX_WITH_TSO,
        1ull << 40,
    };
    struct ibv_qp_init_attr_ex init;

    for (size_t i = 0; i < sizeof(refused) / sizeof(*refused); i++) {
        init = attributes(&loop, 0, ALL_OPERATIONS | refused[i]);
        errno = 0;
        CHECK(!ibv_create_qp_ex(loop.context, &init) && errno == EOPNOTSUPP);
    }
    init = attributes(&loop, 0, ALL_OPERATIONS);
    init.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    errno = 0;
    CHECK(!ibv_create_qp_ex(loop.context, &init) && errno == EINVAL);

    // Without the flags, a queue pair does not have these functions.
    init = attributes(&loop, 0, 0);
    init.comp_mask = IBV_QP_INIT_ATTR_PD;
    struct ibv_qp *plain = ibv_create_qp_ex(loop.context, &init);
    CHECK(plain && !ibv_qp_to_qp_ex(plain));
    CHECK(!ibv_destroy_qp(plain));

    // Operations that the program has not asked for are refused. This queue pair has not been connected either.
    init = attributes(&loop, 0, IBV_QP_EX_WITH_SEND);
    struct ibv_qp *sends = ibv_create_qp_ex(loop.context, &init);
    struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(sends);
    CHECK(sends && ex && &ex->qp_base == sends);
    for (int i = 0; i < 2; i++) {
        ibv_wr_start(ex);
        if (i == 0)
            ibv_wr_send(ex);
        else
            ibv_wr_send_imm(ex, 1);
        CHECK(ibv_wr_complete(ex) == EINVAL);
    }
    CHECK(!ibv_destroy_qp(sends));
}

// Each datagram needs an address, exactly once, and has at most the length of a packet.
static void datagrams_have_addresses(void) {
    struct ibv_port_attr port;
    struct ibv_qp *qps[2];
    CHECK(!ibv_query_port(loop.context, 1, &port));
    struct ibv_qp_init_attr_ex init = attributes(&loop, 0, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE);
    init.qp_type = IBV_QPT_UD;
    CHECK(!ibv_create_qp_ex(loop.context, &init) && errno == EOPNOTSUPP);
    for (int i = 0; i < 2; i++) {
        init = attributes(&loop, i, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM);
        init.qp_type = IBV_QPT_UD;
        qps[i] = ibv_create_qp_ex(loop.context, &init);
        CHECK(qps[i]);
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 77};
        CHECK(!ibv_modify_qp(qps[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
        attr.qp_state = IBV_QPS_RTR;
        CHECK(!ibv_modify_qp(qps[i], &attr, IBV_QP_STATE));
        attr.qp_state = IBV_QPS_RTS;
        CHECK(!ibv_modify_qp(qps[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
    }
    struct ibv_ah_attr to = {.dlid = port.lid, .port_num = 1};
    struct ibv_ah *ah = ibv_create_ah(loop.pd, &to);
    CHECK(ah);
    for (int i = 0; i < 3; i++) {
        struct ibv_sge sge = {at(8192 + 1000 * i), 1000, loop.mr->lkey};
        struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
        CHECK(!ibv_post_recv(qps[1], &wr, &bad));
    }

    struct ibv_qp_ex *before = qp;
    qp = ibv_qp_to_qp_ex(qps[0]);
    for (int mistake = 0; mistake < 6; mistake++) {
        ibv_wr_start(qp);
        begin(1, IBV_SEND_SIGNALED);
        ibv_wr_send(qp);
        if (mistake != 0)
            ibv_wr_set_ud_addr(qp, mistake == 1 ? NULL : ah, qps[1]->qp_num, 77);
        if (mistake == 2)
            ibv_wr_set_ud_addr(qp, ah, qps[1]->qp_num, 77);
        ibv_wr_set_sge(qp, loop.mr->lkey, at(0), mistake == 3 ? 4097 : 8);
        begin(2, IBV_SEND_SIGNALED);
        ibv_wr_send(qp);
        if (mistake != 4)
            ibv_wr_set_ud_addr(qp, ah, qps[1]->qp_num, 77);
        struct ibv_sge list[] = {{at(0), 4096, loop.mr->lkey}, {at(0), 1, loop.mr->lkey}};
        ibv_wr_set_sge_list(qp, mistake == 5 ? 2 : 1, list);
        CHECK(ibv_wr_complete(qp) == EINVAL);
        nothing_has_happened();
    }
    ibv_wr_start(qp);
    for (int i = 0; i < 3; i++) {
        begin(10 + i, IBV_SEND_SIGNALED);
        ibv_wr_send_imm(qp, i);
        // The calls may come in any order.
        if (i % 2)
            ibv_wr_set_ud_addr(qp, ah, qps[1]->qp_num, 77);
        ibv_wr_set_inline_data(qp, "hello", 6);
        if (i % 2 == 0)
            ibv_wr_set_ud_addr(qp, ah, qps[1]->qp_num, 77);
    }
    CHECK(ibv_wr_complete(qp) == 0);
    for (int i = 0; i < 3; i++) {
        completes(0, 10 + i, IBV_WC_SEND);
        struct ibv_wc wc = next(loop.cqs[1]);
        CHECK(wc.wr_id == (uint64_t)i && !wc.status && wc.imm_data == (uint32_t)i && wc.byte_len == 46);
        CHECK(wc.src_qp == qps[0]->qp_num && !strcmp(loop.bytes + 8192 + 1000 * i + 40, "hello"));
    }
    qp = before;
    CHECK(!ibv_destroy_ah(ah) && !ibv_destroy_qp(qps[0]) && !ibv_destroy_qp(qps[1]));
    nothing_has_happened();
}

// In the error state requests are flushed, and so are those of a batch.
static void a_failure_flushes_what_follows(void) {
    ibv_wr_start(qp);
    for (int i = 0; i < 3; i++) {
        begin(i, i == 1 ? 0 : IBV_SEND_SIGNALED);
        ibv_wr_rdma_write(qp, i == 1 ? 0xdead : loop.mr->rkey, at(16384));
        ibv_wr_set_sge(qp, loop.mr->lkey, at(0), 8);
    }
    CHECK(ibv_wr_complete(qp) == 0);
    enum ibv_wc_status expected[] = {IBV_WC_SUCCESS, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR};
    for (int i = 0; i < 3; i++) {
        struct ibv_wc wc = next(loop.cqs[0]);
        CHECK(wc.wr_id == (uint64_t)i && wc.status == expected[i]);
    }
    CHECK(is_empty(loop.cqs[0]));
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    loop.context = open_named(argv[1]);
    loop.pd = ibv_alloc_pd(loop.context);
    CHECK(loop.pd);
    for (int i = 0; i < 2; i++) {
        loop.cqs[i] = ibv_create_cq(loop.context, 256, NULL, NULL, 0);
        CHECK(loop.cqs[i]);
    }
    make_loop(&loop);
    qp = ibv_qp_to_qp_ex(loop.qps[0]);
    CHECK(qp);

    all_operations();
    inline_data_is_copied_at_once();
    inline_data_waits();
    nothing_of_an_aborted_batch_is_posted();
    a_mistake_is_told_at_the_end();
    a_batch_waits_if_there_is_room_for_all();
    a_long_batch_keeps_everything();
    threads_take_turns();
    only_what_is_offered_is_granted();
    datagrams_have_addresses();
    a_failure_flushes_what_follows();
    end_loop(&loop);
    return 0;
}
