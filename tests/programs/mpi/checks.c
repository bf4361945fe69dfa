/* Uses MPI as its programs do, and checks all data: messages of many sizes, collectives, one-sided communication with each kind of
 * synchronisation, and threads.
 *
 * checks [--no-shared-windows] [COMMAND]
 *
 * Rank 0 runs COMMAND at the end, while all ranks are connected. */
#include "check.h"
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int has_shared_windows = 1;

/* Returns the byte at a position of a message, which depends on the sender and the receiver. */
static unsigned char byte_of(int from, int to, size_t at)
{
    return (unsigned char)(from * 31 + to * 17 + at * 7 + (at >> 8) * 3);
}

static void fill(unsigned char *bytes, size_t length, int from, int to)
{
    for (size_t i = 0; i < length; i++)
        bytes[i] = byte_of(from, to, i);
}

static void check(const unsigned char *bytes, size_t length, int from, int to)
{
    for (size_t i = 0; i < length; i++)
        CHECK(bytes[i] == byte_of(from, to, i));
}

/* Messages round a ring, and from each rank to each rank without waiting. */
static void messages(void)
{
    static const int sizes[] = {0, 1, 8, 100, 4096, 8000, 65536, 300000, 2000000};
    int right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int size = sizes[s], count;
        unsigned char *out = malloc(size + 1), *in = malloc(size + 1);
        MPI_Status status;
        fill(out, size, rank, right);
        MPI_Sendrecv(out, size, MPI_BYTE, right, 3, in, size, MPI_BYTE, left, 3, MPI_COMM_WORLD, &status);
        MPI_Get_count(&status, MPI_BYTE, &count);
        CHECK(count == size);
        check(in, size, left, rank);
        free(out);
        free(in);
    }
    int size = 20000;
    unsigned char *bytes = malloc((size_t)size * ranks * 2);
    MPI_Request *requests = malloc(sizeof(MPI_Request) * 2 * ranks);
    for (int i = 0; i < ranks; i++)
        MPI_Irecv(bytes + (size_t)i * size, size, MPI_BYTE, i, 4, MPI_COMM_WORLD, requests + i);
    for (int i = 0; i < ranks; i++) {
        unsigned char *out = bytes + (size_t)(ranks + i) * size;
        fill(out, size, rank, i);
        MPI_Issend(out, size, MPI_BYTE, i, 4, MPI_COMM_WORLD, requests + ranks + i);
    }
    MPI_Waitall(2 * ranks, requests, MPI_STATUSES_IGNORE);
    for (int i = 0; i < ranks; i++)
        check(bytes + (size_t)i * size, size, i, rank);
    free(requests);
    free(bytes);
    /* Short messages, for which the receiver has not posted a receive yet. */
    for (int i = 0; i < 500; i++) {
        int out = rank * 1000 + i;
        MPI_Send(&out, 1, MPI_INT, right, 5, MPI_COMM_WORLD);
    }
    for (int i = 0; i < 500; i++) {
        int in;
        MPI_Recv(&in, 1, MPI_INT, left, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        CHECK(in == left * 1000 + i);
    }
}

static void collectives(void)
{
    for (int count = 1; count <= 100000; count *= 10) {
        int *out = malloc(sizeof(int) * count * ranks), *in = malloc(sizeof(int) * count * ranks);
        for (int i = 0; i < count * ranks; i++)
            out[i] = rank * 1000003 + i;
        MPI_Alltoall(out, count, MPI_INT, in, count, MPI_INT, MPI_COMM_WORLD);
        for (int i = 0; i < count * ranks; i++)
            CHECK(in[i] == i / count * 1000003 + rank * count + i % count);
        MPI_Allgather(out, count, MPI_INT, in, count, MPI_INT, MPI_COMM_WORLD);
        for (int i = 0; i < count * ranks; i++)
            CHECK(in[i] == i / count * 1000003 + i % count);
        MPI_Allreduce(out, in, count, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < count; i++)
            CHECK(in[i] == ranks * (ranks - 1) / 2 * 1000003 + ranks * i);
        for (int root = 0; root < ranks; root++) {
            memcpy(in, out, sizeof(int) * count);
            MPI_Bcast(in, count, MPI_INT, root, MPI_COMM_WORLD);
            for (int i = 0; i < count; i++)
                CHECK(in[i] == root * 1000003 + i);
        }
        free(out);
        free(in);
    }
    int mine = rank + 1, before = 0;
    MPI_Exscan(&mine, &before, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(rank == 0 || before == rank * (rank + 1) / 2);
}

/* One-sided communication: fence, post-start-complete-wait, locks, atomic operations, and memory that is attached later. */
static void one_sided(void)
{
    enum { WORDS = 5000 };
    int64_t *words, *got = malloc(sizeof(int64_t) * WORDS);
    int right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
    MPI_Win win;
    MPI_Win_allocate(sizeof(int64_t) * WORDS, sizeof(int64_t), MPI_INFO_NULL, MPI_COMM_WORLD, &words, &win);
    for (int i = 0; i < WORDS; i++)
        words[i] = -1;
    MPI_Win_fence(0, win);
    for (int i = 0; i < WORDS; i++)
        got[i] = rank * 100000 + i;
    MPI_Put(got, WORDS, MPI_INT64_T, right, 0, WORDS, MPI_INT64_T, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < WORDS; i++)
        CHECK(words[i] == left * 100000 + i);
    MPI_Get(got, WORDS, MPI_INT64_T, right, 0, WORDS, MPI_INT64_T, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < WORDS; i++)
        CHECK(got[i] == rank * 100000 + i);

    MPI_Group all, to, from;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, 1, &right, &to);
    MPI_Group_incl(all, 1, &left, &from);
    for (int turn = 0; turn < 20; turn++) {
        MPI_Win_post(from, 0, win);
        MPI_Win_start(to, 0, win);
        int64_t word = turn * 1000 + rank;
        MPI_Put(&word, 1, MPI_INT64_T, right, 7, 1, MPI_INT64_T, win);
        MPI_Win_complete(win);
        MPI_Win_wait(win);
        CHECK(words[7] == turn * 1000 + left);
    }
    MPI_Group_free(&to);
    MPI_Group_free(&from);
    MPI_Group_free(&all);

    words[0] = words[1] = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    for (int turn = 0; turn < 50; turn++) {
        int64_t one = 1, old;
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, win);
        MPI_Get(&old, 1, MPI_INT64_T, 0, 0, 1, MPI_INT64_T, win);
        MPI_Win_flush(0, win);
        old++;
        MPI_Put(&old, 1, MPI_INT64_T, 0, 0, 1, MPI_INT64_T, win);
        MPI_Win_unlock(0, win);
        MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, win);
        MPI_Fetch_and_op(&one, &old, MPI_INT64_T, 0, 1, MPI_SUM, win);
        MPI_Win_unlock(0, win);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock_all(0, win);
    int64_t counts[2];
    MPI_Get(counts, 2, MPI_INT64_T, 0, 0, 2, MPI_INT64_T, win);
    MPI_Win_flush_all(win);
    CHECK(counts[0] == 50 * ranks && counts[1] == 50 * ranks);
    int64_t swapped = 1, nobody = -5, mine = rank;
    MPI_Compare_and_swap(&mine, &nobody, &swapped, MPI_INT64_T, 0, 0, win);
    MPI_Win_unlock_all(win);
    CHECK(swapped == counts[0]);
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < WORDS; i++)
        words[i] = 0;
    MPI_Win_fence(0, win);
    for (int i = 0; i < WORDS; i++)
        got[i] = i + rank;
    for (int i = 0; i < ranks; i++)
        MPI_Accumulate(got, WORDS, MPI_INT64_T, i, 0, WORDS, MPI_INT64_T, MPI_SUM, win);
    MPI_Win_fence(0, win);
    for (int i = 0; i < WORDS; i++)
        CHECK(words[i] == (int64_t)ranks * i + ranks * (ranks - 1) / 2);
    MPI_Win_free(&win);

    int64_t *later = malloc(sizeof(int64_t) * WORDS);
    for (int i = 0; i < WORDS; i++)
        later[i] = rank * 7 + i;
    MPI_Win_create_dynamic(MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_attach(win, later, sizeof(int64_t) * WORDS);
    MPI_Aint address, of_all[ranks];
    MPI_Get_address(later, &address);
    MPI_Allgather(&address, 1, MPI_AINT, of_all, 1, MPI_AINT, MPI_COMM_WORLD);
    MPI_Win_lock_all(0, win);
    MPI_Get(got, WORDS, MPI_INT64_T, right, of_all[right], WORDS, MPI_INT64_T, win);
    MPI_Win_unlock_all(win);
    for (int i = 0; i < WORDS; i++)
        CHECK(got[i] == right * 7 + i);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_detach(win, later);
    MPI_Win_free(&win);
    free(later);
    free(got);

    /* Memory that the ranks of a machine share. */
    if (!has_shared_windows)
        return;
    MPI_Comm machine;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine);
    int here, of_machine, unit;
    MPI_Comm_rank(machine, &here);
    MPI_Comm_size(machine, &of_machine);
    int *shared, *next;
    MPI_Aint size;
    MPI_Win_allocate_shared(sizeof(int), sizeof(int), MPI_INFO_NULL, machine, &shared, &win);
    MPI_Win_fence(0, win);
    *shared = here * 11;
    MPI_Win_fence(0, win);
    MPI_Win_shared_query(win, (here + 1) % of_machine, &size, &unit, &next);
    CHECK(*next == (here + 1) % of_machine * 11);
    MPI_Win_fence(0, win);
    MPI_Win_free(&win);
    MPI_Comm_free(&machine);
}

/* Each thread has messages of its own, which its number identifies. */
static void *talk(void *number)
{
    int tag = 100 + (int)(intptr_t)number, right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
    unsigned char out[3000], in[3000];
    for (int turn = 0; turn < 100; turn++) {
        size_t length = (size_t)turn * 29 + 1;
        fill(out, length, rank + tag, right + turn);
        MPI_Sendrecv(out, (int)length, MPI_BYTE, right, tag, in, (int)length, MPI_BYTE, left, tag, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
        check(in, length, left + tag, rank + turn);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    has_shared_windows = argc < 2 || strcmp(argv[1], "--no-shared-windows") != 0;
    messages();
    collectives();
    one_sided();
    CHECK(provided == MPI_THREAD_MULTIPLE);
    pthread_t threads[2];
    for (intptr_t i = 0; i < 2; i++)
        CHECK(pthread_create(threads + i, NULL, talk, (void *)i) == 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0 && argc > (has_shared_windows ? 1 : 2))
        CHECK(system(argv[argc - 1]) == 0);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("all data are right: %d ranks\n", ranks);
    MPI_Finalize();
    return 0;
}
