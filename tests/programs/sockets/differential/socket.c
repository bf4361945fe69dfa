/* socket(7), recv(2), send(2) and their variants. */
#include "case.h"

CASE(socket_read_nothing)
{
    char byte;
    if (me == CONNECTOR) {
        say("read of 0 bytes without data", read(fd, &byte, 0));
        struct iovec none = { &byte, 0 };
        say("readv of 0 bytes without data", readv(fd, &none, 1));
        say("readv of no vectors", readv(fd, &none, 0));
    }
    meet();
}

CASE(socket_receive_nothing)
{
    char byte;
    if (me == CONNECTOR) {
        say("recv of 0 bytes without data", recv(fd, &byte, 0, MSG_DONTWAIT));
        struct msghdr none = { 0 };
        say("recvmsg of 0 bytes without data", recvmsg(fd, &none, MSG_DONTWAIT));
    }
    meet();
    if (me == ACCEPTOR)
        send_all(fd, "ab", 2);
    meet();
    if (me == CONNECTOR) {
        say("readable", events_of(fd, POLLIN, PATIENCE));
        say("recv of 0 bytes", recv(fd, &byte, 0, 0));
        say("recv of 0 bytes, peeking", recv(fd, &byte, 0, MSG_PEEK));
        say("recv of 1 byte", recv(fd, &byte, 1, 0));
        say("recv of 1 byte", recv(fd, &byte, 1, 0));
        say("recv of 0 bytes", recv(fd, &byte, 0, MSG_DONTWAIT));
    }
    meet();
    if (me == ACCEPTOR)
        close(fd);
    meet();
    if (me == CONNECTOR)
        say("recv of 0 bytes at the end", recv(fd, &byte, 0, 0));
}

CASE(socket_send_nothing)
{
    signal(SIGPIPE, SIG_IGN);
    if (me == CONNECTOR) {
        say("send of 0 bytes", send(fd, "", 0, 0));
        say("write of 0 bytes", write(fd, "", 0));
        say("writev of no vectors", writev(fd, NULL, 0));
        say("shutdown", shutdown(fd, SHUT_WR));
        say("send of 0 bytes", send(fd, "", 0, 0));
        say("write of 0 bytes", write(fd, "", 0));
        struct iovec none = { "", 0 };
        say("writev of 0 bytes", writev(fd, &none, 1));
        say("pwritev2 of 0 bytes", pwritev2(fd, &none, 1, -1, 0));
        struct msghdr message = { .msg_iov = &none, .msg_iovlen = 1 };
        say("sendmsg of 0 bytes", sendmsg(fd, &message, 0));
        say("send of 1 byte", send(fd, "", 1, MSG_NOSIGNAL));
    }
    meet();
}

CASE(socket_vector_counts)
{
    static struct iovec vectors[UIO_MAXIOV + 1];
    char byte = 'a';
    if (me == CONNECTOR)
        send_all(fd, "abc", 3);
    meet();
    int counts[] = { -1, UIO_MAXIOV + 1 };
    for (int i = 0; i < 2; i++) {
        if (me == ACCEPTOR) {
            say("readv", readv(fd, vectors, counts[i]));
            say("writev", writev(fd, vectors, counts[i]));
            say("preadv2", preadv2(fd, vectors, counts[i], -1, 0));
            say("pwritev2", pwritev2(fd, vectors, counts[i], -1, 0));
            struct msghdr message = { .msg_iov = vectors, .msg_iovlen = counts[i] };
            say("sendmsg", sendmsg(fd, &message, 0));
            say("recvmsg", recvmsg(fd, &message, 0));
        }
    }
    if (me == ACCEPTOR) {
        for (int i = 0; i < UIO_MAXIOV; i++)
            vectors[i] = (struct iovec){ &byte, i == UIO_MAXIOV - 1 };
        say("readv of the most vectors", readv(fd, vectors, UIO_MAXIOV));
        say("writev of the most vectors", writev(fd, vectors, UIO_MAXIOV));
    }
    meet();
}

CASE(socket_vector_lengths)
{
    char bytes[8] = "abcdefg";
    if (me == CONNECTOR)
        send_all(fd, bytes, 8);
    meet();
    if (me == ACCEPTOR) {
        struct iovec negative[] = { { bytes, 1 }, { bytes, -1 } };
        say("writev with a negative length", writev(fd, negative, 2));
        say("readv with a negative length", readv(fd, negative, 2));
        struct msghdr message = { .msg_iov = negative, .msg_iovlen = 2 };
        say("sendmsg with a negative length", sendmsg(fd, &message, 0));
        say("recvmsg with a negative length", recvmsg(fd, &message, 0));
        say("write of a negative length", write(fd, bytes, -1));
        say("read of a negative length", read(fd, bytes, -1));
    }
    meet();
    if (me == ACCEPTOR)
        send_all(fd, "z", 1);
    else
        say("bytes", recv(fd, bytes, 8, 0));
    meet();
}

CASE(socket_receive_many)
{
    enum { COUNT = 4 };
    char bytes[COUNT][4];
    struct iovec vectors[COUNT];
    struct mmsghdr messages[COUNT];
    memset(messages, 0, sizeof messages);
    for (int i = 0; i < COUNT; i++) {
        vectors[i] = (struct iovec){ bytes[i], 2 };
        messages[i].msg_hdr = (struct msghdr){ .msg_iov = &vectors[i], .msg_iovlen = 1 };
    }
    if (me == CONNECTOR)
        send_all(fd, "abcd", 4);
    meet();
    if (me == ACCEPTOR) {
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 4; })), "4 bytes");
        say("recvmmsg of 4, with MSG_WAITFORONE", recvmmsg(fd, messages, COUNT, MSG_WAITFORONE, NULL));
        say("recvmmsg of 4, with MSG_DONTWAIT", recvmmsg(fd, messages, COUNT, MSG_DONTWAIT, NULL));
    }
    meet();
    if (me == CONNECTOR) {
        send_all(fd, "ab", 2);
        usleep(20000);
        send_all(fd, "cdefgh", 6);
    } else {
        say("recvmmsg of 4", recvmmsg(fd, messages, COUNT, 0, NULL));
        int sum = 0;
        for (int i = 0; i < COUNT; i++)
            sum += messages[i].msg_len;
        say("bytes", sum);
    }
    meet();
    if (me == CONNECTOR) {
        send_all(fd, "ab", 2);
        close(fd);
    } else {
        say("recvmmsg of 4 at the end", recvmmsg(fd, messages, COUNT, 0, NULL));
        for (int i = 0; i < COUNT; i++)
            say("bytes", messages[i].msg_len);
        struct timespec wrong = { 0, -1 };
        say("recvmmsg with a negative time", recvmmsg(fd, messages, COUNT, 0, &wrong));
    }
}

CASE(socket_peek)
{
    char bytes[8] = "";
    if (me == CONNECTOR)
        send_all(fd, "abcd", 4);
    meet();
    if (me == ACCEPTOR) {
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 4; })), "4 bytes");
        say("peek", recv(fd, bytes, 8, MSG_PEEK));
        say("peek and truncate", recv(fd, bytes, 2, MSG_PEEK | MSG_TRUNC));
        say("peek for 4", recv(fd, bytes, 4, MSG_PEEK | MSG_WAITALL));
        say("peek for 8 without waiting", recv(fd, bytes, 8, MSG_PEEK | MSG_WAITALL | MSG_DONTWAIT));
        say("count", recv(fd, NULL, 8, MSG_PEEK | MSG_TRUNC));
        struct timeval limit = { 0, 20000 };
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        say("peek for 8, for a while", recv(fd, bytes, 8, MSG_PEEK | MSG_WAITALL));
        say("drop 1", recv(fd, NULL, 1, MSG_TRUNC));
        say("receive", recv(fd, bytes, 8, 0));
        printf("%.3s\n", bytes);
    }
    meet();
}

CASE(socket_peek_for_all)
{
    char bytes[8] = "";
    if (me == CONNECTOR) {
        send_all(fd, "abcd", 4);
        usleep(20000);
        send_all(fd, "efgh", 4);
    } else {
        say("peek for 8", recv(fd, bytes, 8, MSG_PEEK | MSG_WAITALL));
        say("receive", recv(fd, bytes, 8, MSG_WAITALL));
    }
    meet();
    if (me == CONNECTOR) {
        send_all(fd, "abcd", 4);
        close(fd);
    } else {
        say("peek for 8 at the end", recv(fd, bytes, 8, MSG_PEEK | MSG_WAITALL));
    }
}

CASE(socket_wait_for_all)
{
    char bytes[8] = "";
    if (me == CONNECTOR) {
        send_all(fd, "abcd", 4);
        usleep(5000);
        send_all(fd, "efgh", 4);
    } else {
        say("recv with MSG_WAITALL", recv(fd, bytes, 8, MSG_WAITALL));
    }
    meet();
    if (me == CONNECTOR) {
        send_all(fd, "abcd", 4);
        close(fd);
    } else {
        say("recv with MSG_WAITALL at the end", recv(fd, bytes, 8, MSG_WAITALL));
        say("recv", recv(fd, bytes, 8, MSG_WAITALL));
    }
}

CASE(socket_receive_timeout)
{
    char byte;
    if (me == CONNECTOR) {
        struct timeval limit = { 0, 30000 };
        say("SO_RCVTIMEO", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
        say("recv", recv(fd, &byte, 1, 0));
        say("read", read(fd, &byte, 1));
    }
    meet();
}

CASE(socket_send_after_shutdown)
{
    char bytes[4];
    signal(SIGPIPE, SIG_IGN);
    if (me == CONNECTOR) {
        send_all(fd, "ab", 2);
        say("shutdown", shutdown(fd, SHUT_WR));
        say("send", send(fd, "c", 1, 0));
        say("shutdown again", shutdown(fd, SHUT_WR));
    } else {
        say("recv", recv(fd, bytes, 4, MSG_WAITALL));
        say("recv at the end", recv(fd, bytes, 4, 0));
        send_all(fd, "xy", 2);
    }
    meet();
    if (me == CONNECTOR)
        say("recv after shutdown", recv(fd, bytes, 2, MSG_WAITALL));
    meet();
}

CASE(socket_invalid_arguments)
{
    char byte = 0;
    if (me == CONNECTOR) {
        say("shutdown with how = 7", shutdown(fd, 7));
        say("sendto with an address", sendto(fd, &byte, 0, 0, NULL, 0));
        say("recv with MSG_OOB", recv(fd, &byte, 1, MSG_OOB));
        say("connect again", connect(fd, NULL, 0));
        say("listen", listen(fd, 1));
        say("accept", accept(fd, NULL, NULL));
        say("close_range with wrong flags", close_range(fd, fd, 99));
        say("still there", send(fd, &byte, 1, 0));
        say("lseek", lseek(fd, 0, SEEK_SET));
        say("pread", pread(fd, &byte, 1, 0));
        say("pwrite", pwrite(fd, &byte, 1, 0));
    }
    meet();
}

/* Sends one byte in a message with this address and these control messages. */
static void send_beside(const char *what, int fd, void *name, int name_length, void *control, size_t control_length)
{
    struct iovec piece = { (void *)what, 1 };
    struct msghdr message = { .msg_name = name,
        .msg_namelen = name_length,
        .msg_iov = &piece,
        .msg_iovlen = 1,
        .msg_control = control,
        .msg_controllen = control_length };
    say(what, sendmsg(fd, &message, MSG_NOSIGNAL));
}

/* TCP judges the address and the control messages, and ignores them otherwise. */
CASE(socket_send_with_an_address)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = 1 };
    char large[200] = "";
    if (me == CONNECTOR) {
        say("a", sendto(fd, "a", 1, 0, (void *)&address, sizeof address));
        say("short", sendto(fd, "b", 1, 0, (void *)&address, 1));
        say("too long", sendto(fd, "c", 1, 0, (void *)large, 200));
        say("negative", sendto(fd, "d", 1, 0, (void *)&address, -1));
        say("not there", sendto(fd, "e", 1, 0, (void *)16, sizeof address));
        say("none, with a length", sendto(fd, "f", 1, 0, NULL, 200));
        say("nothing", sendto(fd, NULL, 0, 0, (void *)16, sizeof address));
        send_beside("1", fd, &address, sizeof address, NULL, 0);
        send_beside("2 short", fd, &address, 1, NULL, 0);
        send_beside("3 too long", fd, large, 200, NULL, 0);
        send_beside("4 negative", fd, &address, -1, NULL, 0);
        send_beside("5 not there", fd, (void *)16, sizeof address, NULL, 0);
        send_beside("6 none, with a length", fd, NULL, 200, NULL, 0);
    }
    meet();
    if (me == ACCEPTOR)
        say("bytes", recv(fd, large, 7, MSG_WAITALL)), puts(large);
    meet();
}

CASE(socket_send_with_control_messages)
{
    union {
        struct cmsghdr head;
        char bytes[1 << 20];
    } *control = calloc(1, sizeof *control);
    struct cmsghdr *head = &control->head;
    char bytes[200] = "";
    if (me == CONNECTOR) {
        int size = CMSG_SPACE(sizeof(int));
        *head = (struct cmsghdr){ CMSG_LEN(sizeof(int)), SOL_SOCKET, SO_TIMESTAMPING };
        send_beside("a timestamp", fd, NULL, 0, control, size);
        memset(CMSG_DATA(head), 0xff, sizeof(int));
        send_beside("b invalid timestamp", fd, NULL, 0, control, size);
        head->cmsg_type = 999;
        send_beside("c unknown", fd, NULL, 0, control, size);
        head->cmsg_level = IPPROTO_IP;
        send_beside("d for IP", fd, NULL, 0, control, size);
        head->cmsg_len = 3;
        send_beside("e too short", fd, NULL, 0, control, size);
        head->cmsg_len = size + 1;
        send_beside("f too long", fd, NULL, 0, control, size);
        head->cmsg_len = LONG_MAX;
        send_beside("g far too long", fd, NULL, 0, control, size);
        *head = (struct cmsghdr){ LONG_MAX, SOL_SOCKET, SCM_RIGHTS };
        send_beside("h too many descriptors", fd, NULL, 0, control, size);
        head->cmsg_len = CMSG_LEN(sizeof(int));
        *(int *)CMSG_DATA(head) = STDOUT_FILENO;
        send_beside("i a descriptor", fd, NULL, 0, control, size);
        send_beside("j less than a head", fd, NULL, 0, control, 3);
        send_beside("k very long", fd, NULL, 0, control, sizeof *control);
        send_beside("l far too long", fd, NULL, 0, control, (size_t)1 << 40);
        send_beside("m not there", fd, NULL, 0, (void *)16, size);
        send_beside("n none, with a length", fd, NULL, 0, NULL, size);
        struct mmsghdr messages[2] = { { { .msg_iov = &(struct iovec){ "op", 1 }, .msg_iovlen = 1 } } };
        messages[1] = messages[0];
        messages[1].msg_hdr.msg_control = control;
        messages[1].msg_hdr.msg_controllen = size;
        head->cmsg_type = 999;
        say("two messages", sendmmsg(fd, messages, 2, 0));
    }
    meet();
    if (me == ACCEPTOR)
        say("bytes", recv(fd, bytes, 5, MSG_WAITALL)), puts(bytes);
    free(control);
    meet();
}
