/* differential [crowded] all | early | CASE...: runs cases, each with two executed processes that have a connection, and prints what their calls
 * returned. The output must be the same over TCP and over Ginnel.
 *
 * `crowded`: in each process, other threads sleep on a second connection, in all ways in which a thread can sleep at the doorbell. They
 * take its few wait points, so the threads of the cases are woken by bytes on the connection. */
#include "case.h"

struct one_case cases[CASES_AT_MOST];
int case_count;

static int other_end = -1;
/* Whether the processes have a crowd. */
static int is_crowded;

/* How many threads of a process, and as many epoll instances, sleep at the doorbell at most. */
enum { WAIT_POINTS = 4 };

long say(const char *what, long result)
{
    int error = errno;
    printf("%s: %ld", what, result);
    if (result == -1)
        printf(" %s", strerrorname_np(error));
    putchar('\n');
    fflush(stdout);
    errno = error;
    return result;
}

void say_events(const char *what, long events)
{
    printf("%s: %#lx\n", what, events);
    fflush(stdout);
}

void check(int condition, const char *what)
{
    if (!condition) {
        printf("%s: %s\n", what, strerror(errno));
        fflush(stdout);
        _exit(1);
    }
}

void meet(void)
{
    char byte = 0;
    check(write(other_end, &byte, 1) == 1 && read(other_end, &byte, 1) == 1, "the other end has ended");
}

void receive_all(int fd, void *into, int size)
{
    for (int got = 0, n; got < size; got += n) {
        n = recv(fd, (char *)into + got, size - got, 0);
        check(n > 0, "receive_all");
    }
}

void send_all(int fd, const void *bytes, int size)
{
    for (int sent = 0, n; sent < size; sent += n) {
        n = send(fd, (const char *)bytes + sent, size - sent, MSG_NOSIGNAL);
        check(n > 0, "send_all");
    }
}

int listen_for_another(int fd)
{
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 4) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    send_all(fd, &address.sin_port, sizeof address.sin_port);
    return listener;
}

struct sockaddr_in address_of_another(int fd)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    receive_all(fd, &address.sin_port, sizeof address.sin_port);
    return address;
}

void abort_connection(int fd)
{
    struct linger none = { 1, 0 };
    check(setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none) == 0, "SO_LINGER");
    close(fd);
}

void send_over_tcp(int fd, const char *bytes, int size)
{
    check(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "O_NONBLOCK");
    for (int sent = 0; sent < size;) {
        events_of(fd, POLLOUT, PATIENCE);
        int now = send(fd, bytes + sent, size - sent, 0);
        check(now > 0 || errno == EAGAIN, "send");
        sent += now > 0 ? now : 0;
    }
}

int events_of(int fd, int interest, int milliseconds)
{
    struct pollfd poll_fd = { .fd = fd, .events = interest };
    int found = poll(&poll_fd, 1, milliseconds);
    check(found >= 0, "poll");
    return found == 0 ? 0 : poll_fd.revents;
}

static struct one_case *find(const char *name)
{
    for (int i = 0; i < case_count; i++)
        if (strcmp(cases[i].name, name) == 0)
            return &cases[i];
    fprintf(stderr, "no case %s\n", name);
    exit(2);
}

/* Both ends exchange some bytes first, so that a connection that is to change over does. */
static void exchange(int me, int fd)
{
    char byte = '.';
    for (int turn = 0; turn < 8; turn++) {
        if (me == CONNECTOR)
            send_all(fd, &byte, 1);
        receive_all(fd, &byte, 1);
        if (me == ACCEPTOR)
            send_all(fd, &byte, 1);
    }
}

static void *sleep_in_poll(void *fd)
{
    events_of(*(int *)fd, POLLIN, -1);
    return NULL;
}

static void *sleep_in_epoll(void *fd)
{
    struct epoll_event event = { .events = EPOLLIN };
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, *(int *)fd, &event) == 0, "epoll_ctl");
    epoll_wait(epoll, &event, 1, -1);
    return NULL;
}

/* Begins the threads that sleep until the process ends. Signals are for the threads of the case. */
static void crowd(int me, int fd)
{
    static int crowded_fd;
    sigset_t all, before;
    exchange(me, crowded_fd = fd);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < WAIT_POINTS; i++) {
        begin_sleep(sleep_in_poll, &crowded_fd);
        begin_sleep(sleep_in_epoll, &crowded_fd);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

struct sleeper {
    void *(*sleep)(void *);
    void *argument;
    int number;
};

static void *sleep_now(void *argument)
{
    struct sleeper *sleeper = argument;
    void *(*sleep)(void *) = sleeper->sleep;
    argument = sleeper->argument;
    __atomic_store_n(&sleeper->number, gettid(), __ATOMIC_RELEASE);
    return sleep(argument);
}

int is_asleep(int number)
{
    char name[64], line[256] = "";
    sprintf(name, "/proc/%d/stat", number);
    int file = open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, line, sizeof line - 1) <= 0)
        line[0] = 0;
    close(file);
    char *end = strrchr(line, ')');
    return end != NULL && end[1] == ' ' && end[2] == 'S';
}

pthread_t begin_sleep(void *(*sleep)(void *), void *argument)
{
    struct sleeper sleeper = { sleep, argument, 0 };
    pthread_t thread;
    check(pthread_create(&thread, NULL, sleep_now, &sleeper) == 0, "pthread_create");
    check(WAIT_UNTIL(__atomic_load_n(&sleeper.number, __ATOMIC_ACQUIRE) != 0), "a thread that begins");
    check(WAIT_UNTIL(is_asleep(sleeper.number)), "a thread that sleeps");
    return thread;
}

static void play(struct one_case *one, int me, int fd)
{
    meet();
    one->function(me, fd);
    exit(0);
}

static int connected(int port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = port };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    return fd;
}

static void connector(struct one_case *one, int port)
{
    int fd = connected(port);
    exchange(CONNECTOR, fd);
    if (is_crowded)
        crowd(CONNECTOR, connected(port));
    play(one, CONNECTOR, fd);
}

static int accepted(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    check(fd >= 0, "accept");
    return fd;
}

static void acceptor(struct one_case *one, int listener)
{
    int fd = accepted(listener);
    exchange(ACCEPTOR, fd);
    if (is_crowded)
        crowd(ACCEPTOR, accepted(listener));
    close(listener);
    play(one, ACCEPTOR, fd);
}

/* Executes this program again as one end, with its output in a file. */
static pid_t begin(const char *name, const char *role, int number, int control, FILE *output)
{
    char text[2][16];
    sprintf(text[0], "%d", number);
    sprintf(text[1], "%d", control);
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        dup2(fileno(output), 1);
        fcntl(control, F_SETFD, 0);
        if (strcmp(role, "acceptor") == 0)
            fcntl(number, F_SETFD, 0);
        execl("/proc/self/exe", "differential", role, name, text[0], text[1], is_crowded ? "crowded" : NULL, NULL);
        _exit(3);
    }
    return child;
}

static void show(const char *role, pid_t child, FILE *output)
{
    int status;
    check(waitpid(child, &status, 0) == child, "waitpid");
    printf("-- %s\n", role);
    char line[1000];
    rewind(output);
    while (fgets(line, sizeof line, output))
        fputs(line, stdout);
    fclose(output);
    if (WIFSIGNALED(status))
        printf("killed by SIG%s\n", sigabbrev_np(WTERMSIG(status)));
    else if (status != 0)
        printf("exit status %d\n", WEXITSTATUS(status));
}

/* A case that is executed. */
struct run {
    const char *name;
    pid_t children[2];
    FILE *outputs[2];
};

static void begin_run(struct run *run, const char *name)
{
    int control[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control) == 0, "socketpair");
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    run->name = name;
    run->outputs[0] = tmpfile();
    run->outputs[1] = tmpfile();
    run->children[0] = begin(name, "acceptor", listener, control[0], run->outputs[0]);
    run->children[1] = begin(name, "connector", address.sin_port, control[1], run->outputs[1]);
    close(listener);
    close(control[0]);
    close(control[1]);
}

static void end_run(struct run *run)
{
    printf("== %s\n", run->name);
    show("acceptor", run->children[0], run->outputs[0]);
    show("connector", run->children[1], run->outputs[1]);
    fflush(stdout);
}

/* Returns whether other cases must not take the CPU from this one. A handler that runs when `recv` has returned, and before its caller has
 * looked at the bytes, finds them in the wrong order, over TCP too. */
static int is_alone(const char *name)
{
    return strncmp(name, "signal_", 7) == 0;
}

/* Executes cases, several at the same time, because most of them wait most of the time. Shows them in their order. */
static void run_all(const char **names, int count)
{
    enum { AT_ONCE = 4 };
    struct run runs[AT_ONCE];
    for (int begun = 0, ended = 0; ended < count;) {
        while (begun < count && begun < ended + AT_ONCE
               && (begun == ended || !(is_alone(names[begun]) || is_alone(names[begun - 1])))) {
            begin_run(&runs[begun % AT_ONCE], names[begun]);
            begun++;
        }
        end_run(&runs[ended++ % AT_ONCE]);
    }
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct one_case *)a)->name, ((const struct one_case *)b)->name);
}

int main(int argc, char **argv)
{
    qsort(cases, case_count, sizeof cases[0], by_name);
    is_crowded = strcmp(argv[argc - 1], "crowded") == 0;
    if (argc >= 5 && (strcmp(argv[1], "acceptor") == 0 || strcmp(argv[1], "connector") == 0)) {
        other_end = atoi(argv[4]);
        /* A case waits a few times at most. */
        alarm(4 * PATIENCE / 1000);
        fcntl(other_end, F_SETFD, FD_CLOEXEC);
        if (strcmp(argv[1], "acceptor") == 0)
            acceptor(find(argv[2]), atoi(argv[3]));
        connector(find(argv[2]), atoi(argv[3]));
    }
    if (argc > 1 && strcmp(argv[1], "crowded") == 0) {
        is_crowded = 1;
        argc--;
        argv++;
    }
    check(argc > 1, "usage: differential [crowded] all | early | CASE...");
    /* Early cases are those whose connections must not change over before they begin. */
    int is_early = strcmp(argv[1], "early") == 0;
    const char *names[CASES_AT_MOST];
    int count = 0;
    if (is_early || strcmp(argv[1], "all") == 0) {
        for (int i = 0; i < case_count; i++)
            if ((strncmp(cases[i].name, "early_", 6) == 0) == is_early)
                names[count++] = cases[i].name;
    } else
        for (int i = 1; i < argc && count < CASES_AT_MOST; i++)
            names[count++] = find(argv[i])->name;
    run_all(names, count);
    return 0;
}
