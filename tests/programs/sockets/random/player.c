/* player PATH ID [FD...]: makes the calls that the test tells it, and says what they have returned. It connects to PATH for that.
 *
 * A command is a line: its number, 1 if a thread of its own is to make the call, the call, and numbers. The answer is a line: the
 * command's number, the result, the error, and further numbers. Sockets are named by their places in a table. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <netinet/tcp.h>
#include <unistd.h>

enum { PLACES = 32, MOST = 1 << 18, ARGUMENTS = 8, EVENTS = 8 };

struct command {
    long number;
    int own_thread;
    char call[16];
    long a[ARGUMENTS];
};

static const char *path;
static int places[PLACES], control, passing, listener = -1, epoll = -1;
static pthread_mutex_t answering = PTHREAD_MUTEX_INITIALIZER;

static volatile int broken_pipes;

static void note_broken_pipe(int number)
{
    (void)number;
    broken_pipes++;
}

static void die(const char *what)
{
    perror(what);
    _exit(3);
}

static void answer(const struct command *command, long result, int error, const char *more)
{
    char line[400];
    int size = snprintf(line, sizeof line, "%ld %ld %d %s\n", command->number, result, result < 0 ? error : 0, more);
    pthread_mutex_lock(&answering);
    if (write(control, line, size) != size)
        _exit(0);
    pthread_mutex_unlock(&answering);
}

static struct sockaddr_un address_of(long id)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (id < 0)
        snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    else
        snprintf(address.sun_path, sizeof address.sun_path, "%s.%ld", path, id);
    return address;
}

/* Connects to the test, as the process with this number. */
static void begin(long id)
{
    struct sockaddr_un address = address_of(-1), own = address_of(id);
    control = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (control < 0 || connect(control, (struct sockaddr *)&address, sizeof address) != 0)
        die("connect to the test");
    passing = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    unlink(own.sun_path);
    if (passing < 0 || bind(passing, (struct sockaddr *)&own, sizeof own) != 0)
        die("bind");
    char hello[32];
    int size = sprintf(hello, "%ld\n", id);
    if (write(control, hello, size) != size)
        die("hello");
}

/* The byte of a stream at this position. */
static unsigned char byte_at(unsigned long stream, unsigned long position)
{
    return (position ^ position >> 8 ^ position >> 16) * 31 + stream * 101;
}

static int place_of_new(int place, int fd)
{
    if (fd >= 0)
        places[place] = fd;
    return fd < 0 ? -1 : 0;
}

/* Splits a buffer into three parts. */
static void in_parts(struct iovec parts[3], char *buffer, size_t size)
{
    parts[0] = (struct iovec){ buffer, size / 3 };
    parts[1] = (struct iovec){ buffer + size / 3, 0 };
    parts[2] = (struct iovec){ buffer + size / 3, size - size / 3 };
}

static long send_file(int fd, const char *bytes, size_t size)
{
    int file = memfd_create("bytes", MFD_CLOEXEC);
    if (file < 0 || write(file, bytes, size) != (ssize_t)size)
        die("memfd");
    off_t from = 0;
    long sent = sendfile(fd, file, &from, size);
    int error = errno;
    close(file);
    errno = error;
    return sent;
}

/* PLACE FORM FLAGS SIZE STREAM POSITION. Says how many SIGPIPE have come. */
static void do_send(const struct command *command)
{
    const long *a = command->a;
    int fd = places[a[0]], flags = a[2] | MSG_NOSIGNAL;
    size_t size = a[3];
    char *bytes = malloc(size + 1);
    for (size_t i = 0; i < size; i++)
        bytes[i] = byte_at(a[4], a[5] + i);
    struct iovec parts[3];
    in_parts(parts, bytes, size);
    struct mmsghdr message = { .msg_hdr = { .msg_iov = parts, .msg_iovlen = 3 } };
    long sent;
    int pipes = broken_pipes;
    switch (a[1]) {
    case 0: sent = send(fd, bytes, size, flags); break;
    case 1: sent = sendto(fd, bytes, size, flags, NULL, 0); break;
    case 2: sent = sendmsg(fd, &message.msg_hdr, flags); break;
    case 3:
        sent = sendmmsg(fd, &message, 1, flags);
        if (sent == 1)
            sent = message.msg_len;
        break;
    case 4: sent = write(fd, bytes, size); break;
    case 5: sent = writev(fd, parts, 3); break;
    default: sent = send_file(fd, bytes, size);
    }
    int error = errno;
    free(bytes);
    char more[32];
    sprintf(more, "%d", broken_pipes - pipes);
    answer(command, sent, error, more);
}

/* PLACE FORM FLAGS SIZE STREAM POSITION. Says also how many of the bytes are the right ones. */
static void do_receive(const struct command *command)
{
    const long *a = command->a;
    int fd = places[a[0]], flags = a[2];
    size_t size = a[3];
    char *bytes = malloc(size + 1);
    struct iovec parts[3];
    in_parts(parts, bytes, size);
    struct mmsghdr message = { .msg_hdr = { .msg_iov = parts, .msg_iovlen = 3 } };
    long got;
    switch (a[1]) {
    case 0: got = recv(fd, bytes, size, flags); break;
    case 1: got = recvfrom(fd, bytes, size, flags, NULL, NULL); break;
    case 2: got = recvmsg(fd, &message.msg_hdr, flags); break;
    case 3:
        got = recvmmsg(fd, &message, 1, flags, NULL);
        if (got == 1)
            got = message.msg_len;
        break;
    case 4: got = read(fd, bytes, size); break;
    default: got = readv(fd, parts, 3);
    }
    int error = errno;
    long right = 0;
    while (right < got && (unsigned char)bytes[right] == byte_at(a[4], a[5] + right))
        right++;
    free(bytes);
    char more[32];
    sprintf(more, "%ld", right);
    answer(command, got, error, more);
}

/* PLACE FORM EVENTS MILLISECONDS */
static void do_poll(const struct command *command)
{
    const long *a = command->a;
    int fd = places[a[0]], found;
    struct pollfd poll_fd = { .fd = fd, .events = a[2] };
    if (a[1] == 1) {
        struct timespec time = { a[3] / 1000, a[3] % 1000 * 1000000 };
        found = ppoll(&poll_fd, 1, a[3] < 0 ? NULL : &time, NULL);
    } else if (a[1] == 2) {
        fd_set in, out;
        FD_ZERO(&in);
        FD_ZERO(&out);
        if (a[2] & POLLIN)
            FD_SET(fd, &in);
        if (a[2] & POLLOUT)
            FD_SET(fd, &out);
        struct timeval time = { a[3] / 1000, a[3] % 1000 * 1000 };
        found = select(fd + 1, &in, &out, NULL, a[3] < 0 ? NULL : &time);
        poll_fd.revents = found <= 0 ? 0 : (FD_ISSET(fd, &in) ? POLLIN : 0) | (FD_ISSET(fd, &out) ? POLLOUT : 0);
    } else {
        found = poll(&poll_fd, 1, a[3]);
    }
    char more[32];
    int error = errno;
    sprintf(more, "%d", found > 0 ? poll_fd.revents : 0);
    answer(command, found, error, more);
}

/* OPERATION PLACE EVENTS */
static void do_control(const struct command *command)
{
    const long *a = command->a;
    if (epoll < 0)
        epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = a[2], .data.u64 = a[1] };
    long result = epoll_ctl(epoll, a[0], places[a[1]], &event);
    answer(command, result, errno, "");
}

static volatile int attends;

/* PLACE: makes calls with a socket until `relax`. */
static void do_attend(const struct command *command)
{
    struct pollfd poll_fd = { .fd = places[command->a[0]], .events = POLLIN };
    while (attends) {
        poll(&poll_fd, 1, 1);
        usleep(500);
    }
    answer(command, 0, 0, "");
}

/* MILLISECONDS. Says the place and the events of each. */
static void do_wait(const struct command *command)
{
    struct epoll_event events[EVENTS];
    int found = epoll_wait(epoll, events, EVENTS, command->a[0]), error = errno;
    char more[40 * EVENTS] = "";
    for (int i = 0; i < found; i++)
        sprintf(more + strlen(more), "%lu %u ", (unsigned long)events[i].data.u64, events[i].events);
    answer(command, found, error, more);
}

/* PLACE TURNS FIRST: exchanges bytes with the other end. */
static void do_exchange(const struct command *command)
{
    const long *a = command->a;
    char byte = '.';
    long good = 1;
    for (long turn = 0; turn < a[1] && good == 1; turn++) {
        if (a[2])
            good = send(places[a[0]], &byte, 1, MSG_NOSIGNAL);
        if (good == 1)
            good = recv(places[a[0]], &byte, 1, 0);
        if (good == 1 && !a[2])
            good = send(places[a[0]], &byte, 1, MSG_NOSIGNAL);
    }
    answer(command, good == 1 ? 0 : -1, errno, "");
}

static void do_listen(const struct command *command)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, size) != 0 || listen(listener, 8) != 0
        || getsockname(listener, (struct sockaddr *)&address, &size) != 0)
        die("listen");
    answer(command, ntohs(address.sin_port), 0, "");
}

/* PLACE PORT */
static void do_connect(const struct command *command)
{
    struct sockaddr_in address
        = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(command->a[1]) };
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    long result = connect(fd, (struct sockaddr *)&address, sizeof address);
    places[command->a[0]] = fd;
    answer(command, result, errno, "");
}

/* PLACE PROCESS */
static void do_pass(const struct command *command)
{
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } rights = { .header = { CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS } };
    memcpy(CMSG_DATA(&rights.header), &places[command->a[0]], sizeof(int));
    struct sockaddr_un address = address_of(command->a[1]);
    struct iovec byte = { ".", 1 };
    struct msghdr message = { .msg_name = &address, .msg_namelen = sizeof address, .msg_iov = &byte, .msg_iovlen = 1,
        .msg_control = rights.space, .msg_controllen = sizeof rights.space };
    long result = sendmsg(passing, &message, 0);
    answer(command, result, errno, "");
}

/* PLACE */
static void do_take(const struct command *command)
{
    char rights[CMSG_SPACE(sizeof(int))], byte;
    struct iovec part = { &byte, 1 };
    struct msghdr message
        = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = rights, .msg_controllen = sizeof rights };
    long result = recvmsg(passing, &message, 0);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (result == 1 && header)
        memcpy(&places[command->a[0]], CMSG_DATA(header), sizeof(int));
    answer(command, header ? result : -1, errno, "");
}

/* PROCESS */
static void do_fork(const struct command *command)
{
    pid_t child = fork();
    if (child == 0) {
        close(control);
        close(passing);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pthread_mutex_init(&answering, NULL);
        begin(command->a[0]);
    } else {
        answer(command, child < 0 ? -1 : 0, errno, "");
    }
}

/* PROCESS */
static void do_exec(const struct command *command)
{
    char numbers[PLACES + 1][16], *arguments[PLACES + 4] = { "player", (char *)path, numbers[PLACES] };
    sprintf(numbers[PLACES], "%ld", command->a[0]);
    for (int place = 0; place < PLACES; place++) {
        sprintf(numbers[place], "%d", places[place]);
        arguments[3 + place] = numbers[place];
    }
    execv("/proc/self/exe", arguments);
    answer(command, -1, errno, "");
}

static void do_set(const struct command *command)
{
    const long *a = command->a;
    int fd = places[a[0]], value = a[2], result;
    struct linger none = { 1, 0 };
    switch (a[1]) {
    case 0: result = fcntl(fd, F_SETFL, value ? O_NONBLOCK : 0); break;
    case 1: result = ioctl(fd, FIONBIO, &value); break;
    case 2: result = setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, sizeof value); break;
    case 3: result = setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none); break;
    case 4: result = setsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, sizeof value); break;
    default: result = setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value);
    }
    answer(command, result, errno, "");
}

/* PLACE REQUEST */
static void do_count(const struct command *command)
{
    int bytes = -1;
    long result = ioctl(places[command->a[0]], command->a[1], &bytes);
    answer(command, result < 0 ? -1 : bytes, errno, "");
}

static void perform(const struct command *command)
{
    const long *a = command->a;
    const char *call = command->call;
    if (strcmp(call, "send") == 0)
        return do_send(command);
    if (strcmp(call, "receive") == 0)
        return do_receive(command);
    if (strcmp(call, "poll") == 0)
        return do_poll(command);
    if (strcmp(call, "control") == 0)
        return do_control(command);
    if (strcmp(call, "wait") == 0)
        return do_wait(command);
    if (strcmp(call, "exchange") == 0)
        return do_exchange(command);
    if (strcmp(call, "listen") == 0)
        return do_listen(command);
    if (strcmp(call, "connect") == 0)
        return do_connect(command);
    if (strcmp(call, "pass") == 0)
        return do_pass(command);
    if (strcmp(call, "take") == 0)
        return do_take(command);
    if (strcmp(call, "fork") == 0)
        return do_fork(command);
    if (strcmp(call, "exec") == 0)
        return do_exec(command);
    if (strcmp(call, "set") == 0)
        return do_set(command);
    if (strcmp(call, "count") == 0)
        return do_count(command);
    if (strcmp(call, "attend") == 0)
        return do_attend(command);
    if (strcmp(call, "exit") == 0)
        _exit(0);
    long result = strcmp(call, "relax") == 0 ? 0 : -2;
    if (strcmp(call, "accept") == 0)
        result = place_of_new(a[0], accept(listener, NULL, NULL));
    else if (strcmp(call, "shutdown") == 0)
        result = shutdown(places[a[0]], a[1]);
    else if (strcmp(call, "close") == 0)
        result = close(places[a[0]]);
    else if (strcmp(call, "dup") == 0)
        result = place_of_new(a[1], dup(places[a[0]]));
    else if (strcmp(call, "forget") == 0)
        result = epoll < 0 ? 0 : close(epoll), epoll = -1;
    answer(command, result, errno, "");
}

static void *perform_and_end(void *command)
{
    perform(command);
    free(command);
    return NULL;
}

static void obey(const char *line)
{
    struct command *command = calloc(1, sizeof *command);
    long *a = command->a;
    if (sscanf(line, "%ld %d %15s %ld %ld %ld %ld %ld %ld", &command->number, &command->own_thread, command->call, &a[0], &a[1],
            &a[2], &a[3], &a[4], &a[5]) < 3)
        die(line);
    if (strcmp(command->call, "attend") == 0)
        attends = 1;
    if (strcmp(command->call, "relax") == 0)
        attends = 0;
    pthread_t thread;
    if (command->own_thread && pthread_create(&thread, NULL, perform_and_end, command) == 0) {
        pthread_detach(thread);
    } else {
        perform(command);
        free(command);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        die("player PATH ID [FD...]");
    signal(SIGCHLD, SIG_IGN);
    signal(SIGPIPE, note_broken_pipe);
    path = argv[1];
    for (int place = 0; place < PLACES; place++)
        places[place] = 3 + place < argc ? atoi(argv[3 + place]) : -1;
    begin(atol(argv[2]));
    char line[200];
    for (int size = 0;;) {
        int got = read(control, line + size, 1);
        if (got <= 0)
            return 0;
        if (line[size] != '\n') {
            size++;
            continue;
        }
        line[size] = 0;
        size = 0;
        obey(line);
    }
}
