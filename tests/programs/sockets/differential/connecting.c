/* connect(2) on a socket that is connected or listens, AF_UNSPEC, and connecting anew. */
#include "case.h"

static int disconnect(int fd)
{
    struct sockaddr none = { .sa_family = AF_UNSPEC };
    return connect(fd, &none, sizeof none);
}

static int connect_to(int fd, struct sockaddr_in address)
{
    return connect(fd, (struct sockaddr *)&address, sizeof address);
}

static int error_of(int fd)
{
    int error = -1;
    socklen_t size = sizeof error;
    check(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0, "SO_ERROR");
    return error;
}

/* Shows that bytes go to and fro. */
static void exchange(const char *what, int me, int fd)
{
    char bytes[4] = "";
    if (me == CONNECTOR)
        send_all(fd, "new", 3);
    receive_all(fd, bytes, 3);
    printf("%s: %s\n", what, bytes);
    if (me == ACCEPTOR)
        send_all(fd, "too", 3);
}

static void accept_another(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    check(fd >= 0, "accept4");
    exchange("the new peer", ACCEPTOR, fd);
    char byte;
    say("recv of the new peer", recv(fd, &byte, 1, 0));
    close(fd);
    close(listener);
}

enum { ALL = POLLIN | POLLOUT | POLLRDHUP };

CASE(connecting_to_another)
{
    char bytes[8];
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd);
        meet();
        say_events("events of the old peer", events_of(fd, ALL, PATIENCE));
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        say("send of the old peer", send(fd, bytes, 1, MSG_NOSIGNAL));
        meet();
        accept_another(listener);
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        say_events("events of the old peer", events_of(fd, ALL, 0));
    } else {
        struct sockaddr_in another = address_of_another(fd);
        say("disconnect", disconnect(fd));
        say_events("events", events_of(fd, ALL, 0));
        say_events("events for nothing", events_of(fd, 0, 0));
        say("recv", recv(fd, bytes, 8, 0));
        say("recv", recv(fd, bytes, 8, 0));
        say("send", send(fd, bytes, 1, MSG_NOSIGNAL));
        say("shutdown", shutdown(fd, SHUT_WR));
        say("SO_ERROR", error_of(fd));
        say_events("events", events_of(fd, ALL, 0));
        struct sockaddr_in peer;
        socklen_t size = sizeof peer;
        say("getpeername", getpeername(fd, (struct sockaddr *)&peer, &size));
        say("disconnect again", disconnect(fd));
        meet();
        meet();
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        say_events("events", events_of(fd, ALL, 0));
        say("SO_ERROR", error_of(fd));
        close(fd);
    }
}

CASE(connecting_without_disconnecting)
{
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd);
        meet();
        exchange("the same peer", me, fd);
        close(listener);
    } else {
        struct sockaddr_in another = address_of_another(fd);
        say("connect", connect_to(fd, another));
        struct sockaddr none = { .sa_family = AF_UNSPEC };
        say("connect with a short address", connect(fd, &none, 1));
        say("connect without an address", connect(fd, NULL, 0));
        say("connect with a bad address", connect(fd, (struct sockaddr *)8, sizeof none));
        int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        say("connect with a bad address", connect(other, (struct sockaddr *)8, sizeof none));
        say("disconnect what is not connected", connect(other, &none, 2));
        say("connect", connect_to(other, another));
        close(other);
        say("connect with a long address", connect(fd, (struct sockaddr *)(char[200]){ 0 }, 200));
        say_events("events", events_of(fd, ALL, 0));
        meet();
        exchange("the connector", me, fd);
    }
    meet();
}

CASE(connecting_with_unread_bytes)
{
    char bytes[8];
    int listener = 0;
    struct sockaddr_in another;
    if (me == ACCEPTOR)
        listener = listen_for_another(fd);
    else
        another = address_of_another(fd);
    send_all(fd, "abc", 3);
    meet();
    say_events("there is something", events_of(fd, POLLIN, PATIENCE));
    meet();
    if (me == ACCEPTOR) {
        meet();
        check(WAIT_UNTIL(events_of(fd, 0, 0) != 0), "the reset");
        say_events("events of the old peer", events_of(fd, ALL, 0));
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        accept_another(listener);
    } else {
        say("disconnect", disconnect(fd));
        say_events("events", events_of(fd, ALL, 0));
        say("recv", recv(fd, bytes, 8, MSG_DONTWAIT));
        say("recv", recv(fd, bytes, 8, MSG_DONTWAIT));
        meet();
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        say("recv", recv(fd, bytes, 8, MSG_DONTWAIT));
        close(fd);
    }
}

CASE(connecting_after_the_peers_end)
{
    char bytes[8];
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd);
        say("shutdown", shutdown(fd, SHUT_WR));
        meet();
        meet();
        check(WAIT_UNTIL(events_of(fd, 0, 0) != 0), "the reset");
        say_events("events of the old peer", events_of(fd, ALL, 0));
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        accept_another(listener);
    } else {
        struct sockaddr_in another = address_of_another(fd);
        meet();
        say("recv", recv(fd, bytes, 8, 0));
        say("disconnect", disconnect(fd));
        meet();
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        close(fd);
    }
}

static int epoll_of(int fd, unsigned events)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = events, .data.u64 = 7 };
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    return epoll;
}

static void say_epoll(const char *what, int epoll, int milliseconds)
{
    struct epoll_event event = { 0 };
    int found = epoll_wait(epoll, &event, 1, milliseconds);
    check(found >= 0, "epoll_wait");
    say_events(what, found ? event.events : 0);
    check(found == 0 || event.data.u64 == 7, "the data");
}

/* The kernel may report the same edge again, so only the first events of an edge-triggered registration are shown. */
static void connecting_in_epoll(int me, int fd, unsigned interest)
{
    char bytes[8];
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd);
        int epoll = epoll_of(fd, interest & ~EPOLLOUT);
        meet();
        say_epoll("the old peer", epoll, PATIENCE);
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        accept_another(listener);
    } else {
        struct sockaddr_in another = address_of_another(fd);
        int epoll = epoll_of(fd, interest);
        say_epoll("before", epoll, PATIENCE);
        say("disconnect", disconnect(fd));
        say_epoll("after", epoll, PATIENCE);
        meet();
        say("connect", connect_to(fd, another));
        say_epoll("connected", epoll, PATIENCE);
        send_all(fd, "new", 3);
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 3; })), "3 bytes");
        say_epoll("with bytes", epoll, PATIENCE);
        receive_all(fd, bytes, 3);
        say("EPOLL_CTL_DEL", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
        say("EPOLL_CTL_DEL", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
        close(fd);
    }
}

CASE(connecting_in_epoll_by_level)
{
    connecting_in_epoll(me, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP);
}

CASE(connecting_in_epoll_by_edge)
{
    connecting_in_epoll(me, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

CASE(connecting_by_a_copy)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
    } else {
        struct sockaddr_in another = address_of_another(fd);
        int copy = dup(fd);
        say("disconnect", disconnect(copy));
        say_events("events", events_of(fd, ALL, 0));
        say("connect", connect_to(fd, another));
        exchange("the copy", me, copy);
        close(copy);
        say_events("events", events_of(fd, ALL, 0));
        close(fd);
    }
}

CASE(connecting_keeps_options)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
    } else {
        struct sockaddr_in another = address_of_another(fd);
        struct timeval limit = { 0, 20000 };
        check(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0, "SO_RCVTIMEO");
        fcntl(fd, F_SETFD, 0);
        say("disconnect", disconnect(fd));
        int on = -1;
        socklen_t size = sizeof on;
        getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, &size);
        say("TCP_NODELAY", on);
        say("F_GETFD", fcntl(fd, F_GETFD));
        say("F_GETFL", fcntl(fd, F_GETFL) & O_NONBLOCK);
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        say("recv", recv(fd, &on, 1, 0));
        fcntl(fd, F_SETFL, O_NONBLOCK);
        say("disconnect", disconnect(fd));
        say("F_GETFL", fcntl(fd, F_GETFL) & O_NONBLOCK);
        say("SO_ERROR", error_of(fd));
        say("recv", recv(fd, &on, 1, 0));
    }
}

struct sleeper {
    int fd;
    int tid;
    long result;
    int error;
};

static void *sleep_in_recv(void *argument)
{
    struct sleeper *sleeper = argument;
    char byte;
    __atomic_store_n(&sleeper->tid, gettid(), __ATOMIC_SEQ_CST);
    sleeper->result = recv(sleeper->fd, &byte, 1, 0);
    sleeper->error = errno;
    return NULL;
}

static void *sleep_in_poll(void *argument)
{
    struct sleeper *sleeper = argument;
    __atomic_store_n(&sleeper->tid, gettid(), __ATOMIC_SEQ_CST);
    sleeper->result = events_of(sleeper->fd, POLLIN | POLLRDHUP, -1);
    return NULL;
}

/* Returns whether a thread of this process sleeps. */
static int sleeps(struct sleeper *sleeper)
{
    int tid = __atomic_load_n(&sleeper->tid, __ATOMIC_SEQ_CST);
    char path[64], state = 0;
    sprintf(path, "/proc/self/task/%d/stat", tid);
    FILE *file = tid ? fopen(path, "r") : NULL;
    if (file) {
        check(fscanf(file, "%*d (%*[^)]) %c", &state) == 1, path);
        fclose(file);
    }
    return state == 'S';
}

/* Starts a thread, and waits until it has slept for a while. */
static pthread_t begin_sleeper(struct sleeper *sleeper, void *(*function)(void *))
{
    pthread_t thread;
    check(pthread_create(&thread, NULL, function, sleeper) == 0, "pthread_create");
    int looks = 0;
    check(WAIT_UNTIL((looks = sleeps(sleeper) ? looks + 1 : 0) > 20), "the thread sleeps");
    return thread;
}

CASE(connecting_while_a_thread_receives)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
    } else {
        struct sockaddr_in another = address_of_another(fd);
        struct sleeper sleeper = { .fd = fd };
        pthread_t thread = begin_sleeper(&sleeper, sleep_in_recv);
        say("disconnect", disconnect(fd));
        pthread_join(thread, NULL);
        errno = sleeper.error;
        say("recv of the thread", sleeper.result);
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        close(fd);
    }
}

CASE(connecting_while_a_thread_polls)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
    } else {
        struct sockaddr_in another = address_of_another(fd);
        struct sleeper sleeper = { .fd = fd };
        pthread_t thread = begin_sleeper(&sleeper, sleep_in_poll);
        say("disconnect", disconnect(fd));
        pthread_join(thread, NULL);
        say_events("events of the thread", sleeper.result);
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        close(fd);
    }
}

CASE(connecting_before_the_report_is_answered)
{
    if (me == ACCEPTOR) {
        int first = listen_for_another(fd);
        accept_another(listen_for_another(fd));
        close(first);
    } else {
        struct sockaddr_in first = address_of_another(fd), another = address_of_another(fd);
        int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        say("connect", connect_to(other, first));
        say_events("events", events_of(other, ALL, 0));
        say("disconnect", disconnect(other));
        say("SO_ERROR", error_of(other));
        say_events("events", events_of(other, ALL, 0));
        say("connect", connect_to(other, another));
        exchange("the connector", me, other);
        close(other);
    }
    meet();
}

CASE(connecting_a_listener)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
    } else {
        struct sockaddr_in another = address_of_another(fd), own = { .sin_family = AF_INET };
        own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        check(bind(listener, (struct sockaddr *)&own, sizeof own) == 0 && listen(listener, 1) == 0, "listen");
        say("connect", connect_to(listener, another));
        say("disconnect", disconnect(listener));
        say("accept", accept(listener, NULL, NULL));
        say_events("events", events_of(listener, ALL, 0));
        say("connect", connect_to(listener, another));
        exchange("the former listener", me, listener);
        close(listener);
    }
    meet();
}

/* Accepts a connection of which the library learns nothing, so that it does not wait for its change, which would not come. */
static int accept_unseen(int listener)
{
#ifdef __x86_64__
    long result = SYS_accept;
    register long none = 0;
    asm volatile("syscall" : "+a"(result) : "D"((long)listener), "S"(none), "d"(none) : "rcx", "r11", "memory");
    check(result >= 0, "accept");
    return result;
#else
    int fd = accept(listener, NULL, NULL);
    check(fd >= 0, "accept");
    return fd;
#endif
}

static void check_child(pid_t child)
{
    int status;
    check(waitpid(child, &status, 0) == child && status == 0, "the child");
}

/* One of two processes that have the connection connects it anew. The other one has it then, too. */
static void connecting_by_a_relative(int me, int fd, int child_connects)
{
    char bytes[8] = "";
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd);
        meet();
        say("recv of the old peer", recv(fd, bytes, 8, 0));
        int new = accept_unseen(listener);
        exchange("the new peer", me, new);
        exchange("the new peer", me, new);
        exchange("the new peer", me, new);
        say("recv of the new peer", recv(new, bytes, 8, 0));
        close(listener);
        return;
    }
    struct sockaddr_in another = address_of_another(fd);
    int there[2], back[2];
    check(pipe(there) == 0 && pipe(back) == 0, "pipe");
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0, "fork");
    int connects = (child == 0) == child_connects, turn = (child == 0), out = turn ? back[1] : there[1], in = turn ? there[0] : back[0];
    if (connects) {
        say("disconnect", disconnect(fd));
        meet();
        say("connect", connect_to(fd, another));
        exchange("who connects", me, fd);
        fflush(stdout);
        check(write(out, "", 1) == 1 && read(in, bytes, 1) == 1, "the relative");
        say_events("events", events_of(fd, ALL, 0));
        exchange("who connects", me, fd);
        close(fd);
        fflush(stdout);
        check(write(out, "", 1) == 1, "the relative");
    } else {
        check(read(in, bytes, 1) == 1, "the relative");
        say_events("events of the relative", events_of(fd, ALL, 0));
        exchange("the relative", me, fd);
        say("recv of the relative", recv(fd, bytes, 8, MSG_DONTWAIT));
        fflush(stdout);
        check(write(out, "", 1) == 1 && read(in, bytes, 1) == 1, "the relative");
        say_events("events of the relative", events_of(fd, ALL, 0));
        close(fd);
    }
    fflush(stdout);
    if (child == 0)
        _exit(0);
    check_child(child);
}

CASE(connecting_by_a_parent)
{
    connecting_by_a_relative(me, fd, 0);
}

CASE(connecting_by_a_child)
{
    connecting_by_a_relative(me, fd, 1);
}

static int received_rounds;

static void *receive_rounds(void *argument)
{
    int fd = *(int *)argument, round = 0;
    while (round >= 0) {
        /* A thread that sleeps in the kernel to receive would keep the next connection on TCP. */
        struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
        if (poll(&poll_fd, 1, 1) == 1 && recv(fd, &round, sizeof round, MSG_DONTWAIT) == sizeof round)
            __atomic_store_n(&received_rounds, round, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

/* Each connection carries its own bytes, also while another thread waits all the time. */
CASE(connecting_again_and_again)
{
    enum { ROUNDS = 30 };
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd), wrong = 0, resets = 0, byte;
        for (int round = 1; round <= ROUNDS + 1; round++) {
            int new = accept4(listener, NULL, NULL, SOCK_CLOEXEC), got;
            check(new >= 0, "accept4");
            receive_all(new, &got, sizeof got);
            wrong += got != round;
            int answer = round > ROUNDS ? -1 : round;
            send_all(new, &answer, sizeof answer);
            resets += recv(new, &byte, sizeof byte, 0) == -1 && errno == ECONNRESET;
            close(new);
        }
        say("wrong bytes", wrong);
        say("resets", resets);
        close(listener);
    } else {
        struct sockaddr_in another = address_of_another(fd);
        pthread_t thread;
        int rounds = 0;
        check(pthread_create(&thread, NULL, receive_rounds, &fd) == 0, "pthread_create");
        for (int round = 1; round <= ROUNDS + 1; round++) {
            int answer = round > ROUNDS ? -1 : round;
            check(disconnect(fd) == 0, "disconnect");
            check(connect_to(fd, another) == 0, "connect");
            send_all(fd, &round, sizeof round);
            rounds += WAIT_UNTIL(__atomic_load_n(&received_rounds, __ATOMIC_SEQ_CST) == answer);
        }
        pthread_join(thread, NULL);
        say("rounds", rounds);
        say("disconnect", disconnect(fd));
    }
    meet();
}

/* A socket that processes share before it is connected stays on TCP while they share it. */
CASE(connecting_after_a_fork)
{
    char byte = 0, bytes[4] = "";
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd), new = accept_unseen(listener);
        exchange("the new peer", me, new);
        exchange("the new peer", me, new);
        say("recv of the new peer", recv(new, &byte, 1, 0));
        close(listener);
        return;
    }
    struct sockaddr_in another = address_of_another(fd);
    int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), there[2], back[2];
    check(pipe(there) == 0 && pipe(back) == 0, "pipe");
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        check(read(there[0], &byte, 1) == 1, "the parent");
        send_all(other, "new", 3);
        receive_all(other, bytes, 3);
        check(strcmp(bytes, "too") == 0 && write(back[1], &byte, 1) == 1, "the child");
        _exit(0);
    }
    say("connect", connect_to(other, another));
    exchange("the parent", me, other);
    check(write(there[1], &byte, 1) == 1 && read(back[0], &byte, 1) == 1, "the child");
    check_child(child);
    close(other);
}

CASE(connecting_again_after_a_refusal)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
    } else {
        struct sockaddr_in another = address_of_another(fd), refusing = { .sin_family = AF_INET };
        refusing.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof refusing;
        int closed = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        check(bind(closed, (struct sockaddr *)&refusing, size) == 0, "bind");
        check(getsockname(closed, (struct sockaddr *)&refusing, &size) == 0, "getsockname");
        int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        say("connect", connect_to(other, refusing));
        say_events("events", events_of(other, ALL, PATIENCE));
        say("SO_ERROR", error_of(other));
        say("connect", connect_to(other, another));
        say_events("events", events_of(other, POLLOUT, PATIENCE));
        say("connect", connect_to(other, another));
        say("connect", connect_to(other, another));
        fcntl(other, F_SETFL, 0);
        exchange("the connector", me, other);
        close(other);
    }
    meet();
}

static void *sleep_in_epoll(void *argument)
{
    struct sleeper *sleeper = argument;
    struct epoll_event event = { 0 };
    __atomic_store_n(&sleeper->tid, gettid(), __ATOMIC_SEQ_CST);
    sleeper->result = epoll_wait(sleeper->fd, &event, 1, -1) == 1 ? (long)event.events : -1;
    return NULL;
}

CASE(connecting_while_a_thread_is_in_epoll)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
    } else {
        struct sockaddr_in another = address_of_another(fd);
        struct sleeper sleeper = { .fd = epoll_of(fd, EPOLLIN | EPOLLRDHUP) };
        pthread_t thread = begin_sleeper(&sleeper, sleep_in_epoll);
        say("disconnect", disconnect(fd));
        pthread_join(thread, NULL);
        say_events("events of the thread", sleeper.result);
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        close(fd);
    }
}

enum { MUCH = 600000 };

static void fill(char *bytes, int size, int seed)
{
    for (int i = 0; i < size; i++)
        bytes[i] = (char)(i * 31 + i / 251 + seed);
}

/* Receives from the old peer until the connection breaks, and much from the new one. */
static void receive_much(int fd, int listener)
{
    static char bytes[MUCH], expected[MUCH];
    int n;
    while ((n = recv(fd, bytes, MUCH, 0)) > 0)
        ;
    say("recv of the old peer in the end", n);
    int new = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    check(new >= 0, "accept4");
    exchange("the new peer", ACCEPTOR, new);
    receive_all(new, bytes, MUCH);
    fill(expected, MUCH, 7);
    say("the bytes", memcmp(bytes, expected, MUCH));
    send_all(new, bytes, MUCH);
    say("recv of the new peer", recv(new, bytes, 1, 0));
    close(new);
    close(listener);
}

/* Another thread sends meanwhile, because both ends send more than there is room for. */
static void *send_much(void *argument)
{
    static char bytes[MUCH];
    fill(bytes, MUCH, 7);
    send_all(*(int *)argument, bytes, MUCH);
    return NULL;
}

static void exchange_much(int fd)
{
    static char bytes[MUCH], expected[MUCH];
    pthread_t thread;
    check(pthread_create(&thread, NULL, send_much, &fd) == 0, "pthread_create");
    receive_all(fd, bytes, MUCH);
    pthread_join(thread, NULL);
    fill(expected, MUCH, 7);
    say("the bytes", memcmp(bytes, expected, MUCH));
}

CASE(connecting_with_much_under_way)
{
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd);
        meet();
        receive_much(fd, listener);
    } else {
        static char bytes[MUCH];
        struct sockaddr_in another = address_of_another(fd);
        while (send(fd, bytes, 1000, MSG_DONTWAIT) > 0)
            ;
        say("disconnect", disconnect(fd));
        meet();
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        exchange_much(fd);
        close(fd);
    }
}

static void *sleep_in_send(void *argument)
{
    static char bytes[MUCH];
    struct sleeper *sleeper = argument;
    __atomic_store_n(&sleeper->tid, gettid(), __ATOMIC_SEQ_CST);
    while ((sleeper->result = send(sleeper->fd, bytes, MUCH, MSG_NOSIGNAL)) == MUCH)
        ;
    sleeper->error = errno;
    return NULL;
}

CASE(connecting_while_a_thread_sends)
{
    if (me == ACCEPTOR) {
        int listener = listen_for_another(fd);
        meet();
        receive_much(fd, listener);
    } else {
        struct sockaddr_in another = address_of_another(fd);
        struct sleeper sleeper = { .fd = fd };
        pthread_t thread = begin_sleeper(&sleeper, sleep_in_send);
        say("disconnect", disconnect(fd));
        pthread_join(thread, NULL);
        say("the thread has not sent all", sleeper.result < MUCH);
        meet();
        say("connect", connect_to(fd, another));
        exchange("the connector", me, fd);
        exchange_much(fd);
        close(fd);
    }
}

/* Tells in a child what a call returns during which the parent disconnects the socket. */
static void connecting_while_a_relative_waits(int me, int fd, void *(*function)(void *), int in_epoll)
{
    if (me == ACCEPTOR) {
        accept_another(listen_for_another(fd));
        return;
    }
    struct sockaddr_in another = address_of_another(fd);
    int begun[2];
    check(pipe(begun) == 0, "pipe");
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0, "fork");
    char byte = 0;
    if (child == 0) {
        struct sleeper sleeper = { .fd = in_epoll ? epoll_of(fd, EPOLLIN | EPOLLRDHUP) : fd };
        pthread_t thread = begin_sleeper(&sleeper, function);
        check(write(begun[1], &byte, 1) == 1, "the parent");
        pthread_join(thread, NULL);
        errno = sleeper.error;
        say("result of the child", sleeper.result);
        _exit(0);
    }
    check(read(begun[0], &byte, 1) == 1, "the child");
    check(disconnect(fd) == 0, "disconnect");
    check_child(child);
    say("connect", connect_to(fd, another));
    exchange("the connector", me, fd);
    close(fd);
}

CASE(connecting_while_a_relative_receives)
{
    connecting_while_a_relative_waits(me, fd, sleep_in_recv, 0);
}

CASE(connecting_while_a_relative_polls)
{
    connecting_while_a_relative_waits(me, fd, sleep_in_poll, 0);
}

CASE(connecting_while_a_relative_is_in_epoll)
{
    connecting_while_a_relative_waits(me, fd, sleep_in_epoll, 1);
}
