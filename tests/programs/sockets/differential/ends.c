/* How a connection ends when both ends have shut down. */
#include "case.h"

/* Both ends have shut down, and `closer` then closes with bytes unread. The other one has no connection any more that this could break. */
static void close_after_both_ends(int me, int fd, int closer, int lingers)
{
    if (me != closer)
        send_all(fd, "abc", 3);
    if (me == CONNECTOR)
        check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    }
    meet();
    say_events("both ends", events_of(fd, POLLRDHUP, PATIENCE));
    meet();
    if (me == closer) {
        if (lingers)
            abort_connection(fd);
        else
            close(fd);
    }
    meet();
    if (me != closer) {
        int error = -1;
        socklen_t size = sizeof error;
        char byte;
        say_events("events", events_of(fd, POLLIN | POLLRDHUP, PATIENCE));
        say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
        say("error", error);
        say("recv", recv(fd, &byte, 1, 0));
        say("send", send(fd, &byte, 1, MSG_NOSIGNAL));
    }
    meet();
}

CASE(ends_closed_unread_after_both_ends)
{
    close_after_both_ends(me, fd, ACCEPTOR, 0);
}

CASE(ends_closed_unread_after_both_ends_by_the_first)
{
    close_after_both_ends(me, fd, CONNECTOR, 0);
}

CASE(ends_aborted_unread_after_both_ends)
{
    close_after_both_ends(me, fd, ACCEPTOR, 1);
}

CASE(ends_aborted_unread_after_both_ends_by_the_first)
{
    close_after_both_ends(me, fd, CONNECTOR, 1);
}

/* The program has received all bytes, and no byte that comes once more breaks its connection. */
CASE(ends_shut_down_behind_all_bytes)
{
    enum { MANY = 130000 };
    static char bytes[MANY];
    if (me == CONNECTOR) {
        send_over_tcp(fd, bytes, MANY);
        shutdown(fd, SHUT_WR);
        meet();
        meet();
        say_events("events", events_of(fd, POLLIN | POLLRDHUP, PATIENCE));
        say("recv", recv(fd, bytes, 1, 0));
    } else {
        meet();
        receive_all(fd, bytes, MANY);
        say("shutdown", shutdown(fd, SHUT_RDWR));
        meet();
        say("recv", recv(fd, bytes, 1, 0));
    }
    meet();
}
