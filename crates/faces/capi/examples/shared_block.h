/* Common code of block_writer and block_reader, which share one block, a mutex and a condition variable of the same name. */
#ifndef SHARED_BLOCK_H
#define SHARED_BLOCK_H

#include <ginnel.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* In nanoseconds. If the other side does nothing for so long, it has died or hangs. */
#define PATIENCE 30000000000LL

enum { EMPTY, FULL, LAST, OVER };

/* The front of the block. The mutex must be held to read or write it. */
struct front {
    uint64_t state;
    uint64_t length; /* of `data`, in bytes */
    char data[];
};

struct shared {
    ginnel_endpoint *endpoint;
    ginnel_mutex *mutex;
    ginnel_condvar *changed;
    ginnel_block *block;
    struct front *front;
    size_t room; /* for `data`, in bytes */
};

static const char *program;

/* Ends the program if a call of the library has failed. */
static int sure(int result)
{
    if (result < 0) {
        fprintf(stderr, "%s: %s\n", program, ginnel_last_error());
        exit(1);
    }
    return result;
}

/* Ends the program if the other side has died while it held the mutex. */
static void must_live(int result)
{
    if (sure(result) == GINNEL_OWNER_DIED) {
        fprintf(stderr, "%s: the other side has died\n", program);
        exit(1);
    }
}

/* Attaches, and opens the mutex and the condition variable; the first of the two programs creates them. */
static void share(struct shared *with, const char *segment, const char *name)
{
    sure(ginnel_attach(segment, NULL, &with->endpoint));
    sure(ginnel_mutex_open(with->endpoint, name, NULL, &with->mutex));
    /* All locks of a segment share one name space, so the condition variable needs another name. */
    char other[80];
    snprintf(other, sizeof other, "%s.changed", name);
    sure(ginnel_condvar_open(with->endpoint, other, NULL, &with->changed));
}

static void map(struct shared *with)
{
    void *address;
    size_t length;
    sure(ginnel_block_map(with->block, &address, &length));
    if (length <= sizeof(struct front)) {
        fprintf(stderr, "%s: a block of %zu bytes is too short\n", program, length);
        exit(2);
    }
    with->front = address;
    with->room = length - sizeof(struct front);
}

static void lock(struct shared *with)
{
    must_live(ginnel_mutex_lock(with->mutex, PATIENCE));
}

/* Waits until the state is one of these two. The mutex must be held. */
static void await_state(struct shared *with, uint64_t one, uint64_t other)
{
    while (with->front->state != one && with->front->state != other)
        must_live(ginnel_condvar_wait(with->changed, with->mutex, PATIENCE));
}

static void unlock(struct shared *with)
{
    sure(ginnel_condvar_signal(with->changed));
    sure(ginnel_mutex_unlock(with->mutex));
}

static void leave(struct shared *with)
{
    ginnel_block_close(with->block);
    ginnel_condvar_close(with->changed);
    ginnel_mutex_close(with->mutex);
    ginnel_detach(with->endpoint);
}

#endif
