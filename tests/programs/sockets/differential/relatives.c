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
