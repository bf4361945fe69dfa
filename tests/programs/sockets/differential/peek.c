/* MSG_PEEK and FIONREAD: programs that wait until they see all of a message before they receive it. */
#include "case.h"

enum { LONGEST = 40000 };
static char bytes[LONGEST], expected[LONGEST];

static void fill(unsigned seed)
{
    for (int i = 0; i < LONGEST; i++)
        expected[i] = seed = seed * 1103515245 + 12345;
}

static int there(int fd)
{
    int queued = -1;
    check(ioctl(fd, FIONREAD, &queued) == 0, "FIONREAD");
    return queued;
}

static void peek_for(int me, int fd, int size, int flags)
{
    fill(1);
    if (me == ACCEPTOR) {
        send_all(fd, expected, size);
        shutdown(fd, SHUT_WR);
    } else {
        if (flags & MSG_WAITALL)
            say("peek", recv(fd, bytes, size, MSG_PEEK | flags));
        else
            say("all are seen", WAIT_UNTIL(recv(fd, bytes, size, MSG_PEEK | flags) == size));
        say("they are right", flags & MSG_TRUNC || memcmp(bytes, expected, size) == 0);
        say("they are counted", there(fd) == size);
        say("they are counted without a copy", recv(fd, NULL, LONGEST, MSG_PEEK | MSG_TRUNC));
        receive_all(fd, bytes, size);
        say("they are right", memcmp(bytes, expected, size) == 0);
        say("the end", recv(fd, bytes, 1, 0));
    }
    meet();
}

CASE(peek_until_more_is_there_than_a_small_ring_has)
{
    peek_for(me, fd, 10000, MSG_DONTWAIT);
}

CASE(peek_until_much_is_there)
{
    peek_for(me, fd, LONGEST, MSG_DONTWAIT);
}

CASE(peek_for_all_of_much)
{
    peek_for(me, fd, LONGEST, MSG_WAITALL);
}

CASE(peek_and_count_until_much_is_there)
{
    peek_for(me, fd, 20000, MSG_DONTWAIT | MSG_TRUNC);
}

CASE(peek_until_much_is_counted)
{
    fill(2);
    if (me == ACCEPTOR) {
        send_all(fd, expected, LONGEST);
    } else {
        say("all are counted", WAIT_UNTIL(there(fd) == LONGEST));
        say("peek", recv(fd, bytes, LONGEST, MSG_PEEK));
        say("they are right", memcmp(bytes, expected, LONGEST) == 0);
        /* A part is received, and the rest is seen. */
        receive_all(fd, bytes, 3000);
        say("the rest", there(fd));
        say("peek", recv(fd, bytes, LONGEST, MSG_PEEK));
        say("it is right", memcmp(bytes, expected + 3000, LONGEST - 3000) == 0);
        say_events("readable", events_of(fd, POLLIN, PATIENCE));
        receive_all(fd, bytes, LONGEST - 3000);
        say("it is right", memcmp(bytes, expected + 3000, LONGEST - 3000) == 0);
        say("nothing is left", there(fd));
    }
    meet();
}

CASE(peek_at_what_is_sent_without_waiting)
{
    fill(3);
    if (me == ACCEPTOR) {
        fcntl(fd, F_SETFL, O_NONBLOCK);
        for (int sent = 0, n; sent < LONGEST; sent += n) {
            n = send(fd, expected + sent, LONGEST - sent, MSG_NOSIGNAL);
            if (n < 0) {
                check(errno == EAGAIN, "send");
                events_of(fd, POLLOUT, PATIENCE);
                n = 0;
            }
        }
    } else {
        say("all are counted", WAIT_UNTIL(there(fd) == LONGEST));
        say("peek", recv(fd, bytes, LONGEST, MSG_PEEK));
        say("they are right", memcmp(bytes, expected, LONGEST) == 0);
        receive_all(fd, bytes, LONGEST);
        say("they are right", memcmp(bytes, expected, LONGEST) == 0);
    }
    meet();
}

/* Messages of many sizes, in both directions at once: the carriers change again and again. */
CASE(peek_at_many_messages)
{
    static const int sizes[] = { 1, 100, 3000, 4096, 5000, 10000, 16384, 20000, LONGEST };
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    long wrong = 0;
    fill(4);
    for (int round = 0; round < 3 * COUNT; round++) {
        int size = sizes[(round * 5 + round / COUNT) % COUNT];
        if (me == round % 2) {
            send_all(fd, expected, size);
            receive_all(fd, bytes, 1);
            continue;
        }
        memset(bytes, 0, size);
        if (round % 3 == 0)
            wrong += !WAIT_UNTIL(there(fd) >= size);
        wrong += !WAIT_UNTIL(recv(fd, bytes, size, MSG_PEEK | MSG_DONTWAIT) == size);
        wrong += memcmp(bytes, expected, size) != 0 || there(fd) != size;
        receive_all(fd, bytes, size);
        wrong += memcmp(bytes, expected, size) != 0 || there(fd) != 0;
        send_all(fd, "a", 1);
    }
    say("wrong", wrong);
    meet();
}
