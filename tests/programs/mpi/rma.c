/* One-sided communication under stress: each way of synchronising, with each kind of window, and transfers of random places and
 * lengths.
 *
 * The operations of all ranks follow from a seed, so each rank knows what the others do. It keeps a model of the windows of all
 * ranks, and compares its own window and all data that it gets with that model, byte by byte.
 *
 * rma ROUNDS */
#include "check.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SLOT = 200000, TRANSFERS = 24, WORDS = 512, HOT = 8, TURNS = 12 };

enum mode { FENCE, POST_START, LOCK, FLUSH, FLUSH_LOCAL, REQUESTS, MODES };
enum kind { ALLOCATED, CREATED, DYNAMIC, KINDS };

/* A window of bytes. Each rank has a slot in it to which only that rank writes. */
struct window {
    MPI_Win win;
    unsigned char *own;
    /* The displacement at which the window begins at each rank. */
    MPI_Aint *begins;
    size_t length;
    enum kind kind;
};

static unsigned char **model;

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

static uint64_t next(uint64_t *state)
{
    return mix((*state)++);
}

/* The random state that determines a rank's operations in an epoch. */
static uint64_t choices(int of, uint64_t epoch)
{
    return mix(mix(20240229 + (uint64_t)of) + epoch);
}

/* A transfer: blocks of the same length, with gaps of that length between them. It may be empty if there is no room. */
struct transfer {
    int target;
    size_t at, block, blocks;
    unsigned char fill;
    uint64_t rest;
};

/* Chooses a transfer within a slot of a random rank. At that rank, everything before `from` is excluded. */
static struct transfer chosen(uint64_t *state, const size_t *from)
{
    struct transfer transfer;
    transfer.target = next(state) % ranks;
    size_t begin = from ? from[transfer.target] : 0, room = SLOT - begin;
    /* Short and long transfers are equally frequent. */
    size_t most = (size_t)1 << next(state) % 17;
    transfer.block = 1 + next(state) % most;
    size_t fit = (room + transfer.block) / (2 * transfer.block);
    transfer.blocks = next(state) % 4 == 0 ? 1 + next(state) % 50 : 1;
    if (transfer.blocks > fit)
        transfer.blocks = fit;
    size_t left = transfer.blocks ? room - (2 * transfer.blocks - 1) * transfer.block : 0;
    transfer.at = begin + next(state) % ((from ? left / 8 : left) + 1);
    transfer.fill = next(state);
    transfer.rest = next(state);
    return transfer;
}

/* Chooses the next put of an epoch. Puts of an epoch do not overlap, because their order would be undefined. */
static struct transfer next_put(uint64_t *state, size_t *from)
{
    struct transfer transfer = chosen(state, from);
    if (transfer.blocks)
        from[transfer.target] = transfer.at + (2 * transfer.blocks - 1) * transfer.block;
    return transfer;
}

static unsigned char byte_of(const struct transfer *transfer, size_t i)
{
    return transfer->fill + i * 7 + (i >> 8) * 3;
}

static void apply(int origin, const struct transfer *transfer)
{
    unsigned char *to = model[transfer->target] + (size_t)origin * SLOT + transfer->at;
    for (size_t i = 0; i < transfer->block * transfer->blocks; i++)
        to[i / transfer->block * 2 * transfer->block + i % transfer->block] = byte_of(transfer, i);
}

static void check_own(struct window *window)
{
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window->win);
    CHECK(memcmp(window->own, model[rank], window->length) == 0);
    MPI_Win_unlock(rank, window->win);
    MPI_Barrier(MPI_COMM_WORLD);
}

static void begin(enum mode mode, MPI_Group all, MPI_Win win)
{
    switch (mode) {
    case FENCE:
        MPI_Win_fence(MPI_MODE_NOPRECEDE, win);
        break;
    case POST_START:
        MPI_Win_post(all, 0, win);
        MPI_Win_start(all, 0, win);
        break;
    case LOCK:
        break;
    default:
        MPI_Win_lock_all(0, win);
    }
}

static void end(enum mode mode, MPI_Win win)
{
    switch (mode) {
    case FENCE:
        MPI_Win_fence(MPI_MODE_NOSUCCEED, win);
        break;
    case POST_START:
        MPI_Win_complete(win);
        MPI_Win_wait(win);
        break;
    case LOCK:
        break;
    default:
        MPI_Win_unlock_all(win);
    }
}

/* Each rank puts into its slots of all windows. */
static void put_all(struct window *window, enum mode mode, MPI_Group all, uint64_t epoch)
{
    unsigned char *bytes[TRANSFERS], *reused = malloc(SLOT);
    uint64_t state = choices(rank, epoch);
    size_t *from_of = calloc(ranks, sizeof *from_of);
    begin(mode, all, window->win);
    for (int i = 0; i < TRANSFERS; i++) {
        struct transfer transfer = next_put(&state, from_of);
        size_t length = transfer.block * transfer.blocks;
        int target = transfer.target;
        /* In MPICH 4.0, a request for blocks with gaps completes before its buffer may be overwritten, whatever the transport. */
        int is_requested = mode == REQUESTS && transfer.blocks == 1, is_reused = mode == FLUSH_LOCAL || is_requested;
        bytes[i] = is_reused ? NULL : malloc(length);
        if (!length)
            continue;
        unsigned char *from = is_reused ? reused : bytes[i];
        for (size_t k = 0; k < length; k++)
            from[k] = byte_of(&transfer, k);
        MPI_Aint at = window->begins[target] + (MPI_Aint)rank * SLOT + transfer.at;
        MPI_Datatype type;
        MPI_Type_vector(transfer.blocks, transfer.block, 2 * transfer.block, MPI_BYTE, &type);
        MPI_Type_commit(&type);
        if (mode == LOCK)
            MPI_Win_lock(transfer.rest % 3 == 0 ? MPI_LOCK_EXCLUSIVE : MPI_LOCK_SHARED, target, 0, window->win);
        if (is_requested) {
            MPI_Request request;
            MPI_Rput(from, length, MPI_BYTE, target, at, 1, type, window->win, &request);
            MPI_Wait(&request, MPI_STATUS_IGNORE);
        } else {
            MPI_Put(from, length, MPI_BYTE, target, at, 1, type, window->win);
        }
        MPI_Type_free(&type);
        if (mode == LOCK)
            MPI_Win_unlock(target, window->win);
        else if (mode == FLUSH && transfer.rest % 2)
            MPI_Win_flush(target, window->win);
        else if (mode == FLUSH && transfer.rest % 4 == 0)
            MPI_Win_flush_all(window->win);
        else if (mode == FLUSH_LOCAL && transfer.rest % 2)
            MPI_Win_flush_local(target, window->win);
        else if (mode == FLUSH_LOCAL)
            MPI_Win_flush_local_all(window->win);
        /* The buffer of the sent data may be overwritten. */
        if (is_reused)
            memset(reused, 0xee, length);
    }
    end(mode, window->win);
    for (int i = 0; i < TRANSFERS; i++)
        free(bytes[i]);
    free(reused);
    for (int origin = 0; origin < ranks; origin++) {
        state = choices(origin, epoch);
        memset(from_of, 0, sizeof *from_of * ranks);
        for (int i = 0; i < TRANSFERS; i++) {
            struct transfer transfer = next_put(&state, from_of);
            apply(origin, &transfer);
        }
    }
    free(from_of);
    check_own(window);
}

static void check_got(const struct transfer *transfer, const unsigned char *bytes)
{
    const unsigned char *from = model[transfer->target] + transfer->rest % ranks * SLOT + transfer->at;
    for (size_t i = 0; i < transfer->block * transfer->blocks; i++)
        CHECK(bytes[i] == from[i / transfer->block * 2 * transfer->block + i % transfer->block]);
}

/* Each rank gets from random slots of all windows. */
static void get_all(struct window *window, enum mode mode, MPI_Group all, uint64_t epoch)
{
    struct transfer transfers[TRANSFERS];
    unsigned char *bytes[TRANSFERS];
    MPI_Request requests[TRANSFERS];
    uint64_t state = choices(rank, epoch);
    begin(mode, all, window->win);
    for (int i = 0; i < TRANSFERS; i++) {
        struct transfer transfer = transfers[i] = chosen(&state, NULL);
        size_t length = transfer.block * transfer.blocks;
        bytes[i] = malloc(length);
        memset(bytes[i], 0xee, length);
        MPI_Aint at = window->begins[transfer.target] + (MPI_Aint)(transfer.rest % ranks) * SLOT + transfer.at;
        MPI_Datatype type;
        MPI_Type_vector(transfer.blocks, transfer.block, 2 * transfer.block, MPI_BYTE, &type);
        MPI_Type_commit(&type);
        if (mode == LOCK)
            MPI_Win_lock(MPI_LOCK_SHARED, transfer.target, 0, window->win);
        requests[i] = MPI_REQUEST_NULL;
        /* Such a request also completes before its data has arrived. */
        if (mode == REQUESTS && transfer.blocks == 1)
            MPI_Rget(bytes[i], length, MPI_BYTE, transfer.target, at, 1, type, window->win, requests + i);
        else
            MPI_Get(bytes[i], length, MPI_BYTE, transfer.target, at, 1, type, window->win);
        MPI_Type_free(&type);
        if (mode == LOCK)
            MPI_Win_unlock(transfer.target, window->win);
    }
    if (mode == REQUESTS) {
        MPI_Waitall(TRANSFERS, requests, MPI_STATUSES_IGNORE);
#ifdef OPEN_MPI
        /* Open MPI 4.1 considers a request complete when an atomic operation that follows it is complete. On adapters without Mellanox's
         * extensions, that operation is a message of UCX, which handles the answer before it stores the data of a short get. */
        MPI_Win_flush_all(window->win);
#endif
        for (int i = 0; i < TRANSFERS; i++)
            if (transfers[i].blocks == 1)
                check_got(transfers + i, bytes[i]);
    }
    /* In these modes, all data has arrived before the end of the epoch. */
    int is_early = mode == FLUSH || mode == FLUSH_LOCAL;
    if (mode == FLUSH)
        MPI_Win_flush_all(window->win);
    if (mode == FLUSH_LOCAL)
        MPI_Win_flush_local_all(window->win);
    if (!is_early)
        end(mode, window->win);
    for (int i = 0; i < TRANSFERS; i++) {
        check_got(transfers + i, bytes[i]);
        free(bytes[i]);
    }
    if (is_early)
        end(mode, window->win);
    MPI_Barrier(MPI_COMM_WORLD);
}

static struct window opened(enum kind kind)
{
    struct window window = {.length = (size_t)ranks * SLOT, .kind = kind, .begins = calloc(ranks, sizeof(MPI_Aint))};
    MPI_Aint begin = 0;
    if (kind == ALLOCATED) {
        MPI_Win_allocate(window.length, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window.own, &window.win);
    } else if (kind == CREATED) {
        window.own = malloc(window.length);
        MPI_Win_create(window.own, window.length, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window.win);
    } else {
        MPI_Win_create_dynamic(MPI_INFO_NULL, MPI_COMM_WORLD, &window.win);
        window.own = malloc(window.length);
        MPI_Win_attach(window.win, window.own, window.length);
        MPI_Get_address(window.own, &begin);
    }
    MPI_Allgather(&begin, 1, MPI_AINT, window.begins, 1, MPI_AINT, MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window.win);
    memset(window.own, 0, window.length);
    MPI_Win_unlock(rank, window.win);
    for (int i = 0; i < ranks; i++)
        memset(model[i], 0, window.length);
    MPI_Barrier(MPI_COMM_WORLD);
    return window;
}

static void closed(struct window *window)
{
    MPI_Barrier(MPI_COMM_WORLD);
    if (window->kind == DYNAMIC)
        MPI_Win_detach(window->win, window->own);
    MPI_Win_free(&window->win);
    if (window->kind != ALLOCATED)
        free(window->own);
    free(window->begins);
}

/* All ranks have incremented a counter together, and each has recorded the earlier values that it saw: each value must have been seen
 * once. */
static void check_counted(const int64_t *seen, int count)
{
    int64_t *all = malloc(sizeof(int64_t) * count * ranks);
    char *is_seen = calloc(count, ranks);
    MPI_Allgather(seen, count, MPI_INT64_T, all, count, MPI_INT64_T, MPI_COMM_WORLD);
    for (int i = 0; i < count * ranks; i++) {
        CHECK(all[i] >= 0 && all[i] < (int64_t)count * ranks && !is_seen[all[i]]);
        is_seen[all[i]] = 1;
    }
    free(is_seen);
    free(all);
}

/* All ranks update the same words at the same time. */
static void atomics(enum mode mode, MPI_Group all, uint64_t epoch)
{
    int64_t *words, *sums = calloc(WORDS, sizeof(int64_t)), addends[TURNS][WORDS / 4];
    MPI_Win win;
    MPI_Win_allocate(sizeof(int64_t) * WORDS, sizeof(int64_t), MPI_INFO_NULL, MPI_COMM_WORLD, &words, &win);
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, win);
    memset(words, 0, sizeof(int64_t) * WORDS);
    MPI_Win_unlock(rank, win);
    MPI_Barrier(MPI_COMM_WORLD);

    /* Sums, and exclusive ors on the second half. */
    begin(mode, all, win);
    for (int origin = 0; origin < ranks; origin++) {
        uint64_t state = choices(origin, epoch);
        for (int turn = 0; turn < TURNS; turn++) {
            int target = next(&state) % ranks, is_sum = next(&state) % 2;
            int count = 1 + next(&state) % (turn % 4 ? 8 : WORDS / 4);
            int at = (is_sum ? 0 : WORDS / 2) + next(&state) % (WORDS / 2 - count + 1);
            for (int i = 0; i < count; i++) {
                int64_t addend = next(&state) >> 8;
                if (origin == rank)
                    addends[turn][i] = addend;
                if (target == rank)
                    sums[at + i] = is_sum ? sums[at + i] + addend : sums[at + i] ^ addend;
            }
            if (origin != rank)
                continue;
            MPI_Op op = is_sum ? MPI_SUM : MPI_BXOR;
            if (mode == LOCK)
                MPI_Win_lock(MPI_LOCK_SHARED, target, 0, win);
            if (mode == REQUESTS) {
                MPI_Request request;
                MPI_Raccumulate(addends[turn], count, MPI_INT64_T, target, at, count, MPI_INT64_T, op, win, &request);
                MPI_Wait(&request, MPI_STATUS_IGNORE);
            } else {
                MPI_Accumulate(addends[turn], count, MPI_INT64_T, target, at, count, MPI_INT64_T, op, win);
            }
            if (mode == LOCK)
                MPI_Win_unlock(target, win);
        }
    }
    end(mode, win);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, win);
    CHECK(memcmp(words, sums, sizeof(int64_t) * WORDS) == 0);
    memset(words, 0, sizeof(int64_t) * WORDS);
    MPI_Win_unlock(rank, win);
    MPI_Barrier(MPI_COMM_WORLD);
    free(sums);

    /* The first words of one rank, which all others increment: each earlier value is seen once. */
    int64_t fetched[TURNS], both[TURNS], swapped[TURNS], one = 1, ones[2] = {1, 1}, two[2];
    int host = epoch % ranks;
    MPI_Win_lock_all(0, win);
    for (int turn = 0; turn < TURNS; turn++) {
        MPI_Fetch_and_op(&one, fetched + turn, MPI_INT64_T, host, 0, MPI_SUM, win);
        MPI_Win_flush(host, win);
        if (mode == REQUESTS) {
            MPI_Request request;
            MPI_Rget_accumulate(ones, 2, MPI_INT64_T, two, 2, MPI_INT64_T, host, 1, 2, MPI_INT64_T, MPI_SUM, win, &request);
            MPI_Wait(&request, MPI_STATUS_IGNORE);
        } else {
            MPI_Get_accumulate(ones, 2, MPI_INT64_T, two, 2, MPI_INT64_T, host, 1, 2, MPI_INT64_T, MPI_SUM, win);
            MPI_Win_flush_local(host, win);
        }
        both[turn] = two[0];
        int64_t expected = turn == 0 ? 0 : swapped[turn - 1] + 1, was;
        for (;; expected = was) {
            int64_t desired = expected + 1;
            MPI_Compare_and_swap(&desired, &expected, &was, MPI_INT64_T, host, 3, win);
            MPI_Win_flush(host, win);
            if (was == expected)
                break;
        }
        swapped[turn] = was;
        int64_t now, nothing = 0;
        MPI_Fetch_and_op(&nothing, &now, MPI_INT64_T, host, 3, MPI_NO_OP, win);
        MPI_Win_flush(host, win);
        CHECK(now > was);
        /* The largest of all values. */
        int64_t large = turn * 100 + rank;
        MPI_Accumulate(&large, 1, MPI_INT64_T, host, 4, 1, MPI_INT64_T, MPI_MAX, win);
    }
    MPI_Win_unlock_all(win);
    check_counted(fetched, TURNS);
    check_counted(both, TURNS);
    check_counted(swapped, TURNS);

    /* The same with operations that are not atomic, under a lock. */
    for (int turn = 0; turn < TURNS / 3; turn++) {
        int64_t count;
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, host, 0, win);
        MPI_Get(&count, 1, MPI_INT64_T, host, 5, 1, MPI_INT64_T, win);
        MPI_Win_flush(host, win);
        fetched[turn] = count++;
        MPI_Put(&count, 1, MPI_INT64_T, host, 5, 1, MPI_INT64_T, win);
        MPI_Win_unlock(host, win);
    }
    check_counted(fetched, TURNS / 3);
    if (rank == host) {
        MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, win);
        for (int i = 0; i < 4; i++)
            CHECK(words[i] == (int64_t)TURNS * ranks);
        CHECK(words[4] == (TURNS - 1) * 100 + ranks - 1 && words[5] == (int64_t)TURNS / 3 * ranks);
        MPI_Win_unlock(rank, win);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_free(&win);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int rounds = atoi(argv[argc - 1]);
    MPI_Group all;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    model = calloc(ranks, sizeof *model);
    for (int i = 0; i < ranks; i++)
        model[i] = malloc((size_t)ranks * SLOT);
    uint64_t epoch = 0;
    for (enum kind kind = 0; kind < KINDS; kind++) {
        struct window window = opened(kind);
        for (int round = 0; round < rounds; round++) {
            for (enum mode mode = 0; mode < MODES; mode++) {
                put_all(&window, mode, all, epoch++);
                get_all(&window, mode, all, epoch++);
            }
        }
        closed(&window);
    }
    for (int round = 0; round < rounds; round++)
        for (enum mode mode = 0; mode < MODES; mode++)
            atomics(mode, all, epoch++);
    for (int i = 0; i < ranks; i++)
        free(model[i]);
    free(model);
    MPI_Group_free(&all);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("all windows are right: %d ranks\n", ranks);
    MPI_Finalize();
    return 0;
}
