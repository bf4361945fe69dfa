/* tcp(7) and shutdown(2). */
#include "case.h"

CASE(tcp_much_after_receiving_was_shut_down)
{
    enum { SIZE = 300000 };
    static char bytes[SIZE];
    if (me == CONNECTOR) {
        say("shutdown", shutdown(fd, SHUT_RD));
        int sent = 0, n = 0;
        while (sent < SIZE && (n = send(fd, bytes + sent, SIZE - sent, MSG_NOSIGNAL)) > 0)
            sent += n;
        say("sent", sent);
        say("shutdown", shutdown(fd, SHUT_WR));
    } else {
        usleep(50000);
        int got = 0, n;
        while ((n = recv(fd, bytes, SIZE, 0)) > 0)
            got += n;
        say("received", got);
        say("recv", n);
    }
    meet();
}

CASE(tcp_linger_of_zero)
{
    if (me == CONNECTOR)
        abort_connection(fd);
    meet();
    if (me == ACCEPTOR) {
        char byte;
        say("recv", recv(fd, &byte, 1, 0));
        say("recv", recv(fd, &byte, 1, 0));
    }
}

/* The acceptor exits with unread data. Returns whether this is the other end, which learns of that. */
static int learns_of_exit(int me, int fd)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR)
        say_events("data", events_of(fd, POLLIN, PATIENCE));
    else
        say_events("reset", events_of(fd, 0, PATIENCE));
    return me == CONNECTOR;
}

CASE(tcp_exit_with_unread_data)
{
    if (!learns_of_exit(me, fd))
        return;
    char byte;
    say("recv", recv(fd, &byte, 1, 0));
    say("recv", recv(fd, &byte, 1, 0));
}

CASE(tcp_send_to_one_that_has_exited)
{
    if (!learns_of_exit(me, fd))
        return;
    say("send", send(fd, "a", 1, 0));
    say("send", send(fd, "a", 1, MSG_NOSIGNAL));
}

CASE(tcp_receive_nothing_after_a_reset)
{
    if (!learns_of_exit(me, fd))
        return;
    char byte;
    say("recv of 0 bytes", recv(fd, &byte, 0, 0));
    say("recv of 0 bytes", recv(fd, &byte, 0, 0));
}

CASE(tcp_options)
{
    if (me == CONNECTOR) {
        int value;
        socklen_t size;
#define GET(level, name) \
    (value = -7, size = sizeof value, say(#name, getsockopt(fd, level, name, &value, &size)), say("value", value), say("size", size))
        GET(SOL_SOCKET, SO_TYPE);
        GET(SOL_SOCKET, SO_ERROR);
        GET(SOL_SOCKET, SO_KEEPALIVE);
        GET(SOL_SOCKET, SO_RCVLOWAT);
        GET(SOL_SOCKET, SO_ACCEPTCONN);
        GET(IPPROTO_TCP, TCP_NODELAY);
        GET(IPPROTO_TCP, TCP_CORK);
        GET(IPPROTO_TCP, TCP_KEEPIDLE);
        GET(IPPROTO_TCP, TCP_KEEPCNT);
        int on = 1;
        say("TCP_NODELAY", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
        GET(IPPROTO_TCP, TCP_NODELAY);
        say("TCP_CORK", setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof on));
        GET(IPPROTO_TCP, TCP_CORK);
        say("SO_KEEPALIVE", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on));
        GET(SOL_SOCKET, SO_KEEPALIVE);
        say("a wrong length", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, 1));
    }
    meet();
}

/* Makes calls while the connection may change over. */
static void look_for_a_while(int fd)
{
    for (int i = 0; i < 30; i++)
        events_of(fd, 0, 1);
}

/* An end closes the connection, or exits, while the kernel still holds bytes that it has sent, and nothing else makes the kernel send them. Over Ginnel,
 * the byte with which the peer has woken it waits in its socket. */
static void ends_early(int me, int fd, int exits)
{
    char bytes[1000] = "";
    if (me == CONNECTOR) {
        int on = 1;
        check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "TCP_NODELAY");
        say("send", send(fd, bytes, sizeof bytes, MSG_MORE));
        look_for_a_while(fd);
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP };
        check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
        for (int i = 0; i < 100; i++)
            epoll_wait(epoll, &event, 1, 0);
        epoll_wait(epoll, &event, 1, 1);
        meet();
        meet();
        say("recv", recv(fd, bytes, sizeof bytes, 0));
        if (exits)
            exit(0);
        say("close", close(fd));
        meet();
    } else {
        look_for_a_while(fd);
        meet();
        say("shutdown", shutdown(fd, SHUT_WR));
        meet();
        if (exits)
            check(WAIT_UNTIL(events_of(fd, POLLRDHUP, 1) & (POLLRDHUP | POLLERR)), "the end");
        else
            meet();
        say("recv", recv(fd, bytes, sizeof bytes, MSG_WAITALL));
        say("recv", recv(fd, bytes, sizeof bytes, 0));
    }
}

CASE(early_closes_before_the_kernel_has_sent)
{
    ends_early(me, fd, 0);
}

CASE(early_exits_before_the_kernel_has_sent)
{
    ends_early(me, fd, 1);
}
