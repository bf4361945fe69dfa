/* select(2). */
#include "case.h"

static long pause_of(struct timeval time, int fd)
{
    fd_set read;
    FD_ZERO(&read);
    FD_SET(fd, &read);
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    say("select", select(fd + 1, &read, NULL, NULL, &time));
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000;
}

CASE(select_times)
{
    if (me == CONNECTOR) {
        say("more than a second of microseconds", pause_of((struct timeval){ 0, 1050000 }, fd) >= 1050);
        pause_of((struct timeval){ -1, 0 }, fd);
        pause_of((struct timeval){ 0, -1 }, fd);
        pause_of((struct timeval){ 1, -1 }, fd);
        pause_of((struct timeval){ 0, 0 }, fd);
        fd_set none;
        FD_ZERO(&none);
        say("select of a negative number", select(-1, &none, NULL, NULL, NULL));
        struct timespec wrong[] = { { -1, 0 }, { 0, -1 }, { 0, 1000000000 } };
        for (int i = 0; i < 3; i++) {
            FD_SET(fd, &none);
            say("pselect", pselect(fd + 1, &none, NULL, NULL, &wrong[i], NULL));
        }
    }
    meet();
}

CASE(select_beyond_the_table)
{
    if (me == CONNECTOR) {
        struct timeval soon = { 0, 1000 };
        /* The kernel looks at no number beyond the table of descriptors. */
        fd_set read;
        FD_ZERO(&read);
        FD_SET(fd, &read);
        FD_SET(1000, &read);
        say("select", select(1001, &read, NULL, NULL, &soon));
        FD_ZERO(&read);
        FD_SET(fd, &read);
        FD_SET(60, &read);
        say("select of a closed one", select(61, &read, NULL, NULL, &soon));
    }
    meet();
}

CASE(select_sets)
{
    if (me == ACCEPTOR)
        send_all(fd, "a", 1);
    meet();
    if (me == CONNECTOR) {
        fd_set read, write, except;
        FD_ZERO(&read);
        FD_ZERO(&write);
        FD_ZERO(&except);
        FD_SET(fd, &read);
        FD_SET(fd, &except);
        say("select", select(fd + 1, &read, &write, &except, NULL));
        say("read", FD_ISSET(fd, &read));
        say("except", FD_ISSET(fd, &except));
        FD_SET(fd, &write);
        say("select", select(fd + 1, &read, &write, &except, NULL));
        say("write", FD_ISSET(fd, &write));
    }
    meet();
}
