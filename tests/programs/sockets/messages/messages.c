/* Messages by all kinds of calls. Both ends are in one thread, and nothing waits. A call that fails (`write` to descriptor -1) stands in the
 * trace of system calls before the messages of each kind, and names it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SIZE = 64, WARM_UP = 100 };

static int from, to, epoll;
static char bytes[SIZE];
static struct sockaddr_in peer;
static struct iovec pieces[2] = { { bytes, SIZE / 2 }, { bytes + SIZE / 2, SIZE / 2 } };

static void by_write(void)
{
    assert(write(from, bytes, SIZE) == SIZE && read(to, bytes, SIZE) == SIZE);
}

static void by_send(void)
{
    assert(send(from, bytes, SIZE, 0) == SIZE && recv(to, bytes, SIZE, 0) == SIZE);
}

static void by_sendto(void)
{
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    assert(sendto(from, bytes, SIZE, 0, (struct sockaddr *)&peer, sizeof peer) == SIZE);
    assert(recvfrom(to, bytes, SIZE, 0, (struct sockaddr *)&address, &size) == SIZE);
}

static void by_writev(void)
{
    assert(writev(from, pieces, 2) == SIZE && readv(to, pieces, 2) == SIZE);
}

static void by_sendmsg(void)
{
    struct msghdr message = { .msg_iov = pieces, .msg_iovlen = 2 };
    assert(sendmsg(from, &message, 0) == SIZE && recvmsg(to, &message, 0) == SIZE);
}

static void by_sendmsg_with_an_address(void)
{
    struct msghdr message = { .msg_name = &peer, .msg_namelen = sizeof peer, .msg_iov = pieces, .msg_iovlen = 2 };
    assert(sendmsg(from, &message, 0) == SIZE && recvmsg(to, &message, 0) == SIZE);
}

static void by_recvmsg_with_room_for_control_messages(void)
{
    char room[512];
    struct msghdr message = { .msg_iov = pieces, .msg_iovlen = 2 };
    assert(sendmsg(from, &message, 0) == SIZE);
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    assert(recvmsg(to, &message, 0) == SIZE);
}

static void by_sendmmsg(void)
{
    struct msghdr half = { .msg_iov = pieces, .msg_iovlen = 1 };
    struct mmsghdr messages[2] = { { .msg_hdr = half }, { .msg_hdr = half } };
    assert(sendmmsg(from, messages, 2, 0) == 2 && recvmmsg(to, messages, 2, MSG_WAITFORONE, NULL) == 2);
}

static void by_calls_that_do_not_wait(void)
{
    assert(recv(to, bytes, SIZE, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    assert(send(from, bytes, SIZE, MSG_DONTWAIT | MSG_NOSIGNAL) == SIZE && recv(to, bytes, SIZE, MSG_DONTWAIT) == SIZE);
}

static void in_parts(void)
{
    assert(send(from, bytes, SIZE / 2, MSG_MORE) == SIZE / 2 && send(from, bytes, SIZE / 2, 0) == SIZE / 2);
    assert(recv(to, bytes, SIZE, MSG_WAITALL) == SIZE);
}

static void with_a_look_ahead(void)
{
    assert(send(from, bytes, SIZE, 0) == SIZE && recv(to, bytes, 1, MSG_PEEK) == 1 && recv(to, NULL, SIZE, MSG_TRUNC) == SIZE);
}

static void after_poll(void)
{
    struct pollfd polls[2] = { { .fd = to, .events = POLLIN }, { .fd = from, .events = POLLIN | POLLOUT } };
    assert(send(from, bytes, SIZE, 0) == SIZE);
    assert(poll(polls, 2, -1) == 2 && polls[0].revents == POLLIN && polls[1].revents == POLLOUT);
    assert(recv(to, bytes, SIZE, 0) == SIZE);
}

static void after_select(void)
{
    fd_set in;
    FD_ZERO(&in);
    FD_SET(to, &in);
    assert(send(from, bytes, SIZE, 0) == SIZE);
    assert(select(to + 1, &in, NULL, NULL, NULL) == 1 && FD_ISSET(to, &in));
    assert(recv(to, bytes, SIZE, 0) == SIZE);
}

static void after_epoll_wait(void)
{
    struct epoll_event events[2];
    assert(send(from, bytes, SIZE, 0) == SIZE);
    assert(epoll_wait(epoll, events, 2, -1) >= 1);
    assert(recv(to, bytes, SIZE, 0) == SIZE);
}

static void with_questions(void)
{
    int unread, unsent, error;
    socklen_t size = sizeof error;
    assert(send(from, bytes, SIZE, 0) == SIZE);
    assert(ioctl(to, FIONREAD, &unread) == 0 && unread == SIZE && ioctl(from, TIOCOUTQ, &unsent) == 0);
    assert(getsockopt(from, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0);
    assert(recv(to, bytes, SIZE, 0) == SIZE);
}

#define KIND(function) { #function, function }
static const struct {
    const char *name;
    void (*message)(void);
} kinds[] = { KIND(by_write), KIND(by_send), KIND(by_sendto), KIND(by_writev), KIND(by_sendmsg), KIND(by_sendmsg_with_an_address),
    KIND(by_recvmsg_with_room_for_control_messages), KIND(by_sendmmsg), KIND(by_calls_that_do_not_wait), KIND(in_parts),
    KIND(with_a_look_ahead), KIND(after_poll), KIND(after_select), KIND(after_epoll_wait), KIND(with_questions) };

static void *pause_for_good(void *nothing)
{
    for (;;)
        pause();
    return nothing;
}

static void prepare(const char *situation)
{
    pthread_t thread;
    struct timeval limit = { .tv_sec = 100 };
    if (!strcmp(situation, "nonblocking")) {
        assert(fcntl(from, F_SETFL, O_NONBLOCK) == 0 && fcntl(to, F_SETFL, O_NONBLOCK) == 0);
    } else if (!strcmp(situation, "shared")) {
        assert(setsockopt(from, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
        assert(setsockopt(to, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
        assert((from = dup(from)) >= 0 && (to = dup(to)) >= 0);
        assert(pthread_create(&thread, NULL, pause_for_good, NULL) == 0);
    } else {
        assert(!strcmp(situation, "alone"));
    }
}

int main(int argc, char **argv)
{
    assert(argc == 3);
    int count = atoi(argv[2]), listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof at;
    assert(bind(listener, (struct sockaddr *)&at, size) == 0 && listen(listener, 1) == 0);
    assert(getsockname(listener, (struct sockaddr *)&at, &size) == 0);
    from = socket(AF_INET, SOCK_STREAM, 0);
    assert(connect(from, (struct sockaddr *)&at, sizeof at) == 0 && (to = accept(listener, NULL, NULL)) >= 0);
    assert(getpeername(from, (struct sockaddr *)&peer, &size) == 0);
    prepare(argv[1]);
    epoll = epoll_create1(0);
    struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLET };
    assert(epoll_ctl(epoll, EPOLL_CTL_ADD, from, &event) == 0);
    event.events = EPOLLIN;
    assert(epoll_ctl(epoll, EPOLL_CTL_ADD, to, &event) == 0);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        for (int warm = 0; warm < WARM_UP; warm++)
            kinds[i].message();
        assert(write(-1, kinds[i].name, strlen(kinds[i].name)) == -1);
        for (int message = 0; message < count; message++)
            kinds[i].message();
        assert(write(-1, "", 0) == -1);
    }
    puts("done");
    return 0;
}
