// Registers memory while other threads use the heap that it is part of. Usage: registers DEVICE [confined | times]
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                \
    do {                                                                                                                \
        if (!(condition)) {                                                                                             \
            fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #condition, errno);                                   \
            exit(1);                                                                                                    \
        }                                                                                                               \
    } while (0)

enum { THREADS = 4, SHARED = 2000, PAGE = 4096, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

// The counters that all threads increment. Each of these structures is in a block of its own, and gets registered.
struct counter {
    pthread_mutex_t mutex;
    uint64_t locked;
    _Atomic uint64_t atomic;
    uint64_t own[THREADS];
};

static struct ibv_pd *pd;
static struct counter *counters[SHARED];
static _Atomic int turn, is_over;
static uint64_t done[THREADS][SHARED];
static char *on_stack[THREADS];
static _Thread_local char local[100];
static char *locals[THREADS];
static pthread_barrier_t begun;
// These counters lie in private pages of the program's file.
static _Atomic uint64_t initialized[3 * PAGE / 8] = {1};
static uint64_t initialized_done[THREADS];

static struct ibv_mr *reg(void *at, size_t len, int access) {
    struct ibv_mr *mr = ibv_reg_mr(pd, at, len, access);
    CHECK(mr);
    return mr;
}

// Returns whether a page is in the segment, which is the only writable shared memory of this program.
static int is_shared(void *at) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096], rights[5];
    int is = 0;
    while (fgets(line, sizeof line, maps)) {
        uintptr_t start, end;
        CHECK(sscanf(line, "%lx-%lx %4s", &start, &end, rights) == 3);
        is |= start <= (uintptr_t)at && (uintptr_t)at < end && rights[1] == 'w' && rights[3] == 's';
    }
    fclose(maps);
    return is;
}

// Registers memory, and returns whether it stays where it is instead of being moved into the segment.
static int stays(void *at, size_t len) {
    struct ibv_mr *mr = reg(at, len, ALL);
    return !is_shared(at) && !ibv_dereg_mr(mr);
}

static uint64_t next(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return *random >> 33;
}

// Allocates memory, stores to it, counts, and checks that everything that it has stored is still there.
static void *hammer(void *argument) {
    enum { BLOCKS = 200 };
    int self = (int)(intptr_t)argument;
    uint64_t random = self + 1, *blocks[BLOCKS] = {0};
    char buffer[100];
    on_stack[self] = buffer;
    locals[self] = local;
    pthread_barrier_wait(&begun);
    while (!is_over) {
        for (int n = turn; n < turn + 3 && n < SHARED; n++) {
            struct counter *counter = counters[n];
            pthread_mutex_lock(&counter->mutex);
            counter->locked++;
            pthread_mutex_unlock(&counter->mutex);
            counter->atomic++;
            counter->own[self]++;
            done[self][n]++;
        }
        initialized[PAGE / 8 + self]++;
        initialized_done[self]++;
        int n = next(&random) % BLOCKS;
        if (blocks[n]) {
            for (uint64_t i = 1; i < blocks[n][0]; i++) {
                CHECK(blocks[n][i] == (uintptr_t)blocks[n] + i);
            }
        }
        free(blocks[n]);
        uint64_t words = 1 + next(&random) % (next(&random) % 50 ? 30 : 3000);
        blocks[n] = malloc(words * 8);
        blocks[n][0] = words;
        for (uint64_t i = 1; i < words; i++) {
            blocks[n][i] = (uintptr_t)blocks[n] + i;
        }
    }
    return NULL;
}

static void among_threads(void) {
    pthread_t threads[THREADS];
    static struct ibv_mr *regions[SHARED];
    for (int n = 0; n < SHARED; n++) {
        counters[n] = calloc(1, sizeof *counters[n] + n % 7 * 200);
        pthread_mutex_init(&counters[n]->mutex, NULL);
    }
    pthread_barrier_init(&begun, NULL, THREADS + 1);
    for (intptr_t n = 0; n < THREADS; n++) {
        CHECK(!pthread_create(&threads[n], NULL, hammer, (void *)n));
    }
    pthread_barrier_wait(&begun);
    for (int n = 0; n < SHARED; n++) {
        turn = n;
        regions[n] = reg(counters[n], sizeof *counters[n], ALL);
        if (n % 3 == 0) {
            CHECK(!ibv_dereg_mr(regions[n]));
            regions[n] = NULL;
        }
        if (n % 50 == 0) {
            // All pages of this block are new.
            char *large = malloc(300000);
            memset(large, n, 300000);
            CHECK(!ibv_dereg_mr(reg(large, 300000, ALL)));
            for (int i = 0; i < 300000; i++) {
                CHECK(large[i] == (char)n);
            }
            free(large);
        }
    }
    CHECK(!ibv_dereg_mr(reg(initialized, sizeof initialized, ALL)));
    // Registering moves neither stacks nor thread-local memory.
    char buffer[100];
    CHECK(stays(buffer, sizeof buffer) && stays(local, sizeof local));
    for (int n = 0; n < THREADS; n++) {
        CHECK(stays(on_stack[n], 100) && stays(locals[n], 100));
        CHECK(!ibv_dereg_mr(reg(on_stack[n], 100, 0)));
    }
    is_over = 1;
    for (int n = 0; n < THREADS; n++) {
        pthread_join(threads[n], NULL);
    }
    uint64_t total = 0;
    for (int n = 0; n < SHARED; n++) {
        uint64_t all = 0;
        for (int thread = 0; thread < THREADS; thread++) {
            all += done[thread][n];
            total += done[thread][n];
            CHECK(counters[n]->own[thread] == done[thread][n]);
        }
        CHECK(counters[n]->locked == all && counters[n]->atomic == all);
        CHECK(!regions[n] || !ibv_dereg_mr(regions[n]));
    }
    for (int thread = 0; thread < THREADS; thread++) {
        CHECK(initialized[PAGE / 8 + thread] == initialized_done[thread]);
    }
    CHECK(initialized[0] == 1 && total > SHARED);
    printf("%lu turns\n", total);
}

static void *pages(void *at, int count) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0);
    char *pages = mmap(at, count * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(pages != MAP_FAILED);
    return pages;
}

// Pages that the program has mapped anew are moved into the segment again, and no other pages.
static void mapped_anew(void) {
    char *at = pages(NULL, 9);
    memset(at, 1, 9 * PAGE);
    CHECK(!ibv_dereg_mr(reg(at, 9 * PAGE, ALL)));
    for (int first = 0; first < 9; first += 3) {
        pages(at + first * PAGE, 2);
        CHECK(!is_shared(at + first * PAGE) && is_shared(at + (first + 2) * PAGE));
        at[first * PAGE] = 7;
        CHECK(!ibv_dereg_mr(reg(at, 9 * PAGE, ALL)));
        for (int n = 0; n < 9; n++) {
            int is_new = n < first + 2 && n % 3 != 2;
            CHECK(is_shared(at + n * PAGE) && at[n * PAGE] == (is_new ? n % 3 == 0 ? 7 : 0 : 1));
        }
    }
    pages(at, 9);
    CHECK(at[5] == 0);
    CHECK(!ibv_dereg_mr(reg(at + 5, 9 * PAGE - 10, ALL)));
    CHECK(is_shared(at) && is_shared(at + 8 * PAGE));
}

static double now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static int by_size(const void *a, const void *b) {
    return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b);
}

static void *rest(void *_) {
    pause();
    return _;
}

// Prints the medians and the best times in microseconds.
static void times(const char *what) {
    static double first[200], again[200], off[200];
    size_t lens[] = {PAGE, 16 * PAGE, 1 << 20};
    for (int i = 0; i < 3; i++) {
        int count = i == 2 ? 40 : 200;
        char *at = pages(NULL, count * lens[i] / PAGE);
        memset(at, 1, count * lens[i]);
        for (int n = 0; n < count; n++, at += lens[i]) {
            double start = now();
            struct ibv_mr *mr = reg(at, lens[i], ALL);
            first[n] = now() - start;
            start = now();
            CHECK(!ibv_dereg_mr(mr));
            off[n] = now() - start;
            start = now();
            mr = reg(at, lens[i], ALL);
            again[n] = now() - start;
            CHECK(!ibv_dereg_mr(mr));
        }
        qsort(first, count, sizeof *first, by_size);
        qsort(again, count, sizeof *again, by_size);
        qsort(off, count, sizeof *off, by_size);
        printf("%s, %7zu bytes: first %.2f (best %.2f), again %.2f (best %.2f), dereg %.2f\n", what, lens[i],
               first[count / 2], first[0], again[count / 2], again[0], off[count / 2]);
    }
}

// Forbids userfaultfd, as container engines do.
static void confine(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    if (argc > 2 && !strcmp(argv[2], "confined")) {
        confine();
    }
    struct ibv_device **devices = ibv_get_device_list(NULL);
    CHECK(devices);
    while (*devices && strcmp(ibv_get_device_name(*devices), argv[1])) {
        devices++;
    }
    struct ibv_context *context = *devices ? ibv_open_device(*devices) : NULL;
    CHECK(context);
    CHECK((pd = ibv_alloc_pd(context)));
    if (argc > 2 && !strcmp(argv[2], "times")) {
        times("alone");
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, rest, NULL));
        times("with another thread");
        return 0;
    }
    mapped_anew();
    among_threads();
    mapped_anew();
    printf("good\n");
}
