/* Two solvers whose results are known: conjugate gradients for Poisson's equation, with halos and sums, and a Fourier transform by
 * transposition, with all-to-all.
 *
 * solvers [TURNS]
 *
 * Rank 0 prints how long each solver took, over all turns. The number of ranks must divide 64. */
#include "check.h"
#include <complex.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Returns a pseudo-random number between -1 and 1, which is the same in each rank (SplitMix64). */
static double number(uint64_t n)
{
    uint64_t z = (n + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)(int64_t)(z ^ z >> 31) / 9223372036854775808.0;
}

static double sum(double own)
{
    double all;
    MPI_Allreduce(&own, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return all;
}

/* The points of a row, and the rows, of the grid. Its border is 0. */
enum { SIDE = 64 };

/* The first and the last row of a rank are those of its neighbours, or the border. */
typedef double row[SIDE];

/* Computes result = A x for the five-point Laplacian, after the rows at the edges have been exchanged. */
static void laplace(row *result, row *x, int rows)
{
    MPI_Request requests[4];
    int up = rank > 0 ? rank - 1 : MPI_PROC_NULL, down = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    MPI_Irecv(x[0], SIDE, MPI_DOUBLE, up, 1, MPI_COMM_WORLD, requests);
    MPI_Irecv(x[rows + 1], SIDE, MPI_DOUBLE, down, 2, MPI_COMM_WORLD, requests + 1);
    MPI_Isend(x[1], SIDE, MPI_DOUBLE, up, 2, MPI_COMM_WORLD, requests + 2);
    MPI_Isend(x[rows], SIDE, MPI_DOUBLE, down, 1, MPI_COMM_WORLD, requests + 3);
    MPI_Waitall(4, requests, MPI_STATUSES_IGNORE);
    for (int i = 1; i <= rows; i++)
        for (int j = 0; j < SIDE; j++)
            result[i][j] = 4 * x[i][j] - x[i - 1][j] - x[i + 1][j] - (j > 0 ? x[i][j - 1] : 0) -
                           (j + 1 < SIDE ? x[i][j + 1] : 0);
}

static double product(row *a, row *b, int rows)
{
    double own = 0;
    for (int i = 1; i <= rows; i++)
        for (int j = 0; j < SIDE; j++)
            own += a[i][j] * b[i][j];
    return sum(own);
}

static void conjugate_gradients(void)
{
    int rows = SIDE / ranks;
    row *x = calloc(rows + 2, sizeof *x), *known = calloc(rows + 2, sizeof *x), *residual = calloc(rows + 2, sizeof *x),
        *direction = calloc(rows + 2, sizeof *x), *step = calloc(rows + 2, sizeof *x);
    for (int i = 1; i <= rows; i++)
        for (int j = 0; j < SIDE; j++)
            known[i][j] = number((uint64_t)((rank * rows + i) * SIDE + j));
    /* The right-hand side of the equation whose solution is known. The initial x is zero. */
    laplace(residual, known, rows);
    memcpy(direction, residual, (rows + 2) * sizeof *x);
    double begin = product(residual, residual, rows), now = begin;
    int turns = 0;
    while (now > 1e-24 * begin) {
        CHECK(turns++ < 1000);
        laplace(step, direction, rows);
        double length = now / product(direction, step, rows);
        for (int i = 1; i <= rows; i++)
            for (int j = 0; j < SIDE; j++) {
                x[i][j] += length * direction[i][j];
                residual[i][j] -= length * step[i][j];
            }
        double next = product(residual, residual, rows);
        for (int i = 1; i <= rows; i++)
            for (int j = 0; j < SIDE; j++)
                direction[i][j] = residual[i][j] + next / now * direction[i][j];
        now = next;
    }
    for (int i = 1; i <= rows; i++)
        for (int j = 0; j < SIDE; j++)
            CHECK(fabs(x[i][j] - known[i][j]) < 1e-8);
    free(x);
    free(known);
    free(residual);
    free(direction);
    free(step);
    if (rank == 0)
        printf("conjugate gradients: %d turns\n", turns);
}

/* The transform has N * N points, stored as a matrix whose rows are distributed over the ranks. */
enum { N = 128 };

/* Transposes the matrix whose rows are distributed over the ranks. */
static void transpose(double complex *matrix, int rows)
{
    size_t block = (size_t)rows * rows;
    double complex *out = malloc(block * ranks * sizeof *out), *in = malloc(block * ranks * sizeof *in);
    for (int to = 0; to < ranks; to++)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < rows; j++)
                out[to * block + (size_t)j * rows + i] = matrix[(size_t)i * N + to * rows + j];
    MPI_Alltoall(out, (int)(2 * block), MPI_DOUBLE, in, (int)(2 * block), MPI_DOUBLE, MPI_COMM_WORLD);
    for (int from = 0; from < ranks; from++)
        for (int j = 0; j < rows; j++)
            memcpy(matrix + (size_t)j * N + from * rows, in + from * block + (size_t)j * rows, rows * sizeof *in);
    free(out);
    free(in);
}

static double complex root(uint64_t n, uint64_t of)
{
    double angle = -2 * M_PI * (double)(n % of) / (double)of;
    return cos(angle) + I * sin(angle);
}

/* Transforms one row in place. */
static void transform_row(double complex *x)
{
    for (int i = 1, j = 0; i < N; i++) {
        int bit = N / 2;
        for (; j & bit; bit /= 2)
            j ^= bit;
        j ^= bit;
        if (i < j) {
            double complex other = x[i];
            x[i] = x[j];
            x[j] = other;
        }
    }
    for (int length = 2; length <= N; length *= 2)
        for (int i = 0; i < N; i += length)
            for (int j = 0; j < length / 2; j++) {
                double complex even = x[i + j], odd = x[i + j + length / 2] * root(j, length);
                x[i + j] = even + odd;
                x[i + j + length / 2] = even - odd;
            }
}

/* Transforms x[N * i + j] in row i to X[N * i + j] in row i. */
static void transform(double complex *matrix, int rows)
{
    transpose(matrix, rows);
    for (int i = 0; i < rows; i++) {
        transform_row(matrix + (size_t)i * N);
        for (int j = 0; j < N; j++)
            matrix[(size_t)i * N + j] *= root((uint64_t)(rank * rows + i) * j, N * N);
    }
    transpose(matrix, rows);
    for (int i = 0; i < rows; i++)
        transform_row(matrix + (size_t)i * N);
    transpose(matrix, rows);
}

static void fourier(void)
{
    int rows = N / ranks;
    size_t own = (size_t)rows * N, begin = rank * own;
    double complex *matrix = malloc(own * sizeof *matrix);
    for (size_t n = 0; n < own; n++)
        matrix[n] = number(2 * (begin + n)) + I * number(2 * (begin + n) + 1);
    transform(matrix, rows);
    /* Computes some frequencies by their definition. */
    static const size_t some[] = {0, 1, N - 1, N, 5000, N * N - 1};
    for (size_t s = 0; s < sizeof some / sizeof *some; s++) {
        double complex part = 0, all;
        for (size_t n = begin; n < begin + own; n++)
            part += (number(2 * n) + I * number(2 * n + 1)) * root((uint64_t)n * some[s], N * N);
        MPI_Allreduce(&part, &all, 1, MPI_C_DOUBLE_COMPLEX, MPI_SUM, MPI_COMM_WORLD);
        if (some[s] >= begin && some[s] < begin + own)
            CHECK(cabs(matrix[some[s] - begin] - all) < 1e-8);
    }
    /* The inverse transform. */
    for (size_t n = 0; n < own; n++)
        matrix[n] = conj(matrix[n]);
    transform(matrix, rows);
    for (size_t n = 0; n < own; n++) {
        double complex back = conj(matrix[n]) / (N * N);
        CHECK(cabs(back - (number(2 * (begin + n)) + I * number(2 * (begin + n) + 1))) < 1e-10);
    }
    free(matrix);
}

static void timed(const char *what, void (*solve)(void), int turns)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime();
    for (int turn = 0; turn < turns; turn++)
        solve();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("%s took %.4f s\n", what, MPI_Wtime() - begin);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int turns = argc > 1 ? atoi(argv[1]) : 1;
    CHECK(SIDE % ranks == 0 && turns > 0);
    timed("conjugate gradients", conjugate_gradients, turns);
    timed("the Fourier transform", fourier, turns);
    if (rank == 0)
        printf("both are solved: %d ranks\n", ranks);
    MPI_Finalize();
    return 0;
}
