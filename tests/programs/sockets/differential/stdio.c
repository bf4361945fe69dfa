/* Streams of the C library over descriptors that are, or become, connections: stdio(3), dup(2), dprintf(3), system(3). */
#include "case.h"

/* Prints the lines that have come, up to one that says "end". */
static void say_lines(int fd)
{
    char line[100];
    int len = 0;
    while (recv(fd, line + len, 1, 0) == 1) {
        if (line[len++] != '\n' && len < 99)
            continue;
        line[len] = 0;
        if (strcmp(line, "end\n") == 0)
            return;
        printf("came: %s", line);
        len = 0;
    }
    printf("came: the end, after %d bytes\n", len);
}

static void send_text(int fd, const char *text)
{
    send_all(fd, text, strlen(text));
}

/* Makes `number` a descriptor of the connection. Returns a copy of what it was before. */
static int become(int fd, int number)
{
    fflush(stdout);
    int before = dup(number);
    check(before > 2, "dup");
    check(dup2(fd, number) == number, "dup2");
    return before;
}

static void restore(int before, int number)
{
    check(dup2(before, number) == number, "dup2 back");
    close(before);
}

/* Both ends go on with the connection by its own descriptor. */
static void go_on(int me, int fd)
{
    char bytes[8];
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

CASE(stdio_output)
{
    if (me == ACCEPTOR) {
        int before = become(fd, 1);
        printf("from printf %d\n", 1);
        puts("from puts");
        fflush(stdout);
        check(write(1, "from write\n", 11) == 11, "write");
        fputs("from fputs\n", stdout);
        fflush(stdout);
        restore(before, 1);
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_output_that_stdout_has_already)
{
    if (me == ACCEPTOR) {
        fflush(stdout);
        printf("from before\n");
        int before = dup(1);
        check(dup2(fd, 1) == 1, "dup2");
        fflush(stdout);
        restore(before, 1);
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
}

CASE(stdio_errors)
{
    if (me == CONNECTOR) {
        int before = become(fd, 2);
        errno = ENOENT;
        perror("from perror");
        psignal(SIGTERM, "from psignal");
        fprintf(stderr, "from fprintf\n");
        errno = ENOENT;
        perror("from perror again");
        restore(before, 2);
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_input)
{
    char line[100];
    if (me == ACCEPTOR) {
        send_text(fd, "first\nsecond\n");
        meet();
        meet();
        send_text(fd, "third\nfourth\n");
        shutdown(fd, SHUT_WR);
    } else {
        meet();
        int before = become(fd, 0);
        for (int i = 0; i < 2; i++)
            printf("fgets: %s", fgets(line, sizeof line, stdin) ? line : "none\n");
        meet();
        char *got = NULL;
        size_t size = 0;
        for (int i = 0; i < 2; i++)
            printf("getline: %s", getline(&got, &size, stdin) > 0 ? got : "none\n");
        say("getchar", getchar());
        restore(before, 0);
    }
    meet();
    say("closed", close(fd));
}

CASE(stdio_input_that_has_come)
{
    char line[100];
    if (me == CONNECTOR) {
        send_text(fd, "first\nsecond\n");
        meet();
    } else {
        meet();
        check(recv(fd, line, 3, 0) == 3, "recv");
        int before = become(fd, 0);
        for (int i = 0; i < 2; i++)
            printf("fgets: %s", fgets(line, sizeof line, stdin) ? line : "none\n");
        restore(before, 0);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_both_in_turn)
{
    char line[100];
    if (me == CONNECTOR) {
        int before = become(fd, 0), output = become(fd, 1);
        for (int i = 0; i < 20; i++) {
            printf("question %d\n", i);
            fflush(stdout);
            check(fgets(line, sizeof line, stdin) != NULL, "fgets");
        }
        restore(output, 1);
        restore(before, 0);
        printf("last: %s", line);
    } else {
        FILE *stream = fdopen(dup(fd), "r+");
        for (int i = 0; i < 20; i++) {
            check(fgets(line, sizeof line, stream) != NULL, "fgets");
            fprintf(stream, "response to %s", line);
            fflush(stream);
        }
        fclose(stream);
        printf("last: %s", line);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_in_a_child)
{
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            check(dup2(fd, 1) == 1, "dup2");
            printf("from a child\n");
            fflush(stdout);
            _exit(0);
        }
        check(waitpid(child, NULL, 0) == child, "waitpid");
        send_text(fd, "from the parent\nend\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_in_a_child_that_has_it_alone)
{
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            char line[100];
            check(dup2(fd, 0) == 0 && dup2(fd, 1) == 1, "dup2");
            close(fd);
            while (fgets(line, sizeof line, stdin)) {
                printf("response to %s", line);
                fflush(stdout);
            }
            exit(0);
        }
        close(fd);
        check(waitpid(child, NULL, 0) == child, "waitpid");
    } else {
        char line[100];
        for (int turn = 0; turn < 3; turn++) {
            send_text(fd, "question\n");
            receive_all(fd, line, 21);
            printf("%.21s", line);
        }
        shutdown(fd, SHUT_WR);
        say("end", recv(fd, line, 1, 0));
    }
    meet();
}

CASE(stdio_executed_programs)
{
    if (me == ACCEPTOR) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            dup2(fd, 0);
            dup2(fd, 1);
            dup2(fd, 2);
            execlp("sh", "sh", "-c", "read word; echo got $word; echo error >&2; read word; echo end", NULL);
            _exit(3);
        }
        int status;
        check(waitpid(child, &status, 0) == child, "waitpid");
        say("exit status", status);
    } else {
        send_text(fd, "one\ntwo\n");
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_commands)
{
    if (me == CONNECTOR) {
        int before = become(fd, 1);
        int status = system("echo from system");
        FILE *command = popen("cat", "w");
        fputs("from popen\n", command);
        pclose(command);
        restore(before, 1);
        say("system", status);
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_dprintf)
{
    if (me == CONNECTOR) {
        say("dprintf", dprintf(fd, "number %d\n", 1));
        int copy = fcntl(fd, F_DUPFD_CLOEXEC, 30);
        say("dprintf", dprintf(copy, "number %d\n", 2));
        int before = become(fd, 1);
        dprintf(1, "number 3\n");
        restore(before, 1);
        close(copy);
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_fdopen_of_a_copy)
{
    char line[100];
    if (me == CONNECTOR) {
        FILE *stream = fdopen(dup(fd), "r+");
        fprintf(stream, "from a stream\n");
        fflush(stream);
        printf("fgets: %s", fgets(line, sizeof line, stream) ? line : "none\n");
        fprintf(stream, "end\n");
        say("fclose", fclose(stream));
    } else {
        send_text(fd, "for the stream\n");
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_of_a_closed_number)
{
    if (me == ACCEPTOR) {
        fflush(stdout);
        int before = dup(1), input = dup(0);
        close(1);
        int copy = dup(fd);
        printf("from stdout, number %d\n", copy);
        fflush(stdout);
        close(0);
        int other = fcntl(fd, F_DUPFD, 0);
        char line[100];
        printf("from stdin, number %d: %s", other, fgets(line, sizeof line, stdin) ? line : "none\n");
        fflush(stdout);
        restore(before, 1);
        restore(input, 0);
        send_text(fd, "end\n");
    } else {
        send_text(fd, "for stdin\n");
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

/* A stream keeps its number when the number gets another file. */
CASE(stdio_of_another_stream)
{
    if (me == ACCEPTOR) {
        FILE *stream = fopen("/dev/null", "r+");
        int number = fileno(stream);
        say("dup3", dup3(fd, number, O_CLOEXEC) == number);
        fprintf(stream, "from a stream\n");
        fflush(stream);
        /* Another connection, or this one again, with the same number. */
        int copy = fcntl(fd, F_DUPFD_CLOEXEC, 30);
        say("dup2", dup2(copy, number) == number);
        close(copy);
        fprintf(stream, "from the stream again\n");
        say("fclose", fclose(stream));
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

/* A connection that begins with a low number. */
CASE(stdio_of_a_new_connection)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    char line[100];
    fflush(stdout);
    if (me == ACCEPTOR) {
        int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        check(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, 1) == 0, "listen");
        check(getsockname(listener, (struct sockaddr *)&address, &size) == 0, "getsockname");
        send_all(fd, &address, sizeof address);
        int before = dup(0);
        close(0);
        say("accept", accept(listener, NULL, NULL));
        for (int i = 0; i < 20; i++) {
            check(fgets(line, sizeof line, stdin) != NULL, "fgets");
            send_text(0, line);
        }
        printf("last: %s", line);
        restore(before, 0);
    } else {
        receive_all(fd, &address, sizeof address);
        int before = dup(1);
        close(1);
        int number = socket(AF_INET, SOCK_STREAM, 0);
        check(number == 1 && connect(1, (struct sockaddr *)&address, size) == 0, "connect");
        for (int i = 0; i < 20; i++) {
            printf("line %d\n", i);
            fflush(stdout);
            line[recv(1, line, sizeof line - 1, 0)] = 0;
        }
        restore(before, 1);
        printf("last: %s", line);
    }
    meet();
}

/* The number of a stream's connection becomes another file's. */
static void say_zeros(int number)
{
    char bytes[4] = "abcd";
    say("read", read(number, bytes, 4));
    say("zeros", memcmp(bytes, "\0\0\0\0", 4) == 0);
}

CASE(stdio_number_of_a_closed_stream)
{
    if (me == ACCEPTOR) {
        FILE *stream = fopen("/dev/null", "r+");
        int number = fileno(stream);
        check(dup2(fd, number) == number, "dup2");
        fprintf(stream, "from a stream\n");
        say("fclose", fclose(stream));
        int zeros = open("/dev/zero", O_RDONLY);
        say("the number", zeros == number);
        say_zeros(zeros);
        close(zeros);
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

CASE(stdio_number_of_a_reopened_stream)
{
    if (me == ACCEPTOR) {
        FILE *stream = fopen("/dev/null", "r+");
        int number = fileno(stream);
        check(dup2(fd, number) == number, "dup2");
        fprintf(stream, "from a stream\n");
        stream = freopen("/dev/zero", "r", stream);
        say("freopen", stream != NULL && fileno(stream) == number);
        say_zeros(number);
        say("getc", getc(stream));
        fclose(stream);
        send_text(fd, "end\n");
    } else {
        say_lines(fd);
    }
    meet();
    go_on(me, fd);
}

/* The connection ends with its last descriptor, which a stream closes. */
CASE(stdio_end_of_a_stream)
{
    char bytes[20];
    if (me == CONNECTOR) {
        FILE *stream = fopen("/dev/null", "r+");
        check(dup2(fd, fileno(stream)) == fileno(stream), "dup2");
        close(fd);
        fprintf(stream, "from a stream");
        stream = freopen("/dev/null", "r", stream);
        check(stream != NULL, "freopen");
        fclose(stream);
    } else {
        receive_all(fd, bytes, 13);
        printf("%.13s\n", bytes);
        say("end", recv(fd, bytes, 1, 0));
    }
    meet();
}
