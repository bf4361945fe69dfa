/* Addresses at which there is no memory: the kernel says EFAULT. */
#include "case.h"
#include <setjmp.h>

static void *const nowhere[] = { NULL, (void *)8, (void *)-1, (void *)-4096, (void *)(1ul << 60) };
enum { NOWHERE = sizeof nowhere / sizeof nowhere[0] };

static void wait_for_bytes(int fd, int size)
{
    int there;
    check(WAIT_UNTIL(ioctl(fd, FIONREAD, &there) == 0 && there >= size), "the bytes do not come");
}

CASE(pointers_receive)
{
    char text[7] = "";
    if (me == ACCEPTOR) {
        for (int i = 0; i < NOWHERE; i++) {
            say("recv without data", recv(fd, nowhere[i], 3, MSG_DONTWAIT));
            say("read of nothing", read(fd, nowhere[i], 0));
        }
    }
    meet();
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        for (int i = 0; i < NOWHERE; i++) {
            void *bad = nowhere[i];
            struct iovec piece = { bad, 3 };
            struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };
            struct mmsghdr messages = { message, 0 };
            say("read", read(fd, bad, 3));
            say("recv", recv(fd, bad, 3, 0));
            say("recv, peeking", recv(fd, bad, 3, MSG_PEEK));
            say("recv of all", recv(fd, bad, 3, MSG_WAITALL));
            say("recv, counting", recv(fd, bad, 3, MSG_PEEK | MSG_TRUNC));
            say("readv", readv(fd, &piece, 1));
            say("preadv2", preadv2(fd, &piece, 1, -1, 0));
            say("recvmsg", recvmsg(fd, &message, 0));
            say("recvmmsg", recvmmsg(fd, &messages, 1, 0, NULL));
            say("recvfrom", recvfrom(fd, bad, 3, 0, NULL, NULL));
            say("readv of bad vectors", readv(fd, bad, 1));
            say("preadv2 of bad vectors", preadv2(fd, bad, 1, -1, 0));
            say("recvmsg of a bad message", recvmsg(fd, bad, 0));
            say("recvmmsg of bad messages", recvmmsg(fd, bad, 1, 0, NULL));
            message.msg_iov = bad;
            say("recvmsg of bad vectors", recvmsg(fd, &message, 0));
            if (bad) {
                say("recvmmsg for a bad time", recvmmsg(fd, &messages, 1, 0, bad));
            }
        }
        say("recv", recv(fd, text, 6, 0));
        printf("%s\n", text);
    }
    meet();
    if (me == CONNECTOR)
        shutdown(fd, SHUT_WR);
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        say("recv at the end", recv(fd, nowhere[0], 3, 0));
    }
    meet();
}

CASE(pointers_receive_address)
{
    char text[3];
    struct sockaddr_in address;
    socklen_t negative = -1, size = sizeof address;
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 3);
        say("recvfrom", recvfrom(fd, text, 1, 0, (struct sockaddr *)&address, &size));
        say("size", size);
        say("recvfrom without a size", recvfrom(fd, text, 1, 0, (struct sockaddr *)&address, NULL));
        say("recvfrom with a negative size", recvfrom(fd, text, 1, 0, (struct sockaddr *)&address, &negative));
        say("recv", recv(fd, text, 1, MSG_DONTWAIT));
    }
    meet();
}

CASE(pointers_send)
{
    signal(SIGPIPE, SIG_IGN);
    if (me == CONNECTOR) {
        for (int turn = 0; turn < 2; turn++) {
            for (int i = 0; i < NOWHERE; i++) {
                void *bad = nowhere[i];
                struct iovec piece = { bad, 3 };
                struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };
                struct mmsghdr messages = { message, 0 };
                say("write", write(fd, bad, 3));
                say("write of much", write(fd, bad, 300000));
                say("send", send(fd, bad, 3, 0));
                say("send without waiting", send(fd, bad, 3, MSG_DONTWAIT));
                say("sendto", sendto(fd, bad, 3, 0, NULL, 0));
                say("writev", writev(fd, &piece, 1));
                say("pwritev2", pwritev2(fd, &piece, 1, -1, 0));
                say("sendmsg", sendmsg(fd, &message, 0));
                say("sendmmsg", sendmmsg(fd, &messages, 1, 0));
                say("writev of bad vectors", writev(fd, bad, 1));
                say("pwritev2 of bad vectors", pwritev2(fd, bad, 1, -1, 0));
                say("sendmsg of a bad message", sendmsg(fd, bad, 0));
                say("sendmmsg of bad messages", sendmmsg(fd, bad, 1, 0));
                message.msg_iov = bad;
                say("sendmsg of bad vectors", sendmsg(fd, &message, 0));
                piece.iov_base = "abc";
                message.msg_iov = &piece;
                message.msg_control = bad;
                message.msg_controllen = 32;
                say("sendmsg with bad control messages", sendmsg(fd, &message, 0));
            }
            if (turn == 0)
                say("shutdown", shutdown(fd, SHUT_WR));
        }
    } else {
        char text[100];
        int n = 0, more;
        while ((more = recv(fd, text + n, sizeof text - n, 0)) > 0)
            n += more;
        printf("%.*s\n", n, text);
    }
    meet();
}

CASE(pointers_poll)
{
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 3);
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { EPOLLIN };
        for (int i = 0; i < NOWHERE; i++) {
            void *bad = nowhere[i];
            fd_set set;
            FD_ZERO(&set);
            FD_SET(fd, &set);
            say("poll", poll(bad, 1, 0));
            say("ppoll", ppoll(bad, 1, NULL, NULL));
            say("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, bad));
            if (bad) {
                say("select of a bad set", select(fd + 1, bad, NULL, NULL, NULL));
                say("select of a bad set", select(fd + 1, &set, bad, NULL, NULL));
            }
        }
        say("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
        for (int i = 0; i < NOWHERE; i++) {
            say("epoll_wait", epoll_wait(epoll, nowhere[i], 1, 0));
            say("epoll_pwait", epoll_pwait(epoll, nowhere[i], 1, 0, NULL));
            say("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_MOD, fd, nowhere[i]));
        }
        say("epoll_wait", epoll_wait(epoll, &event, 1, 0));
    }
    meet();
}

CASE(pointers_requests)
{
    if (me == ACCEPTOR) {
        for (int i = 0; i < NOWHERE; i++) {
            void *bad = nowhere[i];
            int value = 1;
            socklen_t size = sizeof value;
            say("FIONREAD", ioctl(fd, FIONREAD, bad));
            say("TIOCOUTQ", ioctl(fd, TIOCOUTQ, bad));
            say("FIONBIO", ioctl(fd, FIONBIO, bad));
            say("TCP_NODELAY", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, bad, sizeof value));
            say("TCP_INQ", setsockopt(fd, IPPROTO_TCP, TCP_INQ, bad, sizeof value));
            say("TCP_USER_TIMEOUT", setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, bad, sizeof value));
            say("TCP_NODELAY", getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, bad, &size));
            say("TCP_NODELAY", getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, bad));
            say("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, bad, &size));
            say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, bad, &size));
            say("getpeername", getpeername(fd, bad, &size));
        }
    }
    meet();
}

enum { PAGE = 4096 };

/* Returns so many pages. */
static char *pages(int n)
{
    char *start = mmap(NULL, n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(start != MAP_FAILED, "mmap");
    return start;
}

/* Returns an address behind which there is a page of a file that has been truncated. */
static char *truncated(void)
{
    FILE *file = tmpfile();
    check(file && ftruncate(fileno(file), PAGE) == 0, "a file");
    char *start = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    check(start != MAP_FAILED && ftruncate(fileno(file), 0) == 0, "a mapping");
    return start;
}

/* The memory of a program that is not there, may not be used, or may only be read. */
enum { ABSENT, FORBIDDEN, READ_ONLY, TRUNCATED, KINDS };

static char *memory(int kind)
{
    char *start = kind == TRUNCATED ? truncated() : pages(1);
    if (kind == ABSENT)
        check(munmap(start, PAGE) == 0, "munmap");
    else if (kind != TRUNCATED)
        check(mprotect(start, PAGE, kind == READ_ONLY ? PROT_READ : PROT_NONE) == 0, "mprotect");
    return start;
}

CASE(pointers_memory_send)
{
    if (me == CONNECTOR) {
        for (int kind = 0; kind < KINDS; kind++) {
            char *bad = memory(kind);
            struct iovec both[] = { { "ab", 2 }, { bad, 3 } };
            say("send", send(fd, bad, 3, 0));
            say("send without waiting", send(fd, bad, 3, MSG_DONTWAIT));
            say("write of much", write(fd, bad, 2 * PAGE) > 0 && kind != READ_ONLY);
            if (kind != READ_ONLY)
                say("writev", writev(fd, both, 2));
            say("writev of bad vectors", writev(fd, (struct iovec *)bad, 1));
            say("sendmsg of a bad message", sendmsg(fd, (struct msghdr *)bad, MSG_DONTWAIT) < 0 && kind != READ_ONLY);
        }
        char *end = pages(2) + PAGE;
        check(munmap(end, PAGE) == 0, "munmap");
        say("send across the end", send(fd, end - 3, 6, 0));
        memcpy(end - 3, "xyz", 3);
        say("send to the end", send(fd, end - 3, 3, 0));
        shutdown(fd, SHUT_WR);
    } else {
        char text[100];
        int n = 0, more;
        while ((more = recv(fd, text + n, 1, 0)) > 0)
            n += text[n] != 0;
        printf("%.*s\n", n, text);
    }
    meet();
}

CASE(pointers_memory_receive)
{
    if (me == CONNECTOR)
        send_all(fd, "abcdefgh", 8);
    meet();
    if (me == ACCEPTOR) {
        char text[9] = "";
        wait_for_bytes(fd, 8);
        for (int kind = 0; kind < KINDS; kind++) {
            char *bad = memory(kind);
            struct iovec both[] = { { text, 2 }, { bad, 3 } };
            say("recv", recv(fd, bad, 3, 0));
            say("recv, peeking", recv(fd, bad, 3, MSG_PEEK));
            say("recv of all", recv(fd, bad, 3, MSG_WAITALL));
            say("recv, discarding nothing", recv(fd, bad, 0, MSG_TRUNC | MSG_DONTWAIT));
            say("readv, peeking", recvmsg(fd, &(struct msghdr){ .msg_iov = both + 1, .msg_iovlen = 1 }, MSG_PEEK));
            say("FIONREAD", ioctl(fd, FIONREAD, bad));
            if (kind != READ_ONLY) {
                say("readv of bad vectors", readv(fd, (struct iovec *)bad, 1));
                say("poll", poll((struct pollfd *)bad, 1, 0));
            }
        }
        char *end = pages(2) + PAGE;
        check(munmap(end, PAGE) == 0, "munmap");
        say("recv across the end", recv(fd, end - 3, 6, 0));
        /* There is room for what comes. */
        say("recv of less than there is room for", recv(fd, end - 8, 100, MSG_PEEK));
        say("recv", recv(fd, text, 8, 0));
        printf("%s\n", text);
    }
    meet();
}

static sigjmp_buf back;

static void jumps(int signal)
{
    siglongjmp(back, signal);
}

/* A program's own handler of faults still gets them, and is what the program finds. */
CASE(pointers_handlers)
{
    struct sigaction action = { .sa_handler = jumps, .sa_flags = SA_NODEFER }, before;
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 2; i++) {
            int number = i ? SIGBUS : SIGSEGV;
            check(sigaction(number, &action, &before) == 0, "sigaction");
            printf("%d %d\n", before.sa_handler == SIG_DFL, before.sa_handler == jumps);
            check(sigaction(number, NULL, &before) == 0, "sigaction");
            printf("%d %d\n", before.sa_handler == jumps, before.sa_flags & SA_NODEFER ? 1 : 0);
            int signal = sigsetjmp(back, 1);
            if (!signal)
                *(volatile char *)memory(i ? TRUNCATED : ABSENT) = 1;
            printf("signal %d\n", signal);
            if (me == CONNECTOR)
                say("send", send(fd, memory(i ? TRUNCATED : ABSENT), 1, 0));
        }
        meet();
    }
    signal(SIGSEGV, SIG_DFL);
    printf("%d\n", signal(SIGSEGV, SIG_IGN) == SIG_DFL);
    raise(SIGSEGV);
    raise(SIGSEGV);
    printf("%d\n", signal(SIGSEGV, SIG_DFL) == SIG_IGN);
    pid_t child = fork();
    if (child == 0) {
        raise(SIGSEGV);
        _exit(0);
    }
    int status = 0;
    check(waitpid(child, &status, 0) == child, "waitpid");
    printf("signal %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    meet();
}

static char *faulting;
static int calls, has_information, is_raised;

/* Makes the memory whose use has faulted usable, and says how it was called. */
static void repairs(int signal, siginfo_t *info, void *context)
{
    stack_t stack;
    sigset_t mask;
    sigaltstack(NULL, &stack);
    sigprocmask(SIG_BLOCK, NULL, &mask);
    printf("handler %d: signal %d, on its stack %d, context %d, address %d, errno %d, blocked %d %d %d\n", ++calls, signal,
           stack.ss_flags & SS_ONSTACK ? 1 : 0, context != NULL, has_information && (char *)info->si_addr == faulting,
           has_information ? info->si_errno : 0,
           sigismember(&mask, SIGSEGV), sigismember(&mask, SIGUSR1), sigismember(&mask, SIGBUS));
    fflush(stdout);
    if (!is_raised)
        mprotect(faulting, PAGE, PROT_READ | PROT_WRITE);
}

/* Runs a child whose handler has these flags. It faults twice, and gets the signal once. */
static void fault_in_child(int fd, int flags)
{
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        static char memory_of_stack[64 << 10];
        stack_t stack = { .ss_sp = memory_of_stack, .ss_size = sizeof memory_of_stack };
        sigaltstack(&stack, NULL);
        struct sigaction action = { .sa_flags = flags }, now;
        action.sa_sigaction = repairs;
        sigemptyset(&action.sa_mask);
        sigaddset(&action.sa_mask, SIGUSR1);
        sigaction(SIGSEGV, &action, NULL);
        has_information = flags & SA_SIGINFO;
        for (int i = 0; i < 2; i++) {
            faulting = memory(FORBIDDEN);
            *(volatile char *)faulting = 1;
            say("send", send(fd, memory(FORBIDDEN), 1, MSG_DONTWAIT));
            sigaction(SIGSEGV, NULL, &now);
            printf("%d %#x\n", now.sa_sigaction == repairs, now.sa_flags & ~0x04000000);
            fflush(stdout);
        }
        is_raised = 1;
        raise(SIGSEGV);
        printf("it goes on\n");
        fflush(stdout);
        _exit(0);
    }
    int status;
    check(waitpid(child, &status, 0) == child, "waitpid");
    printf("flags %#x: status %#x\n", flags, status & 0x7f);
}

CASE(pointers_handlers_of_all_kinds)
{
    meet();
    if (me == CONNECTOR) {
        int flags[] = { 0, SA_SIGINFO, SA_RESETHAND, SA_NODEFER, SA_ONSTACK, SA_SIGINFO | SA_ONSTACK | SA_RESTART, SA_RESETHAND | SA_NODEFER };
        for (unsigned i = 0; i < sizeof flags / sizeof flags[0]; i++)
            fault_in_child(fd, flags[i]);
    }
    meet();
}

CASE(pointers_events)
{
    char *end = pages(2) + PAGE;
    check(munmap(end, PAGE) == 0, "munmap");
    int epoll = epoll_create1(EPOLL_CLOEXEC), copies[6];
    for (int i = 0; i < 6; i++) {
        struct epoll_event event = { .events = EPOLLOUT, .data.u64 = i };
        copies[i] = dup(fd);
        check(epoll_ctl(epoll, EPOLL_CTL_ADD, copies[i], &event) == 0, "epoll_ctl");
    }
    say("epoll_wait", epoll_wait(epoll, (struct epoll_event *)(end - sizeof(struct epoll_event)), 64, 100));
    say("epoll_wait", epoll_wait(epoll, (struct epoll_event *)(end - 4), 64, 100));
    for (int i = 0; i < 6; i++)
        close(copies[i]);
    meet();
}
