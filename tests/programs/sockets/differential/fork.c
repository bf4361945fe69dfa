/* fork(2), _Fork(3), vfork(2), clone(2): processes that have a connection, however they were made. */
#include "case.h"
#include <linux/sched.h>
#include <sched.h>

typedef pid_t birth(void);

static pid_t by_fork(void)
{
    return fork();
}

static pid_t by_fork_alone(void)
{
    return _Fork();
}

static pid_t by_fork_number(void)
{
    return syscall(SYS_fork);
}

static pid_t by_clone_number(void)
{
    return syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
}

static pid_t by_clone3_number(void)
{
    struct clone_args arguments = { .exit_signal = SIGCHLD };
    return syscall(SYS_clone3, &arguments, sizeof arguments);
}

/* The child's part: answers what comes until the end, after its parent has closed the connection. */
static int answer(int fd, int go)
{
    char bytes[100];
    check(read(go, bytes, 1) == 1, "the parent has ended");
    for (;;) {
        int got = recv(fd, bytes, sizeof bytes, 0);
        if (got <= 0)
            return got == 0 ? 7 : 8;
        send_all(fd, bytes, got);
    }
}

static void say_end(pid_t child)
{
    int status = 0;
    check(child > 0 && waitpid(child, &status, 0) == child, "waitpid");
    printf("the child has ended with %#x\n", status);
}

/* The child goes on alone with a connection that its parent has closed, and the peer sees the end when the child has closed it. */
static void goes_on(int me, int fd, birth *birth)
{
    char bytes[100];
    int go[2];
    check(pipe2(go, O_CLOEXEC) == 0, "pipe2");
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t child = birth();
        if (child == 0)
            _exit(answer(fd, go[0]));
        say("close", close(fd));
        check(write(go[1], "g", 1) == 1, "write");
        meet();
        say_end(child);
    } else {
        meet();
        for (int turn = 0; turn < 20; turn++) {
            int size = sprintf(bytes, "question %d", turn);
            send_all(fd, bytes, size);
            receive_all(fd, bytes, size);
            bytes[size] = 0;
        }
        printf("last: %s\n", bytes);
        static char many[20000];
        for (int turn = 0; turn < 3; turn++) {
            send_all(fd, many, sizeof many / 10);
            receive_all(fd, many, sizeof many / 10);
        }
        say("nothing more", recv(fd, bytes, 1, MSG_DONTWAIT));
        shutdown(fd, SHUT_WR);
        say("end", recv(fd, bytes, 1, 0));
    }
    meet();
}

/* The parent goes on with a connection that its child has used and closed. */
static void comes_back(int me, int fd, birth *birth)
{
    char bytes[100];
    if (me == CONNECTOR) {
        fflush(stdout);
        for (int turn = 0; turn < 3; turn++) {
            pid_t child = birth();
            if (child == 0) {
                send_all(fd, "child ", 6);
                receive_all(fd, bytes, 6);
                close(fd);
                _exit(memcmp(bytes, "child ", 6) != 0);
            }
            say_end(child);
            send_all(fd, "parent", 6);
            receive_all(fd, bytes, 6);
            printf("%.6s\n", bytes);
        }
        say("close", close(fd));
    } else {
        int got = 0;
        while (recv(fd, bytes, 6, MSG_WAITALL) == 6) {
            got += 6;
            send_all(fd, bytes, 6);
        }
        say("bytes", got);
    }
    meet();
}

#define BIRTHS(name, birth) \
    CASE(fork_goes_on_##name) \
    { \
        goes_on(me, fd, birth); \
    } \
    CASE(fork_comes_back_##name) \
    { \
        comes_back(me, fd, birth); \
    }

BIRTHS(after_fork, by_fork)
BIRTHS(after_fork_alone, by_fork_alone)
BIRTHS(after_fork_number, by_fork_number)
BIRTHS(after_clone_number, by_clone_number)
BIRTHS(after_clone3_number, by_clone3_number)

struct part {
    int fd, go;
};

static char stack[1 << 16] __attribute__((aligned(16)));

static int answer_by(void *argument)
{
    struct part *part = argument;
    return answer(part->fd, part->go);
}

/* `clone` of the C library runs a function on another stack. */
CASE(fork_goes_on_after_clone)
{
    char bytes[10];
    int go[2];
    check(pipe2(go, O_CLOEXEC) == 0, "pipe2");
    struct part part = { fd, go[0] };
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t parent_tid = 0;
        pid_t child = clone(answer_by, stack + sizeof stack, SIGCHLD | CLONE_PARENT_SETTID, &part, &parent_tid);
        printf("the child's number is %s\n", parent_tid == child ? "that" : "another");
        say("close", close(fd));
        check(write(go[1], "g", 1) == 1, "write");
        meet();
        say_end(child);
    } else {
        meet();
        for (int turn = 0; turn < 20; turn++) {
            send_all(fd, "question", 8);
            receive_all(fd, bytes, 8);
        }
        printf("last: %.8s\n", bytes);
        shutdown(fd, SHUT_WR);
        say("end", recv(fd, bytes, 1, 0));
    }
    meet();
}

static int close_it(void *argument)
{
    struct part *part = argument;
    return close(part->fd) == 0 && write(part->fd, "x", 1) == -1 && errno == EBADF ? 0 : 9;
}

/* Both processes have one table of descriptors. */
static void shares(int me, int fd, int flags)
{
    char bytes[10];
    struct part part = { fd, -1 };
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t child = clone(close_it, stack + sizeof stack, SIGCHLD | CLONE_FILES | flags, &part);
        say_end(child);
        signal(SIGPIPE, SIG_IGN);
        say("send", send(fd, "x", 1, 0));
        say("close", close(fd));
        /* The number is free for another file. */
        int other = open("/dev/zero", O_RDONLY);
        say("the number", other == fd);
        say("read", read(other, bytes, 4));
        close(other);
    } else {
        say("end", recv(fd, bytes, 1, 0));
    }
    meet();
}

CASE(fork_shares_descriptors)
{
    shares(me, fd, 0);
}

CASE(fork_shares_descriptors_and_memory)
{
    shares(me, fd, CLONE_VM | CLONE_VFORK);
}

static int send_and_close(void *argument)
{
    struct part *part = argument;
    char byte;
    check(read(part->go, &byte, 1) == 1, "read");
    send_all(part->fd, "from the child", 14);
    syscall(SYS_exit_group, close(part->fd));
    return 9;
}

/* The child has its parent's memory, and descriptors of its own. */
CASE(fork_shares_memory)
{
    char bytes[20];
    int go[2];
    check(pipe2(go, O_CLOEXEC) == 0, "pipe2");
    if (me == ACCEPTOR) {
        fflush(stdout);
        struct part part = { fd, go[0] };
        pid_t child = clone(send_and_close, stack + sizeof stack, SIGCHLD | CLONE_VM, &part);
        say("close", close(fd));
        check(write(go[1], "g", 1) == 1, "write");
        say_end(child);
    } else {
        receive_all(fd, bytes, 14);
        printf("%.14s\n", bytes);
        say("end", recv(fd, bytes, 1, 0));
    }
    meet();
}

/* A child that only executes a program, which has the connection. */
static void executes(int me, int fd, pid_t (*birth)(void))
{
    char bytes[100];
    if (me == ACCEPTOR) {
        char script[100];
        sprintf(script, "read line <&%d; echo got $line >&%d", fd, fd);
        fflush(stdout);
        pid_t child = birth();
        if (child == 0) {
            fcntl(fd, F_SETFD, 0);
            execl("/bin/sh", "sh", "-c", script, NULL);
            _exit(9);
        }
        say_end(child);
        send_all(fd, "parent\n", 7);
        close(fd);
    } else {
        send_all(fd, "a line\n", 7);
        receive_all(fd, bytes, 18);
        printf("%.18s", bytes);
        say("end", recv(fd, bytes, 1, 0));
    }
    meet();
}

CASE(fork_executes_after_fork_alone)
{
    executes(me, fd, by_fork_alone);
}

CASE(fork_executes_after_clone3_number)
{
    executes(me, fd, by_clone3_number);
}

CASE(fork_executes_after_vfork)
{
    executes(me, fd, vfork);
}

/* A grandchild whose parent has ended. */
CASE(fork_goes_on_after_two)
{
    char bytes[10];
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t child = by_clone_number();
        if (child == 0) {
            if (by_fork_alone() != 0)
                _exit(0);
            receive_all(fd, bytes, 8);
            send_all(fd, bytes, 8);
            _exit(0);
        }
        say("close", close(fd));
        say_end(child);
        meet();
    } else {
        meet();
        send_all(fd, "question", 8);
        receive_all(fd, bytes, 8);
        printf("%.8s\n", bytes);
        say("end", recv(fd, bytes, 1, 0));
    }
    meet();
}

/* A child that sees its parent in no table of processes, and closes the connection. (Where nobody may make one, there is none.) */
static void leaves_from_another_namespace(int me, int fd, birth *birth)
{
    char bytes[10];
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t child = birth();
        if (child == 0) {
            close(fd);
            _exit(0);
        }
        if (child > 0)
            say_end(child);
    }
    meet();
    for (int turn = 0; turn < 4; turn++) {
        if (me == ACCEPTOR)
            send_all(fd, "question", 8);
        receive_all(fd, bytes, 8);
        if (me == CONNECTOR)
            send_all(fd, "response", 8);
    }
    printf("went on: %.8s\n", bytes);
    meet();
}

static pid_t into_a_namespace(void)
{
    return syscall(SYS_clone, SIGCHLD | CLONE_NEWUSER | CLONE_NEWPID, NULL, NULL, NULL, NULL);
}

static pid_t after_unshare(void)
{
    return unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0 ? fork() : -1;
}

CASE(fork_into_a_namespace)
{
    leaves_from_another_namespace(me, fd, into_a_namespace);
}

CASE(fork_after_unshare)
{
    leaves_from_another_namespace(me, fd, after_unshare);
}

/* A connection that has not changed over when the child is made. */
static void executes_first(int me, int fd, pid_t (*birth)(int))
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    char bytes[100];
    if (me == ACCEPTOR) {
        int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
        check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
        send_all(fd, &address, sizeof address);
        int first = accept(listener, NULL, NULL);
        receive_all(first, bytes, 4);
        for (int turn = 0; turn < 3000; turn++) {
            send_all(first, "question", 8);
            receive_all(first, bytes, 8);
        }
        send_all(first, "a line\n", 7);
        int got = recv(first, bytes, 11, MSG_WAITALL);
        printf("%d bytes: %.*s", got, got, bytes);
        say("end", recv(first, bytes, 1, 0));
    } else {
        receive_all(fd, &address, sizeof address);
        int first = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(first, (struct sockaddr *)&address, size) == 0, "connect");
        fflush(stdout);
        int go[2];
        check(pipe2(go, O_CLOEXEC) == 0 && dup2(go[0], 60) == 60 && dup2(first, 61) == 61, "dup2");
        pid_t child = birth(61);
        close(60);
        close(61);
        send_all(first, "here", 4);
        for (int turn = 0; turn < 3000; turn++) {
            receive_all(first, bytes, 8);
            send_all(first, "response", 8);
        }
        check(write(go[1], "go\n", 3) == 3, "write");
        if (child > 0)
            say_end(child);
        close(first);
    }
    meet();
}

static char *const waits[] = { "sh", "-c", "read go <&60; read line <&61; echo got $line >&61", NULL };

static pid_t executed_by_vfork(int fd)
{
    (void)fd;
    pid_t child = vfork();
    if (child == 0) {
        execv("/bin/bash", waits);
        _exit(9);
    }
    return child;
}

static char *const waits_for_copy[] = { "sh", "-c", "read go <&60; read line <&62; echo got $line >&62", NULL };

static pid_t copied_by_vfork(int fd)
{
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    pid_t child = vfork();
    if (child == 0) {
        dup2(fd, 62);
        execv("/bin/bash", waits_for_copy);
        _exit(9);
    }
    return child;
}

CASE(early_executes_a_copy_after_vfork)
{
    executes_first(me, fd, copied_by_vfork);
}

static pid_t executed_by_posix_spawn(int fd)
{
    (void)fd;
    extern char **environ;
    pid_t child;
    check(posix_spawn(&child, "/bin/bash", NULL, NULL, waits, environ) == 0, "posix_spawn");
    return child;
}

static pid_t executed_by_popen(int fd)
{
    (void)fd;
    FILE *command = popen("exec bash -c 'read go <&60; read line <&61; echo got $line >&61'", "r");
    check(command != NULL, "popen");
    return -1;
}

CASE(early_executes_by_popen)
{
    executes_first(me, fd, executed_by_popen);
}

CASE(early_executes_after_vfork)
{
    executes_first(me, fd, executed_by_vfork);
}

CASE(early_executes_by_posix_spawn)
{
    executes_first(me, fd, executed_by_posix_spawn);
}

/* A connection that the peer has broken stays broken for the child and for its parent. */
CASE(fork_after_the_peer_has_shut_down_both)
{
    static char bytes[1000];
    if (me == ACCEPTOR) {
        send_all(fd, bytes, sizeof bytes);
        shutdown(fd, SHUT_RDWR);
        meet();
        meet();
        say("recv", recv(fd, bytes, sizeof bytes, 0));
    } else {
        signal(SIGPIPE, SIG_IGN);
        receive_all(fd, bytes, sizeof bytes);
        meet();
        say("send", send(fd, bytes, 64, 0));
        say_events("events", events_of(fd, POLLIN | POLLOUT, 10000));
        check(WAIT_UNTIL(send(fd, bytes, 1, 0) == -1), "an error");
        say("send", send(fd, bytes, 1, 0));
        say("recv", recv(fd, bytes, sizeof bytes, 0));
        pid_t child = fork();
        if (child == 0) {
            pause();
            _exit(1);
        }
        say("recv", recv(fd, bytes, sizeof bytes, 0));
        say("send", send(fd, bytes, sizeof bytes, 0));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        say("send", send(fd, bytes, sizeof bytes, 0));
        meet();
    }
    meet();
}
