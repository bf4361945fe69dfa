/* Uses Global Arrays as its programs do, and checks all elements: put, get and accumulate of patches, single elements, a shared
 * counter, locks, ghost cells, sums, and products of matrices. */
#include "check.h"
#include <ga.h>
#include <macdecls.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { ROWS = 203, COLUMNS = 157, TASKS = 200, ELEMENTS = 300, SIDE = 120 };

static uint64_t state = 12345;

/* All ranks get the same numbers, because they draw them in the same order. */
static int drawn(int below)
{
    state = state * 6364136223846793005 + 1442695040888963407;
    return (state >> 33) % below;
}

static int array(int type, int rows, int columns)
{
    int dims[2] = {rows, columns};
    int handle = NGA_Create(type, 2, dims, "an array", NULL);
    CHECK(handle != 0);
    GA_Zero(handle);
    return handle;
}

/* Random patches: in turns, each rank puts one or adds to one, and all ranks read it. */
static void patches(void)
{
    int handle = array(C_DBL, ROWS, COLUMNS);
    double *model = calloc(ROWS * COLUMNS, sizeof *model), *patch = malloc(ROWS * COLUMNS * sizeof *patch);
    for (int turn = 0; turn < 60; turn++) {
        int lo[2] = {drawn(ROWS), drawn(COLUMNS)}, adds = drawn(2), who = drawn(ranks);
        int hi[2] = {lo[0] + drawn(ROWS - lo[0]), lo[1] + drawn(COLUMNS - lo[1])};
        int width = hi[1] - lo[1] + 1, count = 0;
        double factor = 3;
        for (int row = lo[0]; row <= hi[0]; row++)
            for (int column = lo[1]; column <= hi[1]; column++) {
                double value = turn * 1000 + row * 2 + column;
                patch[count++] = value;
                double *cell = model + row * COLUMNS + column;
                /* All ranks add, but only one puts. */
                *cell = adds ? *cell + factor * value * ranks : value;
            }
        if (adds)
            NGA_Acc(handle, lo, hi, patch, &width, &factor);
        else if (rank == who)
            NGA_Put(handle, lo, hi, patch, &width);
        GA_Sync();
        int first[2] = {drawn(ROWS), drawn(COLUMNS)}, last[2];
        last[0] = first[0] + drawn(ROWS - first[0]);
        last[1] = first[1] + drawn(COLUMNS - first[1]);
        width = last[1] - first[1] + 1;
        NGA_Get(handle, first, last, patch, &width);
        for (int row = first[0]; row <= last[0]; row++)
            for (int column = first[1]; column <= last[1]; column++)
                CHECK(patch[(row - first[0]) * width + column - first[1]] == model[row * COLUMNS + column]);
        GA_Sync();
    }
    free(model);
    free(patch);
    GA_Destroy(handle);
}

/* Tasks from a shared counter: each is executed once. The rank that executes a task records it as an element, and counts it under a
 * lock. */
static void tasks(void)
{
    int counter = array(C_LONG, 1, 1), done = array(C_LONG, TASKS, 1), sum = array(C_LONG, 1, 1);
    int here[2] = {0, 0}, one = 1;
    CHECK(GA_Create_mutexes(1));
    long task;
    while ((task = NGA_Read_inc(counter, here, 1)) < TASKS) {
        int at[2] = {task, 0};
        long add = 1, factor = 1, total;
        NGA_Acc(done, at, at, &add, &one, &factor);
        if (task % 10)
            continue;
        GA_Lock(0);
        NGA_Get(sum, here, here, &total, &one);
        total += task;
        NGA_Put(sum, here, here, &total, &one);
        GA_Init_fence();
        GA_Fence();
        GA_Unlock(0);
    }
    GA_Sync();
    long all[TASKS], total;
    int lo[2] = {0, 0}, hi[2] = {TASKS - 1, 0};
    NGA_Get(done, lo, hi, all, &one);
    for (int i = 0; i < TASKS; i++)
        CHECK(all[i] == 1);
    NGA_Get(counter, here, here, &total, &one);
    CHECK(total == TASKS + ranks);
    NGA_Get(sum, here, here, &total, &one);
    CHECK(total == 10 * (TASKS / 10) * (TASKS / 10 - 1) / 2);
    GA_Destroy_mutexes();
    GA_Destroy(counter);
    GA_Destroy(done);
    GA_Destroy(sum);
}

/* Single elements: each rank scatters to places of its own, and gathers all. */
static void elements(void)
{
    int handle = array(C_LONG, ROWS, COLUMNS), count = ELEMENTS;
    int (*places)[2] = malloc(sizeof *places * ELEMENTS), **subscripts = malloc(sizeof *subscripts * ELEMENTS);
    long values[ELEMENTS], factor = 2;
    for (int turn = 0; turn < 2; turn++) {
        for (int of = 0; of < ranks; of++) {
            for (int i = 0; i < count; i++) {
                /* This number and the number of cells have no common divisor, so no place occurs twice. */
                int place = ((i * ranks + of) * 1009) % (ROWS * COLUMNS);
                places[i][0] = place / COLUMNS;
                places[i][1] = place % COLUMNS;
                subscripts[i] = places[i];
                values[i] = of * 10000 + i;
            }
            if (turn == 0 && of == rank) {
                NGA_Scatter(handle, values, subscripts, count);
                NGA_Scatter_acc(handle, values, subscripts, count, &factor);
            }
            if (turn == 1) {
                NGA_Gather(handle, values, subscripts, count);
                for (int i = 0; i < count; i++)
                    CHECK(values[i] == 3 * (of * 10000 + i));
            }
        }
        GA_Sync();
    }
    free(places);
    free(subscripts);
    GA_Destroy(handle);
}

/* Each rank's own part, surrounded by a border of its neighbours' elements. */
static void ghosts(void)
{
    int dims[2] = {ROWS, COLUMNS}, width[2] = {2, 3}, lo[2], hi[2], around[2], line;
    int handle = NGA_Create_ghosts(C_DBL, 2, dims, width, "with ghosts", NULL);
    CHECK(handle != 0);
    NGA_Distribution(handle, rank, lo, hi);
    double *own;
    NGA_Access(handle, lo, hi, &own, &line);
    for (int row = lo[0]; row <= hi[0]; row++)
        for (int column = lo[1]; column <= hi[1]; column++)
            own[(row - lo[0]) * line + column - lo[1]] = row * 1000 + column;
    NGA_Release_update(handle, lo, hi);
    GA_Sync();
    GA_Update_ghosts(handle);
    NGA_Access_ghosts(handle, around, &own, &line);
    CHECK(around[0] == hi[0] - lo[0] + 1 + 2 * width[0] && around[1] == hi[1] - lo[1] + 1 + 2 * width[1]);
    for (int i = 0; i < around[0]; i++)
        for (int k = 0; k < around[1]; k++) {
            /* The array is periodic. */
            int row = (lo[0] - width[0] + i + ROWS) % ROWS, column = (lo[1] - width[1] + k + COLUMNS) % COLUMNS;
            CHECK(own[i * line + k] == row * 1000 + column);
        }
    NGA_Release_ghosts(handle);
    GA_Sync();
    GA_Destroy(handle);
}

static void products(void)
{
    int a = array(C_DBL, SIDE, SIDE), b = array(C_DBL, SIDE, SIDE), c = array(C_DBL, SIDE, SIDE);
    int lo[2] = {0, 0}, hi[2] = {SIDE - 1, SIDE - 1}, width = SIDE;
    double *of_a = malloc(SIDE * SIDE * sizeof(double)), *of_b = malloc(SIDE * SIDE * sizeof(double));
    double *found = malloc(SIDE * SIDE * sizeof(double));
    for (int i = 0; i < SIDE * SIDE; i++) {
        of_a[i] = drawn(19) - 9;
        of_b[i] = drawn(19) - 9;
    }
    if (rank == 0)
        NGA_Put(a, lo, hi, of_a, &width);
    if (rank == ranks - 1)
        NGA_Put(b, lo, hi, of_b, &width);
    GA_Sync();
    for (int is_transposed = 0; is_transposed < 2; is_transposed++) {
        GA_Dgemm(is_transposed ? 't' : 'n', 'n', SIDE, SIDE, SIDE, 2, a, b, 0, c);
        NGA_Get(c, lo, hi, found, &width);
        double square = 0;
        /* These are sums of small integers, so they have no rounding error. */
        for (int i = 0; i < SIDE; i++)
            for (int k = 0; k < SIDE; k++) {
                double sum = 0;
                for (int j = 0; j < SIDE; j++)
                    sum += of_a[is_transposed ? j * SIDE + i : i * SIDE + j] * of_b[j * SIDE + k];
                CHECK(found[i * SIDE + k] == 2 * sum);
                square += 4 * sum * sum;
            }
        CHECK(GA_Ddot(c, c) == square);
        GA_Sync();
    }
    /* b - 3 a, and the other way round. */
    double minus_three = -3, one = 1;
    GA_Add(&minus_three, a, &one, b, c);
    GA_Transpose(c, a);
    NGA_Get(a, lo, hi, found, &width);
    for (int i = 0; i < SIDE; i++)
        for (int k = 0; k < SIDE; k++)
            CHECK(found[k * SIDE + i] == of_b[i * SIDE + k] - 3 * of_a[i * SIDE + k]);
    GA_Sync();
    free(of_a);
    free(of_b);
    free(found);
    GA_Destroy(a);
    GA_Destroy(b);
    GA_Destroy(c);
}

int main(int argc, char **argv)
{
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
    GA_Initialize();
    rank = GA_Nodeid();
    ranks = GA_Nnodes();
    CHECK(MA_init(C_DBL, 1000000, 1000000));
    patches();
    tasks();
    elements();
    ghosts();
    products();
    double sums[3] = {rank, 1, rank * rank};
    GA_Dgop(sums, 3, "+");
    CHECK(sums[0] == ranks * (ranks - 1) / 2 && sums[1] == ranks);
    CHECK(sums[2] == (ranks - 1) * ranks * (2 * ranks - 1) / 6);
    GA_Sync();
    if (rank == 0)
        printf("all arrays are right: %d ranks\n", ranks);
    GA_Terminate();
    MPI_Finalize();
    return 0;
}
