/*
 * Tests channels with ginnel.h: conversation SCENARIO. Each scenario has two processes, the server and its child, the
 * client, in the segment "test". Exits with 0 if the scenario succeeds.
 */
#include <ginnel.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define LENGTH(array) (sizeof(array) / sizeof *(array))

/* The time limit of a scenario, in seconds; it normally takes a fraction of that. */
#define WATCHDOG 60

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition,      \
                    ginnel_last_error());                                                    \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

/* Ends the process if a result is an error; otherwise returns it. */
#define OK(call) check_ok(__LINE__, #call, (call))
#define FAILS(status, call) check_fails(__LINE__, #call, #status, (status), (call))

static ssize_t check_ok(int line, const char *call, ssize_t result)
{
    if (result < 0) {
        fprintf(stderr, "%s:%d: %s: %zd, %s\n", __FILE__, line, call, result, ginnel_last_error());
        exit(1);
    }
    return result;
}

static void check_fails(int line, const char *call, const char *name, int status, ssize_t result)
{
    if (result != status) {
        fprintf(stderr, "%s:%d: %s: %zd instead of %s (last error: %s)\n", __FILE__, line, call, result, name,
                ginnel_last_error());
        exit(1);
    }
    CHECK(strlen(ginnel_last_error()) > 0);
}

/* One process tells the other that it may continue. */
static int to_client[2], to_server[2];

static void tell(int fds[2])
{
    CHECK(write(fds[1], "", 1) == 1);
}

static void await(int fds[2])
{
    char byte;
    CHECK(read(fds[0], &byte, 1) == 1);
}

static ginnel_channel *serve(const char *address, int kind)
{
    ginnel_listener *listener;
    ginnel_channel *channel;
    OK(ginnel_listen(address, kind, NULL, &listener));
    OK(ginnel_accept(listener, WATCHDOG * SECOND, &channel));
    ginnel_listener_close(listener);
    return channel;
}

static ginnel_channel *join(const char *address, int kind)
{
    ginnel_channel_options options = {0};
    ginnel_channel *channel;
    options.size = sizeof options;
    options.patience_ns = WATCHDOG * SECOND;
    OK(ginnel_connect(address, kind, &options, &channel));
    return channel;
}

static void pattern(unsigned char *bytes, size_t len, unsigned seed)
{
    for (size_t i = 0; i < len; i++)
        bytes[i] = (unsigned char)(i * 31 + i / 251 + seed);
}

static int readable(int fd, int timeout_ms)
{
    struct pollfd one = {0};
    one.fd = fd;
    one.events = POLLIN;
    return poll(&one, 1, timeout_ms);
}

/* Messages of all sizes are echoed. */

static unsigned char buffer[1 << 20], expected[1 << 20];

static void messages_server(void)
{
    ginnel_channel *channel = serve("test/echo", GINNEL_MESSAGE);
    ssize_t len;
    while ((len = ginnel_message_recv(channel, buffer, sizeof buffer)) >= 0)
        OK(ginnel_message_send(channel, buffer, (size_t)len));
    CHECK(len == GINNEL_ERR_FINISHED);
    ginnel_channel_close(channel);
}

static void messages_client(void)
{
    ginnel_channel *channel = join("test/echo", GINNEL_MESSAGE);
    ginnel_channel_info info = {0};
    info.size = sizeof info;
    OK(ginnel_channel_get_info(channel, &info));
    CHECK(info.max_message <= sizeof buffer);
    size_t sizes[] = {0, 1, 7, 8, 55, 56, 57, 64, 1000, 4096, info.max_message - 1, info.max_message};
    for (unsigned round = 0; round < 50; round++) {
        size_t len = sizes[round % LENGTH(sizes)];
        pattern(expected, len, round);
        OK(ginnel_message_send(channel, expected, len));
        memset(buffer, 0, len);
        CHECK((size_t)OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == len);
        CHECK(memcmp(buffer, expected, len) == 0);
    }
    FAILS(GINNEL_ERR_TOO_LONG, ginnel_message_send(channel, buffer, info.max_message + 1));
    ginnel_channel_close(channel);
}

/* Messages in place: committed in a batch, aborted, peeked at twice. */

static void in_place_server(void)
{
    ginnel_channel *channel = serve("test/place", GINNEL_MESSAGE);
    const void *data, *again;
    size_t len;
    for (unsigned i = 0; i < 3; i++) {
        OK(ginnel_message_peek(channel, &data, &len));
        OK(ginnel_message_peek(channel, &again, &len));
        CHECK(data == again && len == 100 + i && (size_t)data % 8 == 0);
        pattern(expected, len, i);
        CHECK(memcmp(data, expected, len) == 0);
        OK(ginnel_message_release(channel));
        FAILS(GINNEL_ERR_NOT_CLAIMED, ginnel_message_release(channel));
    }
    /* The message is forwarded from its place in the ring. */
    OK(ginnel_message_peek(channel, &data, &len));
    OK(ginnel_message_send(channel, data, len));
    OK(ginnel_message_release(channel));
    FAILS(GINNEL_ERR_FINISHED, ginnel_message_peek(channel, &data, &len));
    ginnel_channel_close(channel);
}

static void in_place_client(void)
{
    ginnel_channel *channel = join("test/place", GINNEL_MESSAGE);
    void *room;
    FAILS(GINNEL_ERR_NOT_CLAIMED, ginnel_message_send_claimed(channel, 0));
    FAILS(GINNEL_ERR_NOT_CLAIMED, ginnel_message_commit(channel, 0));
    OK(ginnel_message_claim(channel, 500, &room));
    memset(room, 0xff, 500);
    FAILS(GINNEL_ERR_CLAIMED, ginnel_message_send(channel, "", 0));
    FAILS(GINNEL_ERR_CLAIMED, ginnel_message_claim(channel, 1, &room));
    FAILS(GINNEL_ERR_INVALID, ginnel_message_send_claimed(channel, 501));
    OK(ginnel_message_abort(channel));
    FAILS(GINNEL_ERR_NOT_CLAIMED, ginnel_message_send_claimed(channel, 0));
    for (unsigned i = 0; i < 3; i++) {
        OK(ginnel_message_claim(channel, 200, &room));
        CHECK((size_t)room % 8 == 0);
        pattern(room, 100 + i, i);
        OK(i < 2 ? ginnel_message_commit(channel, 100 + i) : ginnel_message_send_claimed(channel, 100 + i));
    }
    OK(ginnel_message_claim(channel, 4, &room));
    memcpy(room, "back", 4);
    OK(ginnel_message_commit(channel, 4));
    OK(ginnel_message_publish(channel));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 4 && memcmp(buffer, "back", 4) == 0);
    OK(ginnel_channel_finish(channel));
    FAILS(GINNEL_ERR_FINISHED, ginnel_message_recv(channel, buffer, sizeof buffer));
    ginnel_channel_close(channel);
}

/* A stream that is longer than its rings runs in both directions at once, in two threads. */

#define STREAM_BYTES (8u << 20)

static void streams_server(void)
{
    ginnel_channel *channel = serve("test/stream", GINNEL_STREAM);
    size_t total = 0;
    ssize_t len;
    while ((len = OK(ginnel_stream_recv(channel, buffer, sizeof buffer))) > 0) {
        OK(ginnel_stream_send_all(channel, buffer, (size_t)len));
        total += (size_t)len;
    }
    CHECK(total == STREAM_BYTES);
    OK(ginnel_channel_finish(channel));
    ginnel_channel_close(channel);
}

static void *stream_out(void *argument)
{
    ginnel_channel *channel = argument;
    for (size_t sent = 0; sent < STREAM_BYTES; sent += sizeof expected) {
        if (sent % (2 * sizeof expected) == 0) {
            OK(ginnel_stream_send_all(channel, expected, sizeof expected));
        } else {
            size_t done = 0;
            while (done < sizeof expected) {
                void *room;
                size_t len;
                OK(ginnel_stream_claim(channel, sizeof expected - done, &room, &len));
                CHECK(len > 0 && len <= sizeof expected - done);
                FAILS(GINNEL_ERR_CLAIMED, ginnel_stream_send(channel, "", 1));
                FAILS(GINNEL_ERR_INVALID, ginnel_stream_send_claimed(channel, len + 1));
                memcpy(room, expected + done, len);
                OK(ginnel_stream_send_claimed(channel, len));
                done += len;
            }
        }
    }
    OK(ginnel_channel_finish(channel));
    return NULL;
}

static void streams_client(void)
{
    ginnel_channel *channel = join("test/stream", GINNEL_STREAM);
    pthread_t sender;
    pattern(expected, sizeof expected, 3);
    CHECK(pthread_create(&sender, NULL, stream_out, channel) == 0);
    for (size_t total = 0; total < STREAM_BYTES;) {
        size_t at = total % sizeof expected, len;
        const void *data;
        OK(ginnel_stream_peek(channel, &data, &len));
        CHECK(len > 0);
        FAILS(GINNEL_ERR_INVALID, ginnel_stream_release(channel, len + 1));
        if (len > sizeof expected - at)
            len = sizeof expected - at;
        CHECK(memcmp(data, expected + at, len) == 0);
        OK(ginnel_stream_release(channel, len));
        total += len;
    }
    const void *data;
    size_t len;
    FAILS(GINNEL_ERR_FINISHED, ginnel_stream_peek(channel, &data, &len));
    CHECK(OK(ginnel_stream_recv(channel, buffer, sizeof buffer)) == 0);
    CHECK(pthread_join(sender, NULL) == 0);
    ginnel_channel_close(channel);
}

/* poll(2) waits for a listener, for data and for room. */

static void nonblocking_server(void)
{
    ginnel_endpoint *endpoint;
    ginnel_listener *listener;
    ginnel_channel *channel;
    OK(ginnel_attach("test", NULL, &endpoint));
    OK(ginnel_endpoint_listen(endpoint, "poll", GINNEL_MESSAGE, NULL, &listener));
    FAILS(GINNEL_ERR_WOULD_BLOCK, ginnel_accept(listener, 0, &channel));
    CHECK(channel == NULL);
    tell(to_client);
    int status;
    do
        CHECK(readable((int)OK(ginnel_listener_fd(listener)), WATCHDOG * 1000) == 1);
    while ((status = ginnel_accept(listener, 0, &channel)) == GINNEL_ERR_WOULD_BLOCK);
    OK(status);
    ginnel_listener_close(listener);
    ginnel_detach(endpoint);

    OK(ginnel_channel_set_nonblocking(channel, GINNEL_SEND | GINNEL_RECEIVE, 1));
    int in = (int)OK(ginnel_channel_fd(channel, GINNEL_RECEIVE));
    CHECK(in == ginnel_channel_fd(channel, GINNEL_RECEIVE));
    FAILS(GINNEL_ERR_WOULD_BLOCK, ginnel_message_recv(channel, buffer, sizeof buffer));
    tell(to_client);
    ssize_t len;
    do
        CHECK(readable(in, WATCHDOG * 1000) == 1);
    while ((len = ginnel_message_recv(channel, buffer, sizeof buffer)) == GINNEL_ERR_WOULD_BLOCK);
    CHECK(OK(len) == 5 && memcmp(buffer, "hello", 5) == 0);

    int out = (int)OK(ginnel_channel_fd(channel, GINNEL_SEND));
    CHECK(out != in);
    unsigned sent = 0;
    while ((status = ginnel_message_send(channel, expected, 1000)) == 0)
        sent++;
    CHECK(status == GINNEL_ERR_WOULD_BLOCK && sent > 1);
    CHECK(readable(out, 0) == 0);
    tell(to_client);
    do
        CHECK(readable(out, WATCHDOG * 1000) == 1);
    while ((status = ginnel_message_send(channel, expected, 1000)) == GINNEL_ERR_WOULD_BLOCK);
    OK(status);

    /* The end of the peer wakes the poll as well. */
    tell(to_client);
    while ((len = ginnel_message_recv(channel, buffer, sizeof buffer)) == GINNEL_ERR_WOULD_BLOCK)
        CHECK(readable(in, WATCHDOG * 1000) == 1);
    CHECK(len == GINNEL_ERR_FINISHED);
    ginnel_channel_close(channel);
}

static void nonblocking_client(void)
{
    await(to_client);
    ginnel_channel *channel = join("test/poll", GINNEL_MESSAGE);
    await(to_client);
    OK(ginnel_message_send(channel, "hello", 5));
    await(to_client);
    /* Room is given back in eighths of the ring, so receive about half of it. */
    ginnel_channel_info info = {0};
    info.size = sizeof info;
    OK(ginnel_channel_get_info(channel, &info));
    for (size_t got = 0; got < info.capacity / 2; got += 1024)
        CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 1000);
    await(to_client);
    ginnel_channel_close(channel);
}

/* Timeouts in each wait mode. */

static long long now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static void timeouts_server(void)
{
    static const long long timeout = SECOND / 20;
    ginnel_listener *listener;
    ginnel_channel *channel;
    OK(ginnel_listen("test/time", GINNEL_MESSAGE, NULL, &listener));
    long long begin = now();
    FAILS(GINNEL_ERR_TIMED_OUT, ginnel_accept(listener, timeout, &channel));
    CHECK(now() - begin >= timeout);
    tell(to_client);
    OK(ginnel_accept(listener, -1, &channel));
    ginnel_listener_close(listener);
    int ways[] = {GINNEL_WAIT_ADAPTIVE, GINNEL_WAIT_POLL, GINNEL_WAIT_INTERRUPT};
    OK(ginnel_channel_set_timeout(channel, GINNEL_SEND | GINNEL_RECEIVE, timeout));
    for (size_t i = 0; i < LENGTH(ways); i++) {
        OK(ginnel_channel_set_wait(channel, GINNEL_SEND | GINNEL_RECEIVE, ways[i], 0));
        begin = now();
        FAILS(GINNEL_ERR_TIMED_OUT, ginnel_message_recv(channel, buffer, sizeof buffer));
        CHECK(now() - begin >= timeout);
        int status;
        while ((status = ginnel_message_send(channel, buffer, 1000)) == 0)
            continue;
        CHECK(status == GINNEL_ERR_TIMED_OUT);
    }
    OK(ginnel_channel_set_timeout(channel, GINNEL_RECEIVE, 0));
    FAILS(GINNEL_ERR_TIMED_OUT, ginnel_message_recv(channel, buffer, sizeof buffer));
    OK(ginnel_channel_set_timeout(channel, GINNEL_RECEIVE, -1));
    tell(to_client);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 4);
    ginnel_channel_close(channel);
}

static void timeouts_client(void)
{
    await(to_client);
    ginnel_channel *channel = join("test/time", GINNEL_MESSAGE);
    await(to_client);
    OK(ginnel_message_send(channel, "late", 4));
    while (ginnel_message_recv(channel, buffer, sizeof buffer) >= 0)
        continue;
    ginnel_channel_close(channel);
}

/* An abort, for both kinds of channel: data that was not received is lost, even if the channel has been closed since. */

static void abort_server(void)
{
    ginnel_channel *channel = serve("test/abort", GINNEL_MESSAGE);
    OK(ginnel_message_send(channel, "void", 4));
    FAILS(GINNEL_ERR_INVALID, ginnel_channel_abort(channel, 0));
    OK(ginnel_channel_abort(channel, GINNEL_SEND | GINNEL_RECEIVE));
    FAILS(GINNEL_ERR_AFTER_FINISH, ginnel_message_send(channel, "more", 4));
    FAILS(GINNEL_ERR_ABORTED, ginnel_message_recv(channel, buffer, sizeof buffer));
    ginnel_channel_close(channel);
    tell(to_client);

    channel = serve("test/abort", GINNEL_STREAM);
    OK(ginnel_stream_send_all(channel, "void", 4));
    OK(ginnel_channel_abort(channel, GINNEL_SEND));
    FAILS(GINNEL_ERR_AFTER_FINISH, ginnel_stream_send(channel, "more", 4));
    tell(to_client);
    CHECK(OK(ginnel_stream_recv(channel, buffer, sizeof buffer)) == 3);
    OK(ginnel_channel_abort(channel, GINNEL_RECEIVE));
    tell(to_client);
    await(to_server);
    ginnel_channel_close(channel);
}

static void abort_client(void)
{
    ginnel_channel *channel = join("test/abort", GINNEL_MESSAGE);
    await(to_client);
    FAILS(GINNEL_ERR_ABORTED, ginnel_message_recv(channel, buffer, sizeof buffer));
    FAILS(GINNEL_ERR_ABORTED, ginnel_message_send(channel, "more", 4));
    ginnel_channel_close(channel);

    channel = join("test/abort", GINNEL_STREAM);
    await(to_client);
    FAILS(GINNEL_ERR_ABORTED, ginnel_stream_recv(channel, buffer, sizeof buffer));
    OK(ginnel_stream_send_all(channel, "one", 3));
    await(to_client);
    FAILS(GINNEL_ERR_ABORTED, ginnel_stream_send(channel, "more", 4));
    tell(to_server);
    ginnel_channel_close(channel);
}

/* A channel that is saved, adopted with its endpoint by another program, and resumed there. */

static void handover_server(void)
{
    ginnel_endpoint *endpoint, *heir;
    ginnel_listener *listener;
    ginnel_channel *channel;
    char *token, *saved, *longer;
    void *room;
    OK(ginnel_attach("test", NULL, &endpoint));
    OK(ginnel_endpoint_listen(endpoint, "handover", GINNEL_MESSAGE, NULL, &listener));
    tell(to_client);
    OK(ginnel_accept(listener, -1, &channel));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 3);

    FAILS(GINNEL_ERR_LIMIT, ginnel_hold(endpoint, 3600LL * 1000000000, &token));
    FAILS(GINNEL_ERR_INVALID, ginnel_hold(endpoint, 0, &token));
    CHECK(token == NULL);
    OK(ginnel_message_claim(channel, 3, &room));
    FAILS(GINNEL_ERR_CLAIMED, ginnel_channel_save(channel, &saved));
    CHECK(saved == NULL);
    memcpy(room, "one", 3);
    OK(ginnel_message_send_claimed(channel, 3));
    OK(ginnel_channel_save(channel, &saved));
    FAILS(GINNEL_ERR_FREED, ginnel_channel_close(channel));

    /* No program has adopted the endpoint, so this one resumes the channel. */
    OK(ginnel_hold(endpoint, 5LL * 1000000000, &token));
    OK(ginnel_release(endpoint, token));
    FAILS(GINNEL_ERR_INVALID, ginnel_release(endpoint, "web"));
    FAILS(GINNEL_ERR_INVALID, ginnel_channel_resume(endpoint, "1,2,3", &channel));
    OK(ginnel_channel_resume(endpoint, saved, &channel));
    ginnel_string_free(saved);
    FAILS(GINNEL_ERR_STALE, ginnel_adopt(token, NULL, &heir));
    ginnel_string_free(token);
    OK(ginnel_message_send(channel, "two", 3));
    tell(to_client);

    /* Another program adopts the endpoint, and accepts the connection that waits. */
    OK(ginnel_listener_leave(NULL));
    OK(ginnel_listener_leave(listener));
    FAILS(GINNEL_ERR_FREED, ginnel_listener_close(listener));
    await(to_server);
    OK(ginnel_channel_save(channel, &saved));
    OK(ginnel_hold(endpoint, 5LL * 1000000000, &token));
    ginnel_detach(endpoint);
    longer = malloc(strlen(token) + 2);
    strcat(strcpy(longer, token), "0");
    FAILS(GINNEL_ERR_INVALID, ginnel_adopt(longer, NULL, &heir));
    free(longer);
    CHECK(heir == NULL);
    OK(ginnel_adopt(token, NULL, &heir));
    OK(ginnel_channel_resume(heir, saved, &channel));
    ginnel_string_free(saved);
    ginnel_string_free(token);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 4 && memcmp(buffer, "four", 4) == 0);
    OK(ginnel_message_send(channel, "five", 4));
    FAILS(GINNEL_ERR_FINISHED, ginnel_message_recv(channel, buffer, sizeof buffer));
    ginnel_channel_close(channel);
    OK(ginnel_endpoint_listen(heir, "handover", GINNEL_MESSAGE, NULL, &listener));
    OK(ginnel_accept(listener, -1, &channel));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 3 && memcmp(buffer, "six", 3) == 0);
    ginnel_channel_close(channel);
    ginnel_listener_close(listener);
    ginnel_detach(heir);
}

static void handover_client(void)
{
    await(to_client);
    ginnel_channel *channel = join("test/handover", GINNEL_MESSAGE);
    OK(ginnel_message_send(channel, "two", 3));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 3 && memcmp(buffer, "one", 3) == 0);
    await(to_client);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 3 && memcmp(buffer, "two", 3) == 0);
    /* The message waits in the ring while no process has the channel. */
    OK(ginnel_message_send(channel, "four", 4));
    ginnel_channel *other = join("test/handover", GINNEL_MESSAGE);
    OK(ginnel_message_send(other, "six", 3));
    tell(to_server);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 4 && memcmp(buffer, "five", 4) == 0);
    ginnel_channel_close(channel);
    ginnel_channel_close(other);
}

/* Half-close and close, for both kinds of channel. */

static void half_close_server(void)
{
    ginnel_channel *channel = serve("test/half", GINNEL_MESSAGE);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 3);
    FAILS(GINNEL_ERR_FINISHED, ginnel_message_recv(channel, buffer, sizeof buffer));
    OK(ginnel_message_send(channel, "answer", 6));
    await(to_server);
    FAILS(GINNEL_ERR_CLOSED, ginnel_message_send(channel, "more", 4));
    ginnel_channel_close(channel);

    channel = serve("test/half", GINNEL_STREAM);
    CHECK(OK(ginnel_stream_recv(channel, buffer, sizeof buffer)) == 3);
    CHECK(OK(ginnel_stream_recv(channel, buffer, sizeof buffer)) == 0);
    OK(ginnel_stream_send_all(channel, "answer", 6));
    await(to_server);
    FAILS(GINNEL_ERR_CLOSED, ginnel_stream_send(channel, "more", 4));
    ginnel_channel_close(channel);
}

static void half_close_client(void)
{
    ginnel_channel *channel = join("test/half", GINNEL_MESSAGE);
    OK(ginnel_message_send(channel, "end", 3));
    OK(ginnel_channel_finish(channel));
    FAILS(GINNEL_ERR_AFTER_FINISH, ginnel_message_send(channel, "end", 3));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 6);
    ginnel_channel_close(channel);
    tell(to_server);

    channel = join("test/half", GINNEL_STREAM);
    OK(ginnel_stream_send_all(channel, "end", 3));
    OK(ginnel_channel_finish(channel));
    FAILS(GINNEL_ERR_AFTER_FINISH, ginnel_stream_send(channel, "end", 3));
    for (size_t got = 0; got < 6;)
        got += (size_t)OK(ginnel_stream_recv(channel, buffer, sizeof buffer));
    ginnel_channel_close(channel);
    tell(to_server);
}

/* The peer is killed: everything that it sent is received, and then its death is reported. */

static pid_t client;

static void death_server(void)
{
    ginnel_channel *messages = serve("test/last", GINNEL_MESSAGE);
    ginnel_channel *bytes = serve("test/words", GINNEL_STREAM);
    await(to_server);
    CHECK(kill(client, SIGKILL) == 0);
    CHECK(OK(ginnel_message_recv(messages, buffer, sizeof buffer)) == 4 && memcmp(buffer, "last", 4) == 0);
    FAILS(GINNEL_ERR_PEER_DEAD, ginnel_message_recv(messages, buffer, sizeof buffer));
    FAILS(GINNEL_ERR_PEER_DEAD, ginnel_message_send(messages, "who?", 4));
    CHECK(OK(ginnel_stream_recv(bytes, buffer, sizeof buffer)) == 5 && memcmp(buffer, "words", 5) == 0);
    FAILS(GINNEL_ERR_PEER_DEAD, ginnel_stream_recv(bytes, buffer, sizeof buffer));
    FAILS(GINNEL_ERR_PEER_DEAD, ginnel_stream_send(bytes, "who?", 4));
    ginnel_channel_close(messages);
    ginnel_channel_close(bytes);
}

static void death_client(void)
{
    ginnel_channel *messages = join("test/last", GINNEL_MESSAGE);
    ginnel_channel *bytes = join("test/words", GINNEL_STREAM);
    OK(ginnel_message_send(messages, "last", 4));
    OK(ginnel_stream_send_all(bytes, "words", 5));
    tell(to_server);
    for (;;)
        pause();
}

/* Mistakes in calls, and refusals by the daemon. */

static void mistakes_server(void)
{
    ginnel_endpoint *endpoint = (void *)1;
    ginnel_listener *listener, *second;
    ginnel_channel *channel;
    ginnel_attach_options attach = {0};
    ginnel_list *list;

    FAILS(GINNEL_ERR_NULL, ginnel_attach(NULL, NULL, &endpoint));
    CHECK(endpoint == NULL && strstr(ginnel_last_error(), "segment is NULL"));
    FAILS(GINNEL_ERR_NULL, ginnel_attach("test", NULL, NULL));
    FAILS(GINNEL_ERR_NAME, ginnel_attach("no/name", NULL, &endpoint));
    FAILS(GINNEL_ERR_NAME, ginnel_attach("\xff", NULL, &endpoint));
    FAILS(GINNEL_ERR_NO_SEGMENT, ginnel_attach("nowhere", NULL, &endpoint));
    FAILS(GINNEL_ERR_INVALID, ginnel_attach("test", &attach, &endpoint));
    CHECK(strstr(ginnel_last_error(), "options->size"));
    attach.size = sizeof attach;
    attach.socket = "/nonexistent/ginnel.sock";
    FAILS(GINNEL_ERR_NO_DAEMON, ginnel_attach("test", &attach, &endpoint));
    CHECK(strstr(ginnel_last_error(), "/nonexistent/ginnel.sock"));
    attach.socket = NULL;
    attach.wait = 17;
    FAILS(GINNEL_ERR_INVALID, ginnel_attach("test", &attach, &endpoint));
    attach.wait = GINNEL_WAIT_INTERRUPT;
    attach.name = "mistaken";
    OK(ginnel_attach("test", &attach, &endpoint));

    /* A program that is newer than the library works as long as it does not use new members. */
    struct {
        ginnel_attach_options known;
        long news;
    } newer = {{0}, 0};
    ginnel_endpoint *other;
    newer.known.size = sizeof newer;
    OK(ginnel_attach("test", &newer.known, &other));
    ginnel_detach(other);
    newer.news = 1;
    FAILS(GINNEL_ERR_INVALID, ginnel_attach("test", &newer.known, &other));

    FAILS(GINNEL_ERR_INVALID, ginnel_endpoint_listen(endpoint, "wrong", 3, NULL, &listener));
    FAILS(GINNEL_ERR_NAME, ginnel_listen("no-slash", GINNEL_MESSAGE, NULL, &listener));
    FAILS(GINNEL_ERR_NAME, ginnel_connect("no-slash", GINNEL_MESSAGE, NULL, &channel));
    FAILS(GINNEL_ERR_REFUSED, ginnel_endpoint_connect(endpoint, "nobody", GINNEL_MESSAGE, NULL, &channel));
    OK(ginnel_endpoint_listen(endpoint, "wrong", GINNEL_MESSAGE, NULL, &listener));
    FAILS(GINNEL_ERR_IN_USE, ginnel_endpoint_listen(endpoint, "wrong", GINNEL_STREAM, NULL, &second));
    FAILS(GINNEL_ERR_KIND, ginnel_endpoint_connect(endpoint, "wrong", GINNEL_STREAM, NULL, &channel));
    FAILS(GINNEL_ERR_NULL, ginnel_accept(NULL, 0, &channel));
    FAILS(GINNEL_ERR_NULL, ginnel_listener_fd(NULL));
    FAILS(GINNEL_ERR_NO_DAEMON, ginnel_list_open("/nonexistent/ginnel.sock", &list));
    CHECK(list == NULL);
    FAILS(GINNEL_ERR_NULL, ginnel_list_next(NULL, NULL));

    tell(to_client);
    OK(ginnel_accept(listener, -1, &channel));
    FAILS(GINNEL_ERR_KIND, ginnel_stream_send(channel, "x", 1));
    FAILS(GINNEL_ERR_KIND, ginnel_stream_recv(channel, buffer, sizeof buffer));
    FAILS(GINNEL_ERR_NULL, ginnel_message_send(NULL, "x", 1));
    FAILS(GINNEL_ERR_NULL, ginnel_message_send(channel, NULL, 1));
    OK(ginnel_message_send(channel, NULL, 0));
    FAILS(GINNEL_ERR_NULL, ginnel_message_claim(channel, 1, NULL));
    FAILS(GINNEL_ERR_BUFFER_TOO_SMALL, ginnel_message_recv(channel, buffer, 2));
    FAILS(GINNEL_ERR_BUFFER_TOO_SMALL, ginnel_message_recv(channel, NULL, 0));
    CHECK(OK(ginnel_message_recv(channel, buffer, 3)) == 3);
    FAILS(GINNEL_ERR_INVALID, ginnel_channel_set_timeout(channel, 0, 0));
    FAILS(GINNEL_ERR_INVALID, ginnel_channel_set_wait(channel, GINNEL_SEND, -1, 0));
    FAILS(GINNEL_ERR_INVALID, ginnel_channel_set_nonblocking(channel, 4, 1));
    FAILS(GINNEL_ERR_INVALID, ginnel_channel_fd(channel, GINNEL_SEND | GINNEL_RECEIVE));
    ginnel_counters counters = {0};
    FAILS(GINNEL_ERR_INVALID, ginnel_channel_get_counters(channel, GINNEL_SEND, &counters));
    FAILS(GINNEL_ERR_NULL, ginnel_channel_get_info(channel, NULL));
    CHECK(strcmp(ginnel_strerror(1234), "unknown status") == 0);
    CHECK(strcmp(ginnel_version(), GINNEL_VERSION) == 0);
    OK(ginnel_channel_close(channel));
    FAILS(GINNEL_ERR_FREED, ginnel_message_send(channel, "x", 1));
    FAILS(GINNEL_ERR_FREED, ginnel_message_recv(channel, buffer, sizeof buffer));
    FAILS(GINNEL_ERR_FREED, ginnel_channel_finish(channel));
    FAILS(GINNEL_ERR_FREED, ginnel_channel_close(channel));
    /* What is no handle is not read. */
    uintptr_t garbage[] = {1, 8, 4096, UINTPTR_MAX, (uintptr_t)1 << 63, (uintptr_t)buffer, (uintptr_t)&garbage,
                           (uintptr_t)endpoint, (uintptr_t)listener ^ 1, (uintptr_t)listener ^ (uintptr_t)1 << 47};
    for (size_t i = 0; i < LENGTH(garbage); i++) {
        void *no_handle = (void *)garbage[i];
        FAILS(GINNEL_ERR_INVALID, ginnel_message_send(no_handle, "x", 1));
        FAILS(GINNEL_ERR_INVALID, ginnel_message_recv(no_handle, buffer, sizeof buffer));
        FAILS(GINNEL_ERR_INVALID, ginnel_channel_close(no_handle));
        FAILS(GINNEL_ERR_INVALID, ginnel_accept(no_handle, 0, &channel));
        FAILS(GINNEL_ERR_INVALID, ginnel_listener_leave(no_handle));
        FAILS(GINNEL_ERR_INVALID, ginnel_block_read(no_handle, 0, buffer, 1));
        FAILS(GINNEL_ERR_INVALID, ginnel_mutex_lock(no_handle, 0));
    }
    OK(ginnel_listener_close(listener));
    FAILS(GINNEL_ERR_FREED, ginnel_accept(listener, 0, &channel));
    FAILS(GINNEL_ERR_FREED, ginnel_listener_close(listener));
    OK(ginnel_detach(endpoint));
    FAILS(GINNEL_ERR_FREED, ginnel_endpoint_listen(endpoint, "wrong", GINNEL_MESSAGE, NULL, &listener));
    FAILS(GINNEL_ERR_FREED, ginnel_detach(endpoint));
    OK(ginnel_detach(NULL));
    OK(ginnel_listener_close(NULL));
    OK(ginnel_channel_close(NULL));
    ginnel_string_free(NULL);
}

static void mistakes_client(void)
{
    await(to_client);
    ginnel_channel *channel = join("test/wrong", GINNEL_MESSAGE);
    OK(ginnel_message_send(channel, "abc", 3));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 0);
    FAILS(GINNEL_ERR_FINISHED, ginnel_message_recv(channel, buffer, sizeof buffer));
    ginnel_channel_close(channel);
}

/* Information about endpoints, channels and the daemon. */

static void facts_server(void)
{
    ginnel_attach_options attach = {0};
    ginnel_channel_options options = {0};
    ginnel_endpoint *endpoint;
    ginnel_listener *listener;
    ginnel_channel *channel;
    attach.size = sizeof attach;
    attach.name = "the-server";
    OK(ginnel_attach("test", &attach, &endpoint));
    ginnel_endpoint_info own = {0};
    own.size = sizeof own;
    OK(ginnel_endpoint_get_info(endpoint, &own));
    CHECK(own.size == sizeof own && own.member == 0 && own.epoch > 0 && own.interrupts == 1 && own.page >= 4096);
    CHECK(own.read_only == 0 && own.memory == GINNEL_MEMORY_FILE);

    options.size = sizeof options;
    options.capacity = 100000;
    options.input_capacity = 200000;
    options.backlog = 4;
    OK(ginnel_endpoint_listen(endpoint, "facts", GINNEL_MESSAGE, &options, &listener));
    tell(to_client);
    OK(ginnel_accept(listener, -1, &channel));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 10);
    OK(ginnel_message_send(channel, buffer, 10));

    ginnel_channel_info info = {0};
    info.size = sizeof info;
    OK(ginnel_channel_get_info(channel, &info));
    CHECK(info.kind == GINNEL_MESSAGE && info.capacity == 131072 && info.input_capacity == 262144 && info.max_message == 131072 / 4 - 8);
    CHECK(info.id > 0 && info.peer_member == 0 && info.peer_endpoint != own.endpoint);
    CHECK(strcmp(info.peer_member_name, "host") == 0 && strcmp(info.peer_name, "conversation") == 0);

    ginnel_counters counters = {0};
    counters.size = sizeof counters;
    OK(ginnel_channel_get_counters(channel, GINNEL_RECEIVE, &counters));
    CHECK(counters.operations == 1 && counters.bytes == 10);
    /* An older program does not know the last two members. */
    memset(&counters, 0xee, sizeof counters);
    counters.size = offsetof(ginnel_counters, rings);
    OK(ginnel_channel_get_counters(channel, GINNEL_SEND, &counters));
    CHECK(counters.operations == 1 && counters.bytes == 10 && counters.rings == 0xeeeeeeeeeeeeeeee);

    char *json;
    OK(ginnel_inspect(NULL, &json));
    CHECK(json[0] == '{' && strstr(json, "\"the-server\"") && strstr(json, "\"facts\""));
    ginnel_string_free(json);

    ginnel_list *list;
    ginnel_list_entry entry = {0};
    int found = 0, result;
    entry.size = sizeof entry;
    OK(ginnel_list_open(NULL, &list));
    while ((result = ginnel_list_next(list, &entry)) == 1) {
        if (entry.subject == GINNEL_MEMBER && entry.number == 0)
            found += strcmp(entry.member, "host") == 0 && entry.active == 1;
        if (entry.subject == GINNEL_ENDPOINT && entry.number == own.endpoint)
            found += strcmp(entry.name, "the-server") == 0 && strcmp(entry.segment, "test") == 0 && entry.epoch == own.epoch;
        if (entry.subject == GINNEL_LISTENER && entry.number == own.endpoint)
            found += strcmp(entry.name, "facts") == 0 && entry.kind == GINNEL_MESSAGE && strcmp(entry.member, "host") == 0;
    }
    CHECK(result == 0 && found == 3);
    CHECK(ginnel_list_next(list, &entry) == 0);
    OK(ginnel_list_close(list));
    FAILS(GINNEL_ERR_FREED, ginnel_list_next(list, &entry));
    FAILS(GINNEL_ERR_FREED, ginnel_list_close(list));

    /* Listener and channel outlive the handle of their endpoint. */
    ginnel_detach(endpoint);
    OK(ginnel_message_send(channel, "still", 5));
    FAILS(GINNEL_ERR_WOULD_BLOCK, ginnel_accept(listener, 0, &channel));
    ginnel_listener_close(listener);
    tell(to_client);
}

static void facts_client(void)
{
    await(to_client);
    ginnel_channel *channel = join("test/facts", GINNEL_MESSAGE);
    OK(ginnel_message_send(channel, "0123456789", 10));
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 10);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 5);
    await(to_client);
    ginnel_channel_close(channel);
}

/* A segment that this machine may only read. */

static void read_only_server(void)
{
    ginnel_endpoint *endpoint;
    ginnel_listener *listener;
    ginnel_channel *channel;
    ginnel_endpoint_info info = {0};
    OK(ginnel_attach("news", NULL, &endpoint));
    info.size = sizeof info;
    OK(ginnel_endpoint_get_info(endpoint, &info));
    CHECK(info.read_only == 1 && info.memory == GINNEL_MEMORY_FILE && info.page == 2 << 20);
    FAILS(GINNEL_ERR_READ_ONLY, ginnel_endpoint_listen(endpoint, "x", GINNEL_MESSAGE, NULL, &listener));
    CHECK(listener == NULL && strstr(ginnel_last_error(), "may only read segment news"));
    FAILS(GINNEL_ERR_READ_ONLY, ginnel_endpoint_connect(endpoint, "x", GINNEL_STREAM, NULL, &channel));
    CHECK(channel == NULL && strstr(ginnel_last_error(), "`readers`"));
    ginnel_detach(endpoint);
}

static void read_only_client(void)
{
    ginnel_channel *channel;
    FAILS(GINNEL_ERR_READ_ONLY, ginnel_connect("news/x", GINNEL_MESSAGE, NULL, &channel));
}

#define MANY 40
#define LISTENER UINT64_MAX

static void ready_server(void)
{
    ginnel_listener *listener;
    ginnel_ready_set *set;
    ginnel_channel *channels[MANY];
    uint64_t keys[4], n = 0;
    OK(ginnel_listen("test/ready", GINNEL_MESSAGE, NULL, &listener));
    OK(ginnel_ready_set_new(&set));
    OK(ginnel_ready_set_set_wait(set, GINNEL_WAIT_INTERRUPT, 0));
    OK(ginnel_ready_set_watch(set, (int)OK(ginnel_listener_fd(listener)), LISTENER));
    FAILS(GINNEL_ERR_INVALID, ginnel_ready_set_wait(set, keys, 0, 0));
    FAILS(GINNEL_ERR_INVALID, ginnel_ready_set_watch(set, -1, 0));
    CHECK(OK(ginnel_ready_set_wait(set, keys, LENGTH(keys), 0)) == 0);
    tell(to_client);

    /* Each channel sends its number, then ends. */
    unsigned ended = 0, said = 0;
    while (ended < MANY) {
        ssize_t count = OK(ginnel_ready_set_wait(set, keys, LENGTH(keys), WATCHDOG * SECOND));
        CHECK(count > 0 && count <= (ssize_t)LENGTH(keys));
        for (ssize_t i = 0; i < count; i++) {
            if (keys[i] == LISTENER) {
                int status = ginnel_accept(listener, 0, &channels[n]);
                if (status == GINNEL_ERR_WOULD_BLOCK)
                    continue;
                OK(status);
                OK(ginnel_ready_set_add(set, channels[n], GINNEL_SEND | GINNEL_RECEIVE, n));
                n++;
                continue;
            }
            CHECK(keys[i] < n);
            ginnel_channel *channel = channels[keys[i]];
            if (channel == NULL)
                continue;
            ssize_t len;
            while ((len = ginnel_message_recv(channel, buffer, sizeof buffer)) >= 0) {
                CHECK(len == 1);
                said++;
            }
            if (len == GINNEL_ERR_WOULD_BLOCK)
                continue;
            CHECK(len == GINNEL_ERR_FINISHED);
            ginnel_channel_close(channel);
            channels[keys[i]] = NULL;
            ended++;
        }
    }
    CHECK(said == 3 * MANY);

    /* A program with an event loop of its own. */
    OK(ginnel_ready_set_unwatch(set, (int)OK(ginnel_listener_fd(listener))));
    ginnel_channel *channel;
    tell(to_client);
    OK(ginnel_accept(listener, WATCHDOG * SECOND, &channel));
    OK(ginnel_ready_set_add(set, channel, GINNEL_RECEIVE, MANY));
    /* Keys of the other channels may still be pending. */
    do {
        CHECK(readable((int)OK(ginnel_ready_set_fd(set)), WATCHDOG * 1000) == 1);
        CHECK(OK(ginnel_ready_set_wait(set, keys, 1, 0)) <= 1);
    } while (keys[0] != MANY);
    FAILS(GINNEL_ERR_WOULD_BLOCK, ginnel_message_recv(channel, buffer, sizeof buffer));
    int fd = (int)OK(ginnel_ready_set_fd(set));
    tell(to_client);
    ssize_t len;
    CHECK(readable(fd, WATCHDOG * 1000) == 1);
    while ((len = ginnel_message_recv(channel, buffer, sizeof buffer)) == GINNEL_ERR_WOULD_BLOCK)
        CHECK(OK(ginnel_ready_set_wait(set, keys, LENGTH(keys), WATCHDOG * SECOND)) > 0);
    CHECK(OK(len) == 4);

    /* Outside the set, operations wait again. */
    OK(ginnel_channel_leave_set(channel, GINNEL_RECEIVE));
    OK(ginnel_ready_set_close(set));
    FAILS(GINNEL_ERR_FREED, ginnel_ready_set_wait(set, keys, LENGTH(keys), 0));
    tell(to_client);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 5);
    ginnel_channel_close(channel);
    ginnel_listener_close(listener);
}

static void ready_client(void)
{
    ginnel_channel *channels[MANY];
    ginnel_channel_options options = {0};
    options.size = sizeof options;
    options.capacity = 4096;
    await(to_client);
    for (unsigned i = 0; i < MANY; i++)
        OK(ginnel_connect("test/ready", GINNEL_MESSAGE, &options, &channels[i]));
    for (unsigned round = 0; round < 3; round++)
        for (unsigned i = 0; i < MANY; i++)
            OK(ginnel_message_send(channels[i * 7 % MANY], "x", 1));
    for (unsigned i = 0; i < MANY; i++)
        ginnel_channel_close(channels[i]);
    await(to_client);
    ginnel_channel *channel = join("test/ready", GINNEL_MESSAGE);
    await(to_client);
    OK(ginnel_message_send(channel, "four", 4));
    await(to_client);
    OK(ginnel_message_send(channel, "fifth", 5));
    ginnel_channel_close(channel);
}

/* A listener and its endpoint are freed while another thread waits for a connection, which still comes. */

static ginnel_listener *shared_listener;
static int shared_stat = -1;

static void *accept_for_another(void *channel)
{
    __atomic_store_n(&shared_stat, open("/proc/thread-self/stat", O_RDONLY), __ATOMIC_RELEASE);
    OK(ginnel_accept(shared_listener, -1, channel));
    return NULL;
}

/* Waits until the other thread sleeps, which it does in its call. */
static void await_sleep(void)
{
    for (;;) {
        char text[256] = {0};
        int fd = __atomic_load_n(&shared_stat, __ATOMIC_ACQUIRE);
        if (fd >= 0 && pread(fd, text, sizeof text - 1, 0) > 0 && strstr(text, ") S "))
            return;
        sched_yield();
    }
}

static void shared_server(void)
{
    ginnel_endpoint *endpoint;
    ginnel_channel *channel = NULL;
    pthread_t thread;
    OK(ginnel_attach("test", NULL, &endpoint));
    OK(ginnel_endpoint_listen(endpoint, "shared", GINNEL_MESSAGE, NULL, &shared_listener));
    CHECK(pthread_create(&thread, NULL, accept_for_another, &channel) == 0);
    await_sleep();
    /* In a child there is no such thread, so there the listener goes at once. */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        int fd = (int)OK(ginnel_listener_fd(shared_listener));
        OK(ginnel_listener_close(shared_listener));
        CHECK(fcntl(fd, F_GETFD) == -1 && errno == EBADF);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(ginnel_detach(endpoint));
    OK(ginnel_listener_close(shared_listener));
    FAILS(GINNEL_ERR_FREED, ginnel_listener_close(shared_listener));
    FAILS(GINNEL_ERR_FREED, ginnel_listener_fd(shared_listener));
    tell(to_client);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(OK(ginnel_message_recv(channel, buffer, sizeof buffer)) == 3);
    ginnel_channel_close(channel);
}

static void shared_client(void)
{
    await(to_client);
    ginnel_channel *channel = join("test/shared", GINNEL_MESSAGE);
    OK(ginnel_message_send(channel, "abc", 3));
    ginnel_channel_close(channel);
}

static const struct {
    const char *name;
    void (*server)(void), (*client)(void);
    int client_dies;
} scenarios[] = {
    {"messages", messages_server, messages_client, 0},
    {"in_place", in_place_server, in_place_client, 0},
    {"streams", streams_server, streams_client, 0},
    {"nonblocking", nonblocking_server, nonblocking_client, 0},
    {"ready", ready_server, ready_client, 0},
    {"timeouts", timeouts_server, timeouts_client, 0},
    {"abort", abort_server, abort_client, 0},
    {"handover", handover_server, handover_client, 0},
    {"half_close", half_close_server, half_close_client, 0},
    {"death", death_server, death_client, 1},
    {"mistakes", mistakes_server, mistakes_client, 0},
    {"shared", shared_server, shared_client, 0},
    {"facts", facts_server, facts_client, 0},
    {"read_only", read_only_server, read_only_client, 0},
};

int main(int argc, char **argv)
{
    for (size_t i = 0; i < LENGTH(scenarios); i++) {
        if (argc != 2 || strcmp(argv[1], scenarios[i].name) != 0)
            continue;
        CHECK(pipe(to_client) == 0 && pipe(to_server) == 0);
        client = fork();
        CHECK(client >= 0);
        alarm(WATCHDOG);
        if (client == 0) {
            scenarios[i].client();
            return 0;
        }
        scenarios[i].server();
        int status;
        CHECK(waitpid(client, &status, 0) == client);
        CHECK(scenarios[i].client_dies ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
        return 0;
    }
    fprintf(stderr, "usage: conversation SCENARIO\n");
    return 2;
}
