/* poll(2), and how it shows the ends of a connection. */
#include "case.h"

static const int INTERESTS[] = {
    0, POLLIN, POLLOUT, POLLRDHUP, POLLIN | POLLRDHUP, POLLIN | POLLOUT, POLLIN | POLLOUT | POLLRDHUP | POLLPRI, POLLRDNORM | POLLWRNORM,
};

/* Prints the events for each interest. */
static void say_all(const char *when, int fd)
{
    for (unsigned i = 0; i < sizeof INTERESTS / sizeof INTERESTS[0]; i++) {
        char what[100];
        sprintf(what, "%s, interest %#x", when, INTERESTS[i]);
        say_events(what, events_of(fd, INTERESTS[i], 0));
    }
}

CASE(poll_idle)
{
    if (me == CONNECTOR)
        say_all("idle", fd);
    meet();
}

CASE(poll_data)
{
    if (me == ACCEPTOR)
        send_all(fd, "ab", 2);
    meet();
    if (me == CONNECTOR) {
        say_events("data", events_of(fd, POLLIN, PATIENCE));
        say_all("data", fd);
    }
    meet();
}

CASE(poll_peer_shut_down)
{
    if (me == ACCEPTOR)
        say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == CONNECTOR) {
        say_events("the end", events_of(fd, POLLRDHUP, PATIENCE));
        say_all("the end", fd);
        char byte;
        say("recv", recv(fd, &byte, 1, 0));
        say_all("after the end", fd);
    }
    meet();
}

CASE(poll_peer_shut_down_with_data)
{
    if (me == ACCEPTOR) {
        send_all(fd, "abc", 3);
        say("shutdown", shutdown(fd, SHUT_WR));
    }
    meet();
    if (me == CONNECTOR) {
        say_events("the end behind data", events_of(fd, POLLRDHUP, PATIENCE));
        say_all("the end behind data", fd);
        char bytes[4];
        say("recv", recv(fd, bytes, 4, 0));
        say_all("after the data", fd);
    }
    meet();
}

CASE(poll_own_shutdown)
{
    if (me == CONNECTOR) {
        say("shutdown", shutdown(fd, SHUT_WR));
        say_all("own end", fd);
    }
    meet();
}

CASE(poll_own_shutdown_of_receiving)
{
    if (me == CONNECTOR) {
        say("shutdown", shutdown(fd, SHUT_RD));
        say_all("nothing is received", fd);
        char byte;
        say("recv", recv(fd, &byte, 1, 0));
    }
    meet();
    if (me == ACCEPTOR)
        send_all(fd, "a", 1);
    meet();
    if (me == CONNECTOR) {
        char byte;
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 1; })), "1 byte");
        say("recv of what came afterwards", recv(fd, &byte, 1, 0));
        say("send", send(fd, "a", 1, 0));
        say("shutdown", shutdown(fd, SHUT_RDWR));
        say_all("both are shut down", fd);
    }
    meet();
}

CASE(poll_both_shut_down)
{
    say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == CONNECTOR) {
        say_events("both ends", events_of(fd, 0, PATIENCE));
        say_all("both ends", fd);
    }
    meet();
}

CASE(poll_both_shut_down_with_data)
{
    send_all(fd, "abc", 3);
    say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == CONNECTOR) {
        say_events("both ends", events_of(fd, 0, PATIENCE));
        say_all("both ends", fd);
        char bytes[4];
        say("recv", recv(fd, bytes, 4, 0));
        say_all("after the data", fd);
    }
    meet();
}

CASE(poll_peer_closed)
{
    if (me == ACCEPTOR)
        close(fd);
    meet();
    if (me == CONNECTOR) {
        say_events("closed", events_of(fd, POLLRDHUP, PATIENCE));
        say_all("closed", fd);
    }
    meet();
}

CASE(poll_peer_aborted)
{
    if (me == ACCEPTOR)
        abort_connection(fd);
    meet();
    if (me == CONNECTOR) {
        say_events("reset", events_of(fd, 0, PATIENCE));
        say_all("reset", fd);
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        say("SO_ERROR", error);
        say_all("after the error", fd);
        char byte;
        say("recv", recv(fd, &byte, 1, 0));
        say("send", send(fd, &byte, 1, MSG_NOSIGNAL));
    }
    meet();
}

CASE(poll_peer_closed_with_unread_data)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        say_events("data", events_of(fd, POLLIN, PATIENCE));
        close(fd);
    }
    meet();
    if (me == CONNECTOR) {
        say_events("reset", events_of(fd, 0, PATIENCE));
        char byte;
        say("recv", recv(fd, &byte, 1, 0));
        say("recv", recv(fd, &byte, 1, 0));
        say("send", send(fd, &byte, 1, MSG_NOSIGNAL));
    }
    meet();
}

CASE(poll_closed_descriptors)
{
    if (me == CONNECTOR) {
        struct pollfd fds[] = { { fd, POLLIN, 0 }, { 500, POLLIN, 0 }, { -1, POLLIN, 7 } };
        say("poll", poll(fds, 3, 0));
        say_events("the closed one", fds[1].revents);
        say_events("the negative one", fds[2].revents);
        struct timespec wrong = { 0, -1 };
        say("ppoll", ppoll(fds, 1, &wrong, NULL));
        say("poll of too many", poll(fds, INT_MAX, 0));
    }
    meet();
}
