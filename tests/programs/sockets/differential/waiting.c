/* Threads and processes that sleep for one connection. */
#include "case.h"

/* Ways of waiting until something can be received. Each returns 1 when there is something. */
static int wait_in_poll(int fd)
{
    return events_of(fd, POLLIN, -1) == POLLIN;
}

static int wait_in_select(int fd)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    return select(fd + 1, &set, NULL, NULL, NULL);
}

static int wait_in_epoll_with(int fd, int interest)
{
    struct epoll_event event = { .events = interest };
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    int found = epoll_wait(epoll, &event, 1, -1);
    close(epoll);
    return found == 1 && event.events == EPOLLIN;
}

static int wait_in_epoll(int fd)
{
    return wait_in_epoll_with(fd, EPOLLIN);
}

static int wait_in_epoll_for_edges(int fd)
{
    return wait_in_epoll_with(fd, EPOLLIN | EPOLLET);
}

/* An instance in another one. */
static int wait_in_nested_epoll(int fd)
{
    struct epoll_event event = { .events = EPOLLIN };
    int inner = epoll_create1(EPOLL_CLOEXEC), outer = epoll_create1(EPOLL_CLOEXEC);
    check(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    check(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &event) == 0, "epoll_ctl");
    /* The outer instance may report the inner one when that has nothing. */
    while (epoll_wait(outer, &event, 1, -1) == 1 && epoll_wait(inner, &event, 1, 0) != 1)
        ;
    close(inner);
    close(outer);
    return 1;
}

static int wait_in_recv(int fd)
{
    char byte;
    return recv(fd, &byte, 1, MSG_PEEK);
}

typedef int way(int fd);
static way *const WAYS[] = {
    wait_in_poll, wait_in_recv, wait_in_epoll, wait_in_select, wait_in_epoll_for_edges, wait_in_nested_epoll,
};
enum { WAYS_COUNT = sizeof WAYS / sizeof WAYS[0], MANY = 12, ROUNDS = 20 };

struct waiter {
    way *way;
    int fd, woken;
    pthread_t thread;
};

static void *wait_for_it(void *argument)
{
    struct waiter *waiter = argument;
    int woken = waiter->way(waiter->fd);
    __atomic_store_n(&waiter->woken, woken, __ATOMIC_RELEASE);
    return NULL;
}

static int count_woken(struct waiter *waiters, int count)
{
    int woken = 0;
    for (int i = 0; i < count; i++)
        woken += __atomic_load_n(&waiters[i].woken, __ATOMIC_ACQUIRE) == 1;
    return woken;
}

/* Several threads wait for one byte, each in one of the ways. All of them must wake, because nobody receives it before. Meanwhile the main
 * thread looks at the socket again and again. */
static void wait_together(int me, int fd, way *const *ways, int ways_count, int looks)
{
    for (int round = 0; round < ROUNDS; round++) {
        struct waiter waiters[MANY];
        if (me == CONNECTOR)
            for (int i = 0; i < MANY; i++) {
                waiters[i] = (struct waiter){ .way = ways[i % ways_count], .fd = fd };
                waiters[i].thread = begin_sleep(wait_for_it, &waiters[i]);
            }
        meet();
        char byte;
        if (me == ACCEPTOR)
            send_all(fd, "a", 1);
        else {
            while (looks && events_of(fd, POLLIN, 0) == 0)
                check(recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 1 || errno == EAGAIN, "recv");
            if (!WAIT_UNTIL(count_woken(waiters, MANY) == MANY)) {
                say("woken", count_woken(waiters, MANY));
                exit(1);
            }
            for (int i = 0; i < MANY; i++)
                pthread_join(waiters[i].thread, NULL);
            receive_all(fd, &byte, 1);
        }
        meet();
    }
}

CASE(waiting_in_poll)
{
    wait_together(me, fd, WAYS, 1, 0);
}

CASE(waiting_in_poll_beside_looks)
{
    wait_together(me, fd, WAYS, 1, 1);
}

CASE(waiting_in_recv)
{
    wait_together(me, fd, WAYS + 1, 1, 0);
}

CASE(waiting_in_recv_beside_looks)
{
    wait_together(me, fd, WAYS + 1, 1, 1);
}

CASE(waiting_in_poll_and_recv)
{
    wait_together(me, fd, WAYS, 2, 0);
}

CASE(waiting_in_epoll)
{
    wait_together(me, fd, WAYS + 2, 1, 0);
}

CASE(waiting_in_all_ways)
{
    wait_together(me, fd, WAYS, WAYS_COUNT, 0);
}

CASE(waiting_in_all_ways_beside_looks)
{
    wait_together(me, fd, WAYS, WAYS_COUNT, 1);
}

static int take_one(int fd)
{
    char byte;
    return recv(fd, &byte, 1, 0);
}

/* As many bytes come as threads wait, and each thread takes one. */
CASE(waiting_threads_take_a_byte_each)
{
    for (int round = 0; round < ROUNDS; round++) {
        struct waiter waiters[MANY];
        if (me == CONNECTOR)
            for (int i = 0; i < MANY; i++) {
                waiters[i] = (struct waiter){ .way = take_one, .fd = fd };
                waiters[i].thread = begin_sleep(wait_for_it, &waiters[i]);
            }
        meet();
        if (me == ACCEPTOR) {
            char bytes[MANY] = "";
            for (int i = 0; i < MANY; i++)
                if (round % 2)
                    send_all(fd, bytes, 1);
            if (round % 2 == 0)
                send_all(fd, bytes, MANY);
        } else {
            check(WAIT_UNTIL(count_woken(waiters, MANY) == MANY), "all bytes");
            for (int i = 0; i < MANY; i++)
                pthread_join(waiters[i].thread, NULL);
        }
        meet();
    }
}

/* Threads that wait for what is beside the connection's bytes sleep on; the others wake. */
CASE(waiting_for_the_end)
{
    struct waiter waiters[MANY];
    if (me == CONNECTOR)
        for (int i = 0; i < MANY; i++) {
            waiters[i] = (struct waiter){ .way = i % 2 ? wait_in_poll : wait_in_select, .fd = fd };
            waiters[i].thread = begin_sleep(wait_for_it, &waiters[i]);
        }
    meet();
    if (me == ACCEPTOR)
        say("shutdown", shutdown(fd, SHUT_WR));
    else {
        for (int i = 0; i < MANY; i++)
            pthread_join(waiters[i].thread, NULL);
        say("woken", count_woken(waiters, MANY));
    }
    meet();
}

/* Processes that share the connection. */
static void wait_in_processes(int me, int fd, way *const *ways, int ways_count, int takes)
{
    enum { PROCESSES = 3 };
    for (int round = 0; round < 5; round++) {
        pid_t children[PROCESSES];
        if (me == CONNECTOR)
            for (int i = 0; i < PROCESSES; i++) {
                children[i] = fork();
                check(children[i] >= 0, "fork");
                if (children[i] == 0)
                    _exit(ways[i % ways_count](fd) == 1 ? 0 : 1);
                check(WAIT_UNTIL(is_asleep(children[i])), "a process that sleeps");
            }
        meet();
        if (me == ACCEPTOR)
            send_all(fd, "abc", PROCESSES);
        else {
            for (int i = 0; i < PROCESSES; i++) {
                int status = -1;
                waitpid(children[i], &status, 0);
                say("status", status);
            }
            char bytes[PROCESSES];
            if (!takes)
                receive_all(fd, bytes, PROCESSES);
        }
        meet();
    }
}

CASE(waiting_processes_in_poll)
{
    wait_in_processes(me, fd, WAYS, 1, 0);
}

CASE(waiting_processes_in_recv)
{
    wait_in_processes(me, fd, WAYS + 1, 1, 0);
}

CASE(waiting_processes_in_epoll)
{
    wait_in_processes(me, fd, WAYS + 2, 1, 0);
}

CASE(waiting_processes_in_different_ways)
{
    wait_in_processes(me, fd, WAYS, 3, 0);
}

CASE(waiting_processes_take_a_byte_each)
{
    static way *const take[] = { take_one };
    wait_in_processes(me, fd, take, 1, 1);
}

static long milliseconds_since(const struct timespec *begun)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - begun->tv_sec) * 1000 + (now.tv_nsec - begun->tv_nsec) / 1000000;
}

/* While one end is in a call with a timeout, the other one moves a few bytes again and again, and would do so for much longer. */
enum { TIMEOUT = 300, LONGER = 6000 };

static void set_timeout(int fd, int option)
{
    struct timeval timeout = { 0, TIMEOUT * 1000 };
    check(setsockopt(fd, SOL_SOCKET, option, &timeout, sizeof timeout) == 0, "a timeout");
}

CASE(waiting_timeout_of_a_call_that_receives)
{
    static char bytes[LONGER];
    struct timespec begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    if (me == CONNECTOR) {
        set_timeout(fd, SO_RCVTIMEO);
        long got = recv(fd, bytes, sizeof bytes, MSG_WAITALL);
        say("some, in time", got > 0 && got < LONGER && milliseconds_since(&begun) < LONGER / 2);
        send_all(fd, "s", 1);
    } else {
        char byte;
        while (milliseconds_since(&begun) < LONGER && recv(fd, &byte, 1, MSG_DONTWAIT) != 1) {
            send_all(fd, "a", 1);
            usleep(5000);
        }
    }
    meet();
}

CASE(waiting_timeout_of_a_call_that_sends)
{
    enum { MUCH = 64 << 20 };
    struct timespec begun;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    if (me == CONNECTOR) {
        char *much = calloc(1, MUCH);
        set_timeout(fd, SO_SNDTIMEO);
        long sent = send(fd, much, MUCH, 0);
        say("some, in time", sent > 0 && sent < MUCH && milliseconds_since(&begun) < LONGER / 2);
        shutdown(fd, SHUT_WR);
    } else {
        static char bytes[1 << 16];
        while (milliseconds_since(&begun) < LONGER && recv(fd, bytes, 1000, 0) > 0 && events_of(fd, POLLRDHUP, 5) == 0)
            ;
        while (recv(fd, bytes, sizeof bytes, 0) > 0)
            ;
    }
    meet();
}
