/* register DEVICE: measures ibv_reg_mr. Prints lines with a name and the median of its samples, in microseconds. */

#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* The numbers of samples: of those that each take a unit of the segment's memory, and of others. */
enum { UNITS = 48, OFTEN = 2000 };
enum { PAGE = 4 << 10, MEBI = 1 << 20, UNIT = 2 << 20 };
enum { REMOTE = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

static struct ibv_pd *domain;
static double samples[OFTEN];

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

/* Registers memory, records the time as a sample, and deregisters the memory. */
static void sample(int i, char *at, size_t bytes, int access)
{
    double begin = now();
    struct ibv_mr *region = ibv_reg_mr(domain, at, bytes, access);
    samples[i] = now() - begin;
    if (!region)
        fail("ibv_reg_mr");
    if (ibv_dereg_mr(region))
        fail("ibv_dereg_mr");
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void tell(const char *name, int count)
{
    qsort(samples, count, sizeof samples[0], compare);
    printf("%s %.4f\n", name, samples[count / 2]);
}

/* Returns memory that is filled and begins at the start of a unit. */
static char *units(int count)
{
    size_t bytes = (size_t)(count + 1) * UNIT;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap");
    /* On most machines malloc does not return huge pages. */
    madvise(memory, bytes, MADV_NOHUGEPAGE);
    memset(memory, 0x5a, bytes);
    return memory + UNIT - (size_t)memory % UNIT;
}

int main(int argc, char **argv)
{
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    struct ibv_context *context = NULL;
    for (int i = 0; devices && i < count; i++)
        if (argc == 2 && !strcmp(ibv_get_device_name(devices[i]), argv[1]))
            context = ibv_open_device(devices[i]);
    if (!context)
        fail("no such device");
    domain = ibv_alloc_pd(context);
    if (!domain)
        fail("ibv_alloc_pd");

    char *memory = units(UNITS);
    for (int i = 0; i < UNITS; i++)
        sample(i, memory + (size_t)i * UNIT, PAGE, REMOTE);
    tell("first", UNITS);
    for (int i = 0; i < OFTEN; i++)
        sample(i, memory + (size_t)(i % UNITS) * UNIT, PAGE, REMOTE);
    tell("again", OFTEN);
    for (int i = 1; i < UNIT / PAGE; i++)
        sample(i - 1, memory + (size_t)i * PAGE, PAGE, REMOTE);
    tell("beside", UNIT / PAGE - 1);
    char *others = units(UNITS);
    for (int i = 0; i < OFTEN; i++)
        sample(i, others + (size_t)i * PAGE, PAGE, 0);
    tell("sending", OFTEN);
    char *large = units(UNITS);
    for (int i = 0; i < UNITS; i++)
        sample(i, large + (size_t)i * UNIT, MEBI, REMOTE);
    tell("mebibyte", UNITS);
    return 0;
}
