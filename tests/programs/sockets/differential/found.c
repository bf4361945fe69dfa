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

/* Hands a descriptor over in a message, and returns its number. */
static int handed_over(int fd)
{
    int pair[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } rights = { .header = { CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS } };
    memcpy(CMSG_DATA(&rights.header), &fd, sizeof fd);
    struct iovec byte = { ".", 1 };
    struct msghdr message
        = { .msg_iov = &byte, .msg_iovlen = 1, .msg_control = rights.space, .msg_controllen = sizeof rights.space };
    long sent = say("sendmsg", sendmsg(pair[0], &message, 0));
    int copy = -1;
    char room;
    byte.iov_base = &room;
    if (sent == 1) {
        say("recvmsg", recvmsg(pair[1], &message, 0));
        memcpy(&copy, CMSG_DATA(&rights.header), sizeof copy);
    }
    close(pair[0]);
    close(pair[1]);
    return copy;
}

static void *wait_for_a_break(void *fd)
{
    events_of(*(int *)fd, 0, -1);
    return NULL;
}

/* A peer that only waits for errors takes part when a connection is handed over. */
CASE(found_hand_over_to_one_that_waits_for_nothing)
{
    char byte;
    pthread_t thread = 0;
    if (me == CONNECTOR)
        thread = begin_sleep(wait_for_a_break, &fd);
    meet();
    int copy = fd;
    if (me == ACCEPTOR) {
        copy = handed_over(fd);
        close(fd);
        abort_connection(copy);
    } else {
        pthread_join(thread, NULL);
        say("recv", recv(fd, &byte, 1, 0));
    }
    meet();
}

/* Nothing is under way when the peer has closed the connection. */
static void hand_over_closed(int me, int fd, int size)
{
    char bytes[10];
    if (me == ACCEPTOR)
        send_all(fd, LETTERS, 10);
    else {
        receive_all(fd, bytes, 10);
        send_all(fd, LETTERS, size);
        close(fd);
    }
    meet();
    if (me == ACCEPTOR) {
        receive_all(fd, bytes, size);
        int copy = handed_over(fd);
        close(fd);
        say_events("events", events_of(copy, POLLIN | POLLOUT | POLLRDHUP, PATIENCE));
        say("recv", recv(copy, bytes, 10, 0));
        say("send", send(copy, bytes, 10, MSG_NOSIGNAL));
    }
    meet();
}

CASE(found_hand_over_what_the_peer_has_closed)
{
    hand_over_closed(me, fd, 0);
}

CASE(found_hand_over_what_the_peer_has_closed_after_bytes)
{
    hand_over_closed(me, fd, 10);
}

/* The peer has broken it, by a close with unread bytes. */
CASE(found_hand_over_what_the_peer_has_broken)
{
    char byte;
    if (me == ACCEPTOR)
        send_all(fd, LETTERS, 10);
    meet();
    if (me == CONNECTOR)
        close(fd);
    meet();
    if (me == ACCEPTOR) {
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, PATIENCE) & POLLHUP);
        recv(fd, &byte, 1, 0);
        int copy = handed_over(fd);
        close(fd);
        say_events("events", events_of(copy, POLLIN | POLLOUT | POLLRDHUP, PATIENCE) & ~POLLERR);
        say("recv", recv(copy, &byte, 1, 0));
        say("send", send(copy, LETTERS, 10, MSG_NOSIGNAL));
    }
    meet();
}

/* The program does not know yet that it is broken. */
CASE(found_hand_over_what_the_peer_has_broken_untold)
{
    if (me == ACCEPTOR)
        send_all(fd, LETTERS, 10);
    meet();
    if (me == CONNECTOR)
        close(fd);
    meet();
    if (me == ACCEPTOR) {
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, PATIENCE) & POLLHUP);
        char byte;
        int copy = handed_over(fd);
        recv(fd, &byte, 1, 0);
        close(fd);
        say_events("events", events_of(copy, POLLIN | POLLOUT | POLLRDHUP, PATIENCE) & POLLHUP);
        say("send", send(copy, LETTERS, 10, MSG_NOSIGNAL));
    }
    meet();
}

/* The program has shut down both directions, and a program that is executed gets it. */
CASE(found_execute_with_what_was_shut_down)
{
    char line[6];
    meet();
    if (me == CONNECTOR) {
        say("shutdown", shutdown(fd, SHUT_RDWR));
        meet();
        sprintf(line, "%d", fd);
        fcntl(fd, F_SETFD, 0);
        fflush(stdout);
        execl("/bin/bash", "bash", "-c", "wc -c <&$0", line, NULL);
    }
    meet();
    say("recv", recv(fd, line, 1, 0));
    say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, PATIENCE));
}

/* Another process gets what both ends have ended. */
CASE(found_hand_over_what_both_have_ended)
{
    meet();
    if (me == CONNECTOR)
        close(fd);
    meet();
    if (me == ACCEPTOR) {
        say("shutdown", shutdown(fd, SHUT_RDWR));
        int copy = handed_over(fd);
        close(fd);
        say_events("events", events_of(copy, POLLIN | POLLOUT | POLLRDHUP, PATIENCE));
    }
    meet();
}

/* A program that is executed gets it too. */
CASE(found_execute_with_what_the_peer_has_closed)
{
    meet();
    if (me == CONNECTOR) {
        close(fd);
        meet();
        return;
    }
    meet();
    char command[40];
    sprintf(command, "wc -c <&%d", fd);
    fcntl(fd, F_SETFD, 0);
    fflush(stdout);
    execl("/bin/bash", "bash", "-c", command, NULL);
}

static volatile sig_atomic_t is_executed;

static void note_execution(int number)
{
    (void)number;
    is_executed = 1;
}

/* It gets the connection also if the peer only polls, and another process at the peer's end was the last to receive. */
CASE(found_execute_where_a_child_of_the_peer_has_received)
{
    pid_t peer = getpid();
    if (me == CONNECTOR) {
        char command[60];
        receive_all(fd, &peer, sizeof peer);
        shutdown(fd, SHUT_WR);
        meet();
        sprintf(command, "kill -USR1 %d; wc -c <&%d", peer, fd);
        fcntl(fd, F_SETFD, 0);
        fflush(stdout);
        execl("/bin/bash", "bash", "-c", command, NULL);
    }
    int told[2];
    char byte;
    check(pipe(told) == 0, "pipe");
    signal(SIGUSR1, note_execution);
    send_all(fd, &peer, sizeof peer);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        check(recv(fd, &byte, 1, 0) == 0, "the end");
        check(write(told[1], ".", 1) == 1, "write");
        pause();
    }
    check(read(told[0], &byte, 1) == 1, "read");
    meet();
    struct pollfd its_end = { .fd = fd, .events = POLLIN };
    while (!is_executed)
        poll(&its_end, 1, 1);
    send_all(fd, "0123456789", 10);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(fd);
}

static void *wait_for_an_end(void *fd)
{
    say_events("end", events_of(*(int *)fd, POLLRDHUP, -1));
    return NULL;
}

/* A thread waits for the end since before the connection has changed over. */
CASE(found_wait_for_an_end_since_before_the_change)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), other;
    char byte = '.';
    pthread_t thread = 0;
    if (me == ACCEPTOR) {
        check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
        check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
        send_all(fd, &address.sin_port, sizeof address.sin_port);
        other = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    } else {
        receive_all(fd, &address.sin_port, sizeof address.sin_port);
        other = listener;
        check(connect(other, (struct sockaddr *)&address, size) == 0, "connect");
        thread = begin_sleep(wait_for_an_end, &other);
    }
    for (int turn = 0; turn < 300; turn++) {
        if (me == CONNECTOR) {
            send_all(other, &byte, 1);
            usleep(200);
        }
        receive_all(other, &byte, 1);
        if (me == ACCEPTOR)
            send_all(other, &byte, 1);
    }
    if (me == ACCEPTOR)
        say("shutdown", shutdown(other, SHUT_WR));
    else
        pthread_join(thread, NULL);
    meet();
}

/* While a relative has the connection too, as much has room as over TCP. */
static void send_beside_a_relative(int me, int fd, int size, int flags)
{
    static char bytes[MUCH];
    pid_t child = -1;
    int pair[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    if (me == ACCEPTOR && (child = fork()) == 0) {
        check(read(pair[1], bytes, 1) == 1, "read");
        say("send", send(fd, "relative", 8, 0));
        _exit(0);
    }
    if (me == ACCEPTOR)
        say("send", send(fd, bytes, size, flags));
    meet();
    if (me == ACCEPTOR) {
        check(write(pair[0], bytes, 1) == 1, "write");
        waitpid(child, NULL, 0);
        say("send", send(fd, "parent", 6, 0));
        shutdown(fd, SHUT_WR);
    } else {
        receive_all(fd, bytes, size);
        receive_all(fd, bytes, 14);
        printf("%.14s\n", bytes);
        say("recv", recv(fd, bytes, 1, 0));
        send_all(fd, LETTERS, 10);
    }
    if (me == ACCEPTOR)
        receive_all(fd, bytes, 10);
    meet();
}

CASE(found_send_beside_a_relative)
{
    send_beside_a_relative(me, fd, 16000, 0);
}

CASE(found_send_much_beside_a_relative)
{
    send_beside_a_relative(me, fd, MUCH, 0);
}

CASE(found_send_beside_a_relative_without_waiting)
{
    send_beside_a_relative(me, fd, 16000, MSG_DONTWAIT);
}

/* Passes a descriptor to this process itself, so that it gets another one for the same socket. */
static int another(int fd)
{
    int pair[2];
    char byte = 0;
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = { .room = "" };
    struct iovec piece = { &byte, 1 };
    struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    control.head = (struct cmsghdr){ CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS };
    memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    check(sendmsg(pair[0], &message, 0) == 1 && recvmsg(pair[1], &message, 0) == 1, "a message with a descriptor");
    memcpy(&fd, CMSG_DATA(&control.head), sizeof fd);
    close(pair[0]);
    close(pair[1]);
    return fd;
}

CASE(found_a_number_that_epoll_knew)
{
    if (me == ACCEPTOR) {
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { .events = EPOLLIN };
        int copy = fcntl(fd, F_DUPFD, 100);
        say("add", epoll_ctl(epoll, EPOLL_CTL_ADD, copy, &event));
        say("remove", epoll_ctl(epoll, EPOLL_CTL_DEL, copy, NULL));
        say("close", close(copy));
        int received = another(fd);
        check(dup2(received, copy) == copy, "dup2");
        say("add", epoll_ctl(epoll, EPOLL_CTL_ADD, copy, &event));
        send_all(fd, "y", 1);
        say("epoll_wait", epoll_wait(epoll, &event, 1, PATIENCE));
        close(copy);
        close(received);
    } else {
        char byte;
        /* Meanwhile, it takes part in what the other end does with the connection. */
        receive_all(fd, &byte, 1);
        send_all(fd, "x", 1);
    }
    meet();
}

static int wait_for_edge(int epoll, int milliseconds)
{
    struct epoll_event event = { 0 };
    return epoll_wait(epoll, &event, 1, milliseconds) == 1 ? event.events : 0;
}

static int watching(int fd, int events)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = events };
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    return epoll;
}

/* More was sent than a ring holds, so what comes later comes over TCP, while there are still bytes in the ring. */
CASE(found_edge_behind_a_ring_that_was_left)
{
    static char much[16384];
    int epoll = watching(fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
    meet();
    if (me == CONNECTOR)
        check(send(fd, much, sizeof much, MSG_DONTWAIT) == sizeof much, "send");
    meet();
    if (me == ACCEPTOR) {
        say_events("events", wait_for_edge(epoll, PATIENCE));
        receive_all(fd, much, 1000);
        while (wait_for_edge(epoll, 50) != 0)
            ;
    }
    meet();
    if (me == CONNECTOR)
        send_all(fd, much, 1000);
    meet();
    if (me == ACCEPTOR)
        say_events("events", wait_for_edge(epoll, PATIENCE));
    meet();
    close(epoll);
}

/* The process that hands a connection over closes it, with bytes unread. That breaks nothing for the one that has got it. */
CASE(found_close_after_a_hand_over_with_unread_bytes)
{
    char bytes[10];
    meet();
    if (me == CONNECTOR)
        send_all(fd, LETTERS, 10);
    meet();
    if (me == ACCEPTOR) {
        int copy = handed_over(fd);
        close(fd);
        struct linger linger = { 7, 7 };
        socklen_t size = sizeof linger;
        say("SO_LINGER", getsockopt(copy, SOL_SOCKET, SO_LINGER, &linger, &size));
        say("l_onoff", linger.l_onoff);
        receive_all(copy, bytes, 10);
        send_all(copy, LETTERS, 10);
        close(copy);
    } else {
        receive_all(fd, bytes, 10);
        say("recv", recv(fd, bytes, 1, 0));
    }
    meet();
}

static void nothing_to_do(int number)
{
    (void)number;
}

/* The kernel restarts only a call that has moved nothing. */
CASE(found_handler_in_a_call_that_has_received)
{
    char bytes[20];
    meet();
    if (me == CONNECTOR) {
        send_all(fd, "abc", 3);
    } else {
        struct sigaction action = { .sa_handler = nothing_to_do, .sa_flags = SA_RESTART };
        sigaction(SIGALRM, &action, NULL);
        struct itimerval often = { { 0, 20000 }, { 0, 20000 } }, never = { 0 };
        setitimer(ITIMER_REAL, &often, NULL);
        say("recv", recv(fd, bytes, sizeof bytes, MSG_WAITALL));
        setitimer(ITIMER_REAL, &never, NULL);
    }
    meet();
}

/* A signal that only the call lets come does not come if there is something to report. */
CASE(found_ppoll_with_a_pending_signal)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        sigset_t blocked, none;
        sigemptyset(&none);
        sigemptyset(&blocked);
        sigaddset(&blocked, SIGUSR2);
        signal(SIGUSR2, nothing_to_do);
        sigprocmask(SIG_BLOCK, &blocked, NULL);
        kill(getpid(), SIGUSR2);
        struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
        struct timespec time = { PATIENCE / 1000, 0 };
        say("ppoll", ppoll(&poll_fd, 1, &time, &none));
        fd_set in;
        FD_ZERO(&in);
        FD_SET(fd, &in);
        say("pselect", pselect(fd + 1, &in, NULL, NULL, &time, &none));
    }
    meet();
}

/* The end is nothing that the third set asks for. */
CASE(found_select_for_exceptions_after_the_end)
{
    say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == ACCEPTOR) {
        fd_set except;
        FD_ZERO(&except);
        FD_SET(fd, &except);
        struct timeval time = { 0, 200000 };
        struct timespec begun, now;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        say("select", select(fd + 1, NULL, NULL, &except, &time));
        clock_gettime(CLOCK_MONOTONIC, &now);
        long waited = (now.tv_sec - begun.tv_sec) * 1000 + (now.tv_nsec - begun.tv_nsec) / 1000000;
        say("has waited", waited >= 199);
    }
    meet();
}

/* The kernel tells an error once, whoever asks. */
CASE(found_error_for_a_relative)
{
    char byte;
    meet();
    if (me == CONNECTOR)
        abort_connection(fd);
    meet();
    if (me == ACCEPTOR) {
        events_of(fd, POLLIN, PATIENCE);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            say("recv", recv(fd, &byte, 1, 0));
            fflush(stdout);
            _exit(0);
        }
        waitpid(child, NULL, 0);
        say("recv", recv(fd, &byte, 1, 0));
        say_events("events", events_of(fd, POLLIN, 0));
    }
    meet();
}

/* A relative's shutdown is an event for all. */
CASE(found_edge_of_a_relatives_shutdown)
{
    meet();
    if (me == CONNECTOR)
        say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == ACCEPTOR) {
        int epoll = watching(fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
        say_events("events", wait_for_edge(epoll, PATIENCE));
        fflush(stdout);
        pid_t child = fork();
        if (child == 0)
            _exit(shutdown(fd, SHUT_WR));
        waitpid(child, NULL, 0);
        say_events("events", wait_for_edge(epoll, PATIENCE));
        close(epoll);
    }
    meet();
}

static int receiver;

static void *receive_one(void *fd)
{
    char byte;
    receiver = gettid();
    say("recv", recv(*(int *)fd, &byte, 1, 0));
    return NULL;
}

/* A thread that sleeps in `recv` goes on sleeping while the connection goes back to TCP. */
CASE(found_sleep_while_the_connection_goes_back)
{
    char byte = '.';
    meet();
    if (me == CONNECTOR) {
        struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
        while (poll(&poll_fd, 1, 1) == 0)
            ;
        receive_all(fd, &byte, 1);
        send_all(fd, &byte, 1);
    } else {
        pthread_t thread = begin_sleep(receive_one, &fd);
        say("O_ASYNC", fcntl(fd, F_SETFL, O_ASYNC));
        int asleep = 0;
        for (int looks = 0; asleep < 20 && looks < PATIENCE; looks++) {
            usleep(1000);
            asleep = is_asleep(receiver) ? asleep + 1 : 0;
        }
        say("asleep", asleep);
        send_all(fd, &byte, 1);
        pthread_join(thread, NULL);
    }
    meet();
}

/* The number of a descriptor that the program has taken out of an epoll instance is given to another one of the same connection. */
CASE(found_number_in_epoll_again)
{
    char byte = '.';
    meet();
    if (me == CONNECTOR) {
        struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
        while (poll(&poll_fd, 1, 1) == 0)
            ;
        receive_all(fd, &byte, 1);
    } else {
        int epoll = watching(fd, EPOLLIN | EPOLLET);
        int copy = handed_over(fd);
        struct epoll_event event = { .events = EPOLLIN };
        say("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
        close(fd);
        check(dup2(copy, fd) == fd, "dup2");
        say("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
        close(copy);
        close(epoll);
        send_all(fd, &byte, 1);
    }
    meet();
}

static void interrupt(int signal)
{
    (void)signal;
}

static char state_of(int process)
{
    char path[40], line[400] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    check(file && fgets(line, sizeof line, file), path);
    fclose(file);
    return strrchr(line, ')')[2];
}

/* Stops a process that sleeps in a call, lets it go on, and sends it what it waits for. */
static void stop_and_send(int fd, int process, const char *bytes)
{
    check(WAIT_UNTIL(is_asleep(process)), "it sleeps");
    kill(process, SIGSTOP);
    check(WAIT_UNTIL(state_of(process) == 'T'), "it has stopped");
    kill(process, SIGCONT);
    check(WAIT_UNTIL(is_asleep(process)), "it sleeps again");
    send_all(fd, bytes, strlen(bytes));
}

/* A stop is no handler: the call goes on, although a handler that never runs would end it. */
CASE(found_a_stop_does_not_end_a_call)
{
    if (me == ACCEPTOR) {
        struct sigaction action = { .sa_handler = interrupt };
        sigaction(SIGUSR1, &action, NULL);
        int process = getpid();
        send_all(fd, &process, sizeof process);
        char bytes[8] = "";
        meet();
        say("recv", recv(fd, bytes, 1, 0));
        meet();
        say("read", read(fd, bytes, 1));
        meet();
        say("peek", recv(fd, bytes, 2, MSG_PEEK));
        say("all", recv(fd, bytes, 2, MSG_WAITALL));
        meet();
        struct iovec part = { bytes, sizeof bytes };
        struct mmsghdr message = { .msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 } };
        say("recvmmsg", recvmmsg(fd, &message, 1, 0, NULL));
        meet();
        FILE *stream = fdopen(dup(fd), "r");
        say("fgetc", fgetc(stream));
        fclose(stream);
    } else {
        int process;
        receive_all(fd, &process, sizeof process);
        const char *all[] = { "a", "b", "cd", "ef", "g" };
        for (int i = 0; i < 5; i++) {
            meet();
            stop_and_send(fd, process, all[i]);
        }
    }
    meet();
}

/* A handler that runs still ends it, or does not. */
CASE(found_a_handler_still_ends_a_call)
{
    if (me == ACCEPTOR) {
        struct sigaction ends = { .sa_handler = interrupt }, restarts = { .sa_handler = interrupt, .sa_flags = SA_RESTART };
        int process = getpid();
        char byte;
        send_all(fd, &process, sizeof process);
        sigaction(SIGUSR1, &ends, NULL);
        meet();
        say("recv", recv(fd, &byte, 1, 0));
        sigaction(SIGUSR1, &restarts, NULL);
        meet();
        say("recv", recv(fd, &byte, 1, 0));
    } else {
        int process;
        receive_all(fd, &process, sizeof process);
        meet();
        check(WAIT_UNTIL(is_asleep(process)), "it sleeps");
        kill(process, SIGUSR1);
        meet();
        check(WAIT_UNTIL(is_asleep(process)), "it sleeps");
        kill(process, SIGUSR1);
        check(WAIT_UNTIL(is_asleep(process)), "it sleeps again");
        send_all(fd, "a", 1);
    }
    meet();
}

static void *with_a_small_stack(void *argument)
{
    int fd = *(int *)argument, ends[2], file = memfd_create("file", 0);
    static char bytes[8192];
    say("send", send(fd, bytes, 100, 0));
    say("recv", recv(fd, bytes, 100, MSG_WAITALL));
    say("write", write(file, bytes, sizeof bytes));
    off_t at = 0;
    say("sendfile", sendfile(fd, file, &at, sizeof bytes));
    say("pipe", pipe(ends));
    say("splice", splice(fd, NULL, ends[1], NULL, 100, 0));
    say("splice", splice(ends[0], NULL, fd, NULL, 100, 0));
    struct pollfd poll_fd = { fd, POLLIN, 0 };
    say("poll", poll(&poll_fd, 1, PATIENCE));
    say("peek", recv(fd, bytes, 1, MSG_PEEK | MSG_TRUNC));
    close(ends[0]);
    close(ends[1]);
    close(file);
    return NULL;
}

/* What the library needs in place of a call of the kernel must fit onto a small stack, also in a build without optimisation. */
CASE(found_small_stacks)
{
    if (me == ACCEPTOR) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        say("stack", pthread_attr_setstacksize(&attributes, 65536));
        check(pthread_create(&thread, &attributes, with_a_small_stack, &fd) == 0, "pthread_create");
        pthread_join(thread, NULL);
    } else {
        static char bytes[8192 + 200];
        receive_all(fd, bytes, 100);
        send_all(fd, bytes, 200);
        receive_all(fd, bytes, 8192 + 100);
        send_all(fd, bytes, 1);
    }
    meet();
}

/* Received bytes as pages of the kernel, of which there are none: the program is told to receive them. */
CASE(found_zero_copy)
{
    if (me == ACCEPTOR) {
        say("send", send(fd, "hello", 5, 0));
        meet();
    } else {
        meet();
        say("events", events_of(fd, POLLIN, PATIENCE));
        void *pages = mmap(NULL, 16384, PROT_READ, MAP_SHARED, fd, 0);
        check(pages != MAP_FAILED, "mmap");
        struct { unsigned long address; unsigned length, skip_hint, inq, error; } zero_copy = { (unsigned long)pages, 16384, 0, 0, 0 };
        socklen_t len = 16;
        say("getsockopt", getsockopt(fd, IPPROTO_TCP, 35, &zero_copy, &len));
        say("mapped", zero_copy.length);
        say("hint", zero_copy.skip_hint);
        char bytes[8];
        say("recv", recv(fd, bytes, sizeof bytes, 0));
    }
    meet();
}
