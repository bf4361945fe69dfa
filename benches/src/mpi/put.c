/* put COUNT: prints the time in microseconds of a put of 8 bytes from PE 0 to PE 1 and of waiting until it has arrived. It is the median of
 * eleven runs of COUNT each. PEs stay on their CPUs. */
#define _GNU_SOURCE
#include <sched.h>
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

int main(int argc, char **argv)
{
    shmem_init();
    int me = shmem_my_pe();
    if (argc != 2 || shmem_n_pes() != 2)
        shmem_global_exit(2);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(me, &one);
    sched_setaffinity(0, sizeof one, &one);
    long count = atol(argv[1]), *to = shmem_malloc(sizeof *to), last = 0;
    *to = 0;
    double times[RUNS];
    /* The first run makes connections. */
    for (int run = -1; run < RUNS; run++) {
        shmem_barrier_all();
        double begin = now();
        for (long i = 0; me == 0 && i < count; i++) {
            last++;
            shmem_putmem(to, &last, sizeof last, 1);
            shmem_quiet();
        }
        if (run >= 0)
            times[run] = (now() - begin) / count;
    }
    shmem_barrier_all();
    /* Check that the last value that was put has arrived. */
    if (me == 1 && *to != count * (RUNS + 1))
        shmem_global_exit(3);
    qsort(times, RUNS, sizeof *times, by_value);
    if (me == 0)
        printf("%.4f\n", times[RUNS / 2]);
    shmem_finalize();
    return 0;
}
