// Clients of a memcached over sockets, each of which uses the sockets in a different way. Usage: client PORT WAY
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int port;

#define CHECK(what)                                                                  \
    do {                                                                             \
        if (!(what)) {                                                               \
            fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #what, strerror(errno)); \
            exit(1);                                                                 \
        }                                                                            \
    } while (0)

static int dial(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(connect(fd, (struct sockaddr *)&at, sizeof at) == 0);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

static void say(int fd, const char *text) { CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text)); }

static void hear(int fd, const char *text) {
    char bytes[8192];
    size_t len = strlen(text), got = 0;
    while (got < len) {
        ssize_t n = read(fd, bytes + got, len - got);
        if (n < 0 && errno == EAGAIN) continue;
        CHECK(n > 0);
        got += n;
    }
    if (memcmp(bytes, text, len) != 0) {
        fprintf(stderr, "got %.*s\nfor %s\n", (int)len, bytes, text);
        exit(1);
    }
}

static void ask(int fd, const char *request, const char *answer) {
    say(fd, request);
    hear(fd, answer);
}

static void put(int fd, const char *key, const char *value) {
    char text[4096];
    snprintf(text, sizeof text, "set %s 0 0 %zu\r\n%s\r\n", key, strlen(value), value);
    ask(fd, text, "STORED\r\n");
}

#define A "VALUE a 0 3\r\none\r\n"
#define B "VALUE b 0 3\r\ntwo\r\n"
#define END "END\r\n"

static int prepared(void) {
    int fd = dial();
    put(fd, "a", "one");
    put(fd, "b", "two");
    return fd;
}

static void nonblocking(int fd) { CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0); }

// Sends requests of all kinds, one after the other and several at once.
static void order(void) {
    int fd = prepared();
    ask(fd, "get a\r\n", A END);
    ask(fd, "get a b\r\nget b\r\nget none\r\n", A B END B END END);
    ask(fd, "get a\r\nset a 0 0 3\r\n1n3\r\nget a\r\nget b\r\n", A END "STORED\r\nVALUE a 0 3\r\n1n3\r\n" END B END);
    ask(fd, "get a\r\n", "VALUE a 0 3\r\n1n3\r\n" END);
    ask(fd, "set a 0 0 3 noreply\r\none\r\nget a\r\n", A END);
    ask(fd, "get a\r\n", A END);
    // The value contains text that looks like requests.
    ask(fd, "set c 0 0 14\r\nget a\r\nget b\r\n\r\n", "STORED\r\n");
    ask(fd, "get c\r\n", "VALUE c 0 14\r\nget a\r\nget b\r\n\r\n" END);
    // The request is sent in several parts.
    say(fd, "ge");
    say(fd, "t a\r\nget ");
    ask(fd, "b\r\n", A END B END);
    ask(fd, "get a\r\n", A END);
    ask(fd, "mg a v f\r\nmg none v\r\nmg b s\r\n", "VA 3 f0\r\none\r\nEN\r\nHD s3\r\n");
    ask(fd, "mg none v q\r\nmg a v q\r\nmn\r\n", "VA 3\r\none\r\nMN\r\n");
    ask(fd, "delete a\r\nget a\r\n", "DELETED\r\n" END);
    ask(fd, "get a\r\n", END);
    ask(fd, "nonsense\r\nget b\r\n", "ERROR\r\n" B END);
    ask(fd, "get b\r\n", B END);
    // One call sends several pieces.
    struct iovec pieces[3] = {{"get ", 4}, {"b", 1}, {"\r\nget b\r\n", 9}};
    CHECK(writev(fd, pieces, 3) == 14);
    hear(fd, B END B END);
    close(fd);
}

static void *one(void *number) {
    int fd = dial();
    char key[32], value[64], request[160], answer[200];
    for (int turn = 0; turn < 2000; turn++) {
        sprintf(key, "key-%ld", (long)number);
        sprintf(value, "%d-%ld", turn, (long)number);
        if (turn % 10 == 0) {
            put(fd, key, value);
        } else {
            sprintf(value, "%d-%ld", turn / 10 * 10, (long)number);
        }
        sprintf(request, "get %s\r\n", key);
        sprintf(answer, "VALUE %s 0 %zu\r\n%s\r\nEND\r\n", key, strlen(value), value);
        ask(fd, request, answer);
    }
    close(fd);
    return NULL;
}

static void threads(void) {
    pthread_t all[8];
    for (long i = 0; i < 8; i++) CHECK(pthread_create(&all[i], NULL, one, (void *)i) == 0);
    for (int i = 0; i < 8; i++) pthread_join(all[i], NULL);
}

static int waits(int e, int timeout, unsigned *events) {
    struct epoll_event event[4];
    int n = epoll_wait(e, event, 4, timeout);
    *events = n > 0 ? event[0].events : 0;
    CHECK(n <= 1 && (n == 0 || event[0].data.u64 == 77));
    return n;
}

// Waits with epoll, with these flags.
static void polled(unsigned flags) {
    int fd = prepared(), e = epoll_create1(0);
    unsigned events;
    nonblocking(fd);
    struct epoll_event event = {.events = EPOLLIN | flags, .data.u64 = 77};
    CHECK(epoll_ctl(e, EPOLL_CTL_ADD, fd, &event) == 0);
    CHECK(waits(e, 0, &events) == 0);
    for (int turn = 0; turn < 500; turn++) {
        say(fd, turn % 7 ? "get a\r\n" : "touch a 0\r\n");
        const char *answer = turn % 7 ? A END : "TOUCHED\r\n";
        CHECK(waits(e, 5000, &events) == 1 && events == EPOLLIN);
        if (turn % 3 == 0) {
            // The answer has not been received yet. Level-triggered epoll reports it again, edge-triggered epoll does not.
            CHECK(waits(e, 0, &events) == (flags ? 0 : 1));
        }
        if (turn % 5 == 0 && turn % 7 && flags == EPOLLET) {
            // More bytes are a new edge.
            say(fd, "get b\r\n");
            CHECK(waits(e, 5000, &events) == 1);
            hear(fd, A END B END);
        } else {
            hear(fd, answer);
        }
        char byte;
        CHECK(read(fd, &byte, 1) == -1 && errno == EAGAIN);
        if (flags & EPOLLONESHOT) {
            CHECK(waits(e, 0, &events) == 0);
            CHECK(epoll_ctl(e, EPOLL_CTL_MOD, fd, &event) == 0);
        }
        CHECK(waits(e, 0, &events) == 0);
    }
    // An answer that has arrived before the socket is added to the epoll instance is reported too.
    CHECK(epoll_ctl(e, EPOLL_CTL_DEL, fd, NULL) == 0);
    say(fd, "get a\r\n");
    CHECK(waits(e, 0, &events) == 0);
    CHECK(epoll_ctl(e, EPOLL_CTL_ADD, fd, &event) == 0);
    CHECK(waits(e, 5000, &events) == 1 && events == EPOLLIN);
    event.events = EPOLLOUT | flags;
    CHECK(epoll_ctl(e, EPOLL_CTL_MOD, fd, &event) == 0);
    CHECK(waits(e, 0, &events) == 1 && events == EPOLLOUT);
    event.events = EPOLLIN | EPOLLOUT | flags;
    CHECK(epoll_ctl(e, EPOLL_CTL_MOD, fd, &event) == 0);
    unsigned all = 0;
    for (int i = 0; i < 3 && all != (EPOLLIN | EPOLLOUT); i++) {
        waits(e, 0, &events);
        all |= events;
    }
    CHECK(all == (EPOLLIN | EPOLLOUT) || flags & EPOLLONESHOT);
    hear(fd, A END);
    close(fd);
    close(e);
}

// Tests poll, select, and the calls that examine the bytes in a socket without receiving them.
static void asked(void) {
    int fd = prepared(), other[2], queued;
    CHECK(pipe(other) == 0);
    for (int turn = 0; turn < 200; turn++) {
        struct pollfd fds[2] = {{fd, POLLIN, 0}, {other[0], POLLIN, 0}};
        CHECK(poll(fds, 1 + turn % 2, 0) == 0);
        say(fd, "get a\r\n");
        if (turn % 3 == 0) CHECK(write(other[1], "x", 1) == 1);
        int n = turn % 3 == 0 && turn % 2 ? 2 : 1;
        // The pipe may become readable first.
        while (poll(fds, 1 + turn % 2, 5000) < n) CHECK(fds[1].revents == POLLIN);
        CHECK(fds[0].revents == POLLIN);
        fd_set set;
        FD_ZERO(&set);
        FD_SET(fd, &set);
        struct timeval time = {5, 0};
        CHECK(select(fd + 1, &set, NULL, NULL, &time) == 1 && FD_ISSET(fd, &set));
        CHECK(ioctl(fd, FIONREAD, &queued) == 0);
        CHECK(queued <= (int)strlen(A END) && queued > 0);
        char bytes[100];
        CHECK(recv(fd, bytes, 7, MSG_PEEK) > 0 && memcmp(bytes, "VALUE a", 1) == 0);
        CHECK(recv(fd, bytes, strlen(A END), MSG_WAITALL) == (ssize_t)strlen(A END));
        CHECK(memcmp(bytes, A END, strlen(A END)) == 0);
        CHECK(recv(fd, bytes, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
        if (turn % 3 == 0) CHECK(read(other[0], bytes, 1) == 1);
        struct pollfd both = {fd, POLLIN | POLLOUT, 0};
        CHECK(poll(&both, 1, 0) == 1 && both.revents == POLLOUT);
    }
    struct timeval soon = {0, 20000};
    char byte;
    CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) == 0);
    CHECK(recv(fd, &byte, 1, 0) == -1 && errno == EAGAIN);
    ask(fd, "get a\r\n", A END);
    // Receives with readv and with recvmsg.
    char first[5], rest[100];
    struct iovec pieces[2] = {{first, 5}, {rest, 100}};
    say(fd, "get b\r\n");
    CHECK(readv(fd, pieces, 2) == (ssize_t)strlen(B END));
    CHECK(memcmp(first, "VALUE", 5) == 0 && memcmp(rest, " b 0 3", 6) == 0);
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2, .msg_flags = -1};
    say(fd, "get b\r\n");
    CHECK(recvmsg(fd, &message, 0) == (ssize_t)strlen(B END) && message.msg_flags == 0);
    // Uses a duplicate of the file descriptor.
    int copy = dup(fd);
    say(copy, "get a\r\n");
    hear(fd, A END);
    close(fd);
    ask(copy, "get a\r\n", A END);
    CHECK(shutdown(copy, SHUT_WR) == 0);
    signal(SIGPIPE, SIG_IGN);
    CHECK(write(copy, "get a\r\n", 7) == -1 && errno == EPIPE);
    CHECK(read(copy, &byte, 1) == 0);
    close(copy);
}

static int shared;
static int in_epoll;

static void *receiver(void *how) {
    char bytes[200];
    for (int turn = 0; turn < 300; turn++) {
        struct pollfd fds = {shared, POLLIN, 0};
        struct epoll_event event;
        if (strcmp(how, "poll") == 0) CHECK(poll(&fds, 1, 10000) == 1);
        if (strcmp(how, "epoll") == 0) CHECK(epoll_wait(in_epoll, &event, 1, 10000) == 1);
        size_t got = 0;
        while (got < strlen(A END)) {
            ssize_t n = read(shared, bytes + got, strlen(A END) - got);
            CHECK(n > 0);
            got += n;
        }
        CHECK(memcmp(bytes, A END, got) == 0);
    }
    return NULL;
}

// One thread sends, and another one sleeps until an answer comes.
static void asleep(void) {
    const char *ways[3] = {"poll", "epoll", "read"};
    for (int way = 0; way < 3; way++) {
        shared = prepared();
        in_epoll = epoll_create1(0);
        struct epoll_event event = {.events = EPOLLIN};
        CHECK(epoll_ctl(in_epoll, EPOLL_CTL_ADD, shared, &event) == 0);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, receiver, (void *)ways[way]) == 0);
        for (int turn = 0; turn < 300; turn++) {
            if (turn % 16 == 0) usleep(2000);
            say(shared, "get a\r\n");
        }
        pthread_join(thread, NULL);
        close(shared);
        close(in_epoll);
    }
    // A thread sleeps in an epoll instance before the connection exists.
    in_epoll = epoll_create1(0);
    shared = -1;
    for (int turn = 0; turn < 3; turn++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        shared = fd;
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, receiver, "epoll") == 0);
        usleep(20000);
        CHECK(connect(fd, (struct sockaddr *)&at, sizeof at) == 0);
        struct epoll_event event = {.events = EPOLLIN};
        CHECK(epoll_ctl(in_epoll, EPOLL_CTL_ADD, fd, &event) == 0);
        for (int i = 0; i < 300; i++) say(fd, "get a\r\n");
        pthread_join(thread, NULL);
        close(fd);
    }
}

// Several processes share one connection.
static void forked(void) {
    int fd = prepared(), status;
    ask(fd, "get a\r\n", A END);
    pid_t child = fork();
    if (child == 0) {
        ask(fd, "get b\r\n", B END);
        ask(fd, "set a 0 0 3\r\n222\r\n", "STORED\r\n");
        int own = dial();
        ask(own, "get b\r\n", B END);
        for (int i = 0; i < 100; i++) ask(own, "get a\r\n", "VALUE a 0 3\r\n222\r\n" END);
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    ask(fd, "get a\r\n", "VALUE a 0 3\r\n222\r\n" END);
    // The process that receives first gets the answer, even if another process has sent the request.
    say(fd, "get b\r\n");
    child = fork();
    if (child == 0) {
        hear(fd, B END);
        ask(fd, "get b\r\n", B END);
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    close(fd);
    fd = prepared();
    ask(fd, "get a\r\n", A END);
    dup2(fd, 0);
    child = fork();
    if (child == 0) {
        execlp("sh", "sh", "-c", "printf 'get b\\r\\n' >&0; head -c 23 <&0 | grep -c two", NULL);
        _exit(1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    close(fd);
}

static void measured(void) {
    int fd = prepared(), turns = 300000;
    char value[101], answer[200];
    memset(value, 'v', 100);
    value[100] = 0;
    put(fd, "b", value);
    struct timespec begin, end;
    for (int round = 0; round < 2; round++) {
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int i = 0; i < turns; i++) {
            CHECK(send(fd, "get b\r\n", 7, 0) == 7);
            CHECK(recv(fd, answer, sizeof answer, 0) == 122);
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
    }
    double ns = (end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec);
    printf("%.0f ns\n", ns / turns);
}

int main(int count, char **words) {
    CHECK(count == 3);
    port = atoi(words[1]);
    const char *way = words[2];
    if (!strcmp(way, "order")) order();
    else if (!strcmp(way, "threads")) threads();
    else if (!strcmp(way, "level")) polled(0);
    else if (!strcmp(way, "edge")) polled(EPOLLET);
    else if (!strcmp(way, "oneshot")) polled(EPOLLONESHOT);
    else if (!strcmp(way, "asked")) asked();
    else if (!strcmp(way, "asleep")) asleep();
    else if (!strcmp(way, "forked")) forked();
    else if (!strcmp(way, "measured")) measured();
    else return 2;
    return 0;
}
