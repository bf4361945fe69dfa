/* Short connections: of one request and one answer each. Both ends are in this thread, so that the system calls of both are counted. */
#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr_in at = { .sin_family = AF_INET };

static int client(void)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert(fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof at) == 0);
    return fd;
}

/* A client that does not wait for connect(), and asks by a second call what has become of the first. */
static int client_that_does_not_wait(int epoll)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int result = connect(fd, (struct sockaddr *)&at, sizeof at);
    assert(fd >= 0 && (result == 0 || errno == EINPROGRESS));
    struct epoll_event event = { .events = EPOLLOUT };
    assert(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0 && epoll_wait(epoll, &event, 1, -1) == 1);
    assert(connect(fd, (struct sockaddr *)&at, sizeof at) == 0 || errno == EISCONN);
    event.events = EPOLLIN;
    assert(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event) == 0);
    return fd;
}

int main(int argc, char **argv)
{
    char line[4096], bytes[600] = "";
    int has_library = 0, count = atoi(argv[argc - 1]), waits = !strcmp(argv[1], "waits");
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        has_library |= strstr(line, "libginnel_preload") != NULL;
    fclose(maps);

    int listener = socket(AF_INET, SOCK_STREAM, 0), epoll = epoll_create1(0);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof at;
    assert(bind(listener, (struct sockaddr *)&at, len) == 0 && listen(listener, 8) == 0);
    assert(getsockname(listener, (struct sockaddr *)&at, &len) == 0);
    for (int i = 0; i < count; i++) {
        struct epoll_event event;
        int one = waits ? client() : client_that_does_not_wait(epoll);
        int other = accept(listener, NULL, NULL);
        assert(send(one, bytes, 100, 0) == 100 && recv(other, bytes, sizeof bytes, 0) == 100);
        assert(send(other, bytes, sizeof bytes, 0) == sizeof bytes && shutdown(other, SHUT_WR) == 0);
        assert(waits || epoll_wait(epoll, &event, 1, -1) == 1);
        assert(recv(one, bytes, sizeof bytes, MSG_WAITALL) == sizeof bytes && recv(one, bytes, 1, 0) == 0);
        close(one);
        assert(recv(other, bytes, 1, 0) == 0);
        close(other);
    }
    puts(has_library ? "with the library" : "without the library");
    return 0;
}
