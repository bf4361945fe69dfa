/* epoll(7), and how it shows the ends of a connection. */
#include "case.h"

static const unsigned INTERESTS[] = {
    0, EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLIN | EPOLLRDHUP, EPOLLIN | EPOLLOUT | EPOLLRDHUP,
    EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, EPOLLRDHUP | EPOLLET, EPOLLIN | EPOLLONESHOT,
};
enum { COUNT = sizeof INTERESTS / sizeof INTERESTS[0] };

/* The instances, one for each interest. */
static int instances[COUNT];

static void watch(int fd)
{
    for (int i = 0; i < COUNT; i++) {
        instances[i] = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { .events = INTERESTS[i], .data.u64 = i };
        check(epoll_ctl(instances[i], EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    }
}

/* Prints the events in each instance, once those in the one with interest in `EPOLLRDHUP` alone are there. */
static void say_all(const char *when, int waits)
{
    struct epoll_event event;
    if (waits)
        check(epoll_wait(instances[3], &event, 1, PATIENCE) == 1, "no event");
    for (int i = 0; i < COUNT; i++) {
        char what[100];
        sprintf(what, "%s, interest %#x", when, INTERESTS[i]);
        int found = epoll_wait(instances[i], &event, 1, 0);
        say_events(what, found == 1 ? event.events : 0);
        if (found == 1)
            check(event.data.u64 == (unsigned)i, "its data");
    }
}

CASE(epoll_idle)
{
    if (me == CONNECTOR) {
        watch(fd);
        say_all("idle", 0);
        say_all("idle, again", 0);
    }
    meet();
}

CASE(epoll_peer_shut_down)
{
    if (me == CONNECTOR) {
        watch(fd);
        say_all("idle", 0);
    }
    meet();
    if (me == ACCEPTOR)
        say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == CONNECTOR) {
        say_all("the end", 1);
        say_all("the end, again", 0);
    }
    meet();
}

CASE(epoll_peer_shut_down_with_data)
{
    if (me == CONNECTOR) {
        watch(fd);
        say_all("idle", 0);
    }
    meet();
    if (me == ACCEPTOR) {
        send_all(fd, "abc", 3);
        say("shutdown", shutdown(fd, SHUT_WR));
    }
    meet();
    if (me == CONNECTOR)
        say_all("the end behind data", 1);
    meet();
}

CASE(epoll_both_shut_down)
{
    if (me == CONNECTOR)
        watch(fd);
    meet();
    say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == CONNECTOR) {
        struct epoll_event event;
        say("an end without interest", epoll_wait(instances[0], &event, 1, PATIENCE));
        say_all("both ends", 1);
    }
    meet();
}

CASE(epoll_peer_aborted)
{
    if (me == CONNECTOR)
        watch(fd);
    meet();
    if (me == ACCEPTOR)
        abort_connection(fd);
    meet();
    if (me == CONNECTOR) {
        struct epoll_event event;
        say("a reset without interest", epoll_wait(instances[0], &event, 1, PATIENCE));
        say_all("reset", 1);
    }
    meet();
}

CASE(epoll_invalid_arguments)
{
    if (me == CONNECTOR) {
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { .events = EPOLLIN };
        say("epoll_wait without room", epoll_wait(epoll, &event, 0, 0));
        say("EPOLL_CTL_MOD before EPOLL_CTL_ADD", epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event));
        say("EPOLL_CTL_DEL before EPOLL_CTL_ADD", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, &event));
        say("EPOLL_CTL_ADD", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
        say("EPOLL_CTL_ADD again", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
        say("an operation that is none", epoll_ctl(epoll, 9, fd, &event));
        say("epoll_ctl of itself", epoll_ctl(epoll, EPOLL_CTL_ADD, epoll, &event));
        say("EPOLL_CTL_DEL", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
        say("EPOLL_CTL_DEL again", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
        event.events = EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT;
        say("EPOLLEXCLUSIVE with EPOLLONESHOT", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
        event.events = EPOLLIN | EPOLLEXCLUSIVE;
        say("EPOLLEXCLUSIVE", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
        say("EPOLL_CTL_MOD of an exclusive one", epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event));
    }
    meet();
}

/* Both ends write, edge-triggered, before one of them reads. TCP's buffers take that much, and rings do not. */
CASE(epoll_both_write_first)
{
    enum { SIZE = 600000 };
    static char bytes[SIZE];
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET };
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    check(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    int sent = 0;
    say("an event", epoll_wait(epoll, &event, 1, PATIENCE));
    while (sent < SIZE) {
        for (int n; sent < SIZE && (n = send(fd, bytes + sent, SIZE - sent, MSG_NOSIGNAL)) > 0;)
            sent += n;
        if (sent < SIZE)
            check(errno == EAGAIN, "send");
        if (sent < SIZE)
            check(epoll_wait(epoll, &event, 1, PATIENCE) == 1, "it waits for ever");
    }
    say("sent", sent);
    meet();
    int got = 0;
    while (got < SIZE) {
        int n = recv(fd, bytes, SIZE, 0);
        check(n > 0 || errno == EAGAIN, "recv");
        got += n > 0 ? n : 0;
        if (got < SIZE && n < 0)
            check(epoll_wait(epoll, &event, 1, PATIENCE) == 1, "it waits for ever to receive");
    }
    say("received", got);
    meet();
}

/* The event of EPOLLONESHOT comes before the change, and so it does not come again after it. */
static void once_during_the_change(int me, int fd, int extra)
{
    char byte;
    if (me == ACCEPTOR) {
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { EPOLLIN | EPOLLONESHOT | extra, { .u32 = 7 } }, got = { 0 };
        check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "EPOLL_CTL_ADD");
        meet();
        say("the first byte", epoll_wait(epoll, &got, 1, 10000));
        say_events("its events", got.events);
        receive_all(fd, &byte, 1);
        for (int turn = 0; turn < 200; turn++) {
            send_all(fd, "a", 1);
            receive_all(fd, &byte, 1);
        }
        meet();
        say_events("another byte", events_of(fd, POLLIN, 10000));
        say("events", epoll_wait(epoll, &got, 1, 0));
        event.data.u32 = 8;
        check(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event) == 0, "EPOLL_CTL_MOD");
        say("asked again", epoll_wait(epoll, &got, 1, 10000));
        say("data", got.data.u32);
        say("asked once", epoll_wait(epoll, &got, 1, 0));
    } else {
        meet();
        send_all(fd, "b", 1);
        for (int turn = 0; turn < 200; turn++) {
            receive_all(fd, &byte, 1);
            send_all(fd, "b", 1);
        }
        meet();
        send_all(fd, "b", 1);
    }
    meet();
}

CASE(early_epoll_once)
{
    once_during_the_change(me, fd, 0);
}

CASE(early_epoll_once_with_edges)
{
    once_during_the_change(me, fd, EPOLLET);
}

/* The peer has sent more than the smallest ring holds, and has shut down both directions, before the program watches the connection. */
CASE(epoll_end_behind_unread_bytes)
{
    static char bytes[4096];
    if (me == CONNECTOR) {
        send_all(fd, bytes, sizeof bytes);
        shutdown(fd, SHUT_RDWR);
        meet();
        meet();
        return;
    }
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, { 0 } }, got;
    meet();
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "EPOLL_CTL_ADD");
    int all = 0;
    while (!(all & EPOLLRDHUP) && epoll_wait(epoll, &got, 1, PATIENCE) > 0)
        all |= got.events;
    say_events("events", all);
    meet();
}
