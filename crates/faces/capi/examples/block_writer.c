/*
 * Sends a file through one block of shared memory, guarded by a mutex and a condition variable:
 *
 *     block_writer SEGMENT NAME FILE [BYTES]
 *
 * BYTES is the size of the block (default 4 MiB). The receiver is block_reader, in any member of the segment.
 */
#include "shared_block.h"

int main(int argc, char **argv)
{
    struct shared shared;
    size_t bytes = argc > 4 ? strtoull(argv[4], NULL, 0) : 4 << 20;
    program = argv[0];
    if (argc < 4) {
        fprintf(stderr, "usage: %s SEGMENT NAME FILE [BYTES]\n", program);
        return 2;
    }
    FILE *file = fopen(argv[3], "rb");
    if (!file) {
        perror(argv[3]);
        return 1;
    }

    share(&shared, argv[1], argv[2]);
    /* The new block is zero, so its state is EMPTY. */
    sure(ginnel_block_create(shared.endpoint, argv[2], bytes, NULL, &shared.block));
    map(&shared);

    uint64_t total = 0;
    size_t length;
    do {
        lock(&shared);
        await_state(&shared, EMPTY, EMPTY);
        length = fread(shared.front->data, 1, shared.room, file);
        if (ferror(file)) {
            perror(argv[3]);
            return 1;
        }
        shared.front->length = length;
        shared.front->state = length ? FULL : LAST;
        unlock(&shared);
        total += length;
    } while (length);

    /* The block's name ends with this process, so wait until the receiver has finished. */
    lock(&shared);
    await_state(&shared, OVER, OVER);
    unlock(&shared);
    fprintf(stderr, "%s: %llu bytes sent\n", program, (unsigned long long)total);
    leave(&shared);
    fclose(file);
    return 0;
}
