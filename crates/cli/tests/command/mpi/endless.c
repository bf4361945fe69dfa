/* Adds numbers up with all ranks, and checks the sums, until a file exists.
 *
 * endless FILE [rests|aborts|puts]     each rank prints "at work: PID" when it has begun; from then on, one that rests uses little of
 *                                      the CPU; with "aborts", rank 1 ends all when the file exists; with "puts", rank 0
 *                                      writes to rank 1 without end, and the others wait */
#include "check.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Numbers that are added up at once: enough for a rendezvous. */
enum { COUNT = 5000 };
/* What rank 1 aborts with. */
enum { CODE = 7 };

static void at_work(void)
{
    printf("at work: %ld\n", (long)getpid());
    fflush(stdout);
}

/* Writes from rank 0 to rank 1, which never ends. */
static void put(void)
{
    double number = 1, *memory;
    MPI_Win win;
    MPI_Win_allocate(sizeof *memory, sizeof *memory, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &win);
    MPI_Win_lock_all(0, win);
    for (long turn = 0; rank == 0; turn++) {
        MPI_Put(&number, 1, MPI_DOUBLE, 1, 0, 1, MPI_DOUBLE, win);
        MPI_Win_flush(1, win);
        if (turn == 10)
            at_work();
    }
    at_work();
    MPI_Barrier(MPI_COMM_WORLD);
}

int main(int argc, char **argv)
{
    static double own[COUNT], all[COUNT];
    /* Whoever started it waits for its end. */
    alarm(300);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const char *how = argc > 2 ? argv[2] : "";
    int stop = 0, rests = strcmp(how, "rests") == 0, aborts = strcmp(how, "aborts") == 0, puts = strcmp(how, "puts") == 0;
    for (long turn = 0; !stop; turn++) {
        for (int i = 0; i < COUNT; i++)
            own[i] = (double)(rank + 1) * (double)(turn % 1000 + i);
        MPI_Allreduce(own, all, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        for (int i = 0; i < COUNT; i++)
            CHECK(all[i] == ranks * (ranks + 1) / 2 * (double)(turn % 1000 + i));
        if (turn == 10 && puts)
            put();
        if (turn == 10)
            at_work();
        if (rests && turn > 10)
            usleep(20000);
        if (rank == (aborts ? 1 : 0) && turn > 10 && access(argv[1], F_OK) == 0) {
            if (aborts)
                MPI_Abort(MPI_COMM_WORLD, CODE);
            stop = 1;
        }
        MPI_Bcast(&stop, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    if (rank == 0)
        printf("all sums are right: %d ranks\n", ranks);
    MPI_Finalize();
    return 0;
}
