/* Computes sums with all ranks, and checks them, until a file exists.
 *
 * endless FILE [rests|aborts|puts]
 *
 * Each rank prints "at work: PID" when it has started. With "rests", a rank then uses little CPU time. With "aborts", rank 1 aborts the
 * job when the file exists. With "puts", rank 0 writes to rank 1 without end, and the others wait. */
#include "check.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Number of values that are added at once: enough for the rendezvous protocol. */
enum { COUNT = 5000 };
/* The error code with which rank 1 aborts. */
enum { CODE = 7 };

static void at_work(void)
{
    printf("at work: %ld\n", (long)getpid());
    fflush(stdout);
}

/* Rank 0 writes to rank 1, without end. */
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
    /* The process that started the job waits for its end. */
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
