/* exchange pingpong|alltoall SIZE COUNT: prints the time of a message one way between ranks 0 and 1, or of an alltoall of all ranks, in
 * microseconds. It is the median of eleven runs of COUNT each. Ranks stay on their CPUs, if there are enough of them. */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RUNS = 11 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 4 || ranks < 2)
        MPI_Abort(MPI_COMM_WORLD, 2);
    int is_alltoall = strcmp(argv[1], "alltoall") == 0, size = atoi(argv[2]), count = atoi(argv[3]);
    if (ranks <= sysconf(_SC_NPROCESSORS_ONLN)) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(rank, &one);
        sched_setaffinity(0, sizeof one, &one);
    }
    size_t room = (size_t)size * (is_alltoall ? ranks : 1);
    char *out = malloc(room), *in = malloc(room);
    memset(out, rank + 1, room);
    memset(in, 0, room);
    double times[RUNS];
    /* The first run makes connections and registers memory. */
    for (int run = -1; run < RUNS; run++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        for (int i = 0; i < count; i++) {
            if (is_alltoall) {
                MPI_Alltoall(out, size, MPI_CHAR, in, size, MPI_CHAR, MPI_COMM_WORLD);
            } else if (rank == 0) {
                MPI_Send(out, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
                MPI_Recv(in, size, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            } else if (rank == 1) {
                MPI_Recv(in, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                MPI_Send(out, size, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
            }
        }
        double each = (MPI_Wtime() - begin) / count / (is_alltoall ? 1 : 2);
        if (run >= 0)
            times[run] = each * 1e6;
    }
    qsort(times, RUNS, sizeof *times, by_value);
    if (rank == 0)
        printf("%.4f\n", times[RUNS / 2]);
    /* Check that the received data are what was sent. */
    int from = is_alltoall ? ranks - 1 : 1 - rank;
    if ((is_alltoall || rank < 2) && size > 0 && in[room - 1] != from + 1)
        MPI_Abort(MPI_COMM_WORLD, 3);
    MPI_Finalize();
    return 0;
}
