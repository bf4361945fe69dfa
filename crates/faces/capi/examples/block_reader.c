/*
 * Receives a file through one block of shared memory, guarded by a mutex and a condition variable:
 *
 *     block_reader SEGMENT NAME FILE
 *
 * The sender is block_writer, in any member of the segment. Either may be started first.
 */
#include "shared_block.h"

int main(int argc, char **argv)
{
    struct shared shared;
    program = argv[0];
    if (argc < 4) {
        fprintf(stderr, "usage: %s SEGMENT NAME FILE\n", program);
        return 2;
    }
    FILE *file = fopen(argv[3], "wb");
    if (!file) {
        perror(argv[3]);
        return 1;
    }

    share(&shared, argv[1], argv[2]);
    sure(ginnel_block_open(shared.endpoint, argv[2], GINNEL_RIGHTS_READ_WRITE, PATIENCE, &shared.block));
    map(&shared);

    uint64_t total = 0, state;
    do {
        lock(&shared);
        await_state(&shared, FULL, LAST);
        state = shared.front->state;
        /* Any member of the segment can write there, so read the length once, and check that value. */
        uint64_t length = *(volatile uint64_t *)&shared.front->length;
        if (length > shared.room) {
            fprintf(stderr, "%s: a piece of %llu bytes\n", program, (unsigned long long)length);
            return 1;
        }
        if (fwrite(shared.front->data, 1, length, file) != length) {
            perror(argv[3]);
            return 1;
        }
        shared.front->state = state == LAST ? OVER : EMPTY;
        unlock(&shared);
        total += length;
    } while (state != LAST);

    fprintf(stderr, "%s: %llu bytes received\n", program, (unsigned long long)total);
    leave(&shared);
    if (fclose(file)) {
        perror(argv[3]);
        return 1;
    }
    return 0;
}
