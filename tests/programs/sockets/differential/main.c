/* differential all | early | CASE...: runs cases, each with two executed processes that have a connection, and prints what their calls returned.
 * The output must be the same over TCP and over Ginnel. */
#include "case.h"

struct one_case cases[CASES_AT_MOST];
int case_count;

static int other_end = -1;

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

void abort_connection(int fd)
{
    struct linger none = { 1, 0 };
    check(setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none) == 0, "SO_LINGER");
    close(fd);
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
static void play(struct one_case *one, int me, int fd)
{
    char byte = '.';
    /* A case waits a few times at most. */
    alarm(4 * PATIENCE / 1000);
    for (int turn = 0; turn < 8; turn++) {
        if (me == CONNECTOR)
            send_all(fd, &byte, 1);
        receive_all(fd, &byte, 1);
        if (me == ACCEPTOR)
            send_all(fd, &byte, 1);
    }
    meet();
    one->function(me, fd);
    exit(0);
}

static void connector(struct one_case *one, int port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = port };
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    play(one, CONNECTOR, fd);
}

static void acceptor(struct one_case *one, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    check(fd >= 0, "accept");
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
        execl("/proc/self/exe", "differential", role, name, text[0], text[1], NULL);
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

static void run(const char *name)
{
    printf("== %s\n", name);
    fflush(stdout);
    int control[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control) == 0, "socketpair");
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
    FILE *outputs[] = { tmpfile(), tmpfile() };
    pid_t children[] = {
        begin(name, "acceptor", listener, control[0], outputs[0]),
        begin(name, "connector", address.sin_port, control[1], outputs[1]),
    };
    close(listener);
    close(control[0]);
    close(control[1]);
    show("acceptor", children[0], outputs[0]);
    show("connector", children[1], outputs[1]);
    fflush(stdout);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct one_case *)a)->name, ((const struct one_case *)b)->name);
}

int main(int argc, char **argv)
{
    qsort(cases, case_count, sizeof cases[0], by_name);
    if (argc == 5) {
        other_end = atoi(argv[4]);
        fcntl(other_end, F_SETFD, FD_CLOEXEC);
        if (strcmp(argv[1], "acceptor") == 0)
            acceptor(find(argv[2]), atoi(argv[3]));
        connector(find(argv[2]), atoi(argv[3]));
    }
    check(argc > 1, "usage: differential all | early | CASE...");
    /* Early cases are those whose connections must not change over before they begin. */
    int is_early = strcmp(argv[1], "early") == 0;
    if (is_early || strcmp(argv[1], "all") == 0) {
        for (int i = 0; i < case_count; i++)
            if ((strncmp(cases[i].name, "early_", 6) == 0) == is_early)
                run(cases[i].name);
    }
    else
        for (int i = 1; i < argc; i++)
            run(find(argv[i])->name);
    return 0;
}
