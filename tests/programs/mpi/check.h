/* Functions that the programs share. */
#include <mpi.h>
#include <stdio.h>

static int rank, ranks;

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "rank %d, line %d: %s\n", rank, __LINE__, #condition); \
            MPI_Abort(MPI_COMM_WORLD, 1); \
        } \
    } while (0)
