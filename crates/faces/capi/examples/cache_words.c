/*
 * Counts words in a cache, and prints their counts:
 *
 *     cache_words SEGMENT/NAME [WORD...]
 *
 * Increments the count of each given word, and then looks up all words at once, in memory.
 */
#include <ginnel.h>
#include <stdio.h>
#include <string.h>

#define MOST 100

static int failed(const char *what)
{
    fprintf(stderr, "cache_words: %s: %s\n", what, ginnel_last_error());
    return 1;
}

/*
 * Increments the count of a word. The first program that counts it creates the item; if two programs do so at
 * the same time, both are counted.
 */
static int count(ginnel_cache *cache, const char *word)
{
    size_t length = strlen(word);
    int status = ginnel_cache_increment(cache, word, length, 1, NULL);
    if (status == GINNEL_ERR_NO_ITEM) {
        status = ginnel_cache_add(cache, word, length, "1", 1, 0, 3600, NULL);
        if (status == GINNEL_ERR_NOT_STORED)
            status = ginnel_cache_increment(cache, word, length, 1, NULL);
    }
    return status;
}

int main(int argc, char **argv)
{
    const char *address = argc > 1 ? argv[1] : "web/words";
    ginnel_cache_key keys[MOST];
    ginnel_cache_found found[MOST];
    char values[MOST * 20];
    ginnel_cache *cache;
    size_t words = 0;

    if (ginnel_cache_open(address, NULL, &cache) < 0)
        return failed(address);
    for (int i = 2; i < argc && words < MOST; i++, words++) {
        if (count(cache, argv[i]) < 0)
            return failed(argv[i]);
        keys[words].key = argv[i];
        keys[words].key_length = strlen(argv[i]);
    }
    if (ginnel_cache_get_many(cache, keys, words, values, sizeof values, found) < 0)
        return failed("looking them up");
    for (size_t i = 0; i < words; i++)
        if (found[i].status == GINNEL_OK)
            printf("%s %.*s\n", (const char *)keys[i].key, (int)found[i].length, values + found[i].offset);
    ginnel_cache_close(cache);
    return 0;
}
