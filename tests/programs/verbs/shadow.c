// Registers memory that cannot lie in the segment, and lets another process access it. Usage: shadow DEVICE
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                \
    do {                                                                                                                \
        if (!(condition)) {                                                                                             \
            fprintf(stderr, "line %d: %s (errno %d, kind %s)\n", __LINE__, #condition, errno, kind_now);                \
            exit(1);                                                                                                    \
        }                                                                                                               \
    } while (0)

enum {
    // More bytes than the library copies at once.
    LEN = 300000,
    STACK_LEN = 100000,
    HUGE_PAGE = 2 << 20,
    LOCAL = IBV_ACCESS_LOCAL_WRITE,
    ALL = LOCAL | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
};

static const char *kind_now = "";
static _Thread_local char local[STACK_LEN];

// One process's end of the connection.
struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    int socket;
};

// A message between the two processes.
struct word {
    uint64_t address;
    uint32_t key, number, len, lid;
};

static void say(struct side *side, struct word word) { CHECK(write(side->socket, &word, sizeof word) == sizeof word); }

static struct word hear(struct side *side) {
    struct word word;
    CHECK(read(side->socket, &word, sizeof word) == sizeof word);
    return word;
}

static struct ibv_qp *queue_pair(struct side *side) {
    struct ibv_qp_init_attr init = {.send_cq = side->cq, .recv_cq = side->cq, .cap = {16, 16, 3, 3, 64}, .qp_type = IBV_QPT_RC};
    struct ibv_qp *qp = ibv_create_qp(side->pd, &init);
    CHECK(qp);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL};
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    return qp;
}

static void connect_to(struct ibv_qp *qp, uint32_t number, uint16_t lid) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = number, .max_dest_rd_atomic = 1,
                               .min_rnr_timer = 1, .ah_attr = {.dlid = lid, .port_num = 1}};
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    struct ibv_qp_attr send = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    CHECK(!ibv_modify_qp(qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                        IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct side open_side(const char *name, int socket) {
    struct side side = {.socket = socket};
    struct ibv_device **devices = ibv_get_device_list(NULL);
    CHECK(devices);
    while (*devices && strcmp(ibv_get_device_name(*devices), name)) {
        devices++;
    }
    CHECK(*devices && (side.context = ibv_open_device(*devices)));
    CHECK((side.pd = ibv_alloc_pd(side.context)) && (side.cq = ibv_create_cq(side.context, 64, NULL, NULL, 0)));
    return side;
}

static void meet(struct side *side) {
    struct ibv_port_attr port;
    CHECK(!ibv_query_port(side->context, 1, &port));
    side->qp = queue_pair(side);
    say(side, (struct word){.number = side->qp->qp_num, .lid = port.lid});
    struct word other = hear(side);
    connect_to(side->qp, other.number, other.lid);
    // Wait until the other side is ready, too.
    say(side, (struct word){0});
    hear(side);
}

static struct ibv_wc completion(struct side *side) {
    struct ibv_wc wc;
    time_t end = time(NULL) + 60;
    int found;
    while (!(found = ibv_poll_cq(side->cq, 1, &wc))) {
        CHECK(time(NULL) < end);
    }
    CHECK(found == 1);
    return wc;
}

static struct ibv_mr *reg(struct side *side, void *at, size_t len, int access) {
    struct ibv_mr *mr = ibv_reg_mr(side->pd, at, len, access);
    CHECK(mr);
    return mr;
}

static int is_refused(struct side *side, void *at, size_t len, int access, int with) {
    errno = 0;
    return !ibv_reg_mr(side->pd, at, len, access) && errno == with;
}

static void *rest(void *buffer_out) {
    char buffer[STACK_LEN];
    __atomic_store_n((char **)buffer_out, buffer, __ATOMIC_RELEASE);
    pause();
    return NULL;
}

static char *mapped(size_t len, int flags, int fd) {
    char *at = mmap(NULL, len, PROT_READ | PROT_WRITE, flags, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

static int file(void) {
    int fd = memfd_create("file", 0);
    CHECK(fd >= 0 && !ftruncate(fd, LEN));
    return fd;
}

// Returns memory of a kind, or NULL if this machine has none of it.
enum { KINDS = 11 };
static char *memory(int kind, char *on_stack, uint32_t *len) {
    static const char *names[KINDS] = {"private",       "shared",   "file",       "sysv",         "stack",      "thread-local",
                                       "thread's stack", "too large", "huge shared", "huge private", "huge sysv"};
    kind_now = names[kind];
    *len = LEN;
    switch (kind) {
    case 0:
        return mapped(LEN, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    case 1:
        return mapped(LEN, MAP_SHARED | MAP_ANONYMOUS, -1);
    case 2:
        return mapped(LEN, MAP_SHARED, file());
    case 3:
    case 10: {
        int huge = kind == 10 ? SHM_HUGETLB : 0;
        int id = shmget(IPC_PRIVATE, huge ? HUGE_PAGE : LEN, IPC_CREAT | 0600 | huge);
        if (id < 0) {
            return NULL;
        }
        char *at = shmat(id, NULL, 0);
        CHECK(!shmctl(id, IPC_RMID, NULL));
        return at == (void *)-1 ? NULL : at;
    }
    case 4:
        *len = STACK_LEN;
        return on_stack;
    case 5:
        *len = STACK_LEN;
        return local;
    case 6: {
        static char *buffer;
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, rest, &buffer));
        while (!__atomic_load_n(&buffer, __ATOMIC_ACQUIRE)) {
        }
        *len = STACK_LEN;
        return buffer;
    }
    case 7: {
        // The region is larger than the segment, although little of it is used.
        return mapped(1ul << 30, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    }
    case 8:
        return mapped(HUGE_PAGE, MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1);
    default:
        return mapped(HUGE_PAGE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1);
    }
}

static size_t registered_len(int kind, uint32_t len) { return kind == 7 ? 1ul << 30 : len; }

static char byte_of(uint32_t i, int salt) { return (char)(i * 31 % 251 + salt); }

static void fill(char *at, uint32_t len, int salt) {
    for (uint32_t i = 0; i < len; i++) {
        at[i] = byte_of(i, salt);
    }
}

static int is_filled(const char *at, uint32_t len, int salt) {
    for (uint32_t i = 0; i < len; i++) {
        if (at[i] != byte_of(i, salt)) {
            return 0;
        }
    }
    return 1;
}

// Owns memory of each kind, and makes no calls for the accesses of the peer.
static void owner(const char *device, int socket) {
    struct side side = open_side(device, socket);
    meet(&side);
    for (int kind = 0; kind < KINDS; kind++) {
        char on_stack[STACK_LEN];
        uint32_t len;
        char *at = memory(kind, on_stack, &len);
        if (!at) {
            printf("lacks %s\n", kind_now);
            say(&side, (struct word){.len = 0});
            continue;
        }
        memset(at, 0, len);
        struct ibv_mr *mr = reg(&side, at, registered_len(kind, len), ALL);
        say(&side, (struct word){.address = (uintptr_t)at, .key = mr->rkey, .len = len});
        // Polls the last byte, as programs do.
        time_t end = time(NULL) + 60;
        while (__atomic_load_n(at + len - 1, __ATOMIC_ACQUIRE) != byte_of(len - 1, 1)) {
            CHECK(time(NULL) < end);
        }
        CHECK(is_filled(at, len, 1));
        say(&side, (struct word){0});
        hear(&side);
        uint64_t words[2];
        memcpy(words, at, sizeof words);
        CHECK(words[0] == 12 && words[1] == 77);
        // Receives a message, a part of which goes to ordinary memory.
        static char other[100];
        struct ibv_mr *other_mr = reg(&side, other, sizeof other, LOCAL);
        fill(at, len, 9);
        struct ibv_sge parts[] = {{(uintptr_t)other, sizeof other, other_mr->lkey}, {(uintptr_t)at, len, mr->lkey}};
        struct ibv_recv_wr receive = {.wr_id = 5, .sg_list = parts, .num_sge = 2}, *bad;
        CHECK(!ibv_post_recv(side.qp, &receive, &bad));
        say(&side, (struct word){0});
        struct ibv_wc wc = completion(&side);
        CHECK(wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS && wc.byte_len == len);
        CHECK(is_filled(other, sizeof other, 3));
        for (uint32_t i = 0; i < len; i++) {
            CHECK(at[i] == (i < len - sizeof other ? byte_of(i + sizeof other, 3) : byte_of(i, 9)));
        }
        // The immediate data of a write arrives after the written bytes.
        CHECK(!ibv_post_recv(side.qp, &receive, &bad));
        say(&side, (struct word){0});
        wc = completion(&side);
        CHECK(wc.wr_id == 5 && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.imm_data == 7 && is_filled(at, len, 4));
        CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(other_mr));
        // A region that is no longer registered is not accessed any more, even if its memory is gone.
        if (kind == 1) {
            CHECK(!munmap(at, len));
        }
        say(&side, (struct word){0});
    }
    // After all this, there is still room for more queue pairs.
    for (int i = 0; i < 50; i++) {
        CHECK(queue_pair(&side));
    }
    // For the last part, the peer stops this process, and then kills it.
    char *at = mapped(LEN, MAP_SHARED | MAP_ANONYMOUS, -1);
    struct ibv_mr *mr = reg(&side, at, LEN, ALL);
    say(&side, (struct word){.address = (uintptr_t)at, .key = mr->rkey, .len = LEN});
    for (;;) {
        pause();
    }
}

static void post(struct side *side, struct ibv_send_wr *request) {
    struct ibv_send_wr *bad;
    CHECK(!ibv_post_send(side->qp, request, &bad));
}

static void done(struct side *side, uint64_t id) {
    struct ibv_wc wc = completion(side);
    CHECK(wc.wr_id == id && wc.status == IBV_WC_SUCCESS);
}

static void peer(const char *device, int socket, pid_t child) {
    struct side side = open_side(device, socket);
    meet(&side);
    for (int kind = 0; kind < KINDS; kind++) {
        struct word theirs = hear(&side);
        if (!theirs.len) {
            continue;
        }
        // This memory is of the same kind as the owner's.
        char on_stack[STACK_LEN];
        uint32_t len;
        char *at = memory(kind, on_stack, &len);
        CHECK(at && len == theirs.len);
        struct ibv_mr *mr = reg(&side, at, len, LOCAL);
        fill(at, len, 1);
        struct ibv_sge all = {(uintptr_t)at, len, mr->lkey};
        struct ibv_send_wr request = {.wr_id = 1, .sg_list = &all, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
        request.wr.rdma.remote_addr = theirs.address, request.wr.rdma.rkey = theirs.key;
        // This side does not poll before the owner has received everything.
        post(&side, &request);
        hear(&side);
        memset(at, 0, len);
        request.send_flags = IBV_SEND_SIGNALED;
        request.wr_id = 2, request.opcode = IBV_WR_RDMA_READ;
        post(&side, &request);
        done(&side, 2);
        CHECK(is_filled(at, len, 1));
        // Posts several requests at once: a write of two words, and then atomic operations on them.
        uint64_t words[2] = {5, 76};
        memcpy(at, words, sizeof words);
        all.length = sizeof words;
        request.wr_id = 3, request.opcode = IBV_WR_RDMA_WRITE, request.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
        post(&side, &request);
        struct ibv_sge result = {(uintptr_t)at + 64, 8, mr->lkey};
        struct ibv_send_wr atomic = {.wr_id = 4, .sg_list = &result, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .send_flags = IBV_SEND_SIGNALED};
        atomic.wr.atomic.remote_addr = theirs.address, atomic.wr.atomic.rkey = theirs.key, atomic.wr.atomic.compare_add = 7;
        post(&side, &atomic);
        struct ibv_sge second = {(uintptr_t)at + 72, 8, mr->lkey};
        atomic.wr_id = 5, atomic.sg_list = &second, atomic.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
        atomic.wr.atomic.remote_addr += 8, atomic.wr.atomic.compare_add = 76, atomic.wr.atomic.swap = 77;
        post(&side, &atomic);
        for (int id = 3; id <= 5; id++) {
            done(&side, id);
        }
        memcpy(words, at + 64, sizeof words);
        CHECK(words[0] == 5 && words[1] == 76);
        say(&side, (struct word){0});
        // Sends a message when the owner has posted a receive for it.
        hear(&side);
        fill(at, len, 3);
        all.length = len;
        struct ibv_send_wr send = {.wr_id = 6, .sg_list = &all, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
        post(&side, &send);
        done(&side, 6);
        hear(&side);
        fill(at, len, 4);
        request.wr_id = 7, request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM, request.imm_data = 7, request.send_flags = IBV_SEND_SIGNALED;
        post(&side, &request);
        done(&side, 7);
        hear(&side);
        CHECK(!ibv_dereg_mr(mr));
    }
    kind_now = "of the dead";
    struct word theirs = hear(&side);
    static char buffer[LEN];
    struct ibv_mr *mr = reg(&side, buffer, LEN, LOCAL);
    int status;
    // A stopped owner may continue later, so the request waits.
    CHECK(!kill(child, SIGSTOP) && waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    struct ibv_sge all = {(uintptr_t)buffer, LEN, mr->lkey};
    struct ibv_send_wr request = {.wr_id = 8, .sg_list = &all, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
    request.wr.rdma.remote_addr = theirs.address, request.wr.rdma.rkey = theirs.key;
    struct ibv_wc wc;
    post(&side, &request);
    for (int i = 0; i < 1000; i++) {
        CHECK(!ibv_poll_cq(side.cq, 1, &wc));
    }
    CHECK(!kill(child, SIGCONT));
    done(&side, 8);
    CHECK(!kill(child, SIGSTOP) && waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    post(&side, &request);
    request.wr_id = 9;
    post(&side, &request);
    CHECK(!ibv_poll_cq(side.cq, 1, &wc));
    CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    wc = completion(&side);
    CHECK(wc.wr_id == 8 && wc.status == IBV_WC_RETRY_EXC_ERR);
    wc = completion(&side);
    CHECK(wc.wr_id == 9 && wc.status == IBV_WC_WR_FLUSH_ERR);
    CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_qp(side.qp) && !ibv_destroy_cq(side.cq));
}

// Makes two connected queue pairs in this process.
static void both_ends(struct side *side, struct ibv_qp *ends[2]) {
    struct ibv_port_attr port;
    CHECK(!ibv_query_port(side->context, 1, &port));
    ends[0] = queue_pair(side), ends[1] = queue_pair(side);
    connect_to(ends[0], ends[1]->qp_num, port.lid);
    connect_to(ends[1], ends[0]->qp_num, port.lid);
    side->qp = ends[0];
}

static void close_side(struct side *side) {
    CHECK(!ibv_destroy_cq(side->cq) && !ibv_dealloc_pd(side->pd) && !ibv_close_device(side->context));
}

// A program that unmaps registered memory continues, and gets no signal.
static void unmapped(const char *device) {
    kind_now = "unmapped";
    struct side side = open_side(device, -1);
    char *at = mapped(LEN, MAP_SHARED | MAP_ANONYMOUS, -1), bytes[8] = "hello";
    struct ibv_mr *gone = reg(&side, at, LEN, ALL), *mr = reg(&side, bytes, sizeof bytes, LOCAL);
    CHECK(!munmap(at, LEN));
    struct ibv_sge here = {(uintptr_t)bytes, 8, mr->lkey};
    enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    for (int i = 0; i < 2; i++) {
        struct ibv_qp *ends[2];
        both_ends(&side, ends);
        struct ibv_send_wr request = {.wr_id = 1, .sg_list = &here, .num_sge = 1, .opcode = opcodes[i], .send_flags = IBV_SEND_SIGNALED};
        request.wr.rdma.remote_addr = (uintptr_t)at, request.wr.rdma.rkey = gone->rkey;
        post(&side, &request);
        struct ibv_wc wc = completion(&side);
        CHECK(wc.wr_id == 1 && wc.status == IBV_WC_REM_OP_ERR);
        CHECK(!ibv_destroy_qp(ends[0]) && !ibv_destroy_qp(ends[1]));
    }
    CHECK(!ibv_dereg_mr(gone) && !ibv_dereg_mr(mr));
    close_side(&side);
}

// Transfers read-only memory between two queue pairs of this process.
static void read_only(const char *device) {
    kind_now = "read-only";
    struct side side = open_side(device, -1);
    for (int shared = 0; shared < 2; shared++) {
        int fd = file();
        CHECK(pwrite(fd, "hello", 5, 0) == 5);
        char *at = mmap(NULL, LEN, PROT_READ, shared ? MAP_SHARED : MAP_PRIVATE, fd, 0);
        CHECK(at != MAP_FAILED);
        CHECK(is_refused(&side, at, LEN, LOCAL, EFAULT) && is_refused(&side, at, LEN, ALL, EFAULT));
        CHECK(is_refused(&side, at, LEN, IBV_ACCESS_REMOTE_WRITE, EINVAL));
        struct ibv_mr *readable = reg(&side, at, LEN, IBV_ACCESS_REMOTE_READ), *sends = reg(&side, at, LEN, 0);
        struct ibv_qp *ends[2];
        both_ends(&side, ends);
        char bytes[8] = "";
        struct ibv_mr *mr = reg(&side, bytes, sizeof bytes, LOCAL);
        struct ibv_sge here = {(uintptr_t)bytes, 8, mr->lkey}, there = {(uintptr_t)at, 5, sends->lkey};
        struct ibv_send_wr request = {.wr_id = 1, .sg_list = &here, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED};
        request.wr.rdma.remote_addr = (uintptr_t)at, request.wr.rdma.rkey = readable->rkey;
        post(&side, &request);
        done(&side, 1);
        CHECK(!memcmp(bytes, "hello", 5));
        memset(bytes, 0, sizeof bytes);
        struct ibv_recv_wr receive = {.wr_id = 2, .sg_list = &here, .num_sge = 1}, *bad;
        CHECK(!ibv_post_recv(ends[1], &receive, &bad));
        struct ibv_send_wr send = {.wr_id = 3, .sg_list = &there, .num_sge = 1, .opcode = IBV_WR_SEND};
        post(&side, &send);
        done(&side, 2);
        CHECK(!memcmp(bytes, "hello", 5));
        // A write to this memory fails, without any other effect.
        request.wr_id = 4, request.opcode = IBV_WR_RDMA_WRITE;
        post(&side, &request);
        struct ibv_wc wc = completion(&side);
        CHECK(wc.wr_id == 4 && wc.status == IBV_WC_REM_ACCESS_ERR);
        CHECK(!ibv_dereg_mr(readable) && !ibv_dereg_mr(sends) && !ibv_dereg_mr(mr));
        CHECK(!ibv_destroy_qp(ends[0]) && !ibv_destroy_qp(ends[1]) && !munmap(at, LEN));
        CHECK(is_refused(&side, at, LEN, ALL, EFAULT));
    }
    close_side(&side);
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    int sockets[2];
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        close(sockets[0]);
        owner(argv[1], sockets[1]);
    }
    close(sockets[1]);
    peer(argv[1], sockets[0], child);
    read_only(argv[1]);
    unmapped(argv[1]);
    printf("good\n");
}
