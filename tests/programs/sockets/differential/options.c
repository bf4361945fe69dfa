/* Options and requests that concern bytes which are queued: TCP_INQ, SO_PEEK_OFF, SIOCINQ, SIOCOUTQ, SIOCATMARK, TCP_INFO. */
#include "case.h"
#include <linux/sockios.h>

static void wait_for_bytes(int fd, int size)
{
    int there;
    check(WAIT_UNTIL(ioctl(fd, FIONREAD, &there) == 0 && there >= size), "the bytes do not come");
}

/* Receives with room for control messages, and prints those that come. */
static void receive_with_control(int fd, int size, int flags)
{
    char text[100] = "", control[200];
    struct iovec piece = { text, size };
    struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    int n = say("recvmsg", recvmsg(fd, &message, flags));
    printf("flags %#x, control %zu\n", message.msg_flags, message.msg_controllen);
    for (struct cmsghdr *one = n < 0 ? NULL : CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one))
        printf("level %d, type %d, length %zu, value %d\n", one->cmsg_level, one->cmsg_type, one->cmsg_len, *(int *)CMSG_DATA(one));
    fflush(stdout);
}

CASE(options_tcp_inq)
{
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        int value = -1, two = 2, on = 1, off = 0;
        socklen_t size = sizeof value;
        say("get", getsockopt(fd, IPPROTO_TCP, TCP_INQ, &value, &size));
        say("value", value);
        receive_with_control(fd, 1, 0);
        say("set to 2", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &two, sizeof two));
        say("set with a wrong length", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &on, 1));
        say("set", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on));
        say("get", getsockopt(fd, IPPROTO_TCP, TCP_INQ, &value, &size));
        say("value", value);
        receive_with_control(fd, 2, 0);
        receive_with_control(fd, 1, MSG_PEEK);
        receive_with_control(fd, 0, 0);
        char text[2];
        say("recv", recv(fd, text, 1, 0));
        receive_with_control(fd, 10, 0);
        receive_with_control(fd, 10, MSG_DONTWAIT);
        struct iovec piece = { text, 1 };
        struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };
        send_all(fd, "", 1);
        meet();
        wait_for_bytes(fd, 4);
        say("recvmsg without room for control", recvmsg(fd, &message, 0));
        printf("flags %#x, control %zu\n", message.msg_flags, message.msg_controllen);
        char control[CMSG_LEN(0) + 2];
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        say("recvmsg with little room for control", recvmsg(fd, &message, 0));
        printf("flags %#x, control %zu\n", message.msg_flags, message.msg_controllen);
        say("unset", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &off, sizeof off));
        receive_with_control(fd, 1, 0);
        say("set", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on));
        meet();
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        receive_with_control(fd, 1, 0);
        receive_with_control(fd, 1, 0);
    } else {
        char byte;
        receive_all(fd, &byte, 1);
        send_all(fd, "ghij", 4);
        meet();
        meet();
        shutdown(fd, SHUT_WR);
    }
    meet();
}

CASE(options_tcp_inq_with_vectors)
{
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        int on = 1;
        check(setsockopt(fd, IPPROTO_TCP, TCP_INQ, &on, sizeof on) == 0, "TCP_INQ");
        char text[2][2], control[2][100];
        struct iovec pieces[2] = { { text[0], 2 }, { text[1], 2 } };
        struct mmsghdr messages[2] = { 0 };
        for (int i = 0; i < 2; i++)
            messages[i].msg_hdr = (struct msghdr){
                .msg_iov = &pieces[i], .msg_iovlen = 1, .msg_control = control[i], .msg_controllen = sizeof control[i]
            };
        say("recvmmsg", recvmmsg(fd, messages, 2, 0, NULL));
        for (int i = 0; i < 2; i++) {
            struct cmsghdr *one = CMSG_FIRSTHDR(&messages[i].msg_hdr);
            say("value", one ? *(int *)CMSG_DATA(one) : -1);
        }
    }
    meet();
}

CASE(options_peek_off)
{
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        int value = -7;
        socklen_t size = sizeof value;
        say("get", getsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &value, &size));
        say("value", value);
    }
    meet();
}

CASE(options_set_peek_off)
{
    int value = 2;
    say("set", setsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &value, sizeof value));
    meet();
}

CASE(options_queues)
{
    int value = -7;
    if (me == CONNECTOR)
        send_all(fd, "abcdef", 6);
    meet();
    if (me == ACCEPTOR) {
        wait_for_bytes(fd, 6);
        say("SIOCINQ", ioctl(fd, SIOCINQ, &value));
        say("value", value);
        char text[6];
        receive_all(fd, text, 4);
        say("SIOCINQ", ioctl(fd, SIOCINQ, &value));
        say("value", value);
        say("SIOCATMARK", ioctl(fd, SIOCATMARK, &value));
        say("value", value);
        say("sockatmark", sockatmark(fd));
        receive_all(fd, text, 2);
        say("SIOCINQ", ioctl(fd, SIOCINQ, &value));
        say("value", value);
        say("SIOCATMARK", ioctl(fd, SIOCATMARK, &value));
        say("value", value);
        say("SIOCGSTAMP", ioctl(fd, 0x8906, &value));
        say("an unknown request", ioctl(fd, 0x123456, &value));
    }
    meet();
    if (me == CONNECTOR) {
        check(WAIT_UNTIL(ioctl(fd, SIOCOUTQ, &value) == 0 && value == 0), "SIOCOUTQ");
        value = -7;
        say("SIOCOUTQNSD", ioctl(fd, SIOCOUTQNSD, &value));
        say("value", value);
        shutdown(fd, SHUT_WR);
    }
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        say("SIOCINQ at the end", ioctl(fd, SIOCINQ, &value));
        say("value", value);
    }
    meet();
}

CASE(options_tcp_info)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    say("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
    say("state", info.tcpi_state);
    say("there is a round-trip time", info.tcpi_rtt > 0);
    say("there is a window", info.tcpi_snd_cwnd > 0);
    say("nothing is lost", info.tcpi_lost + info.tcpi_retrans == 0);
    meet();
    if (me == CONNECTOR) {
        send_all(fd, "abc", 3);
        check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    }
    meet();
    if (me == ACCEPTOR)
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
    meet();
    size = sizeof info;
    say("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
    /* Whether the end is acknowledged depends on time. */
    if (me == CONNECTOR)
        say("it has ended", info.tcpi_state == TCP_FIN_WAIT1 || info.tcpi_state == TCP_FIN_WAIT2);
    else
        say("state", info.tcpi_state);
    size = 1;
    say("TCP_INFO of a byte", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
    say("size", size);
    meet();
    if (me == ACCEPTOR)
        check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    meet();
    size = sizeof info;
    if (me == CONNECTOR)
        say_events("end", events_of(fd, 0, PATIENCE));
    say("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
    say("state", info.tcpi_state);
}

/* The program has shut down, and then the peer has closed its end. */
CASE(options_tcp_info_after_both_ends)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    if (me == CONNECTOR)
        check(shutdown(fd, SHUT_WR) == 0, "shutdown");
    meet();
    if (me == ACCEPTOR) {
        say_events("end", events_of(fd, POLLRDHUP, PATIENCE));
        close(fd);
    }
    meet();
    if (me == CONNECTOR) {
        say_events("end", events_of(fd, 0, PATIENCE));
        say("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
        say("state", info.tcpi_state);
    }
    meet();
}

CASE(options_of_time_and_room)
{
    int value;
    socklen_t size;
#define GET(level, name) \
    (value = -7, size = sizeof value, say(#name, getsockopt(fd, level, name, &value, &size)), say("value", value))
    if (me == ACCEPTOR) {
        GET(SOL_SOCKET, SO_TIMESTAMP);
        GET(SOL_SOCKET, SO_TIMESTAMPING);
        GET(SOL_SOCKET, SO_ZEROCOPY);
        GET(SOL_SOCKET, SO_BUSY_POLL);
        GET(SOL_SOCKET, SO_PRIORITY);
        GET(IPPROTO_TCP, TCP_REPAIR);
        GET(IPPROTO_TCP, TCP_NOTSENT_LOWAT);
        GET(IPPROTO_TCP, TCP_USER_TIMEOUT);
        GET(IPPROTO_TCP, TCP_ULP);
        int some = 7;
        say("TCP_NOTSENT_LOWAT", setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &some, sizeof some));
        GET(IPPROTO_TCP, TCP_NOTSENT_LOWAT);
        say("TCP_USER_TIMEOUT", setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &some, sizeof some));
        GET(IPPROTO_TCP, TCP_USER_TIMEOUT);
    }
    meet();
}

static volatile int signalled;

static void note(int number)
{
    signalled++;
}

CASE(options_signals_for_input)
{
    int on = 1, off = 0;
    char byte;
    signal(SIGIO, note);
    meet();
    if (me == ACCEPTOR) {
        say("F_SETOWN", fcntl(fd, F_SETOWN, getpid()));
        say("FIOASYNC", ioctl(fd, FIOASYNC, &on));
        say_events("O_ASYNC", fcntl(fd, F_GETFL) & O_ASYNC);
        meet();
        check(WAIT_UNTIL(signalled), "no signal");
        receive_all(fd, &byte, 1);
        say("FIOASYNC", ioctl(fd, FIOASYNC, &off));
        say_events("O_ASYNC", fcntl(fd, F_GETFL) & O_ASYNC);
    } else {
        meet();
        send_all(fd, "a", 1);
    }
    meet();
}
