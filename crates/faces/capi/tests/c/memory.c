/*
 * Tests blocks and locks with ginnel.h: each failure has a status of its own. Runs in the segment "test".
 */
#include <ginnel.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define WATCHDOG 60

#define IS(expected, call)                                                                       \
    do {                                                                                         \
        long result_ = (long)(call);                                                             \
        if (result_ != (long)(expected)) {                                                       \
            fprintf(stderr, "%s:%d: %s: %ld instead of %s (%s)\n", __FILE__, __LINE__, #call,    \
                    result_, #expected, ginnel_last_error());                                    \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

static void blocks(void)
{
    ginnel_endpoint *one, *two;
    ginnel_block *block, *other, *none;
    ginnel_block_options options = {.size = sizeof options, .set_others = 1, .others = GINNEL_RIGHTS_READ};
    ginnel_block_info info = {.size = sizeof info};
    ginnel_endpoint_info who = {.size = sizeof who};
    /* One byte too long. */
    char name[65] = "";
    char text[8] = "";
    void *address;
    size_t length;

    IS(0, ginnel_attach("test", NULL, &one));
    IS(0, ginnel_attach("test", NULL, &two));
    IS(0, ginnel_endpoint_get_info(two, &who));
    IS(0, ginnel_block_create(one, "b", 5000, &options, &block));
    IS(GINNEL_ERR_IN_USE, ginnel_block_create(one, "b", 1, NULL, &none));
    IS(1, none == NULL);
    IS(GINNEL_ERR_INVALID, ginnel_block_create(one, "c", 0, NULL, &none));
    IS(GINNEL_ERR_NO_MEMORY, ginnel_block_create(one, "c", 18 << 20, NULL, &none));
    IS(GINNEL_ERR_QUOTA, ginnel_block_create(one, "c", 1 << 30, NULL, &none));
    IS(GINNEL_ERR_NAME, ginnel_block_create(one, "no blanks", 1, NULL, &none));
    memset(name, 'n', sizeof name - 1);
    IS(GINNEL_ERR_NAME, ginnel_block_create(one, name, 1, NULL, &none));
    IS(GINNEL_ERR_NAME, ginnel_block_open(one, name, GINNEL_RIGHTS_READ, 0, &none));
    IS(GINNEL_ERR_NOT_FOUND, ginnel_block_open(two, "c", GINNEL_RIGHTS_READ, 0, &none));
    IS(GINNEL_ERR_DENIED, ginnel_block_open(two, "b", GINNEL_RIGHTS_READ_WRITE, 0, &none));
    IS(GINNEL_ERR_INVALID, ginnel_block_open(two, "b", 4, 0, &none));
    IS(0, ginnel_block_open(two, "b", GINNEL_RIGHTS_READ, 0, &other));
    IS(0, ginnel_block_write(block, 4990, "0123456789", 10));
    IS(GINNEL_ERR_RANGE, ginnel_block_write(block, 4991, "0123456789", 10));
    IS(GINNEL_ERR_DENIED, ginnel_block_write(other, 0, "x", 1));
    IS(0, ginnel_block_read(other, 4995, text, 5));
    IS(0, strcmp(text, "56789"));
    IS(0, ginnel_block_get_info(other, &info));
    IS(5000, info.length);
    IS(GINNEL_RIGHTS_READ, info.rights);

    /* A store without the right does not reach the block, and the next call reports it. */
    IS(0, ginnel_block_map(other, &address, &length));
    IS(5000, length);
    IS(0, ginnel_block_guard(other));
    memcpy((char *)address + 4990, "wrong", 5);
    IS(GINNEL_ERR_DENIED, ginnel_block_read(other, 4990, text, 5));
    IS(0, ginnel_block_read(other, 4990, text, 5));
    IS(0, memcmp(text, "01234", 5));
    IS(0, memcmp((char *)address + 4990, "01234", 5));

    /* Rights are granted and revoked, and an exclusive opener waits for the others. */
    IS(GINNEL_ERR_DENIED, ginnel_block_grant(other, who.member, who.endpoint, GINNEL_RIGHTS_READ_WRITE));
    IS(0, ginnel_block_grant(block, who.member, who.endpoint, GINNEL_RIGHTS_WRITE_EXCLUSIVE));
    IS(GINNEL_ERR_BUSY, ginnel_block_open(two, "b", GINNEL_RIGHTS_WRITE_EXCLUSIVE, 0, &none));
    IS(0, ginnel_block_close(block));
    IS(GINNEL_ERR_FREED, ginnel_block_close(block));
    IS(0, ginnel_block_close(NULL));
    /* A freed handle stays freed, even if its slot has been reused. */
    for (int n = 0; n < 100; n++) {
        IS(0, ginnel_block_create(one, NULL, 1, NULL, &none));
        IS(GINNEL_ERR_FREED, ginnel_block_close(block));
        IS(GINNEL_ERR_FREED, ginnel_block_read(block, 0, text, 1));
        IS(GINNEL_ERR_FREED, ginnel_block_resize(block, 10));
        IS(0, ginnel_block_write(none, 0, "x", 1));
        IS(0, ginnel_block_close(none));
    }
    IS(0, ginnel_block_close(other));
    IS(0, ginnel_block_open(two, "b", GINNEL_RIGHTS_WRITE_EXCLUSIVE, 10 * SECOND, &other));
    IS(0, ginnel_process_events(one));
    IS(GINNEL_ERR_DENIED, ginnel_block_unlink(two, "b"));
    IS(0, ginnel_block_unlink(one, "b"));
    IS(0, ginnel_block_create(one, NULL, 1, NULL, &block));
    IS(0, ginnel_block_resize(block, 10));
    IS(0, ginnel_block_link(block, "b"));
    IS(0, ginnel_block_close(block));
    IS(0, ginnel_block_close(other));
    IS(0, ginnel_detach(two));
    IS(0, ginnel_detach(one));
}

static void locks(void)
{
    ginnel_endpoint *endpoint;
    ginnel_mutex *mutex, *same;
    ginnel_rwlock *lock, *other;
    ginnel_condvar *condvar;
    ginnel_semaphore *semaphore;
    ginnel_barrier *barrier;
    ginnel_once *once;
    ginnel_lock_options options = {.size = sizeof options, .existing = 1};
    uint64_t permits;

    IS(0, ginnel_attach("test", NULL, &endpoint));
    IS(GINNEL_ERR_NOT_FOUND, ginnel_mutex_open(endpoint, "m", &options, &mutex));
    IS(0, ginnel_mutex_open(endpoint, "m", NULL, &mutex));
    IS(GINNEL_ERR_KIND, ginnel_rwlock_open(endpoint, "m", NULL, &lock));
    IS(0, ginnel_mutex_open(endpoint, "m", &options, &same));
    IS(GINNEL_ERR_NOT_OWNER, ginnel_mutex_unlock(mutex));
    IS(0, ginnel_mutex_lock(mutex, -1));
    IS(GINNEL_ERR_DEADLOCK, ginnel_mutex_lock(mutex, 0));
    IS(GINNEL_ERR_TIMED_OUT, ginnel_mutex_lock(same, SECOND / 100));
    IS(GINNEL_ERR_NOT_OWNER, ginnel_mutex_unlock(same));
    IS(0, ginnel_mutex_unlock(mutex));

    IS(0, ginnel_condvar_open(endpoint, "c", NULL, &condvar));
    IS(GINNEL_ERR_NOT_OWNER, ginnel_condvar_wait(condvar, mutex, 0));
    IS(0, ginnel_mutex_lock(mutex, 0));
    IS(GINNEL_ERR_TIMED_OUT, ginnel_condvar_wait(condvar, mutex, SECOND / 100));
    IS(0, ginnel_condvar_signal(condvar));
    IS(0, ginnel_condvar_broadcast(condvar));
    IS(0, ginnel_mutex_unlock(mutex));

    IS(0, ginnel_rwlock_open(endpoint, "r", NULL, &lock));
    IS(0, ginnel_rwlock_open(endpoint, "r", NULL, &other));
    IS(0, ginnel_rwlock_rdlock(lock, -1));
    IS(0, ginnel_rwlock_rdlock(other, -1));
    IS(0, ginnel_rwlock_unlock(other));
    IS(GINNEL_ERR_TIMED_OUT, ginnel_rwlock_wrlock(other, SECOND / 100));
    IS(0, ginnel_rwlock_unlock(lock));
    IS(0, ginnel_rwlock_wrlock(other, -1));
    IS(0, ginnel_rwlock_unlock(other));

    IS(GINNEL_ERR_INVALID, ginnel_semaphore_open(endpoint, "s", 1, 2, NULL, &semaphore));
    IS(0, ginnel_semaphore_open(endpoint, "s", 2, 1, NULL, &semaphore));
    IS(0, ginnel_semaphore_wait(semaphore, 0));
    IS(GINNEL_ERR_TIMED_OUT, ginnel_semaphore_wait(semaphore, SECOND / 100));
    IS(0, ginnel_semaphore_post(semaphore, 2));
    IS(GINNEL_ERR_OVERFLOW, ginnel_semaphore_post(semaphore, 1));
    IS(0, ginnel_semaphore_get(semaphore, &permits));
    IS(2, permits);

    IS(0, ginnel_barrier_open(endpoint, "p", 1, NULL, &barrier));
    IS(1, ginnel_barrier_wait(barrier, -1));
    IS(0, ginnel_once_open(endpoint, "o", NULL, &once));
    IS(GINNEL_ONCE_BEGIN, ginnel_once_begin(once, -1));
    IS(0, ginnel_once_end(once, 0));
    IS(GINNEL_ONCE_AGAIN, ginnel_once_begin(once, -1));
    IS(0, ginnel_once_end(once, 1));
    IS(0, ginnel_once_begin(once, -1));
    IS(GINNEL_ERR_NOT_OWNER, ginnel_once_end(once, 1));

    /* Another process dies with the mutex; then we get it, and unlock it without marking the data consistent. */
    pid_t child = fork();
    if (child == 0) {
        ginnel_endpoint *own;
        ginnel_mutex *locked;
        IS(0, ginnel_attach("test", NULL, &own));
        IS(0, ginnel_mutex_open(own, "m", NULL, &locked));
        IS(0, ginnel_mutex_lock(locked, -1));
        _exit(0);
    }
    IS(child, waitpid(child, NULL, 0));
    IS(GINNEL_OWNER_DIED, ginnel_mutex_lock(mutex, 10 * SECOND));
    IS(0, ginnel_mutex_consistent(mutex));
    IS(0, ginnel_mutex_unlock(mutex));
    IS(0, ginnel_mutex_lock(same, -1));
    IS(0, ginnel_lock_unlink(endpoint, "m"));
    IS(GINNEL_ERR_NOT_FOUND, ginnel_lock_unlink(endpoint, "m"));
    /* A mutex that is closed while it is locked. */
    IS(0, ginnel_mutex_close(same));
    IS(GINNEL_OWNER_DIED, ginnel_mutex_lock(mutex, 10 * SECOND));
    IS(0, ginnel_mutex_unlock(mutex));
    IS(GINNEL_ERR_NOT_RECOVERABLE, ginnel_mutex_lock(mutex, -1));

    /* Each handle is freed once, and stays freed even if its slot has been reused. */
    IS(0, ginnel_once_close(once));
    IS(0, ginnel_barrier_close(barrier));
    IS(0, ginnel_semaphore_close(semaphore));
    IS(0, ginnel_rwlock_close(other));
    IS(0, ginnel_rwlock_close(lock));
    IS(0, ginnel_condvar_close(condvar));
    IS(GINNEL_ERR_FREED, ginnel_mutex_lock(same, 0));
    IS(GINNEL_ERR_FREED, ginnel_mutex_close(same));
    IS(GINNEL_ERR_FREED, ginnel_condvar_wait(condvar, mutex, 0));
    IS(0, ginnel_mutex_close(mutex));
    IS(0, ginnel_mutex_open(endpoint, "m", NULL, &same));
    IS(GINNEL_ERR_FREED, ginnel_mutex_lock(mutex, 0));
    IS(GINNEL_ERR_FREED, ginnel_mutex_close(mutex));
    IS(GINNEL_ERR_FREED, ginnel_condvar_close(condvar));
    IS(GINNEL_ERR_FREED, ginnel_rwlock_rdlock(lock, 0));
    IS(GINNEL_ERR_FREED, ginnel_rwlock_close(lock));
    IS(GINNEL_ERR_FREED, ginnel_semaphore_wait(semaphore, 0));
    IS(GINNEL_ERR_FREED, ginnel_semaphore_close(semaphore));
    IS(GINNEL_ERR_FREED, ginnel_barrier_wait(barrier, 0));
    IS(GINNEL_ERR_FREED, ginnel_barrier_close(barrier));
    IS(GINNEL_ERR_FREED, ginnel_once_begin(once, 0));
    IS(GINNEL_ERR_FREED, ginnel_once_close(once));
    IS(0, ginnel_mutex_lock(same, 0));
    IS(0, ginnel_mutex_unlock(same));
    IS(0, ginnel_mutex_close(same));
    IS(0, ginnel_detach(endpoint));
    IS(GINNEL_ERR_FREED, ginnel_mutex_open(endpoint, "m", NULL, &same));
    IS(GINNEL_ERR_FREED, ginnel_detach(endpoint));
}

int main(void)
{
    alarm(WATCHDOG);
    blocks();
    locks();
    return 0;
}
