/* Is preloaded into the ranks of a program. When they call MPI_Finalize, rank 0 first runs the command $WITNESS, while all are still
 * connected. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int MPI_Finalize(void)
{
    int rank;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    PMPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        /* The command itself is not a rank. */
        unsetenv("LD_PRELOAD");
        if (system(getenv("WITNESS")) != 0) {
            fprintf(stderr, "the witness has failed\n");
            PMPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    PMPI_Barrier(MPI_COMM_WORLD);
    return PMPI_Finalize();
}
