/* What random programs have found (`random`). */
#include "case.h"

static const char LETTERS[] = "abcdefghij";

/* MSG_PEEK fills all vectors, also with what waits behind the first carrier. */
static void peek_into_vectors(int fd, int size, int flags)
{
    char bytes[3][8192];
    memset(bytes, '-', sizeof bytes);
    struct iovec pieces[] = { { bytes[0], size / 3 }, { NULL, 0 }, { bytes[1], 1 }, { bytes[2], size - size / 3 - 1 } };
    struct msghdr message = { .msg_iov = pieces, .msg_iovlen = 4 };
    say("recvmsg", recvmsg(fd, &message, MSG_PEEK | flags));
    say("flags", message.msg_flags);
    printf("%.3s %.1s %.3s %.3s\n", bytes[0], bytes[1], bytes[2], bytes[2] + pieces[3].iov_len - 3);
}

CASE(found_peek_into_vectors)
{
    if (me == ACCEPTOR)
        send_all(fd, LETTERS, 10);
    meet();
    if (me == CONNECTOR) {
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 10; })), "bytes");
        peek_into_vectors(fd, 10, 0);
        peek_into_vectors(fd, 9, MSG_WAITALL);
        peek_into_vectors(fd, 300, MSG_DONTWAIT);
        peek_into_vectors(fd, 10, MSG_TRUNC);
        char bytes[10];
        receive_all(fd, bytes, 10);
        peek_into_vectors(fd, 10, MSG_DONTWAIT);
    }
    meet();
    if (me == ACCEPTOR)
        shutdown(fd, SHUT_WR);
    else {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        peek_into_vectors(fd, 10, 0);
    }
    meet();
}

/* More than a small ring has. */
CASE(found_peek_much_into_vectors)
{
    static char bytes[20000];
    if (me == ACCEPTOR) {
        for (int i = 0; i < 20000; i++)
            bytes[i] = LETTERS[i % 10];
        send_all(fd, bytes, 20000);
    } else {
        check(WAIT_UNTIL(({ int n = 0; ioctl(fd, FIONREAD, &n); n == 20000; })), "bytes");
        peek_into_vectors(fd, 10000, 0);
        receive_all(fd, bytes, 9000);
        peek_into_vectors(fd, 10000, MSG_WAITALL);
        receive_all(fd, bytes, 11000);
    }
    meet();
}
