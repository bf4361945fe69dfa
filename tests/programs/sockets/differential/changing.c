/* Calls in the middle of the change from TCP to a ring, or of the way back. Over TCP, nothing of that can be seen. */
#include "case.h"

/* Makes another connection between the two ends, and moves a byte each way, so that it changes over. */
static int connect_another(int me, int listener, struct sockaddr_in address)
{
    char byte = '.';
    int one = me == ACCEPTOR ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (me == CONNECTOR) {
        check(connect(one, (struct sockaddr *)&address, sizeof address) == 0, "connect");
        send_all(one, &byte, 1);
    }
    receive_all(one, &byte, 1);
    if (me == ACCEPTOR)
        send_all(one, &byte, 1);
    return one;
}

/* A call that does not wait takes all of a short message, also while the receiver makes room a few bytes at a time. */
CASE(changing_page_while_the_receiver_makes_room)
{
    enum { CONNECTIONS = 100, PAGE = 4096 };
    static char bytes[PAGE];
    int listener = me == ACCEPTOR ? listen_for_another(fd) : -1, cut = 0;
    struct sockaddr_in address = { 0 };
    if (me == CONNECTOR)
        address = address_of_another(fd);
    for (int i = 0; i < CONNECTIONS; i++) {
        int one = connect_another(me, listener, address);
        if (me == ACCEPTOR) {
            for (int left = PAGE; left > 0;) {
                int n = recv(one, bytes, 64, MSG_DONTWAIT);
                if (n > 0)
                    left -= n;
                else
                    check(n < 0 && errno == EAGAIN, "recv");
            }
            send_all(one, bytes, 1);
        } else {
            int n = send(one, bytes, PAGE, MSG_DONTWAIT);
            cut += n < PAGE;
            if (n < PAGE)
                send_all(one, bytes, PAGE - (n > 0 ? n : 0));
            receive_all(one, bytes, 1);
        }
        close(one);
    }
    if (me == CONNECTOR)
        say("cut messages", cut);
    meet();
}

/* Sends until there has been no room for so many milliseconds. A small ring without room is left after 20 ms, the largest one after a second. */
static void fill(int fd, int milliseconds)
{
    static char bytes[16384];
    check(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    do {
        while (send(fd, bytes, sizeof bytes, 0) > 0)
            ;
        check(errno == EAGAIN, "send");
    } while (events_of(fd, POLLOUT, milliseconds));
}

/* Gives the connection time to change over. */
static void change_over(int me, int fd, int milliseconds)
{
    for (int i = 0; i < milliseconds; i++) {
        events_of(fd, me == CONNECTOR ? POLLOUT : POLLIN, 0);
        usleep(1000);
    }
}

/* Receives until nothing has come for so many milliseconds. */
static void drain(int fd, int milliseconds)
{
    static char bytes[65536];
    while (events_of(fd, POLLIN, milliseconds))
        check(recv(fd, bytes, sizeof bytes, 0) > 0, "recv");
}

/* Lets the connection go back to TCP, and change over to larger rings, until it has the largest. TCP has little room. */
static void get_largest_ring(int me, int fd)
{
    int size = 16384;
    check(setsockopt(fd, SOL_SOCKET, me == CONNECTOR ? SO_SNDBUF : SO_RCVBUF, &size, sizeof size) == 0, "setsockopt");
    for (int pause = 200; pause <= 400; pause *= 2) {
        if (me == CONNECTOR)
            fill(fd, 200);
        meet();
        if (me == ACCEPTOR)
            drain(fd, 100);
        meet();
        change_over(me, fd, pause);
        meet();
    }
}

/* Receives what the kernel has, without the library's knowledge, so that nobody tells the peer of room but the kernel. */
static long receive_from_kernel(int fd, void *into, long size)
{
    long result;
#if defined(__x86_64__)
    register long flags __asm__("r10") = MSG_DONTWAIT, address __asm__("r8") = 0, length __asm__("r9") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_recvfrom), "D"(fd), "S"(into), "d"(size), "r"(flags), "r"(address), "r"(length)
                     : "rcx", "r11", "memory");
#else
    result = recv(fd, into, size, MSG_DONTWAIT);
#endif
    return result;
}

/* A thread waits for room in a ring, which is left for TCP meanwhile, where there is no room either. */
static void wait_for_room(int me, int fd, int interest)
{
    if (me == CONNECTOR)
        fill(fd, 200);
    meet();
    /* What the first ring has is received, and the connection changes over again, behind all that TCP has. */
    if (me == ACCEPTOR) {
        static char bytes[16384];
        receive_all(fd, bytes, sizeof bytes);
    }
    change_over(me, fd, 200);
    meet();
    if (me == CONNECTOR) {
        char byte = '.';
        while (send(fd, &byte, 1, 0) > 0)
            ;
        meet();
        say_events("events", events_of(fd, interest, PATIENCE));
    } else {
        static char bytes[65536];
        meet();
        /* A ring without room is left after 20 ms. The peer must have done that before there is room. */
        usleep(200000);
        while (receive_from_kernel(fd, bytes, sizeof bytes) > 0)
            ;
    }
    meet();
    /* The bytes are not counted any more, so nothing else can be done with the connection. */
    abort_connection(fd);
}

CASE(changing_room_where_a_ring_was_left)
{
    wait_for_room(me, fd, POLLIN | POLLOUT);
}

CASE(changing_room_alone_where_a_ring_was_left)
{
    wait_for_room(me, fd, POLLOUT);
}

CASE(changing_room_after_receiving_was_shut_down)
{
    if (me == CONNECTOR)
        check(shutdown(fd, SHUT_RD) == 0, "shutdown");
    wait_for_room(me, fd, POLLOUT);
}

/* The same for the largest ring. (While a larger one is about to come, a thread looks every millisecond.) What it has is sent again over TCP,
 * which has no room then. */
static void wait_for_room_in_largest(int me, int fd, int (*wait)(int fd))
{
    static char bytes[65536];
    get_largest_ring(me, fd);
    if (me == CONNECTOR) {
        while (send(fd, bytes, sizeof bytes, 0) > 0)
            ;
        meet();
        time_t begun = time(NULL);
        int has_room = wait(fd);
        /* A thread that nobody has woken finds room when it does not want to wait any more. */
        say("has room in time", has_room && time(NULL) - begun < PATIENCE / 2000);
    } else {
        meet();
        /* The largest ring is left after a second. A busy machine may send what it had much later, and without that there is no room. */
        usleep(1500000);
        drain(fd, 2000);
    }
    meet();
}

static int wait_in_poll(int fd)
{
    return events_of(fd, POLLIN | POLLOUT, PATIENCE) == POLLOUT;
}

static void *look_for_room(void *fd)
{
    while (!events_of(*(int *)fd, POLLOUT, 0))
        usleep(100);
    return NULL;
}

/* Another thread leaves the ring. */
static int wait_beside_another(int fd)
{
    pthread_t other;
    check(pthread_create(&other, NULL, look_for_room, &fd) == 0, "pthread_create");
    int has_room = wait_in_poll(fd);
    pthread_join(other, NULL);
    return has_room;
}

static int wait_in_epoll(int fd)
{
    struct epoll_event event = { .events = EPOLLIN | EPOLLOUT };
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    return epoll_wait(epoll, &event, 1, PATIENCE) == 1 && event.events == EPOLLOUT;
}

static int wait_after_shutdown(int fd)
{
    check(shutdown(fd, SHUT_RD) == 0, "shutdown");
    return events_of(fd, POLLOUT, PATIENCE) == POLLOUT;
}

CASE(changing_room_in_the_largest_ring)
{
    wait_for_room_in_largest(me, fd, wait_in_poll);
}

CASE(changing_room_in_the_largest_ring_beside_another)
{
    wait_for_room_in_largest(me, fd, wait_beside_another);
}

CASE(changing_room_in_the_largest_ring_for_epoll)
{
    wait_for_room_in_largest(me, fd, wait_in_epoll);
}

CASE(changing_room_in_the_largest_ring_after_shutdown)
{
    wait_for_room_in_largest(me, fd, wait_after_shutdown);
}

/* The ends make calls in turn, so the connection changes over step by step. After so many turns, the acceptor makes no more calls before it closes. It
 * may have counted what it has received by then, and not have seen that no more of that comes. The byte with which the connector has told it of
 * the end waits in its socket. */
static void close_while_it_changes(int me, int fd, int turns)
{
    char byte = '.';
    if (me == CONNECTOR)
        send_all(fd, &byte, 1);
    receive_all(fd, &byte, 1);
    if (me == ACCEPTOR)
        send_all(fd, &byte, 1);
    for (int turn = 0; turn < 2 * turns; turn++) {
        if ((me == CONNECTOR) == turn % 2)
            events_of(fd, POLLIN, 0);
        /* The daemon answers meanwhile, so that each call gets as far as it can. */
        usleep(2000);
        meet();
    }
    if (me == ACCEPTOR) {
        struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP | EPOLLET };
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    }
    meet();
    if (me == CONNECTOR) {
        events_of(fd, POLLIN, 0);
        events_of(fd, POLLIN, 0);
        check(shutdown(fd, SHUT_RDWR) == 0, "shutdown");
    }
    meet();
    if (me == ACCEPTOR)
        close(fd);
    meet();
    if (me == CONNECTOR)
        say("recv", recv(fd, &byte, 1, 0));
    meet();
}

#define EARLY_CLOSE(turns, attempt) \
    CASE(early_close_after_##turns##_turns_##attempt) \
    { \
        close_while_it_changes(me, fd, turns); \
    }
EARLY_CLOSE(0, 1)
EARLY_CLOSE(0, 2)
EARLY_CLOSE(0, 3)
EARLY_CLOSE(0, 4)
EARLY_CLOSE(1, 1)
EARLY_CLOSE(1, 2)
EARLY_CLOSE(1, 3)
EARLY_CLOSE(1, 4)
EARLY_CLOSE(2, 1)
EARLY_CLOSE(2, 2)
EARLY_CLOSE(2, 3)
EARLY_CLOSE(2, 4)
