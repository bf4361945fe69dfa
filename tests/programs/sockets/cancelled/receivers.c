/* Threads are cancelled while they receive over a connection that has not changed over. It changes over afterwards. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void check(int condition, const char *what)
{
    if (!condition) {
        perror(what);
        exit(1);
    }
}

static int number;

/* Returns whether the thread with that number sleeps. */
static int is_asleep(void)
{
    char name[64], line[256] = "";
    sprintf(name, "/proc/self/task/%d/stat", __atomic_load_n(&number, __ATOMIC_ACQUIRE));
    FILE *file = fopen(name, "r");
    if (file == NULL)
        return 0;
    check(fgets(line, sizeof line, file) != NULL, name);
    fclose(file);
    char *end = strrchr(line, ')');
    return end != NULL && end[2] == 'S';
}

static void *by_recv(void *fd)
{
    __atomic_store_n(&number, gettid(), __ATOMIC_RELEASE);
    char byte;
    recv(*(int *)fd, &byte, 1, 0);
    return NULL;
}

static void *by_read(void *fd)
{
    __atomic_store_n(&number, gettid(), __ATOMIC_RELEASE);
    char byte;
    read(*(int *)fd, &byte, 1);
    return NULL;
}

static void *by_recvmsg(void *fd)
{
    __atomic_store_n(&number, gettid(), __ATOMIC_RELEASE);
    char byte;
    struct iovec piece = { &byte, 1 };
    struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };
    recvmsg(*(int *)fd, &message, 0);
    return NULL;
}

/* Returns how many ends of the connection have changed over in both directions, as the report says. */
static int changed(void)
{
    int ends = 0;
    char line[1000];
    FILE *report = fopen(getenv("GINNEL_SOCKETS_REPORT"), "r");
    check(report != NULL, "the report");
    while (fgets(line, sizeof line, report))
        ends += strstr(line, "sent_after_us") && strstr(line, "received_after_us");
    fclose(report);
    return ends;
}

int main(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), a = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    check(connect(a, (struct sockaddr *)&address, size) == 0, "connect");
    int b = accept(listener, NULL, NULL);
    check(b >= 0, "accept");
    void *(*ways[])(void *) = { by_recv, by_read, by_recvmsg };
    for (int i = 0; i < 6; i++) {
        pthread_t thread;
        __atomic_store_n(&number, 0, __ATOMIC_RELEASE);
        void *result;
        check(pthread_create(&thread, NULL, ways[i / 2], i % 2 ? &a : &b) == 0, "pthread_create");
        /* The thread may sleep for a moment for another reason before. */
        for (int looks = 0; looks < 5; looks = is_asleep() ? looks + 1 : 0)
            usleep(1000);
        check(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0, "pthread_cancel");
        check(result == PTHREAD_CANCELED, "a thread that was cancelled");
    }
    for (time_t end = time(NULL) + 40; changed() < 2;) {
        char byte = 0;
        check(send(a, &byte, 1, 0) == 1 && recv(b, &byte, 1, 0) == 1, "from one end");
        check(send(b, &byte, 1, 0) == 1 && recv(a, &byte, 1, 0) == 1, "from the other end");
        check(time(NULL) < end, "a connection that changes over");
        usleep(1000);
    }
    return 0;
}
