/* Bytes that are sent to a peer that has closed its end. It answers with a reset. */
#include "case.h"

static void tell(int number)
{
    say("signal", number);
}

/* The connector closes its end. Returns whether this is the acceptor, which has sent something afterwards. */
static int has_sent_in_vain(int me, int fd)
{
    signal(SIGPIPE, tell);
    meet();
    if (me == CONNECTOR)
        close(fd);
    meet();
    if (me == CONNECTOR)
        return 0;
    say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
    say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
    say("send", send(fd, "abc", 3, 0));
    say_events("reset", events_of(fd, 0, PATIENCE));
    say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
    return 1;
}

CASE(vain_send_and_receive)
{
    char byte;
    if (has_sent_in_vain(me, fd)) {
        say("recv", recv(fd, &byte, 1, 0));
        say("recv", recv(fd, &byte, 1, 0));
        say_events("events", events_of(fd, 0, PATIENCE));
        say("send", send(fd, "abc", 3, 0));
        say_events("events", events_of(fd, 0, PATIENCE));
        say("send", send(fd, "abc", 3, 0));
    }
    meet();
}

CASE(vain_send_and_error)
{
    if (has_sent_in_vain(me, fd)) {
        int value = -7;
        socklen_t size = sizeof value;
        say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &size));
        say("value", value);
        say_events("events", events_of(fd, 0, PATIENCE));
        say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &size));
        say("value", value);
        say("send", send(fd, "abc", 3, 0));
    }
    meet();
}

CASE(vain_send_with_unread_data)
{
    char byte;
    if (me == CONNECTOR)
        send_all(fd, "xy", 2);
    if (has_sent_in_vain(me, fd)) {
        for (int i = 0; i < 3; i++)
            say("recv", recv(fd, &byte, 1, 0));
        say_events("events", events_of(fd, 0, PATIENCE));
        say("send", send(fd, "abc", 3, 0));
    }
    meet();
}

/* An edge-triggered instance reports the reset. */
CASE(vain_send_and_epoll)
{
    signal(SIGPIPE, tell);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { EPOLLIN | EPOLLRDHUP | EPOLLET };
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    meet();
    if (me == CONNECTOR)
        close(fd);
    meet();
    if (me == ACCEPTOR) {
        say("epoll_wait", epoll_wait(epoll, &event, 1, PATIENCE));
        say_events("events", event.events);
        say("send", send(fd, "abc", 3, 0));
        say("epoll_wait", epoll_wait(epoll, &event, 1, PATIENCE));
        say_events("events", event.events);
        say("send", send(fd, "abc", 3, 0));
    }
    meet();
}

/* The end of the stream, unlike bytes, does not break a connection whose other end takes no more, also where somebody has slept. */
CASE(vain_end)
{
    static char some[20000];
    if (me == CONNECTOR) {
        send_all(fd, some, sizeof some);
        fflush(stdout);
        pid_t sleeper = getpid(), child = fork();
        if (child == 0) {
            while (!is_asleep(sleeper))
                usleep(1000);
            _exit(shutdown(fd, SHUT_RDWR));
        }
        say_events("events", events_of(fd, POLLIN, -1) & POLLIN);
        int status;
        waitpid(child, &status, 0);
        say("shutdown", WEXITSTATUS(status));
    }
    meet();
    if (me == ACCEPTOR) {
        say("shutdown", shutdown(fd, SHUT_WR));
        receive_all(fd, some, sizeof some);
        say("recv", recv(fd, some, 1, 0));
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
    }
    meet();
}

/* The program's own end comes before the peer's: what is sent after it is an error. */
CASE(vain_after_the_own_end)
{
    if (me == ACCEPTOR) {
        close(fd);
        meet();
    } else {
        meet();
        check(events_of(fd, POLLRDHUP, PATIENCE) & POLLRDHUP, "the end");
        say_events("room", events_of(fd, POLLOUT, PATIENCE));
        say("shutdown", shutdown(fd, SHUT_WR));
        say("send", send(fd, "x", 1, MSG_NOSIGNAL));
        say("send", send(fd, "x", 1, MSG_NOSIGNAL));
    }
    meet();
}
