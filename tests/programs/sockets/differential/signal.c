/* signal(7) and signal-safety(7): handlers that use the connection whose calls they interrupt. */
#include "case.h"

#include <setjmp.h>
#include <sys/time.h>

/* A record says who has sent it, and is its sender's next. */
struct record {
    int sender;
    unsigned number;
    unsigned check[2];
};

enum { MAIN, HANDLER, SENDERS };

static int connection;
static volatile sig_atomic_t handled;
static volatile unsigned next_of[SENDERS];
static sigjmp_buf away;
static volatile int leaves;

static void send_record(int sender)
{
    unsigned number = next_of[sender]++;
    struct record record = { sender, number, { ~number, number * 2654435761u } };
    ssize_t sent = send(connection, &record, sizeof record, MSG_NOSIGNAL);
    check(sent == sizeof record, "send_record");
}

static int is_whole(const struct record *record)
{
    return (record->sender == MAIN || record->sender == HANDLER) && record->check[0] == ~record->number &&
           record->check[1] == record->number * 2654435761u;
}

/* Receives records until the end. Says how many are not whole, or not the next ones of their sender. */
static void receive_records(int fd, int may_miss_some)
{
    static struct record records[4096];
    unsigned next[SENDERS] = { 0 };
    long broken = 0, wrong = 0, rest = 0, n;
    while ((n = recv(fd, (char *)records + rest, sizeof records - rest, 0)) > 0) {
        rest += n;
        long whole = rest / (long)sizeof records[0];
        for (long i = 0; i < whole; i++) {
            struct record *record = &records[i];
            if (!is_whole(record)) {
                broken++;
                continue;
            }
            wrong += may_miss_some ? record->number < next[record->sender] : record->number != next[record->sender];
            next[record->sender] = record->number + 1;
        }
        rest -= whole * sizeof records[0];
        memmove(records, records + whole, rest);
    }
    say("the end", n);
    say("broken", broken);
    say("twice, missing or out of order", wrong);
    say("bytes that are left over", rest);
}

/* Interrupts the main thread again as soon as its handler has run. */
static pthread_t main_thread;
static volatile int is_over;

static void *interrupt(void *unused)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    while (!is_over) {
        sig_atomic_t before = handled;
        pthread_kill(main_thread, SIGUSR1);
        while (handled == before && !is_over)
            sched_yield();
    }
    return unused;
}

static void begin_interrupting(int fd, void (*handler)(int), pthread_t *thread)
{
    connection = fd;
    main_thread = pthread_self();
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
    check(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
    check(pthread_create(thread, NULL, interrupt, NULL) == 0, "pthread_create");
}

static void end_interrupting(pthread_t thread)
{
    is_over = 1;
    pthread_join(thread, NULL);
}

static void begin_timer(int fd, void (*handler)(int), int microseconds)
{
    connection = fd;
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
    check(sigaction(SIGALRM, &action, NULL) == 0, "sigaction");
    struct itimerval interval = { { 0, microseconds }, { 0, microseconds } };
    check(setitimer(ITIMER_REAL, &interval, NULL) == 0, "setitimer");
}

static void end_timer(void)
{
    struct itimerval none = { { 0, 0 }, { 0, 0 } };
    setitimer(ITIMER_REAL, &none, NULL);
    signal(SIGALRM, SIG_DFL);
}

enum { INTERRUPTIONS = 3000 };

static void sends(int signal)
{
    int error = errno;
    (void)signal;
    if (handled < INTERRUPTIONS)
        send_record(HANDLER);
    handled++;
    errno = error;
}

/* Makes room for all that a case sends: TCP, too, mixes what a handler sends with what it interrupts once there is none. */
static void make_room(int fd)
{
    int size = 1 << 20;
    check(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0, "SO_SNDBUF");
}

CASE(signal_handler_sends_while_sending)
{
    if (me == CONNECTOR) {
        pthread_t thread;
        make_room(fd);
        begin_interrupting(fd, sends, &thread);
        for (int i = 0; i < 10000 || handled < INTERRUPTIONS; i++)
            send_record(MAIN);
        end_interrupting(thread);
        shutdown(fd, SHUT_WR);
    } else {
        receive_records(fd, 0);
    }
    meet();
}

CASE(signal_handler_sends_by_the_clock)
{
    if (me == CONNECTOR) {
        make_room(fd);
        begin_timer(fd, sends, 20);
        for (int i = 0; i < 10000 || handled < 500; i++)
            send_record(MAIN);
        end_timer();
        shutdown(fd, SHUT_WR);
    } else {
        receive_records(fd, 0);
    }
    meet();
}

static void writes_vectors(int signal)
{
    int error = errno;
    (void)signal;
    if (handled < INTERRUPTIONS) {
        unsigned number = next_of[HANDLER]++;
        struct record record = { HANDLER, number, { ~number, number * 2654435761u } };
        struct iovec halves[] = { { &record, 8 }, { (char *)&record + 8, 8 } };
        check(writev(connection, halves, 2) == sizeof record, "writev");
    }
    handled++;
    errno = error;
}

CASE(signal_handler_of_signal_sends_vectors)
{
    if (me == CONNECTOR) {
        connection = fd;
        main_thread = pthread_self();
        check(signal(SIGUSR1, writes_vectors) != SIG_ERR, "signal");
        pthread_t thread;
        check(pthread_create(&thread, NULL, interrupt, NULL) == 0, "pthread_create");
        for (int i = 0; i < 10000 || handled < INTERRUPTIONS; i++)
            send_record(MAIN);
        end_interrupting(thread);
        say("the handler is known", signal(SIGUSR1, SIG_DFL) == writes_vectors);
        shutdown(fd, SHUT_WR);
    } else {
        receive_records(fd, 0);
    }
    meet();
}

enum { RECORDS = 50000 };
static unsigned char times_seen[RECORDS];
static volatile long not_whole;

static int receive_record(int flags)
{
    struct record record;
    ssize_t n = recv(connection, &record, sizeof record, flags);
    if (n <= 0)
        return n;
    if (n != sizeof record || !is_whole(&record) || record.number >= RECORDS)
        not_whole++;
    else
        times_seen[record.number]++;
    return n;
}

static void receives(int signal)
{
    int error = errno;
    (void)signal;
    receive_record(MSG_DONTWAIT);
    handled++;
    errno = error;
}

static void say_what_was_seen(void)
{
    long wrong = 0;
    for (int i = 0; i < RECORDS; i++)
        wrong += times_seen[i] != 1;
    say("broken", not_whole);
    say("twice or missing", wrong);
}

static void send_records(int fd)
{
    connection = fd;
    while (next_of[MAIN] < RECORDS)
        send_record(MAIN);
    shutdown(fd, SHUT_WR);
}

CASE(signal_handler_receives_while_receiving)
{
    if (me == CONNECTOR) {
        pthread_t thread;
        begin_interrupting(fd, receives, &thread);
        int n;
        while ((n = receive_record(0)) > 0)
            ;
        say("the end", n);
        end_interrupting(thread);
        say_what_was_seen();
    } else {
        send_records(fd);
    }
    meet();
}

CASE(signal_handler_receives_by_the_clock)
{
    if (me == CONNECTOR) {
        begin_timer(fd, receives, 20);
        int n;
        while ((n = receive_record(0)) > 0)
            ;
        say("the end", n);
        end_timer();
        say_what_was_seen();
    } else {
        send_records(fd);
    }
    meet();
}

/* Looks at the connection in every way, and sends. */
static void looks_and_sends(int signal)
{
    int error = errno, there;
    char byte;
    (void)signal;
    struct pollfd poll_fd = { .fd = connection, .events = POLLIN | POLLOUT };
    poll(&poll_fd, 1, 0);
    ioctl(connection, FIONREAD, &there);
    recv(connection, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    int copy = dup(connection);
    check(copy >= 0 && close(copy) == 0, "dup");
    if (handled < INTERRUPTIONS)
        send_record(HANDLER);
    handled++;
    errno = error;
}

CASE(signal_handler_looks_while_sending_and_receiving)
{
    if (me == CONNECTOR) {
        pthread_t thread;
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { .events = EPOLLIN };
        check(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
        begin_interrupting(fd, looks_and_sends, &thread);
        long wrong = 0;
        for (unsigned i = 0; i < 5000; i++) {
            send_record(MAIN);
            char bytes[16];
            /* A handler may interrupt these, so their results are not certain. */
            struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
            poll(&poll_fd, 1, 0);
            epoll_wait(epoll, &event, 1, 0);
            int there;
            ioctl(fd, FIONREAD, &there);
            /* The other end sends each record of this thread back. */
            receive_all(fd, bytes, sizeof bytes);
            struct record *record = (struct record *)bytes;
            wrong += !is_whole(record) || record->number != i;
        }
        end_interrupting(thread);
        say("wrong answers", wrong);
        shutdown(fd, SHUT_WR);
    } else {
        struct record record;
        unsigned next[SENDERS] = { 0 };
        long n, wrong = 0;
        while ((n = recv(fd, &record, sizeof record, MSG_WAITALL)) == sizeof record) {
            if (!is_whole(&record) || record.number != next[record.sender]++)
                wrong++;
            else if (record.sender == MAIN)
                send_all(fd, &record, sizeof record);
        }
        say("the end", n);
        say("wrong requests", wrong);
    }
    meet();
}

static void sends_and_leaves(int signal)
{
    (void)signal;
    send_record(HANDLER);
    handled++;
    if (leaves)
        siglongjmp(away, 1);
}

CASE(signal_handler_sends_and_leaves_for_good)
{
    if (me == CONNECTOR) {
        pthread_t thread;
        begin_interrupting(fd, sends_and_leaves, &thread);
        volatile int i = 0;
        sigsetjmp(away, 1);
        leaves = 1;
        while (i < 20000 || handled < INTERRUPTIONS / 4) {
            i++;
            send_record(MAIN);
        }
        leaves = 0;
        end_interrupting(thread);
        shutdown(fd, SHUT_WR);
    } else {
        /* The interrupted call may have sent its record or not. */
        receive_records(fd, 1);
    }
    meet();
}

static void forks(int signal)
{
    int error = errno;
    (void)signal;
    pid_t child = fork();
    if (child == 0) {
        send_record(HANDLER);
        _exit(0);
    }
    int status;
    check(child > 0 && waitpid(child, &status, 0) == child && status == 0, "fork");
    next_of[HANDLER]++;
    handled++;
    errno = error;
}

CASE(signal_handler_forks_while_sending)
{
    if (me == CONNECTOR) {
        pthread_t thread;
        begin_interrupting(fd, forks, &thread);
        while (handled < 50)
            send_record(MAIN);
        end_interrupting(thread);
        shutdown(fd, SHUT_WR);
    } else {
        receive_records(fd, 0);
    }
    meet();
}

/* What a program may ask about a handler. */
static void first(int signal)
{
    (void)signal;
}

static void second(int signal, siginfo_t *info, void *context)
{
    (void)context;
    printf("signal %d, code %d, value %d\n", signal, info->si_code, info->si_value.sival_int);
    struct sigaction now;
    sigaction(signal, NULL, &now);
    say("it is the default again", now.sa_handler == SIG_DFL);
}

CASE(signal_handlers_are_those_of_the_program)
{
    if (me == ACCEPTOR) {
        struct sigaction old, action = { .sa_handler = first, .sa_flags = SA_RESTART };
        say("sigaction", sigaction(SIGUSR1, &action, &old));
        say("the default", old.sa_handler == SIG_DFL);
        struct sigaction one_time = { .sa_sigaction = second, .sa_flags = SA_SIGINFO | (int)SA_RESETHAND };
        say("sigaction", sigaction(SIGUSR1, &one_time, &old));
        say("the first", old.sa_handler == first);
        say("its flags", old.sa_flags & ~0x04000000);
        say("sigaction", sigaction(SIGUSR1, NULL, &old));
        say("the second", old.sa_sigaction == second);
        say("its flags", (unsigned)old.sa_flags & ~0x04000000u);
        union sigval value = { .sival_int = 7 };
        say("sigqueue", sigqueue(getpid(), SIGUSR1, value));
        say("no signal", sigaction(SIGKILL, &action, NULL));
        say("no signal", sigaction(0, &action, NULL));
        say("no signal", sigaction(65, &action, NULL));
        say("signal of none", signal(100, first) == SIG_ERR);
        say("signal", signal(SIGUSR2, first) == SIG_DFL);
        say("raise", raise(SIGUSR2));
        say("sigaction", sigaction(SIGUSR2, NULL, &old));
        say("its flags", old.sa_flags & ~0x04000000);
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
        say("siginterrupt", siginterrupt(SIGUSR2, 1));
        say("sigaction", sigaction(SIGUSR2, NULL, &old));
        say("the first", old.sa_handler == first);
        say("its flags", old.sa_flags & ~0x04000000);
        say("signal", signal(SIGUSR2, SIG_IGN) == first);
        say("signal", signal(SIGUSR2, SIG_DFL) == SIG_IGN);
    }
    meet();
}
