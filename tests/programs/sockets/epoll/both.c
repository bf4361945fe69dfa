/* both ROUNDS: a ping-pong between two processes that want to know of input and of room, edge-triggered, as asynchronous runtimes do:
 * a receiving call that gets less than it asked for is the last one until the next event of input. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(int condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

/* Answers each message with one of the same length, and sends the first one if it begins. The length is that of the round, so that both
 * know when a message is complete. */
static void play(int fd, int begins, int rounds)
{
    int epoll = epoll_create1(0);
    struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET };
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
    static char bytes[4096];
    for (int turn = 0, sends = begins; turn < 2 * rounds; turn++, sends = !sends) {
        int size = 1 + turn / 2 % 700;
        if (sends) {
            check(send(fd, bytes, size, MSG_NOSIGNAL) == size, "send");
            continue;
        }
        for (int got = 0; got < size;) {
            int n = recv(fd, bytes, sizeof bytes, 0);
            check(n > 0 || (n < 0 && errno == EAGAIN), "recv");
            if (n > 0)
                got += n;
            while (got < size) {
                int found = epoll_wait(epoll, &event, 1, 40000);
                if (found == 0) {
                    n = recv(fd, bytes, sizeof bytes, 0);
                    fprintf(stderr, "round %d: no event, but %d bytes are there\n", turn / 2, n);
                    exit(1);
                }
                check(found == 1, "epoll_wait");
                if (event.events & EPOLLIN)
                    break;
            }
        }
    }
}

int main(int argc, char **argv)
{
    check(argc == 2, "usage: both ROUNDS");
    int rounds = atoi(argv[1]);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    check(bind(listener, (struct sockaddr *)&address, size) == 0, "bind");
    check(listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0)
        listener = socket(AF_INET, SOCK_STREAM, 0);
    if (child == 0)
        check(connect(listener, (struct sockaddr *)&address, size) == 0, "connect");
    int fd = child == 0 ? listener : accept(listener, NULL, NULL);
    check(fd >= 0, "accept");
    check(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    play(fd, child == 0, rounds);
    int status = 0;
    if (child > 0)
        check(waitpid(child, &status, 0) == child && status == 0, "the other one");
    return 0;
}
