// Calls that are left in the middle: `cancelled`, a thread that is cancelled while the library asks a server that does not answer; another
// thread sends on the same connection afterwards. `signalled`, a signal handler that receives on the connection whose call it interrupts.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, strerror(errno)); \
            exit(1); \
        } \
    } while (0)

static struct sockaddr_in address = {.sin_family = AF_INET};
static int fd;

static const char get[] = "get a\r\n";
#define GET (sizeof get - 1)

static void *send_first(void *unused) {
    (void)unused;
    for (;;) {
        send(fd, get, GET, 0);
        pthread_testcancel();
    }
    return NULL;
}

static void cancelled(void) {
    // A server that accepts connections, and answers nothing.
    address.sin_addr.s_addr = htonl(0x7f000102);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 10) == 0);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, (void *)&address, sizeof address) == 0);
    int peer = accept(listener, NULL, NULL);
    CHECK(peer >= 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, send_first, NULL) == 0);
    // The question comes: over this connection, or over one of the library's.
    struct pollfd either[] = {{.fd = listener, .events = POLLIN}, {.fd = peer, .events = POLLIN}};
    CHECK(poll(either, 2, -1) > 0);
    CHECK(pthread_cancel(thread) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(send(fd, get, GET, 0) == (ssize_t)GET);
    // Exactly whole requests have come.
    shutdown(fd, SHUT_WR);
    char seen[GET];
    for (;;) {
        ssize_t n = recv(peer, seen, GET, MSG_WAITALL);
        if (n == 0)
            break;
        CHECK(n == (ssize_t)GET && memcmp(seen, get, GET) == 0);
    }
}

static volatile long received;

static void receive(int flags) {
    char bytes[64];
    ssize_t n = recv(fd, bytes, sizeof bytes, flags);
    if (n > 0)
        __atomic_add_fetch(&received, n, __ATOMIC_SEQ_CST);
}

static void handle(int number) {
    (void)number;
    int kept = errno;
    receive(MSG_DONTWAIT);
    errno = kept;
}

static void every(int microseconds) {
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

// The library leaves a connection to the server once the handler has interrupted a call that is in the kernel to receive. How soon that
// is depends on the machine, so there are many connections.
static void signalled(void) {
    address.sin_addr.s_addr = htonl(0x7f000001);
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    for (int connection = 0; connection < 50; connection++) {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(fd, (void *)&address, sizeof address) == 0);
        const char set[] = "set a 0 0 5\r\nvalue\r\n";
        CHECK(send(fd, set, sizeof set - 1, 0) == (ssize_t)sizeof set - 1);
        received = 0;
        while (received < 8)
            receive(0);
        every(50);
        long expected = 8;
        for (int i = 0; i < 500; i++) {
            CHECK(send(fd, get, GET, 0) == (ssize_t)GET);
            expected += (long)strlen("VALUE a 0 5\r\nvalue\r\nEND\r\n");
            while (received < expected)
                receive(MSG_DONTWAIT);
            CHECK(received == expected);
        }
        every(0);
        CHECK(close(fd) == 0);
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    address.sin_port = htons((unsigned short)atoi(argv[1]));
    if (strcmp(argv[2], "cancelled") == 0)
        cancelled();
    else
        signalled();
    puts("good");
}
