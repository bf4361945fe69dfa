/* tcp(7) and shutdown(2). */
#include "both.h"

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
    if (me == CONNECTOR) {
        struct linger none = { 1, 0 };
        say("SO_LINGER", setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none));
        close(fd);
    }
    meet();
    if (me == ACCEPTOR) {
        char byte;
        say("recv", recv(fd, &byte, 1, 0));
        say("recv", recv(fd, &byte, 1, 0));
    }
}

CASE(tcp_exit_with_unread_data)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        say_events("data", events_of(fd, POLLIN, 10000));
        return;
    }
    char byte;
    say_events("reset", events_of(fd, 0, 10000));
    say("recv", recv(fd, &byte, 1, 0));
    say("recv", recv(fd, &byte, 1, 0));
}

CASE(tcp_send_to_one_that_has_exited)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        say_events("data", events_of(fd, POLLIN, 10000));
        return;
    }
    say_events("reset", events_of(fd, 0, 10000));
    say("send", send(fd, "a", 1, 0));
    say("send", send(fd, "a", 1, MSG_NOSIGNAL));
}

CASE(tcp_receive_nothing_after_a_reset)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        say_events("data", events_of(fd, POLLIN, 10000));
        return;
    }
    char byte;
    say_events("reset", events_of(fd, 0, 10000));
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
