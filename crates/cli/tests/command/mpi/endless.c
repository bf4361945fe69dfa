/* Adds numbers up with all ranks, and checks the sums, until a file exists.
 *
 * endless FILE [rests]     each rank prints "at work: PID" when it has begun; one that rests uses little of the CPU from then on */
#include "check.h"
#include <stdlib.h>
#include <unistd.h>

/* Numbers that are added up at once: enough for a rendezvous. */
enum { COUNT = 5000 };

int main(int argc, char **argv)
{
    static double own[COUNT], all[COUNT];
    /* Whoever started it waits for its end. */
    alarm(300);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int stop = 0;
    for (long turn = 0; !stop; turn++) {
        for (int i = 0; i < COUNT; i++)
            own[i] = (double)(rank + 1) * (double)(turn % 1000 + i);
        MPI_Allreduce(own, all, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < COUNT; i++)
            CHECK(all[i] == ranks * (ranks + 1) / 2 * (double)(turn % 1000 + i));
        if (turn == 10) {
            printf("at work: %ld\n", (long)getpid());
            fflush(stdout);
        }
        if (argc > 2 && turn > 10)
            usleep(20000);
        stop = rank == 0 && turn > 10 && access(argv[1], F_OK) == 0;
        MPI_Bcast(&stop, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    if (rank == 0)
        printf("all sums are right: %d ranks\n", ranks);
    MPI_Finalize();
    return 0;
}
