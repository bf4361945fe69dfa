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

/* Sends until there has been no room for a while. */
static void fill(int fd)
{
    static char bytes[16384];
    check(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    do {
        while (send(fd, bytes, sizeof bytes, 0) > 0)
            ;
        check(errno == EAGAIN, "send");
    } while (events_of(fd, POLLOUT, 200));
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
        fill(fd);
    meet();
    /* What the first ring has is received, and the connection changes over again, behind all that TCP has. */
    if (me == ACCEPTOR) {
        static char bytes[16384];
        receive_all(fd, bytes, sizeof bytes);
    }
    for (int i = 0; i < 200; i++) {
        events_of(fd, me == CONNECTOR ? POLLOUT : POLLIN, 0);
        usleep(1000);
    }
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
