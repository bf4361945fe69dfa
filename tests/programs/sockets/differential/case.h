/* What the cases have in common. A case is a function that both ends of a connection execute, each in a process of its own:
 *
 *     CASE(name)
 *     {
 *         if (me == ACCEPTOR)
 *             say("send", send(fd, "abc", 3, 0));
 *         meet();
 *         ...
 *     }
 *
 * What the ends print must not depend on time. `meet` waits for the other end, so that both know what the other one has done. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ACCEPTOR, CONNECTOR };

typedef void end(int me, int fd);

struct one_case {
    const char *name;
    end *function;
};

#define CASES_AT_MOST 500
extern struct one_case cases[CASES_AT_MOST];
extern int case_count;

/* Defines a case. Cases register themselves before `main`, in the order of their names. */
#define CASE(case_name) \
    static end case_name; \
    __attribute__((constructor)) static void register_##case_name(void) \
    { \
        cases[case_count++] = (struct one_case){ #case_name, case_name }; \
    } \
    static void case_name(int me __attribute__((unused)), int fd __attribute__((unused)))

/* Prints a result, and the error if it is -1. Returns the result. */
long say(const char *what, long result);
/* Prints events of poll or epoll. */
void say_events(const char *what, long events);
/* Waits until the other end has come to its `meet`. */
void meet(void);
/* Exits with a message unless the condition holds. */
void check(int condition, const char *what);
/* Receives so many bytes, and exits at an end or an error. */
void receive_all(int fd, void *into, int size);
/* Sends all bytes, and exits at an error. */
void send_all(int fd, const void *bytes, int size);
/* Sends all bytes by calls that do not wait, so that a ring that is full is left for TCP. */
void send_over_tcp(int fd, const char *bytes, int size);
/* Returns the events of one descriptor, after at most so many milliseconds. */
int events_of(int fd, int interest, int milliseconds);
/* Makes a listener, and tells the other end over the connection where it is. */
int listen_for_another(int fd);
/* Returns the address of which the other end tells. */
struct sockaddr_in address_of_another(int fd);
/* Closes a connection so that the peer gets a reset. */
void abort_connection(int fd);
/* Returns whether a thread or a process with this number sleeps. */
int is_asleep(int number);
/* Begins a thread that executes `sleep`. Returns when the thread sleeps. */
pthread_t begin_sleep(void *(*sleep)(void *), void *argument);
/* How long an end waits for what must happen, in milliseconds. It is far longer than anything takes, also on a busy machine. */
enum { PATIENCE = 40000 };
/* Waits until `condition` holds, for at most that long. Returns whether it does. */
#define WAIT_UNTIL(condition) \
    ({ \
        int left = PATIENCE; \
        while (!(condition) && --left > 0) \
            usleep(1000); \
        left > 0; \
    })
