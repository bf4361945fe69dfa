/* put SIZE COUNT: the time until SIZE bytes of PE 0 are in the memory of PE 1, in microseconds: the median of eleven runs of COUNT each. PEs stay on
 * their CPUs, where there are enough. */
#define _GNU_SOURCE
#include <sched.h>
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RUNS = 11 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

int main(int argc, char **argv)
{
    shmem_init();
    int pe = shmem_my_pe();
    if (argc != 3 || shmem_n_pes() != 2)
        shmem_global_exit(2);
    size_t size = (size_t)atol(argv[1]), count = (size_t)atol(argv[2]);
    if (sysconf(_SC_NPROCESSORS_ONLN) >= 2) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(pe, &one);
        sched_setaffinity(0, sizeof one, &one);
    }
    char *to = shmem_calloc(1, size), *from = malloc(size);
    double times[RUNS];
    /* The first run makes connections. */
    for (int run = -1; run < RUNS; run++) {
        memset(from, run + 2, size);
        shmem_barrier_all();
        double begin = now();
        for (size_t i = 0; pe == 0 && i < count; i++) {
            shmem_putmem(to, from, size, 1);
            shmem_quiet();
        }
        if (run >= 0)
            times[run] = (now() - begin) / (double)count;
        shmem_barrier_all();
        if (pe == 1 && to[size - 1] != run + 2)
            shmem_global_exit(3);
    }
    qsort(times, RUNS, sizeof *times, by_value);
    if (pe == 0)
        printf("%.4f\n", times[RUNS / 2]);
    shmem_finalize();
    return 0;
}
