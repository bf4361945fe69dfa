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

/* Returns the events of one descriptor that poll, select and epoll report now, and checks that they agree. */
static void say_readable(const char *what, int fd)
{
    struct epoll_event event = { .events = EPOLLIN };
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    struct timeval none = { 0, 0 };
    printf("%s: poll %#x, select %d, epoll %d\n", what, events_of(fd, POLLIN, 0), select(fd + 1, &set, NULL, NULL, &none),
           epoll_wait(epoll, &event, 1, 0));
    close(epoll);
}

static void set_lowat(int fd, int bytes)
{
    say("SO_RCVLOWAT", setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes));
    socklen_t size = sizeof bytes;
    bytes = -2;
    getsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, &size);
    say("it is", bytes);
}

/* Waits until so many bytes can be received. */
static void wait_for_bytes(int fd, int bytes)
{
    check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == bytes; })), "bytes");
}

CASE(waiting_lowat_values)
{
    if (me == CONNECTOR) {
        set_lowat(fd, 10);
        set_lowat(fd, 0);
        set_lowat(fd, 1000);
        set_lowat(fd, 1);
    }
    meet();
}

CASE(waiting_lowat_in_poll)
{
    if (me == CONNECTOR)
        set_lowat(fd, 10);
    meet();
    if (me == ACCEPTOR)
        send_all(fd, "12345", 5);
    else {
        wait_for_bytes(fd, 5);
        say_readable("5 of 10", fd);
    }
    meet();
    if (me == ACCEPTOR)
        send_all(fd, "67890", 5);
    else {
        say_events("10 of 10", events_of(fd, POLLIN, PATIENCE));
        say_readable("10 of 10", fd);
        set_lowat(fd, 11);
        say_readable("10 of 11", fd);
        set_lowat(fd, 3);
        say_readable("10 of 3", fd);
        char bytes[20];
        say("recv", recv(fd, bytes, 8, 0));
        say_readable("2 of 3", fd);
        say("recv without waiting", recv(fd, bytes, 20, MSG_DONTWAIT));
        say_readable("0 of 3", fd);
    }
    meet();
}

CASE(waiting_lowat_at_the_end)
{
    if (me == CONNECTOR)
        set_lowat(fd, 10);
    meet();
    if (me == ACCEPTOR) {
        send_all(fd, "12345", 5);
        shutdown(fd, SHUT_WR);
    } else {
        say_events("the end behind 5 of 10", events_of(fd, POLLIN, PATIENCE));
        say_readable("the end behind 5 of 10", fd);
        char bytes[20];
        say("recv", recv(fd, bytes, 20, 0));
        say("recv", recv(fd, bytes, 20, 0));
    }
    meet();
}

static int receive_20(int fd)
{
    char bytes[20];
    return recv(fd, bytes, 20, 0) == 10;
}

static int peek_20(int fd)
{
    char bytes[20];
    return recv(fd, bytes, 20, MSG_PEEK) == 10;
}

/* Threads that sleep are woken when enough has come. */
static void wait_for_enough(int me, int fd, way *way, int is_taken)
{
    for (int round = 0; round < 5; round++) {
        struct waiter waiter = { .way = way, .fd = fd };
        int bytes = 10;
        if (me == CONNECTOR) {
            check(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0, "SO_RCVLOWAT");
            waiter.thread = begin_sleep(wait_for_it, &waiter);
        }
        meet();
        for (int part = 0; part < 2; part++) {
            if (me == ACCEPTOR)
                send_all(fd, "12345", 5);
            else if (part == 0 && !is_taken) {
                wait_for_bytes(fd, 5);
                say("woken by 5 of 10", waiter.woken);
            }
            meet();
        }
        if (me == CONNECTOR) {
            pthread_join(waiter.thread, NULL);
            say("woken by 10 of 10", waiter.woken);
            char all[10];
            if (!is_taken)
                receive_all(fd, all, 10);
        }
        meet();
    }
}

CASE(waiting_lowat_sleep_in_poll)
{
    wait_for_enough(me, fd, wait_in_poll, 0);
}

CASE(waiting_lowat_sleep_in_select)
{
    wait_for_enough(me, fd, wait_in_select, 0);
}

CASE(waiting_lowat_sleep_in_epoll)
{
    wait_for_enough(me, fd, wait_in_epoll, 0);
}

CASE(waiting_lowat_sleep_in_epoll_for_edges)
{
    wait_for_enough(me, fd, wait_in_epoll_for_edges, 0);
}

CASE(waiting_lowat_sleep_in_recv)
{
    wait_for_enough(me, fd, receive_20, 1);
}

CASE(waiting_lowat_sleep_in_peek)
{
    wait_for_enough(me, fd, peek_20, 0);
}

/* A call that has room for fewer bytes waits only for these. */
CASE(waiting_lowat_with_less_room)
{
    if (me == CONNECTOR)
        set_lowat(fd, 10);
    meet();
    if (me == ACCEPTOR)
        send_all(fd, "12345", 5);
    else {
        wait_for_bytes(fd, 5);
        char bytes[10];
        say("recv of 3", recv(fd, bytes, 3, 0));
        say("recv of 2", recv(fd, bytes, 2, 0));
    }
    meet();
}

/* More than the smallest ring holds. */
CASE(waiting_lowat_is_large)
{
    enum { LARGE = 20000 };
    static char bytes[LARGE];
    if (me == CONNECTOR)
        set_lowat(fd, LARGE);
    meet();
    if (me == ACCEPTOR)
        send_all(fd, bytes, LARGE);
    else {
        say("recv", recv(fd, bytes, LARGE, 0));
        set_lowat(fd, 1);
    }
    meet();
    if (me == ACCEPTOR)
        send_all(fd, "a", 1);
    else {
        say_events("data", events_of(fd, POLLIN, PATIENCE));
        say("recv", recv(fd, bytes, LARGE, 0));
    }
    meet();
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

static void *receive_one(void *connection)
{
    char byte;
    return (void *)recv(*(int *)connection, &byte, 1, 0);
}

static void limit_to(int fd, int milliseconds)
{
    struct timeval timeout = { 0, milliseconds * 1000 };
    check(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) == 0, "SO_RCVTIMEO");
}

CASE(waiting_timeout_that_is_set_after_a_wait_without_one)
{
    char byte;
    if (me == CONNECTOR) {
        meet();
        send_all(fd, "w", 1);
        meet();
        return;
    }
    void *got;
    pthread_t sleeper = begin_sleep(receive_one, &fd);
    meet();
    pthread_join(sleeper, &got);
    say("without one", (long)got);
    limit_to(fd, 30);
    say("with one", recv(fd, &byte, 1, 0));
    limit_to(fd, 0);
    int copy = dup(fd);
    limit_to(copy, 30);
    close(copy);
    say("set by another number", recv(fd, &byte, 1, 0));
    limit_to(fd, 0);
    struct timeval timeout = { 0, 30000 };
    syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    say("set by syscall", recv(fd, &byte, 1, 0));
    limit_to(fd, 0);
    int child = fork();
    if (child == 0) {
        limit_to(fd, 30);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    say("set by a child", recv(fd, &byte, 1, 0));
    meet();
}

/* Ways of waiting in a call that does not come back by itself. */
static int send_much(int fd)
{
    static char bytes[1 << 16];
    while (send(fd, bytes, sizeof bytes, 0) > 0)
        ;
    return 0;
}

static int receive_all_of_it(int fd)
{
    static char bytes[100];
    return recv(fd, bytes, sizeof bytes, MSG_WAITALL);
}

static int wait_in_accept(int fd)
{
    return accept(fd, NULL, NULL);
}

static int receive_message(int fd)
{
    char byte;
    struct iovec piece = { &byte, 1 };
    struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };
    return recvmsg(fd, &message, 0);
}

static void cancel(pthread_t thread)
{
    void *result;
    check(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0, "pthread_cancel");
    say("cancelled", result == PTHREAD_CANCELED);
}

/* Threads are cancelled while others wait. The others and those that come later are woken. */
static void cancel_some(int me, int fd, way *way)
{
    for (int round = 0; round < 4; round++) {
        struct waiter cancelled[2], waiters[3];
        if (me == CONNECTOR) {
            for (int i = 0; i < 3; i++) {
                if (i < 2) {
                    cancelled[i] = (struct waiter){ .way = way, .fd = fd };
                    cancelled[i].thread = begin_sleep(wait_for_it, &cancelled[i]);
                }
                waiters[i] = (struct waiter){ .way = WAYS[(round + i) % 3], .fd = fd };
                if (round % 2)
                    waiters[i].thread = begin_sleep(wait_for_it, &waiters[i]);
            }
            cancel(cancelled[0].thread);
            cancel(cancelled[1].thread);
            for (int i = 0; i < 3; i++)
                if (round % 2 == 0)
                    waiters[i].thread = begin_sleep(wait_for_it, &waiters[i]);
        }
        meet();
        if (me == ACCEPTOR)
            send_all(fd, "a", 1);
        else {
            for (int i = 0; i < 3; i++)
                pthread_join(waiters[i].thread, NULL);
            say("woken", count_woken(waiters, 3));
            char byte;
            receive_all(fd, &byte, 1);
            send_all(fd, &byte, 1);
        }
        if (me == ACCEPTOR) {
            char byte;
            receive_all(fd, &byte, 1);
        }
        meet();
    }
}

CASE(waiting_cancelled_in_recv)
{
    cancel_some(me, fd, take_one);
}

CASE(waiting_cancelled_in_recvmsg)
{
    cancel_some(me, fd, receive_message);
}

CASE(waiting_cancelled_in_recv_of_all)
{
    cancel_some(me, fd, receive_all_of_it);
}

CASE(waiting_cancelled_in_poll)
{
    cancel_some(me, fd, wait_in_poll);
}

CASE(waiting_cancelled_in_select)
{
    cancel_some(me, fd, wait_in_select);
}

CASE(waiting_cancelled_in_epoll)
{
    cancel_some(me, fd, wait_in_epoll);
}

/* The other end receives what was sent before, and goes on. */
CASE(waiting_cancelled_in_send)
{
    struct waiter sender = { .way = send_much, .fd = fd };
    if (me == CONNECTOR) {
        sender.thread = begin_sleep(wait_for_it, &sender);
        cancel(sender.thread);
        say("shutdown", shutdown(fd, SHUT_WR));
    }
    meet();
    if (me == ACCEPTOR) {
        static char bytes[1 << 16];
        long got, all = 0;
        while ((got = recv(fd, bytes, sizeof bytes, 0)) > 0)
            all += got;
        say("the end", got);
        say("some", all > 0);
        send_all(fd, "a", 1);
    } else {
        char byte;
        receive_all(fd, &byte, 1);
    }
    meet();
}

CASE(waiting_cancelled_in_accept)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    if (me == CONNECTOR) {
        int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
        check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
        struct waiter waiter = { .way = wait_in_accept, .fd = listener };
        waiter.thread = begin_sleep(wait_for_it, &waiter);
        cancel(waiter.thread);
        send_all(fd, &address.sin_port, sizeof address.sin_port);
        say_events("a connection", events_of(listener, POLLIN, PATIENCE));
    } else {
        receive_all(fd, &address.sin_port, sizeof address.sin_port);
        int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        check(connect(other, (struct sockaddr *)&address, size) == 0, "connect");
    }
    meet();
}

/* A thread that is cancelled before it calls: the call does nothing. */
static void *call_when_cancelled(void *argument)
{
    struct waiter *waiter = argument;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    __atomic_store_n(&waiter->woken, 2, __ATOMIC_RELEASE);
    while (__atomic_load_n(&waiter->woken, __ATOMIC_ACQUIRE) == 2)
        ;
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    waiter->way(waiter->fd);
    return NULL;
}

static int send_one(int fd)
{
    return send(fd, "x", 1, 0);
}

static int write_one(int fd)
{
    return write(fd, "x", 1);
}

static int read_one(int fd)
{
    char byte;
    return read(fd, &byte, 1);
}

CASE(waiting_cancelled_before_the_call)
{
    static way *const ways[] = {
        take_one, receive_message, read_one, send_one, write_one, wait_in_poll, wait_in_select, wait_in_epoll,
    };
    if (me == ACCEPTOR)
        send_all(fd, "abc", 3);
    else {
        wait_for_bytes(fd, 3);
        for (unsigned i = 0; i < sizeof ways / sizeof ways[0]; i++) {
            struct waiter waiter = { .way = ways[i], .fd = fd };
            check(pthread_create(&waiter.thread, NULL, call_when_cancelled, &waiter) == 0, "pthread_create");
            check(WAIT_UNTIL(__atomic_load_n(&waiter.woken, __ATOMIC_ACQUIRE) == 2), "a thread that begins");
            pthread_cancel(waiter.thread);
            __atomic_store_n(&waiter.woken, 0, __ATOMIC_RELEASE);
            void *result;
            pthread_join(waiter.thread, &result);
            say("cancelled", result == PTHREAD_CANCELED);
            int bytes = 0;
            ioctl(fd, FIONREAD, &bytes);
            say("bytes", bytes);
        }
        shutdown(fd, SHUT_WR);
    }
    meet();
    char bytes[10];
    if (me == ACCEPTOR)
        say("recv", recv(fd, bytes, 10, 0));
    else
        say("recv", recv(fd, bytes, 10, 0));
    meet();
}
