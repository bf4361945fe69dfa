/* Threads and processes that use one connection at the same time. TCP keeps each message together while it has room. */
#include "case.h"

enum { THREADS = 4, ROUNDS = 40, LONGEST = 20000 };

struct work {
    int fd, size, vectors;
    char letter;
    pthread_barrier_t *barrier;
};

static void send_one(int fd, char letter, int size, int vectors)
{
    char message[LONGEST];
    memset(message, letter, size);
    message[0] = '<';
    message[size - 1] = '>';
    if (vectors == 1) {
        check(send(fd, message, size, MSG_NOSIGNAL) == size, "send");
        return;
    }
    struct iovec pieces[16];
    int at = 0;
    for (int i = 0; i < vectors; i++) {
        int len = i == vectors - 1 ? size - at : size / vectors;
        pieces[i] = (struct iovec){ message + at, len };
        at += len;
    }
    check(writev(fd, pieces, vectors) == size, "writev");
}

/* Receives so many messages of one size, and returns how many are not whole. */
static int receive_messages(int fd, int count, int size)
{
    static char message[LONGEST];
    int broken = 0;
    for (int i = 0; i < count; i++) {
        receive_all(fd, message, size);
        int is_whole = message[0] == '<' && message[size - 1] == '>';
        for (int j = 2; j < size - 1; j++)
            is_whole &= message[j] == message[1];
        broken += !is_whole;
    }
    return broken;
}

static void *send_in_rounds(void *argument)
{
    struct work *work = argument;
    for (int round = 0; round < ROUNDS; round++) {
        send_one(work->fd, work->letter, work->size, work->vectors);
        /* TCP has room for one round. */
        if (pthread_barrier_wait(work->barrier) == PTHREAD_BARRIER_SERIAL_THREAD) {
            char byte;
            receive_all(work->fd, &byte, 1);
        }
        pthread_barrier_wait(work->barrier);
    }
    return NULL;
}

static void threads_send(int me, int fd, int size, int vectors)
{
    int on = 1;
    check(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "TCP_NODELAY");
    if (me == CONNECTOR) {
        pthread_barrier_t barrier;
        pthread_barrier_init(&barrier, NULL, THREADS);
        pthread_t threads[THREADS];
        struct work work[THREADS];
        for (int i = 0; i < THREADS; i++) {
            work[i] = (struct work){ fd, size, vectors, 'a' + i, &barrier };
            check(pthread_create(&threads[i], NULL, send_in_rounds, &work[i]) == 0, "pthread_create");
        }
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i], NULL);
    } else {
        int broken = 0;
        for (int round = 0; round < ROUNDS; round++) {
            broken += receive_messages(fd, THREADS, size);
            send_all(fd, "a", 1);
        }
        say("broken", broken);
    }
    meet();
}

CASE(threads_send_short_messages)
{
    threads_send(me, fd, 64, 1);
}

CASE(threads_send_messages)
{
    threads_send(me, fd, 1500, 1);
}

CASE(threads_send_messages_that_almost_fill_a_small_ring)
{
    threads_send(me, fd, 3500, 1);
}

CASE(threads_send_pages)
{
    threads_send(me, fd, 4096, 1);
}

CASE(threads_send_messages_larger_than_a_small_ring)
{
    threads_send(me, fd, 10000, 1);
}

CASE(threads_send_short_vectors)
{
    threads_send(me, fd, 100, 16);
}

CASE(threads_send_long_vectors)
{
    threads_send(me, fd, 20000, 4);
}

/* Many short messages, with and without room. The ring is full often. TCP has room for all. */
CASE(threads_processes_send_messages)
{
    enum { COUNT = 400, SIZE = 160 };
    if (me == CONNECTOR) {
        pid_t children[2];
        for (int i = 0; i < 2; i++) {
            children[i] = fork();
            check(children[i] >= 0, "fork");
            if (children[i] == 0) {
                for (int j = 0; j < COUNT; j++)
                    send_one(fd, 'a' + i, SIZE, 1 + j % 2);
                _exit(0);
            }
        }
        for (int i = 0; i < 2; i++) {
            int status;
            check(waitpid(children[i], &status, 0) == children[i] && status == 0, "a child");
        }
    } else {
        say("broken", receive_messages(fd, 2 * COUNT, SIZE));
    }
    meet();
}

static int count_of[THREADS], broken_of[THREADS];

static void *receive_until_the_end(void *argument)
{
    struct work *work = argument;
    int i = work->letter;
    char message[64];
    int n;
    while ((n = recv(work->fd, message, sizeof message, 0)) > 0) {
        int is_whole = n == sizeof message && message[0] == '<' && message[sizeof message - 1] == '>';
        count_of[i]++;
        broken_of[i] += !is_whole;
    }
    check(n == 0, "recv");
    return NULL;
}

CASE(threads_receive_short_messages)
{
    enum { COUNT = 4000 };
    if (me == CONNECTOR) {
        pthread_t threads[THREADS];
        struct work work[THREADS];
        for (int i = 0; i < THREADS; i++) {
            work[i] = (struct work){ .fd = fd, .letter = i };
            check(pthread_create(&threads[i], NULL, receive_until_the_end, &work[i]) == 0, "pthread_create");
        }
        int count = 0, broken = 0;
        for (int i = 0; i < THREADS; i++) {
            pthread_join(threads[i], NULL);
            count += count_of[i];
            broken += broken_of[i];
        }
        say("messages", count);
        say("broken", broken);
    } else {
        for (int i = 0; i < COUNT; i++)
            send_one(fd, 'a', 64, 1);
        shutdown(fd, SHUT_WR);
    }
    meet();
}
