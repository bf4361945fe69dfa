// Calls functions that are forwarded to real.c, and some that real.c does not have. Usage: calls FOLDER, with this crate's libraries.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                                \
    do {                                                                                                                \
        if (!(condition)) {                                                                                             \
            fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #condition, errno);                                   \
            exit(1);                                                                                                    \
        }                                                                                                               \
    } while (0)

static void *verbs, *cm;

static void *open_one(const char *folder, const char *file) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return library;
}

static void *find(void *library, const char *name, const char *node) {
    void *found = dlvsym(library, name, node);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

static void *at_once(void *barrier) {
    int (*dealloc)(int) = find(verbs, "ibv_cmd_dealloc_pd", "IBVERBS_PRIVATE_34");
    pthread_barrier_wait(barrier);
    CHECK(dealloc(41) == 42);
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    verbs = open_one(argv[1], "libibverbs.so.1");
    cm = open_one(argv[1], "librdmacm.so.1");

    // One provider is registered before the real library is opened, and one afterwards.
    void (*register_driver)(const void *) = find(verbs, "verbs_register_driver_34", "IBVERBS_PRIVATE_34");
    int (*drivers)(void *, size_t) = find(verbs, "ibv_dofork_range", "IBVERBS_1.1");
    register_driver(&register_driver);

    // Many threads look up the function at the same time.
    pthread_t threads[8];
    pthread_barrier_t barrier;
    CHECK(pthread_barrier_init(&barrier, NULL, 8) == 0);
    for (int at = 0; at < 8; at++)
        CHECK(pthread_create(&threads[at], NULL, at_once, &barrier) == 0);
    for (int at = 0; at < 8; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);

    CHECK(drivers(NULL, 0) == 1);
    register_driver(&register_driver);
    CHECK(drivers(NULL, 0) == 2);

    // First the slow path, then the fast one.
    double (*many)(long, long, long, long, long, long, long, long, double, double, double, double, double, double, double,
                   double, double) = find(verbs, "ibv_cmd_reg_mr", "IBVERBS_PRIVATE_34");
    int (*variadic)(int, int, ...) = find(cm, "repoll_ctl", "RDMACM_1.5");
    for (int at = 0; at < 2; at++) {
        errno = 77;
        CHECK(many(1, 2, 3, 4, 5, 6, 7, 8, 9.5, 10, 11, 12, 13, 14, 15, 16, 17) == 1785 + 4.5);
        CHECK(variadic(5, 1, 1, 2, 3, 4, 5, 1.0, 2.0, 3.0, 4.0, 5.0) == 111);
        CHECK(errno == 77);
    }

    // The same name in another version node is another function.
    int (*other)(void) = find(verbs, "ibv_cmd_reg_mr", "IBVERBS_PRIVATE_59");
    int (*minus)(void) = find(cm, "repoll_wait", "RDMACM_1.5");
    void *(*null)(void) = find(verbs, "verbs_open_device", "IBVERBS_PRIVATE_34");
    long (*negative)(void *, void *, size_t, unsigned, size_t) = find(verbs, "_ibv_query_gid_table", "IBVERBS_1.11");
    unsigned (*zero)(void) = find(verbs, "__ioctl_final_num_attrs", "IBVERBS_PRIVATE_34");
    void (*nothing)(void) = find(verbs, "verbs_uninit_context", "IBVERBS_PRIVATE_34");
    for (int at = 0; at < 2; at++) {
        errno = 0;
        CHECK(other() == ENOSYS && errno == ENOSYS);
        errno = 0;
        CHECK(minus() == -1 && errno == ENOSYS);
        errno = 0;
        CHECK(null() == NULL && errno == ENOSYS);
        errno = 0;
        CHECK(negative(NULL, NULL, 0, 0, 0) == -ENOSYS && errno == ENOSYS);
        errno = 0;
        CHECK(zero() == 0 && errno == ENOSYS);
        errno = 0;
        nothing();
        CHECK(errno == ENOSYS);
    }
    return 0;
}
