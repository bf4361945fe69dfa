/* Uses OpenSHMEM as its programs do, and checks all data: put, get, atomic operations, locks, a signal by a flag, and collectives.
 *
 * The processing elements (PEs) form a ring. */
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "PE %d, line %d: %s\n", shmem_my_pe(), __LINE__, #condition); \
            shmem_global_exit(1); \
        } \
    } while (0)

enum { LONGEST = 300000, TURNS = 200 };

static long sync[SHMEM_REDUCE_SYNC_SIZE], gather_sync[SHMEM_COLLECT_SYNC_SIZE];
static long work[SHMEM_REDUCE_MIN_WRKDATA_SIZE];
static long counter, total, own, all[64], lock, guarded;

static unsigned char byte_of(int from, size_t at, int turn)
{
    return (unsigned char)(from * 37 + at * 11 + (at >> 8) + turn);
}

int main(void)
{
    shmem_init();
    int me = shmem_my_pe(), pes = shmem_n_pes(), right = (me + 1) % pes, left = (me + pes - 1) % pes;
    for (size_t i = 0; i < sizeof sync / sizeof *sync; i++)
        sync[i] = SHMEM_SYNC_VALUE;
    for (size_t i = 0; i < sizeof gather_sync / sizeof *gather_sync; i++)
        gather_sync[i] = SHMEM_SYNC_VALUE;
    unsigned char *in = shmem_malloc(LONGEST), *out = malloc(LONGEST);
    long *flag = shmem_malloc(sizeof *flag);
    CHECK(in && out && flag);
    *flag = 0;
    shmem_barrier_all();

    /* A put, then a flag behind it; and a get of the same bytes. */
    static const size_t lengths[] = {1, 8, 100, 4096, 65536, LONGEST};
    for (int turn = 0; turn < TURNS; turn++) {
        size_t length = lengths[turn % 6];
        for (size_t i = 0; i < length; i++)
            out[i] = byte_of(me, i, turn);
        shmem_putmem(in, out, length, right);
        shmem_fence();
        shmem_long_p(flag, turn + 1, right);
        shmem_long_wait_until(flag, SHMEM_CMP_GE, turn + 1);
        for (size_t i = 0; i < length; i++)
            CHECK(in[i] == byte_of(left, i, turn));
        memset(out, 0, length);
        shmem_getmem(out, in, length, right);
        for (size_t i = 0; i < length; i++)
            CHECK(out[i] == byte_of(me, i, turn));
        shmem_barrier_all();
    }

    /* All PEs increment a counter at the first one. */
    for (int turn = 0; turn < TURNS; turn++) {
        shmem_long_atomic_inc(&counter, 0);
        shmem_long_atomic_fetch_add(&counter, me, 0);
        shmem_set_lock(&lock);
        long now = shmem_long_g(&guarded, 0);
        shmem_long_p(&guarded, now + 1, 0);
        shmem_quiet();
        shmem_clear_lock(&lock);
    }
    shmem_barrier_all();
    if (me == 0) {
        CHECK(counter == (long)TURNS * (pes + pes * (pes - 1) / 2));
        CHECK(guarded == (long)TURNS * pes);
    }
    CHECK(shmem_long_atomic_compare_swap(&all[0], 0, 7, me) == 0 && all[0] == 7);
    shmem_barrier_all();

    own = me + 1;
    shmem_long_sum_to_all(&total, &own, 1, 0, 0, pes, work, sync);
    CHECK(total == (long)pes * (pes + 1) / 2);
    shmem_fcollect64(all, &own, 1, 0, 0, pes, gather_sync);
    for (int pe = 0; pe < pes; pe++)
        CHECK(all[pe] == pe + 1);
    shmem_barrier_all();
    if (me == 0)
        printf("all of the memory is right: %d PEs\n", pes);
    shmem_free(flag);
    shmem_free(in);
    shmem_finalize();
    return 0;
}
