/* State that belongs to the open file description or to the socket, and that a relative changes after fork(2). */
#include "case.h"

typedef void work(int fd);

struct relative {
    pid_t child;
    int orders, answers;
};

/* Forks a child that does what it is told. */
static struct relative begin_relative(int fd)
{
    int orders[2], answers[2];
    check(pipe2(orders, O_CLOEXEC) == 0 && pipe2(answers, O_CLOEXEC) == 0, "pipe");
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        work *order;
        close(orders[1]);
        while (read(orders[0], &order, sizeof order) == sizeof order) {
            order(fd);
            fflush(stdout);
            check(write(answers[1], "", 1) == 1, "an answer");
        }
        _exit(0);
    }
    close(orders[0]);
    close(answers[1]);
    return (struct relative){ child, orders[1], answers[0] };
}

/* Has the child do something, and waits until it has done it. */
static void let(struct relative *relative, work *order)
{
    char byte;
    fflush(stdout);
    check(write(relative->orders, &order, sizeof order) == sizeof order, "an order");
    check(read(relative->answers, &byte, 1) == 1, "the child has ended");
}

static void end_relative(struct relative *relative)
{
    int status;
    close(relative->orders);
    check(waitpid(relative->child, &status, 0) == relative->child && status == 0, "the child");
    close(relative->answers);
}

static void nothing(int fd __attribute__((unused)))
{
}

static void set_nonblocking(int fd)
{
    check(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "F_SETFL");
}

static void set_nonblocking_by_number(int fd)
{
    check(syscall(SYS_fcntl, fd, F_SETFL, O_NONBLOCK) == 0, "F_SETFL");
}

static void set_nonblocking_by_ioctl(int fd)
{
    int on = 1;
    check(ioctl(fd, FIONBIO, &on) == 0, "FIONBIO");
}

static void set_blocking(int fd)
{
    check(fcntl(fd, F_SETFL, 0) == 0, "F_SETFL");
}

static void set_blocking_by_ioctl(int fd)
{
    int on = 0;
    check(ioctl(fd, FIONBIO, &on) == 0, "FIONBIO");
}

/* Sends until nothing more can be sent. */
static void fill(int fd)
{
    static char bytes[65536];
    long sent;
    do
        sent = send(fd, bytes, sizeof bytes, MSG_NOSIGNAL);
    while (sent > 0);
    say("send in the end", sent);
}

/* Receives what has been sent until then. */
static void drain(int fd)
{
    static char bytes[65536];
    while (events_of(fd, POLLIN, 200) != 0)
        check(recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0, "recv");
}

static void relatives_set(int me, int fd, work *nonblocking, work *blocking)
{
    char byte;
    if (me == CONNECTOR) {
        say("recv", recv(fd, &byte, 1, MSG_DONTWAIT));
        struct relative relative = begin_relative(fd);
        let(&relative, nonblocking);
        say("recv", recv(fd, &byte, 1, 0));
        fill(fd);
        meet();
        meet();
        let(&relative, blocking);
        meet();
        say("recv", recv(fd, &byte, 1, 0));
        let(&relative, nonblocking);
        end_relative(&relative);
        say("recv", recv(fd, &byte, 1, 0));
        say("F_GETFL", fcntl(fd, F_GETFL) & O_NONBLOCK);
    } else {
        meet();
        drain(fd);
        meet();
        meet();
        usleep(20000);
        send_all(fd, "a", 1);
    }
    meet();
}

CASE(relatives_set_nonblocking)
{
    relatives_set(me, fd, set_nonblocking, set_blocking);
}

CASE(relatives_set_nonblocking_by_number)
{
    relatives_set(me, fd, set_nonblocking_by_number, set_blocking);
}

CASE(relatives_set_nonblocking_by_ioctl)
{
    relatives_set(me, fd, set_nonblocking_by_ioctl, set_blocking_by_ioctl);
}

static void receive_a_byte(int fd)
{
    char byte;
    say("recv of the child", recv(fd, &byte, 1, 0));
}

/* The parent changes what the child finds. */
CASE(relatives_of_a_parent_that_sets_nonblocking)
{
    if (me == CONNECTOR) {
        struct relative relative = begin_relative(fd);
        let(&relative, nothing);
        set_nonblocking(fd);
        let(&relative, receive_a_byte);
        set_blocking(fd);
        meet();
        let(&relative, receive_a_byte);
        end_relative(&relative);
    } else {
        meet();
        usleep(20000);
        send_all(fd, "a", 1);
    }
    meet();
}

static void set_timeouts(int fd)
{
    struct timeval limit = { 0, 20000 };
    check(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0, "SO_RCVTIMEO");
    check(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0, "SO_SNDTIMEO");
}

CASE(relatives_set_timeouts)
{
    char byte;
    if (me == CONNECTOR) {
        struct relative relative = begin_relative(fd);
        let(&relative, set_timeouts);
        say("recv", recv(fd, &byte, 1, 0));
        fill(fd);
        end_relative(&relative);
        say("recv", recv(fd, &byte, 1, 0));
    }
    meet();
}

static void linger_not(int fd)
{
    struct linger none = { 1, 0 };
    check(setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none) == 0, "SO_LINGER");
}

static void linger_not_and_close(int fd)
{
    linger_not(fd);
    close(fd);
}

static void close_it(int fd)
{
    close(fd);
}

static void relatives_linger(int me, int fd, work *first, int parent_is_last)
{
    if (me == CONNECTOR) {
        struct relative relative = begin_relative(fd);
        let(&relative, first);
        if (parent_is_last)
            end_relative(&relative);
        close(fd);
        meet();
        meet();
        if (!parent_is_last) {
            let(&relative, linger_not_and_close);
            end_relative(&relative);
        }
        meet();
    } else {
        char byte;
        meet();
        say_events("events", events_of(fd, POLLIN | POLLRDHUP, parent_is_last ? PATIENCE : 20));
        meet();
        meet();
        say_events("events", events_of(fd, POLLIN | POLLRDHUP, PATIENCE));
        say("recv", recv(fd, &byte, 1, 0));
        say("recv", recv(fd, &byte, 1, 0));
    }
    meet();
}

CASE(relatives_set_linger)
{
    relatives_linger(me, fd, linger_not, 1);
}

CASE(relatives_set_linger_and_close)
{
    relatives_linger(me, fd, linger_not_and_close, 1);
}

CASE(relatives_set_linger_and_close_last)
{
    relatives_linger(me, fd, nothing, 0);
}

/* The last one that closes the connection leaves bytes unread. */
static void relatives_leave_bytes(int me, int fd, int parent_is_last)
{
    if (me == CONNECTOR) {
        struct relative relative = begin_relative(fd);
        let(&relative, nothing);
        meet();
        say_events("there is something", events_of(fd, POLLIN, PATIENCE));
        if (parent_is_last)
            end_relative(&relative);
        close(fd);
        if (!parent_is_last) {
            let(&relative, close_it);
            end_relative(&relative);
        }
        meet();
    } else {
        char byte;
        send_all(fd, "abc", 3);
        meet();
        meet();
        say_events("events", events_of(fd, POLLIN | POLLRDHUP, PATIENCE));
        say("recv", recv(fd, &byte, 1, 0));
        say("recv", recv(fd, &byte, 1, 0));
    }
    meet();
}

CASE(relatives_leave_bytes_to_the_parent)
{
    relatives_leave_bytes(me, fd, 1);
}

CASE(relatives_leave_bytes_to_the_child)
{
    relatives_leave_bytes(me, fd, 0);
}

static int tcp_flag(int fd, int option)
{
    int on = -1;
    socklen_t size = sizeof on;
    check(getsockopt(fd, IPPROTO_TCP, option, &on, &size) == 0, "getsockopt");
    return on;
}

static void set_delays(int fd)
{
    int on = 1;
    check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "TCP_NODELAY");
    check(setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof on) == 0, "TCP_CORK");
}

static void set_no_cork(int fd)
{
    int off = 0;
    check(setsockopt(fd, IPPROTO_TCP, TCP_CORK, &off, sizeof off) == 0, "TCP_CORK");
}

static void say_delays(int fd)
{
    say("TCP_NODELAY", tcp_flag(fd, TCP_NODELAY));
    say("TCP_CORK", tcp_flag(fd, TCP_CORK));
}

CASE(relatives_set_delays)
{
    if (me == CONNECTOR) {
        say_delays(fd);
        struct relative relative = begin_relative(fd);
        let(&relative, set_delays);
        say_delays(fd);
        set_no_cork(fd);
        let(&relative, say_delays);
        end_relative(&relative);
        say_delays(fd);
        struct relative another = begin_relative(fd);
        let(&another, say_delays);
        end_relative(&another);
    }
    meet();
}

static void shut_down_receiving(int fd)
{
    say("shutdown", shutdown(fd, SHUT_RD));
}

static void shut_down_sending(int fd)
{
    say("shutdown", shutdown(fd, SHUT_WR));
}

static void shut_down_both(int fd)
{
    say("shutdown", shutdown(fd, SHUT_RDWR));
}

static void say_all(const char *who, int fd)
{
    char byte, text[64];
    sprintf(text, "events of %s", who);
    say_events(text, events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
    sprintf(text, "recv of %s", who);
    say(text, recv(fd, &byte, 1, MSG_DONTWAIT));
    sprintf(text, "send of %s", who);
    say(text, send(fd, "a", 1, MSG_NOSIGNAL));
}

static void say_all_of_child(int fd)
{
    say_all("the child", fd);
}

static void relatives_shut_down(int me, int fd, work *order)
{
    if (me == CONNECTOR) {
        struct relative relative = begin_relative(fd);
        let(&relative, order);
        say_all("the parent", fd);
        let(&relative, say_all_of_child);
        meet();
        meet();
        end_relative(&relative);
        say_all("the parent", fd);
        struct relative another = begin_relative(fd);
        let(&another, say_all_of_child);
        end_relative(&another);
        meet();
    } else {
        char bytes[4];
        meet();
        if (order != shut_down_sending && order != shut_down_both)
            receive_all(fd, bytes, 2);
        say_events("events of the peer", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0));
        say("recv of the peer", recv(fd, bytes, 1, MSG_DONTWAIT));
        meet();
        meet();
    }
}

CASE(relatives_shut_down_receiving)
{
    relatives_shut_down(me, fd, shut_down_receiving);
}

CASE(relatives_shut_down_sending)
{
    relatives_shut_down(me, fd, shut_down_sending);
}

CASE(relatives_shut_down_both)
{
    relatives_shut_down(me, fd, shut_down_both);
}

/* More was sent than a ring holds, so a ring may not carry any more. */
CASE(relatives_end_both_directions)
{
    static char much[16384];
    if (me == ACCEPTOR)
        say("shutdown", shutdown(fd, SHUT_WR));
    meet();
    if (me == CONNECTOR) {
        struct relative relative = begin_relative(fd);
        check(send(fd, much, sizeof much, MSG_DONTWAIT) == sizeof much, "send");
        let(&relative, shut_down_sending);
        say_events("events of the parent", events_of(fd, 0, 0));
        say_all("the parent", fd);
        end_relative(&relative);
        say_events("events of the parent", events_of(fd, 0, 0));
        struct relative another = begin_relative(fd);
        let(&another, say_all_of_child);
        end_relative(&another);
    }
    meet();
    if (me == ACCEPTOR) {
        receive_all(fd, much, sizeof much);
        say_all("the peer", fd);
    }
    meet();
}

static void shut_down_receiving_later(int fd)
{
    usleep(20000);
    shutdown(fd, SHUT_RD);
}

static void shut_down_both_later(int fd)
{
    usleep(20000);
    shutdown(fd, SHUT_RDWR);
}

static void relatives_wake(int me, int fd, work *order)
{
    if (me == CONNECTOR) {
        char byte;
        struct relative relative = begin_relative(fd);
        check(write(relative.orders, &order, sizeof order) == sizeof order, "an order");
        say("recv", recv(fd, &byte, 1, 0));
        check(read(relative.answers, &byte, 1) == 1, "an answer");
        end_relative(&relative);
    }
    meet();
}

CASE(relatives_shut_down_receiving_while_one_receives)
{
    relatives_wake(me, fd, shut_down_receiving_later);
}

CASE(relatives_shut_down_both_while_one_receives)
{
    relatives_wake(me, fd, shut_down_both_later);
}

static void send_descriptor(int over, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof fd)] = "";
    struct iovec bytes = { &byte, 1 };
    struct msghdr message = { .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    *head = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd) };
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    check(WAIT_UNTIL(sendmsg(over, &message, 0) == 1 || errno != EAGAIN), "sendmsg");
}

static int receive_descriptor(int over)
{
    int fd;
    char byte, control[CMSG_SPACE(sizeof fd)] = "";
    struct iovec bytes = { &byte, 1 };
    struct msghdr message = { .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    check(recvmsg(over, &message, 0) == 1, "recvmsg");
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* A process that gets the descriptor in a message sets the flag. */
CASE(relatives_by_message_set_nonblocking)
{
    char byte;
    if (me == CONNECTOR) {
        int pair[2];
        check(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
        fflush(stdout);
        pid_t child = fork();
        check(child >= 0, "fork");
        if (child == 0) {
            close(fd);
            close(pair[0]);
            check(write(pair[1], "", 1) == 1, "the parent");
            set_nonblocking(receive_descriptor(pair[1]));
            check(write(pair[1], "", 1) == 1 && read(pair[1], &byte, 1) == 0, "the parent");
            _exit(0);
        }
        close(pair[1]);
        check(read(pair[0], &byte, 1) == 1, "the child");
        send_descriptor(pair[0], fd);
        check(read(pair[0], &byte, 1) == 1, "the child");
        say("recv", recv(fd, &byte, 1, 0));
        say("F_GETFL", fcntl(fd, F_GETFL) & O_NONBLOCK);
        say("send", send(fd, "a", 1, 0));
        close(pair[0]);
        int status;
        check(waitpid(child, &status, 0) == child && status == 0, "the child");
    } else {
        say("recv", recv(fd, &byte, 1, 0));
    }
    meet();
}

static void send_a_byte(int fd)
{
    say("send of the child", send(fd, "a", 1, MSG_NOSIGNAL));
}

/* The peer has closed its end, and answers what the child sends with a reset, which concerns the parent too. */
CASE(relatives_send_to_a_peer_that_has_closed)
{
    if (me == ACCEPTOR) {
        close(fd);
        meet();
    } else {
        struct relative relative = begin_relative(fd);
        meet();
        say_events("the end", events_of(fd, POLLRDHUP, PATIENCE));
        let(&relative, send_a_byte);
        check(WAIT_UNTIL(events_of(fd, 0, 0) & POLLHUP), "a reset");
        say("send", send(fd, "b", 1, MSG_NOSIGNAL));
        end_relative(&relative);
        say_events("events", events_of(fd, POLLIN | POLLOUT | POLLRDHUP, 0) & ~POLLERR);
        say("send", send(fd, "b", 1, MSG_NOSIGNAL));
    }
    meet();
}

/* A child that has ended, and for which nobody has waited, has no connection any more. What this end sends is over TCP by then. */
CASE(relatives_close_beside_a_child_that_has_ended)
{
    enum { MANY = 60000 };
    static char bytes[MANY];
    if (me == ACCEPTOR) {
        send_over_tcp(fd, bytes, MANY);
        int child = fork();
        if (child == 0)
            _exit(0);
        siginfo_t info;
        check(waitid(P_PID, child, &info, WEXITED | WNOWAIT) == 0, "waitid");
        meet();
        check(WAIT_UNTIL(ioctl(fd, FIONREAD, &child) == 0 && child > 0), "bytes");
        close(fd);
        meet();
    } else {
        meet();
        send_all(fd, "abc", 3);
        meet();
        int error = -1;
        socklen_t size = sizeof error;
        say_events("events", events_of(fd, POLLHUP, PATIENCE));
        say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
        say("error", error);
    }
    meet();
}
