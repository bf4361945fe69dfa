/*
 * Tests the cache functions of ginnel.h, and each of their errors. Needs the cache "test/c" and its server.
 */
#include <ginnel.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define IS(expected, call)                                                                       \
    do {                                                                                         \
        long result_ = (long)(call);                                                             \
        if (result_ != (long)(expected)) {                                                       \
            fprintf(stderr, "%s:%d: %s: %ld instead of %s (%s)\n", __FILE__, __LINE__, #call,    \
                    result_, #expected, ginnel_last_error());                                    \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

/* Passes a string as two arguments: pointer and length. */
#define S(text) (text), strlen(text)

static ginnel_cache *cache;

static void mistakes(void)
{
    ginnel_cache *none;
    ginnel_cache_options options = {.size = sizeof options, .patience_ns = -1};
    ginnel_cache_item item = {.size = 1};
    char value[8], *text, key[251];

    memset(key, 'k', sizeof key);
    IS(GINNEL_ERR_NOT_FOUND, ginnel_cache_open("test/none", &options, &none));
    IS(1, none == NULL);
    IS(GINNEL_ERR_NO_SEGMENT, ginnel_cache_open("none/c", &options, &none));
    IS(GINNEL_ERR_NAME, ginnel_cache_open("test", &options, &none));
    options.changes = "over there";
    IS(GINNEL_ERR_NAME, ginnel_cache_open("test/c", &options, &none));
    IS(GINNEL_ERR_NULL, ginnel_cache_open(NULL, NULL, &none));
    IS(GINNEL_ERR_NULL, ginnel_cache_get(NULL, S("key"), value, sizeof value, NULL));
    IS(GINNEL_ERR_NULL, ginnel_cache_get(cache, NULL, 3, value, sizeof value, NULL));
    IS(GINNEL_ERR_NULL, ginnel_cache_get(cache, S("key"), NULL, 1, NULL));
    IS(GINNEL_ERR_INVALID, ginnel_cache_get(cache, S(""), value, sizeof value, NULL));
    IS(GINNEL_ERR_INVALID, ginnel_cache_get(cache, key, sizeof key, value, sizeof value, NULL));
    IS(GINNEL_ERR_INVALID, ginnel_cache_set(cache, key, sizeof key, S("value"), 0, 0, NULL));
    IS(GINNEL_ERR_NULL, ginnel_cache_cas(cache, S("key"), S("value"), 0, 0, NULL));
    IS(0, ginnel_cache_set(cache, S("key"), S("value"), 0, 0, NULL));
    IS(GINNEL_ERR_INVALID, ginnel_cache_get(cache, S("key"), value, sizeof value, &item));
    IS(GINNEL_ERR_SERVER, ginnel_cache_increment(cache, S("key"), 1, NULL));
    IS(1, strstr(ginnel_last_error(), "non-numeric") != NULL);
    IS(GINNEL_ERR_NAME, ginnel_cache_stats(cache, "two\r\nlines", &text));
    IS(1, text == NULL);

    /* No server listens at this socket. */
    options.changes = "unix /nowhere";
    IS(0, ginnel_cache_open("test/c", &options, &none));
    IS(5, ginnel_cache_get(none, S("key"), value, sizeof value, NULL));
    IS(GINNEL_ERR_NO_SERVER, ginnel_cache_set(none, S("key"), S("other"), 0, 0, NULL));
    IS(1, strstr(ginnel_last_error(), "/nowhere") != NULL);
    IS(0, ginnel_cache_close(none));
    IS(GINNEL_ERR_FREED, ginnel_cache_close(none));
    IS(GINNEL_ERR_FREED, ginnel_cache_get(none, S("key"), value, sizeof value, NULL));
    IS(0, ginnel_cache_close(NULL));
}

static void values(void)
{
    ginnel_cache_item item = {.size = sizeof item};
    char value[100];
    uint64_t cas = 0, before, number;

    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_get(cache, S("a"), value, sizeof value, &item));
    IS(0, ginnel_cache_set(cache, S("a"), S("one"), 7, 0, &cas));
    IS(3, ginnel_cache_get(cache, S("a"), value, sizeof value, &item));
    IS(0, memcmp(value, "one", 3));
    IS(7, item.flags);
    IS(3, item.length);
    IS(1, item.cas == cas && cas != 0);
    IS(GINNEL_ERR_BUFFER_TOO_SMALL, ginnel_cache_get(cache, S("a"), value, 2, &item));
    IS(3, item.length);
    IS(GINNEL_ERR_BUFFER_TOO_SMALL, ginnel_cache_get(cache, S("a"), NULL, 0, NULL));

    IS(GINNEL_ERR_NOT_STORED, ginnel_cache_add(cache, S("a"), S("two"), 0, 0, NULL));
    IS(0, ginnel_cache_add(cache, S("b"), S("two"), 0, 0, NULL));
    IS(GINNEL_ERR_NOT_STORED, ginnel_cache_replace(cache, S("c"), S("x"), 0, 0, NULL));
    IS(0, ginnel_cache_replace(cache, S("b"), S("three"), 0, 0, NULL));
    IS(GINNEL_ERR_NOT_STORED, ginnel_cache_append(cache, S("c"), S("x"), NULL));
    IS(0, ginnel_cache_append(cache, S("b"), S(">"), NULL));
    IS(0, ginnel_cache_prepend(cache, S("b"), S("<"), &cas));
    IS(7, ginnel_cache_get(cache, S("b"), value, sizeof value, &item));
    IS(0, memcmp(value, "<three>", 7));
    before = cas;
    IS(0, ginnel_cache_cas(cache, S("b"), S("four"), 0, 0, &cas));
    IS(1, cas != before);
    IS(GINNEL_ERR_CHANGED, ginnel_cache_cas(cache, S("b"), S("five"), 0, 0, &before));
    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_cas(cache, S("c"), S("five"), 0, 0, &before));

    IS(0, ginnel_cache_set(cache, S("n"), S("10"), 0, 0, NULL));
    IS(0, ginnel_cache_increment(cache, S("n"), 5, &number));
    IS(15, number);
    IS(0, ginnel_cache_decrement(cache, S("n"), 20, &number));
    IS(0, number);
    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_increment(cache, S("c"), 1, &number));

    /* Keys with blanks and control characters. */
    IS(0, ginnel_cache_set(cache, "a b\r\n\0c", 7, S("odd"), 0, 0, NULL));
    IS(3, ginnel_cache_get(cache, "a b\r\n\0c", 7, value, sizeof value, NULL));
    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_get(cache, "a b\r\n\0d", 7, value, sizeof value, NULL));
    IS(0, ginnel_cache_delete(cache, "a b\r\n\0c", 7));

    IS(0, ginnel_cache_touch(cache, S("n"), 1000));
    IS(2, ginnel_cache_get(cache, S("n"), value, sizeof value, NULL));
    IS(0, memcmp(value, "0 ", 2));
    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_touch(cache, S("c"), 1000));
    IS(0, ginnel_cache_delete(cache, S("n")));
    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_delete(cache, S("n")));
    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_get(cache, S("n"), value, sizeof value, NULL));
    IS(0, ginnel_cache_set(cache, S("empty"), NULL, 0, 0, 0, NULL));
    IS(0, ginnel_cache_get(cache, S("empty"), value, sizeof value, NULL));
}

#define MANY 500

static void many(void)
{
    static char names[MANY][16], buffer[MANY * 16];
    static ginnel_cache_entry entries[MANY];
    static ginnel_cache_stored stored[MANY];
    static ginnel_cache_key keys[MANY];
    static ginnel_cache_found found[MANY];

    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "many:%d", i);
        entries[i] = (ginnel_cache_entry){names[i], strlen(names[i]), names[i], strlen(names[i]), i, 0};
        keys[i] = (ginnel_cache_key){names[i], strlen(names[i])};
    }
    /* An empty key is invalid. */
    entries[100].key_length = 0;
    IS(MANY - 1, ginnel_cache_set_many(cache, entries, MANY, stored));
    IS(GINNEL_ERR_INVALID, stored[100].status);
    IS(0, stored[101].status);
    IS(MANY - 1, ginnel_cache_get_many(cache, keys, MANY, buffer, sizeof buffer, found));
    for (int i = 0; i < MANY; i++) {
        if (i == 100) {
            IS(GINNEL_ERR_NO_ITEM, found[i].status);
            continue;
        }
        IS(0, found[i].status);
        IS(i, found[i].flags);
        IS(1, found[i].cas == stored[i].cas);
        IS(strlen(names[i]), found[i].length);
        IS(0, memcmp(buffer + found[i].offset, names[i], found[i].length));
    }
    /* The buffer has room for one value. */
    IS(2, ginnel_cache_get_many(cache, keys, 2, buffer, 8, found));
    IS(0, found[0].status);
    IS(GINNEL_ERR_BUFFER_TOO_SMALL, found[1].status);
    IS(0, ginnel_cache_get_many(cache, NULL, 0, NULL, 0, NULL));
}

static void *counting(void *argument)
{
    (void)argument;
    for (int i = 0; i < 500; i++)
        IS(0, ginnel_cache_increment(cache, S("counter"), 1, NULL));
    return NULL;
}

static void threads_and_forks(void)
{
    pthread_t threads[4];
    char value[20];
    int status;

    IS(0, ginnel_cache_set(cache, S("counter"), S("1000"), 0, 0, NULL));
    for (int i = 0; i < 4; i++)
        IS(0, pthread_create(&threads[i], NULL, counting, NULL));
    for (int i = 0; i < 4; i++)
        IS(0, pthread_join(threads[i], NULL));
    IS(4, ginnel_cache_get(cache, S("counter"), value, sizeof value, NULL));
    IS(0, memcmp(value, "3000", 4));
    pid_t child = fork();
    counting(NULL);
    if (child == 0)
        _exit(0);
    IS(child, waitpid(child, &status, 0));
    IS(0, status);
    IS(4, ginnel_cache_get(cache, S("counter"), value, sizeof value, NULL));
    IS(0, memcmp(value, "4000", 4));
}

int main(void)
{
    ginnel_cache_counters counters = {.size = sizeof counters};
    char *text;

    ginnel_cache_options options = {.size = sizeof options, .patience_ns = 20000000000LL};

    /* The server may still be starting. */
    IS(0, ginnel_cache_open("test/c", &options, &cache));
    mistakes();
    values();
    many();
    threads_and_forks();
    IS(0, ginnel_cache_stats(cache, NULL, &text));
    IS(1, strstr(text, "cmd_set ") != NULL);
    ginnel_string_free(text);
    IS(0, ginnel_cache_flush(cache));
    IS(GINNEL_ERR_NO_ITEM, ginnel_cache_get(cache, S("a"), NULL, 0, NULL));
    IS(0, ginnel_cache_get_counters(cache, &counters));
    IS(1, counters.hits > MANY && counters.misses > 0 && counters.lost == 0);
    IS(0, ginnel_cache_close(cache));
    return 0;
}
