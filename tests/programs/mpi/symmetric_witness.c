/* Is preloaded into processing elements of OpenSHMEM, as witness.c is into ranks of an MPI. */
#include <pshmem.h>
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>

void shmem_finalize(void)
{
    pshmem_barrier_all();
    if (pshmem_my_pe() == 0) {
        unsetenv("LD_PRELOAD");
        if (system(getenv("WITNESS")) != 0) {
            fprintf(stderr, "the witness has failed\n");
            pshmem_global_exit(1);
        }
    }
    pshmem_barrier_all();
    pshmem_finalize();
}
