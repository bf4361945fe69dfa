/*
 * waiting DEVICE: measures when a process that waits for its peer learns of the peer's death, and how much processor time waiting takes.
 * Prints lines with a name and a number.
 *
 * death, death-asleep   the median time in milliseconds from the end of a peer, which is killed, to the first error completion, for a
 *                       process that polls, and for one that sleeps in ibv_get_cq_event
 * idle                  processor time of a process that sleeps in ibv_get_cq_event, in microseconds per second
 */

#include <infiniband/verbs.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { DEATHS = 9, RECEIVES = 8, IDLE_SECONDS = 3 };

struct end {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    struct ibv_qp *pair;
    struct ibv_mr *region;
};

static char bytes[4096] __attribute__((aligned(4096)));
static const char *device;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

/* Opens the device, sends the address of its queue pair to the other process, and connects it with the other process's queue pair. */
static struct end connect_over(int to, int from)
{
    struct end end = {0};
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (int i = 0; list && list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), device))
            end.context = ibv_open_device(list[i]);
    if (!end.context)
        fail("ibv_open_device");
    struct ibv_pd *domain = ibv_alloc_pd(end.context);
    end.channel = ibv_create_comp_channel(end.context);
    end.queue = ibv_create_cq(end.context, 64, NULL, end.channel, 0);
    end.region = ibv_reg_mr(domain, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp_init_attr init = {
        .send_cq = end.queue, .recv_cq = end.queue, .cap = {8, RECEIVES, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    end.pair = domain && end.queue && end.region ? ibv_create_qp(domain, &init) : NULL;
    struct ibv_port_attr port;
    if (!end.pair || ibv_query_port(end.context, 1, &port))
        fail("ibv_create_qp");
    unsigned own[2] = {end.pair->qp_num, port.lid}, other[2];
    if (write(to, own, sizeof own) != sizeof own || read(from, other, sizeof other) != sizeof other)
        fail("pipe");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    if (ibv_modify_qp(end.pair, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("INIT");
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = other[0],
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12, .ah_attr = {.dlid = other[1], .port_num = 1}};
    if (ibv_modify_qp(end.pair, &attr,
            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        fail("RTR");
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    if (ibv_modify_qp(end.pair, &attr,
            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC))
        fail("RTS");
    return end;
}

static void post_receives(struct end *end)
{
    struct ibv_sge element = {(uintptr_t)bytes, 64, end->region->lkey};
    struct ibv_recv_wr request = {.sg_list = &element, .num_sge = 1}, *bad;
    for (int i = 0; i < RECEIVES; i++)
        if (ibv_post_recv(end->pair, &request, &bad))
            fail("ibv_post_recv");
}

/* Runs a peer that connects, reports that, and does nothing until it is killed. */
static pid_t start_peer(int to[2], int from[2])
{
    if (pipe(to) || pipe(from))
        fail("pipe");
    pid_t peer = fork();
    if (peer)
        return peer;
    struct end end = connect_over(from[1], to[0]);
    post_receives(&end);
    if (write(from[1], "", 1) != 1)
        fail("pipe");
    for (;;)
        pause();
}

/* Waits for a completion for at most this many milliseconds. Returns whether there was one; it must be an error completion. */
static int sleep_for_error(struct end *end, int milliseconds)
{
    struct ibv_wc completion;
    struct pollfd channel = {.fd = end->channel->fd, .events = POLLIN};
    for (;;) {
        if (ibv_req_notify_cq(end->queue, 0))
            fail("ibv_req_notify_cq");
        if (ibv_poll_cq(end->queue, 1, &completion))
            break;
        if (poll(&channel, 1, milliseconds) == 0)
            return 0;
        struct ibv_cq *queue;
        void *context;
        if (ibv_get_cq_event(end->channel, &queue, &context))
            fail("ibv_get_cq_event");
        ibv_ack_cq_events(queue, 1);
    }
    if (completion.status == IBV_WC_SUCCESS)
        fail("a completion without an error");
    return 1;
}

/* Runs in a separate process, because a process that has opened the device should not fork. */
static double one_death(int sleeps, double *idle)
{
    int to[2], from[2], result[2];
    if (pipe(result))
        fail("pipe");
    pid_t peer = start_peer(to, from), survivor = fork();
    if (!survivor) {
        struct end end = connect_over(to[1], from[0]);
        post_receives(&end);
        char ready;
        if (read(from[0], &ready, 1) != 1)
            fail("the peer");
        double begin, took[2] = {0};
        if (idle) {
            /* The first call starts a thread of the library. */
            if (sleep_for_error(&end, 100))
                fail("an error before the peer's end");
            begin = now(CLOCK_PROCESS_CPUTIME_ID);
            if (sleep_for_error(&end, IDLE_SECONDS * 1000))
                fail("an error before the peer's end");
            took[1] = (now(CLOCK_PROCESS_CPUTIME_ID) - begin) * 1e3 / IDLE_SECONDS;
        }
        begin = now(CLOCK_MONOTONIC);
        if (kill(peer, SIGKILL))
            fail("kill");
        struct ibv_wc completion;
        if (sleeps)
            sleep_for_error(&end, -1);
        else
            while (!ibv_poll_cq(end.queue, 1, &completion))
                ;
        took[0] = now(CLOCK_MONOTONIC) - begin;
        exit(write(result[1], took, sizeof took) != sizeof took);
    }
    double took[2];
    close(result[1]);
    if (read(result[0], took, sizeof took) != sizeof took)
        exit(1);
    close(result[0]);
    waitpid(peer, NULL, 0);
    waitpid(survivor, NULL, 0);
    for (int i = 0; i < 2; i++)
        close(to[i]), close(from[i]);
    if (idle)
        *idle = took[1];
    return took[0];
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: waiting DEVICE\n");
        return 2;
    }
    device = argv[1];
    /* Children must not inherit buffered output. */
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int sleeps = 0; sleeps < 2; sleeps++) {
        double took[DEATHS];
        for (int i = 0; i < DEATHS; i++)
            took[i] = one_death(sleeps, NULL);
        qsort(took, DEATHS, sizeof took[0], compare);
        printf("%s %.3f\n", sleeps ? "death-asleep" : "death", took[DEATHS / 2]);
    }
    double idle;
    one_death(1, &idle);
    printf("idle %.3f\n", idle);
    return 0;
}
