/* splice(2), tee(2), vmsplice(2) and sendfile(2). */
#include "case.h"

enum { MUCH = 5 << 20, PIECE = 65536 };

static int in[2];
static char bytes[MUCH], got[MUCH];

static void make_pipe(int flags)
{
    check(pipe2(in, flags | O_CLOEXEC) == 0, "pipe2");
}

/* A pipe that takes no byte more. */
static void make_full_pipe(int flags)
{
    make_pipe(flags);
    int size = fcntl(in[1], F_SETPIPE_SZ, 4096);
    check(write(in[1], bytes, size) == size, "write");
}

static void set_nonblocking(int fd)
{
    check(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0, "F_SETFL");
}

static void say_bytes(const char *what, int fd, int most)
{
    char text[100] = "";
    int n = read(fd, text, most);
    if (n <= 0)
        say(what, n);
    else
        printf("%s: %.*s\n", what, n, text);
    fflush(stdout);
}

static void tell(int number)
{
    say("signal", number);
}

static void wait_for_input(int fd)
{
    say_events("input", events_of(fd, POLLIN, PATIENCE));
}

/* Waits until so many bytes can be received. */
static void wait_for_bytes(int fd, int size)
{
    int there;
    check(WAIT_UNTIL(ioctl(fd, FIONREAD, &there) == 0 && there >= size), "the bytes do not come");
}

static long from_socket(int fd, int len, int flags)
{
    return splice(fd, NULL, in[1], NULL, len, flags);
}

static long to_socket(int fd, int len, int flags)
{
    return splice(in[0], NULL, fd, NULL, len, flags);
}

static void fill_with_pattern(void)
{
    for (int i = 0; i < MUCH; i++)
        bytes[i] = (i * 2654435761u) >> 24;
}

CASE(splice_from_a_socket)
{
    if (me == CONNECTOR)
        send_all(fd, "a few bytes", 11);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 11);
        make_pipe(0);
        say("splice of 2", from_socket(fd, 2, 0));
        say("splice of 3", from_socket(fd, 3, SPLICE_F_NONBLOCK));
        say_bytes("the pipe", in[0], 100);
        say("splice of the rest", from_socket(fd, 1000, SPLICE_F_MOVE | SPLICE_F_NONBLOCK));
        say_bytes("the pipe", in[0], 100);
        int there;
        say("FIONREAD", ioctl(fd, FIONREAD, &there));
        say("left", there);
    }
    meet();
}

CASE(splice_to_a_socket)
{
    if (me == CONNECTOR) {
        make_pipe(0);
        check(write(in[1], "a few bytes", 11) == 11, "write");
        say("splice of 2", to_socket(fd, 2, 0));
        say("splice of 3", to_socket(fd, 3, SPLICE_F_MORE));
        say("splice of the rest", to_socket(fd, 1000, SPLICE_F_MOVE | SPLICE_F_NONBLOCK));
        say("splice of an empty pipe", to_socket(fd, 1000, SPLICE_F_NONBLOCK));
    } else {
        char text[12] = "";
        receive_all(fd, text, 11);
        printf("%s\n", text);
    }
    meet();
}

CASE(splice_arguments)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        wait_for_input(fd);
        make_pipe(0);
        check(write(in[1], "abc", 3) == 3, "write");
        loff_t none = 0, one = 1;
        say("0 bytes from a socket", splice(fd, NULL, in[1], NULL, 0, 0));
        say("0 bytes to a socket", splice(in[0], NULL, fd, NULL, 0, 0));
        say("0 bytes and unknown flags", splice(in[0], NULL, fd, NULL, 0, 256));
        say("unknown flags", splice(fd, NULL, in[1], NULL, 1, 256));
        say("unknown flags", splice(in[0], NULL, fd, NULL, 1, 256));
        say("an offset of 0 in a source socket", splice(fd, &none, in[1], NULL, 1, 0));
        say("an offset of 1 in a source socket", splice(fd, &one, in[1], NULL, 1, 0));
        say("an offset in the pipe behind a socket", splice(fd, NULL, in[1], &none, 1, 0));
        say("an offset in both", splice(fd, &none, in[1], &none, 1, 0));
        say("an offset of 0 in a destination socket", splice(in[0], NULL, fd, &none, 1, 0));
        say("an offset of 1 in a destination socket", splice(in[0], NULL, fd, &one, 1, 0));
        say("an offset in the pipe before a socket", splice(in[0], &none, fd, NULL, 1, 0));
        say("from the writing end", splice(in[1], NULL, fd, NULL, 1, 0));
        say("to the reading end", splice(fd, NULL, in[0], NULL, 1, 0));
        say("from socket to socket", splice(fd, NULL, fd, NULL, 1, 0));
        say("from nothing", splice(-1, NULL, fd, NULL, 1, 0));
        say("to nothing", splice(fd, NULL, -1, NULL, 1, 0));
        int zero = open("/dev/zero", O_RDWR);
        say("from a device", splice(zero, NULL, fd, NULL, 1, 0));
        say("to a device", splice(fd, NULL, zero, NULL, 1, 0));
        say("tee of a socket", tee(fd, in[1], 1, 0));
        say("tee to a socket", tee(in[0], fd, 1, 0));
        struct iovec piece = { bytes, 1 };
        say("vmsplice of a socket", vmsplice(fd, &piece, 1, 0));
        say("copy_file_range from a socket", copy_file_range(fd, NULL, zero, NULL, 1, 0));
        say("copy_file_range to a socket", copy_file_range(zero, NULL, fd, NULL, 1, 0));
        say("copy_file_range between sockets", copy_file_range(fd, NULL, fd, NULL, 1, 0));
        say_bytes("the pipe still has", in[0], 100);
        say_bytes("the socket still has", fd, 100);
    }
    meet();
}

CASE(splice_by_number)
{
    if (me == CONNECTOR) {
        make_pipe(0);
        check(write(in[1], "abcdef", 6) == 6, "write");
        say("splice", syscall(SYS_splice, in[0], NULL, fd, NULL, 6, 0));
    } else {
        make_pipe(0);
        wait_for_bytes(fd, 6);
        say("splice", syscall(SYS_splice, fd, NULL, in[1], NULL, 100, 0));
        say_bytes("the pipe", in[0], 100);
    }
    meet();
}

CASE(splice_from_an_empty_socket)
{
    if (me == ACCEPTOR) {
        make_pipe(0);
        struct timeval moment = { .tv_usec = 20000 };
        check(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &moment, sizeof moment) == 0, "SO_RCVTIMEO");
        say("splice after a timeout", from_socket(fd, 10, 0));
        say("splice that must not wait for the pipe", from_socket(fd, 10, SPLICE_F_NONBLOCK));
        set_nonblocking(fd);
        say("splice without waiting", from_socket(fd, 10, 0));
        say("splice without waiting", from_socket(fd, 10, SPLICE_F_NONBLOCK));
    }
    meet();
}

CASE(splice_waits_for_the_socket)
{
    if (me == ACCEPTOR) {
        make_pipe(0);
        meet();
        say("splice", from_socket(fd, 10, 0));
        say_bytes("the pipe", in[0], 100);
        say("splice", from_socket(fd, 10, 0));
    } else {
        meet();
        usleep(30000);
        send_all(fd, "abc", 3);
        usleep(30000);
        shutdown(fd, SHUT_WR);
    }
    meet();
}

CASE(splice_from_an_empty_pipe)
{
    if (me == CONNECTOR) {
        make_pipe(0);
        say("splice without waiting", to_socket(fd, 10, SPLICE_F_NONBLOCK));
        set_nonblocking(in[0]);
        say("splice without waiting", to_socket(fd, 10, 0));
        make_pipe(0);
        check(write(in[1], "abc", 3) == 3, "write");
        close(in[1]);
        say("splice of all", to_socket(fd, 10, 0));
        say("splice without a writer", to_socket(fd, 10, 0));
        say("splice without a writer", to_socket(fd, 10, SPLICE_F_NONBLOCK));
    }
    meet();
}

static void *write_later(void *to)
{
    usleep(30000);
    check(write(*(int *)to, "abc", 3) == 3, "write");
    usleep(30000);
    close(*(int *)to);
    return NULL;
}

CASE(splice_waits_for_the_pipe)
{
    if (me == CONNECTOR) {
        make_pipe(0);
        pthread_t thread;
        check(pthread_create(&thread, NULL, write_later, &in[1]) == 0, "pthread_create");
        say("splice", to_socket(fd, 10, 0));
        say("splice", to_socket(fd, 10, 0));
        pthread_join(thread, NULL);
    } else {
        char text[4] = "";
        receive_all(fd, text, 3);
        printf("%s\n", text);
    }
    meet();
}

CASE(splice_to_a_full_pipe)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 3);
        make_full_pipe(0);
        say("splice without waiting", from_socket(fd, 10, SPLICE_F_NONBLOCK));
        set_nonblocking(in[1]);
        say("splice without waiting", from_socket(fd, 10, 0));
        set_nonblocking(fd);
        say("splice without waiting", from_socket(fd, 10, 0));
        say_bytes("the socket still has", fd, 100);
    }
    meet();
}

static void *read_later(void *from)
{
    usleep(30000);
    for (int n = 0; n < 4096 + 3; ) {
        int more = read(*(int *)from, got + n, 8192);
        check(more > 0, "read");
        n += more;
    }
    return NULL;
}

CASE(splice_waits_for_room_in_the_pipe)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 3);
        make_full_pipe(0);
        pthread_t thread;
        check(pthread_create(&thread, NULL, read_later, &in[0]) == 0, "pthread_create");
        say("splice", from_socket(fd, 10, 0));
        pthread_join(thread, NULL);
        printf("%.3s\n", got + 4096);
    }
    meet();
}

CASE(splice_to_a_pipe_without_a_reader)
{
    signal(SIGPIPE, tell);
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 3);
        make_pipe(0);
        close(in[0]);
        say("splice", from_socket(fd, 10, 0));
        say("splice", from_socket(fd, 10, SPLICE_F_NONBLOCK));
        make_full_pipe(0);
        close(in[0]);
        say("splice to one that is full", from_socket(fd, 10, 0));
        say_bytes("the socket still has", fd, 100);
        set_nonblocking(fd);
        say("splice of nothing", from_socket(fd, 10, 0));
    }
    meet();
}

CASE(splice_at_the_end_of_the_stream)
{
    if (me == CONNECTOR) {
        send_all(fd, "abc", 3);
        shutdown(fd, SHUT_WR);
    }
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        make_pipe(0);
        say("splice", from_socket(fd, 10, 0));
        say("splice", from_socket(fd, 10, 0));
        set_nonblocking(fd);
        say("splice", from_socket(fd, 10, SPLICE_F_NONBLOCK));
        say_bytes("the pipe", in[0], 100);
    }
    meet();
}

CASE(splice_after_receiving_was_shut_down)
{
    if (me == ACCEPTOR) {
        make_pipe(0);
        say("shutdown", shutdown(fd, SHUT_RD));
        say("splice", from_socket(fd, 10, 0));
    }
    meet();
}

CASE(splice_after_sending_was_shut_down)
{
    signal(SIGPIPE, tell);
    if (me == ACCEPTOR) {
        make_pipe(0);
        check(write(in[1], "abc", 3) == 3, "write");
        say("shutdown", shutdown(fd, SHUT_WR));
        say("splice", to_socket(fd, 10, 0));
        say("splice", to_socket(fd, 10, SPLICE_F_NONBLOCK));
        say_bytes("the pipe still has", in[0], 100);
        set_nonblocking(in[0]);
        say("splice of an empty pipe", to_socket(fd, 10, 0));
    }
    meet();
}

CASE(splice_to_a_peer_that_has_closed)
{
    signal(SIGPIPE, tell);
    if (me == CONNECTOR)
        close(fd);
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        make_pipe(0);
        check(write(in[1], "abcdef", 6) == 6, "write");
        say("splice", to_socket(fd, 3, 0));
        say_events("hang-up", events_of(fd, 0, PATIENCE));
        say("splice", to_socket(fd, 3, 0));
        say_bytes("the pipe still has", in[0], 100);
    }
    meet();
}

CASE(splice_after_a_reset)
{
    signal(SIGPIPE, tell);
    if (me == CONNECTOR)
        abort_connection(fd);
    meet();
    if (me == ACCEPTOR) {
        say_events("hang-up", events_of(fd, 0, PATIENCE));
        make_pipe(0);
        check(write(in[1], "abcdef", 6) == 6, "write");
        say("splice", from_socket(fd, 10, 0));
        say("splice", from_socket(fd, 10, 0));
        say("splice", to_socket(fd, 3, 0));
    }
    meet();
}

CASE(splice_what_was_peeked)
{
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        make_pipe(0);
        say("recv", recv(fd, got, 6, MSG_PEEK));
        say("splice", from_socket(fd, 4, 0));
        say("recv", recv(fd, got, 6, 0));
        printf("%.2s\n", got);
        say_bytes("the pipe", in[0], 100);
    }
    meet();
}

static void nothing(int number)
{
}

/* Delivers a signal in a while. */
static void interrupt(int flags)
{
    struct sigaction action = { .sa_handler = nothing, .sa_flags = flags };
    check(sigaction(SIGALRM, &action, NULL) == 0, "sigaction");
    struct itimerval soon = { .it_value.tv_usec = 50000 };
    check(setitimer(ITIMER_REAL, &soon, NULL) == 0, "setitimer");
}

CASE(splice_is_interrupted)
{
    if (me == ACCEPTOR) {
        make_pipe(0);
        interrupt(0);
        say("splice of an empty socket", from_socket(fd, 10, 0));
        interrupt(0);
        say("splice of an empty pipe", to_socket(fd, 10, 0));
        make_full_pipe(0);
        interrupt(0);
        say("splice to a full pipe", from_socket(fd, 10, 0));
    }
    meet();
}

CASE(splice_is_restarted)
{
    if (me == ACCEPTOR) {
        make_pipe(0);
        interrupt(SA_RESTART);
        meet();
        say("splice of an empty socket", from_socket(fd, 10, 0));
        say_bytes("the pipe", in[0], 100);
        pthread_t thread;
        check(pthread_create(&thread, NULL, write_later, &in[1]) == 0, "pthread_create");
        interrupt(SA_RESTART);
        say("splice of an empty pipe", to_socket(fd, 10, 0));
        pthread_join(thread, NULL);
    } else {
        meet();
        usleep(150000);
        send_all(fd, "abc", 3);
    }
    meet();
}

CASE(splice_fed_by_vmsplice_and_tee)
{
    if (me == CONNECTOR) {
        make_pipe(0);
        int other[2];
        check(pipe2(other, O_CLOEXEC) == 0, "pipe2");
        static char page[4096] __attribute__((aligned(4096))) = "of a page";
        struct iovec piece = { page, 9 };
        say("vmsplice", vmsplice(in[1], &piece, 1, 0));
        say("tee", tee(in[0], other[1], 100, 0));
        say("splice", to_socket(fd, 100, 0));
        say("splice of the copy", splice(other[0], NULL, fd, NULL, 100, 0));
        say("tee of an empty pipe", tee(in[0], other[1], 100, SPLICE_F_NONBLOCK));
    } else {
        char text[19] = "";
        receive_all(fd, text, 18);
        printf("%s\n", text);
    }
    meet();
}

/* Moves so many bytes from a pipe to the socket. */
static void *all_to_socket(void *socket)
{
    int fd = *(int *)socket;
    for (long sent = 0, n; sent < MUCH; sent += n) {
        n = to_socket(fd, MUCH - sent, SPLICE_F_MOVE | SPLICE_F_MORE);
        if (n < 0 && errno == EAGAIN) {
            events_of(fd, POLLOUT, PATIENCE);
            n = 0;
            continue;
        }
        check(n > 0, "splice to the socket");
    }
    return NULL;
}

static void *all_from_socket(void *socket)
{
    int fd = *(int *)socket;
    for (long taken = 0, n; taken < MUCH; taken += n) {
        n = from_socket(fd, MUCH - taken, SPLICE_F_MOVE);
        if (n < 0 && errno == EAGAIN) {
            events_of(fd, POLLIN, PATIENCE);
            n = 0;
            continue;
        }
        check(n > 0, "splice from the socket");
    }
    return NULL;
}

/* One end sends by splice, the other receives by splice. */
static void move_much(int me, int fd)
{
    fill_with_pattern();
    make_pipe(0);
    pthread_t thread;
    if (me == CONNECTOR) {
        check(pthread_create(&thread, NULL, all_to_socket, &fd) == 0, "pthread_create");
        for (int written = 0, n; written < MUCH; written += n) {
            n = write(in[1], bytes + written, written + PIECE + 77 < MUCH ? PIECE + 77 : MUCH - written);
            check(n > 0, "write");
        }
    } else {
        check(pthread_create(&thread, NULL, all_from_socket, &fd) == 0, "pthread_create");
        for (int taken = 0, n; taken < MUCH; taken += n) {
            n = read(in[0], got + taken, MUCH - taken);
            check(n > 0, "read");
        }
        say("the bytes are the same", memcmp(bytes, got, MUCH) == 0);
    }
    pthread_join(thread, NULL);
}

CASE(splice_much)
{
    move_much(me, fd);
    meet();
    move_much(!me, fd);
    meet();
}

CASE(splice_much_without_waiting)
{
    set_nonblocking(fd);
    move_much(me, fd);
    meet();
    move_much(!me, fd);
    meet();
}

/* Some bytes are spliced, and others are sent and received by other calls. */
CASE(splice_among_other_calls)
{
    fill_with_pattern();
    make_pipe(0);
    if (me == CONNECTOR) {
        for (int sent = 0, turn = 0; sent < MUCH; turn++) {
            int size = 1 + turn * 7919 % 30000, n;
            if (size > MUCH - sent)
                size = MUCH - sent;
            if (turn % 3) {
                check(write(in[1], bytes + sent, size) == size, "write");
                for (int moved = 0; moved < size; moved += n) {
                    n = to_socket(fd, size - moved, 0);
                    check(n > 0, "splice");
                }
            } else {
                send_all(fd, bytes + sent, size);
            }
            sent += size;
        }
    } else {
        for (int taken = 0, turn = 0; taken < MUCH; turn++) {
            int size = 1 + turn * 5471 % 40000, n;
            if (size > MUCH - taken)
                size = MUCH - taken;
            if (turn % 3) {
                n = from_socket(fd, size, 0);
                check(n > 0, "splice");
                check(read(in[0], got + taken, n) == n, "read");
            } else {
                n = recv(fd, got + taken, size, 0);
                check(n > 0, "recv");
            }
            taken += n;
        }
        say("the bytes are the same", memcmp(bytes, got, MUCH) == 0);
    }
    meet();
}

/* A pipe whose bytes do not all fit into the socket's buffers keeps the others. */
CASE(splice_to_a_full_socket)
{
    if (me == CONNECTOR) {
        set_nonblocking(fd);
        make_pipe(O_NONBLOCK);
        long fed = 0, sent = 0, n;
        do {
            while ((n = write(in[1], bytes, 1 + fed % 1000)) > 0)
                fed += n;
            n = to_socket(fd, MUCH, SPLICE_F_NONBLOCK);
            sent += n > 0 ? n : 0;
        } while (n > 0);
        say("splice", n);
        say_events("room", events_of(fd, POLLOUT, 0));
        meet();
        say_events("room", events_of(fd, POLLOUT, PATIENCE));
        for (; sent < fed; sent += n > 0 ? n : 0) {
            n = to_socket(fd, MUCH, SPLICE_F_NONBLOCK);
            check(n > 0 || events_of(fd, POLLOUT, PATIENCE) != 0, "splice");
        }
        say("splice of all", to_socket(fd, MUCH, SPLICE_F_NONBLOCK));
        shutdown(fd, SHUT_WR);
        long received;
        say_events("answer", events_of(fd, POLLIN, PATIENCE));
        receive_all(fd, &received, sizeof received);
        say("all came", received == fed);
    } else {
        meet();
        long received = 0, n;
        while ((n = recv(fd, got, MUCH, 0)) > 0)
            received += n;
        say("recv", n);
        send_all(fd, &received, sizeof received);
    }
    meet();
}

struct mover {
    int fd, pipe[2];
    char letter;
    long moved;
};

static void *move_from(void *mover)
{
    struct mover *me = mover;
    long n;
    while ((n = splice(me->fd, NULL, me->pipe[1], NULL, 3000, 0)) > 0) {
        check(read(me->pipe[0], (char[3000]){ 0 }, 3000) == n, "read");
        me->moved += n;
    }
    return NULL;
}

static void *move_to(void *mover)
{
    struct mover *me = mover;
    char text[1000];
    memset(text, me->letter, sizeof text);
    for (int turn = 0; turn < 1000; turn++) {
        check(write(me->pipe[1], text, sizeof text) == sizeof text, "write");
        for (long moved = 0, n; moved < (long)sizeof text; moved += n) {
            n = splice(me->pipe[0], NULL, me->fd, NULL, sizeof text - moved, 0);
            check(n > 0, "splice");
        }
    }
    return NULL;
}

CASE(splice_by_two_threads)
{
    struct mover movers[2] = { { .fd = fd, .letter = 'a' }, { .fd = fd, .letter = 'b' } };
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        check(pipe2(movers[i].pipe, O_CLOEXEC) == 0, "pipe2");
        check(pthread_create(&threads[i], NULL, me == CONNECTOR ? move_to : move_from, &movers[i]) == 0, "pthread_create");
    }
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    if (me == CONNECTOR)
        shutdown(fd, SHUT_WR);
    else
        say("moved", movers[0].moved + movers[1].moved);
    meet();
}

static void *to_socket_to_the_end(void *socket)
{
    while (to_socket(*(int *)socket, 1000, 0) > 0)
        ;
    return NULL;
}

/* Two threads take from one pipe. The bytes come in the order of the pipe. */
CASE(splice_one_pipe_by_two_threads)
{
    fill_with_pattern();
    if (me == CONNECTOR) {
        make_pipe(0);
        pthread_t threads[2];
        for (int i = 0; i < 2; i++)
            check(pthread_create(&threads[i], NULL, to_socket_to_the_end, &fd) == 0, "pthread_create");
        for (int written = 0, n; written < MUCH; written += n) {
            n = write(in[1], bytes + written, written + PIECE < MUCH ? PIECE : MUCH - written);
            check(n > 0, "write");
        }
        close(in[1]);
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
    } else {
        receive_all(fd, got, MUCH);
        say("the bytes are the same", memcmp(bytes, got, MUCH) == 0);
    }
    meet();
}

static int make_file(const char *text)
{
    int file = memfd_create("file", MFD_CLOEXEC);
    check(write(file, text, strlen(text)) == (long)strlen(text), "write");
    lseek(file, 0, SEEK_SET);
    return file;
}

CASE(sendfile_of_a_file)
{
    if (me == CONNECTOR) {
        int file = make_file("the text of a file");
        off_t at = 4;
        say("sendfile", sendfile(fd, file, &at, 4));
        say("offset", at);
        say("position", lseek(file, 0, SEEK_CUR));
        say("sendfile", sendfile(fd, file, NULL, 3));
        say("position", lseek(file, 0, SEEK_CUR));
        say("sendfile of nothing", sendfile(fd, file, NULL, 0));
        say("sendfile of the rest", sendfile(fd, file, NULL, 1000));
        say("sendfile at the end", sendfile(fd, file, NULL, 1000));
        at = 100;
        say("sendfile behind the end", sendfile(fd, file, &at, 1000));
        say("offset", at);
        at = -1;
        say("sendfile of a negative offset", sendfile(fd, file, &at, 1000));
        shutdown(fd, SHUT_WR);
    } else {
        char text[100] = "";
        int n = 0, more;
        while ((more = recv(fd, text + n, 100 - n, 0)) > 0)
            n += more;
        printf("%s\n", text);
    }
    meet();
}

CASE(sendfile_of_other_things)
{
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        make_pipe(0);
        check(write(in[1], "abc", 3) == 3, "write");
        off_t none = 0;
        say("a pipe", sendfile(fd, in[0], NULL, 2));
        say("a pipe with an offset", sendfile(fd, in[0], &none, 2));
        say("the writing end of a pipe", sendfile(fd, in[1], NULL, 2));
        say("the socket itself", sendfile(fd, fd, NULL, 2));
        say("no descriptor", sendfile(fd, -1, NULL, 2));
        say("nothing of a pipe", sendfile(fd, in[0], NULL, 0));
        int file = open("/proc/self/exe", O_PATH);
        say("a path", sendfile(fd, file, NULL, 2));
        say("a directory", sendfile(fd, open("/", O_RDONLY), NULL, 2));
        file = open("/dev/zero", O_RDWR);
        say("a device", sendfile(fd, file, NULL, 2));
        file = make_file("text");
        say("a socket to a file", sendfile(file, fd, NULL, 2));
        say("a socket to a pipe with an offset", sendfile(in[1], fd, &none, 2));
        say("a socket to a pipe", sendfile(in[1], fd, NULL, 2));
        say("nothing to a pipe", sendfile(in[1], fd, NULL, 0));
        say_bytes("the pipe", in[0], 100);
        say_bytes("the socket still has", fd, 100);
        set_nonblocking(fd);
        say("an empty socket to a pipe", sendfile(in[1], fd, NULL, 2));
        send_all(fd, "end", 3);
    } else {
        char text[6] = "";
        receive_all(fd, text, 5);
        printf("%d %d %s\n", text[0], text[1], text + 2);
    }
    meet();
}

CASE(sendfile_after_sending_was_shut_down)
{
    signal(SIGPIPE, tell);
    if (me == CONNECTOR) {
        int file = make_file("text");
        shutdown(fd, SHUT_WR);
        off_t at = 1;
        say("sendfile", sendfile(fd, file, &at, 2));
        say("offset", at);
        say("sendfile of nothing", sendfile(fd, file, &at, 0));
        at = 100;
        say("sendfile behind the end", sendfile(fd, file, &at, 10));
    }
    meet();
}

/* Two processes have the connection, and move bytes in turn. */
CASE(splice_after_fork)
{
    make_pipe(0);
    for (int turn = 0; turn < 6; turn++) {
        if (me == CONNECTOR) {
            pid_t child = fork();
            check(child >= 0, "fork");
            if (child == 0) {
                check(write(in[1], "of the child ", 13) == 13, "write");
                _exit(to_socket(fd, 13, 0) != 13);
            }
            int status;
            check(waitpid(child, &status, 0) == child, "waitpid");
            say("the child", status);
            check(write(in[1], "of the parent ", 14) == 14, "write");
            say("splice", to_socket(fd, 14, 0));
        } else {
            for (int n = 0, more; n < 27; n += more) {
                more = from_socket(fd, 27 - n, 0);
                check(more > 0, "splice");
            }
            say_bytes("the pipe", in[0], 27);
        }
        meet();
    }
}

/* The receiver's child takes the bytes, and then its parent does. */
CASE(splice_in_a_child_that_receives)
{
    make_pipe(0);
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        pid_t child = fork();
        check(child >= 0, "fork");
        if (child == 0)
            _exit(from_socket(fd, 2, 0) != 2);
        int status;
        check(waitpid(child, &status, 0) == child, "waitpid");
        say("the child", status);
        say_bytes("the pipe", in[0], 100);
        say("splice", from_socket(fd, 100, 0));
        say_bytes("the pipe", in[0], 100);
    }
    meet();
}

/* A connection goes back to TCP while its bytes are moved, because another process gets its descriptor. */
CASE(splice_and_pass_on)
{
    fill_with_pattern();
    enum { SIZE = 300000 };
    if (me == CONNECTOR) {
        make_pipe(0);
        int pair[2];
        check(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
        for (int sent = 0; sent < SIZE; sent += 3000) {
            check(write(in[1], bytes + sent, 3000) == 3000, "write");
            for (int moved = 0, n; moved < 3000; moved += n) {
                n = to_socket(fd, 3000 - moved, 0);
                check(n > 0, "splice");
            }
            if (sent == SIZE / 2) {
                char control[CMSG_SPACE(sizeof fd)] = "", byte = 0;
                struct iovec piece = { &byte, 1 };
                struct msghdr message = {
                    .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control
                };
                struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
                *rights = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd) };
                memcpy(CMSG_DATA(rights), &fd, sizeof fd);
                check(WAIT_UNTIL(sendmsg(pair[0], &message, 0) == 1), "sendmsg");
            }
        }
        check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    } else {
        make_pipe(0);
        int taken = 0, n;
        while ((n = from_socket(fd, 5000, 0)) > 0) {
            check(read(in[0], got + taken, n) == n, "read");
            taken += n;
        }
        say("splice", n);
        say("bytes", taken);
        say("they are the same", memcmp(bytes, got, SIZE) == 0);
    }
    meet();
}
