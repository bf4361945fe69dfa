/* What random programs have found (`random`). */
#include "case.h"

static void tell(int number)
{
    say("signal", number);
}

static const char LETTERS[] = "abcdefghij";

/* MSG_PEEK fills all vectors, also with what waits behind the first carrier. */
static void peek_into_vectors(int fd, int size, int flags)
{
    char bytes[3][8192];
    memset(bytes, '-', sizeof bytes);
    struct iovec pieces[] = { { bytes[0], size / 3 }, { NULL, 0 }, { bytes[1], 1 }, { bytes[2], size - size / 3 - 1 } };
    struct msghdr message = { .msg_iov = pieces, .msg_iovlen = 4 };
    say("recvmsg", recvmsg(fd, &message, MSG_PEEK | flags));
    say("flags", message.msg_flags);
    printf("%.3s %.1s %.3s %.3s\n", bytes[0], bytes[1], bytes[2], bytes[2] + pieces[3].iov_len - 3);
}

CASE(found_peek_into_vectors)
{
    if (me == ACCEPTOR)
        send_all(fd, LETTERS, 10);
    meet();
    if (me == CONNECTOR) {
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 10; })), "bytes");
        peek_into_vectors(fd, 10, 0);
        peek_into_vectors(fd, 9, MSG_WAITALL);
        peek_into_vectors(fd, 300, MSG_DONTWAIT);
        peek_into_vectors(fd, 10, MSG_TRUNC);
        char bytes[10];
        receive_all(fd, bytes, 10);
        peek_into_vectors(fd, 10, MSG_DONTWAIT);
    }
    meet();
    if (me == ACCEPTOR)
        shutdown(fd, SHUT_WR);
    else {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        peek_into_vectors(fd, 10, 0);
    }
    meet();
}

/* More than a small ring has. */
CASE(found_peek_much_into_vectors)
{
    static char bytes[20000];
    if (me == ACCEPTOR) {
        for (int i = 0; i < 20000; i++)
            bytes[i] = LETTERS[i % 10];
        send_all(fd, bytes, 20000);
    } else {
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 20000; })), "bytes");
        peek_into_vectors(fd, 10000, 0);
        receive_all(fd, bytes, 9000);
        peek_into_vectors(fd, 10000, MSG_WAITALL);
        receive_all(fd, bytes, 11000);
    }
    meet();
}

/* The connector shuts down both ways, in one call or in two. Bytes that come afterwards break the connection. */
static void send_to_one_that_has_shut_down(int me, int fd, const int *how, int size, int unread)
{
    static char bytes[16000];
    signal(SIGPIPE, tell);
    if (me == ACCEPTOR && unread > 0)
        send_all(fd, LETTERS, unread);
    meet();
    if (me == CONNECTOR) {
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == unread; })), "bytes");
        for (int i = 0; i < 2; i++)
            if (how[i] >= 0)
                say("shutdown", shutdown(fd, how[i]));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
    }
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        say("send", send(fd, bytes, size, 0));
        say_events("reset", events_of(fd, 0, PATIENCE));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
    }
    meet();
    if (me == CONNECTOR) {
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        for (int i = 0; i < 3; i++)
            say("recv", recv(fd, bytes, 100, 0));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        say("send", send(fd, "a", 1, 0));
    } else {
        say("recv", recv(fd, bytes, 100, 0));
        say("send", send(fd, "a", 1, 0));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        say("send", send(fd, "a", 1, 0));
    }
    meet();
}

CASE(found_shut_down_both_then_bytes_come)
{
    send_to_one_that_has_shut_down(me, fd, (int[]){ SHUT_RDWR, -1 }, 3, 0);
}

CASE(found_shut_down_both_then_many_bytes_come)
{
    send_to_one_that_has_shut_down(me, fd, (int[]){ SHUT_RDWR, -1 }, 16000, 0);
}

CASE(found_shut_down_both_with_unread_bytes)
{
    send_to_one_that_has_shut_down(me, fd, (int[]){ SHUT_RDWR, -1 }, 3, 7);
}

CASE(found_shut_down_sending_then_receiving)
{
    send_to_one_that_has_shut_down(me, fd, (int[]){ SHUT_WR, SHUT_RD }, 3, 0);
}

CASE(found_shut_down_receiving_then_sending)
{
    send_to_one_that_has_shut_down(me, fd, (int[]){ SHUT_RD, SHUT_WR }, 3, 7);
}

/* An edge-triggered instance reports the reset to the end that has shut down. */
CASE(found_shut_down_both_and_epoll)
{
    struct epoll_event event = { EPOLLIN | EPOLLRDHUP | EPOLLET };
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    if (me == CONNECTOR) {
        shutdown(fd, SHUT_RDWR);
        say("epoll_wait", epoll_wait(epoll, &event, 1, PATIENCE));
        say_events("events", event.events);
        say("epoll_wait", epoll_wait(epoll, &event, 1, 0));
    }
    meet();
    if (me == ACCEPTOR)
        say("send", send(fd, "abc", 3, 0));
    else {
        say("epoll_wait", epoll_wait(epoll, &event, 1, PATIENCE));
        say_events("events", event.events);
    }
    meet();
}

/* More than a small ring holds, so that the sender goes back to TCP. */
enum { MUCH = 40000 };

/* The connector closes with bytes unread that have come over the ring, or over TCP after that. */
static void close_unread(int me, int fd, int taken, int answer)
{
    static char bytes[MUCH];
    signal(SIGPIPE, tell);
    if (me == ACCEPTOR)
        send_all(fd, bytes, MUCH);
    meet();
    if (me == CONNECTOR) {
        receive_all(fd, bytes, taken);
        send_all(fd, LETTERS, answer);
        close(fd);
    }
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        for (int i = 0; i < 3; i++)
            say("recv", recv(fd, bytes, 100, 0));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        if (taken < MUCH)
            say("send", send(fd, "abc", 3, 0));
    }
    meet();
}

CASE(found_close_unread_of_the_ring)
{
    close_unread(me, fd, 0, 0);
}

CASE(found_close_unread_of_the_ring_after_an_answer)
{
    close_unread(me, fd, 0, 10);
}

CASE(found_close_unread_of_tcp)
{
    close_unread(me, fd, MUCH - 1, 0);
}

CASE(found_close_unread_of_tcp_after_an_answer)
{
    close_unread(me, fd, MUCH - 1, 10);
}

CASE(found_close_with_nothing_unread)
{
    close_unread(me, fd, MUCH, 10);
}

/* A reset with bytes before it is reported at once. */
CASE(found_reset_behind_bytes)
{
    char byte;
    if (me == ACCEPTOR)
        send_all(fd, LETTERS, 10);
    meet();
    if (me == CONNECTOR) {
        send_all(fd, LETTERS, 10);
        abort_connection(fd);
    } else {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        say_events("reset", events_of(fd, 0, PATIENCE));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        say("recv", recv(fd, &byte, 1, 0));
    }
    meet();
}

/* The end is behind bytes that the ring has, and others that come over TCP again. */
CASE(found_end_behind_bytes_of_both)
{
    static char bytes[MUCH];
    if (me == ACCEPTOR) {
        send_all(fd, bytes, MUCH);
        say("shutdown", shutdown(fd, SHUT_WR));
    } else {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        receive_all(fd, bytes, 100);
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        receive_all(fd, bytes, MUCH - 101);
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        say("recv", recv(fd, bytes, 2, 0));
        say("recv", recv(fd, bytes, 2, 0));
    }
    meet();
    if (me == CONNECTOR)
        send_all(fd, LETTERS, 10);
    else
        receive_all(fd, bytes, 10);
    meet();
}
