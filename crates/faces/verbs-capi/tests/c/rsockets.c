/* Two processes with rsockets: a server and its client, which is a child that was forked before there was an rsocket. Each step of
 * one process is answered by the other. Arguments: a port, and a second port at which nothing listens. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <rdma/rsocket.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *who = "server";
/* Sends one byte for each step that the other process waits for. */
static int steps;

#define CHECK(condition)                                                                               \
	do {                                                                                           \
		if (!(condition)) {                                                                    \
			fprintf(stderr, "%s, line %d: %s (%s)\n", who, __LINE__, #condition, strerror(errno)); \
			_exit(1);                                                                      \
		}                                                                                      \
	} while (0)
#define FAILS(call, error) (errno = 0, (long)(call) == -1 && errno == (error))

static void step(void)
{
	CHECK(write(steps, "", 1) == 1);
}

static void await(void)
{
	char byte;
	CHECK(read(steps, &byte, 1) == 1);
}

/* Waits until the first thread of a process sleeps. */
static void await_sleep(pid_t pid)
{
	char name[64], text[512], *state;
	snprintf(name, sizeof name, "/proc/%d/stat", pid);
	do {
		FILE *file = fopen(name, "r");
		CHECK(file && fgets(text, sizeof text, file) && (state = strrchr(text, ')')));
		fclose(file);
	} while (state[2] != 'S' && sched_yield() == 0);
}

static struct sockaddr_in local(int port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return address;
}

static long millis(clockid_t clock)
{
	struct timespec now;
	clock_gettime(clock, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void send_all(int s, const void *bytes, size_t len)
{
	CHECK(rsend(s, bytes, len, 0) == (ssize_t)len);
}

static void expect(int s, const char *text)
{
	char buffer[64] = "";
	size_t len = strlen(text);
	CHECK(rrecv(s, buffer, len, MSG_WAITALL) == (ssize_t)len);
	CHECK(memcmp(buffer, text, len) == 0);
}

static short ready(int s, short events, int timeout)
{
	struct pollfd one = {.fd = s, .events = events};
	int found = rpoll(&one, 1, timeout);
	CHECK(found == (one.revents != 0));
	return one.revents;
}

static int connected(int port, int io_maps)
{
	struct sockaddr_in address = local(port);
	int s = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(s >= 0);
	if (io_maps)
		CHECK(rsetsockopt(s, SOL_RDMA, RDMA_IOMAPSIZE, &io_maps, sizeof io_maps) == 0);
	CHECK(rconnect(s, (struct sockaddr *)&address, sizeof address) == 0);
	return s;
}

/* --- names --- */

static void names_server(int listener, int port)
{
	struct sockaddr_in address = local(port), peer, own;
	socklen_t len = sizeof peer;
	int other = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(rbind(other, (struct sockaddr *)&address, sizeof address) == 0);
	CHECK(FAILS(rlisten(other, 5), EADDRINUSE));
	CHECK(rclose(other) == 0);
	/* An identifier of the connection manager uses the same ports. */
	struct rdma_cm_id *id;
	struct rdma_event_channel *channel = rdma_create_event_channel();
	CHECK(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) == 0);
	CHECK(FAILS(rdma_listen(id, 5), EADDRINUSE));
	CHECK(rdma_destroy_id(id) == 0);
	/* The descriptor of an event channel is an ordinary one. */
	CHECK(ready(channel->fd, POLLIN, 0) == 0);
	rdma_destroy_event_channel(channel);

	CHECK(FAILS(raccept(other, NULL, NULL), EBADF) && FAILS(rclose(other), EBADF));
	int s = raccept(listener, (struct sockaddr *)&peer, &len);
	CHECK(s >= 0 && len == sizeof peer && peer.sin_addr.s_addr == htonl(INADDR_LOOPBACK) && peer.sin_port != 0);
	len = sizeof own;
	CHECK(rgetsockname(s, (struct sockaddr *)&own, &len) == 0 && own.sin_port == htons(port));
	send_all(s, &peer, sizeof peer);
	/* Waits until the client has checked everything. */
	CHECK(rrecv(s, &peer, 1, 0) == 0);
	CHECK(rclose(s) == 0);
	CHECK(FAILS(rsend(s, "x", 1, 0), EBADF));
}

static void names_client(int port, int nobody)
{
	struct sockaddr_in address = local(nobody), own, told;
	socklen_t len = sizeof own;
	int error = -1, s = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(FAILS(rsend(s, "x", 1, 0), ENOTCONN));
	CHECK(FAILS(rconnect(s, (struct sockaddr *)&address, sizeof address), ECONNREFUSED));
	/* The same without blocking. */
	CHECK(rfcntl(s, F_SETFL, rfcntl(s, F_GETFL, 0) | O_NONBLOCK) == 0);
	CHECK(FAILS(rconnect(s, (struct sockaddr *)&address, sizeof address), EINPROGRESS));
	CHECK(ready(s, POLLOUT, -1) == (POLLOUT | POLLERR | POLLHUP));
	len = sizeof error;
	CHECK(rgetsockopt(s, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == ECONNREFUSED);
	CHECK(rgetsockopt(s, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0);
	/* The listener of an rsocket refuses an identifier. */
	struct rdma_cm_id *id;
	address = local(port);
	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000) == 0);
	CHECK(rdma_resolve_route(id, 1000) == 0);
	CHECK(FAILS(rdma_connect(id, NULL), ECONNREFUSED));
	CHECK(rdma_destroy_id(id) == 0);
	/* The rsocket can be used again. */
	CHECK(FAILS(rconnect(s, (struct sockaddr *)&address, sizeof address), EINPROGRESS));
	CHECK(ready(s, POLLOUT, -1) == POLLOUT);
	CHECK(rgetsockopt(s, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0);
	CHECK(rconnect(s, (struct sockaddr *)&address, sizeof address) == 0);
	CHECK(FAILS(rconnect(s, (struct sockaddr *)&address, sizeof address), EISCONN));
	CHECK(ready(s, POLLIN, -1) & POLLIN);
	CHECK(rrecv(s, &told, sizeof told, MSG_WAITALL | MSG_DONTWAIT) == sizeof told);
	len = sizeof own;
	CHECK(rgetsockname(s, (struct sockaddr *)&own, &len) == 0 && memcmp(&own, &told, sizeof own) == 0);
	len = sizeof own;
	CHECK(rgetpeername(s, (struct sockaddr *)&own, &len) == 0 && own.sin_port == htons(port));
	CHECK(FAILS(rsocket(AF_INET, SOCK_DGRAM, 0), EPROTONOSUPPORT));
	CHECK(rclose(s) == 0);
}

/* --- the two directions --- */

static void halves_server(int s)
{
	char text[32];
	CHECK(rrecv(s, text, 4, MSG_PEEK) == 4 && memcmp(text, "requ", 4) == 0);
	struct iovec parts[2] = {{text, 3}, {text + 3, 4}};
	CHECK(rreadv(s, parts, 2) == 7 && memcmp(text, "request", 7) == 0);
	CHECK(ready(s, POLLIN | POLLRDHUP, -1) == (POLLIN | POLLRDHUP));
	CHECK(rrecv(s, text, sizeof text, 0) == 0);
	CHECK(rrecv(s, text, sizeof text, 0) == 0);
	/* The other direction continues to work. */
	parts[0] = (struct iovec){"ans", 3}, parts[1] = (struct iovec){"wer", 3};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
	CHECK(rsendmsg(s, &message, 0) == 6);
	CHECK(rclose(s) == 0);
}

static void halves_client(int s)
{
	char text[32];
	CHECK(FAILS(rrecv(s, text, sizeof text, MSG_DONTWAIT), EAGAIN));
	CHECK(rwrite(s, "request", 7) == 7);
	CHECK(rshutdown(s, SHUT_WR) == 0);
	CHECK(FAILS(rsend(s, "x", 1, 0), EPIPE));
	expect(s, "answer");
	CHECK(rread(s, text, sizeof text) == 0);
	CHECK(ready(s, POLLIN, -1) == (POLLIN | POLLHUP));
	CHECK(rclose(s) == 0);
}

/* --- a full stream --- */

static void full_server(int s)
{
	char *bytes = malloc(1 << 20);
	size_t got = 0, sent;
	await();
	while (got < (4 << 10))
		got += rrecv(s, bytes, (4 << 10) - got, 0);
	step();
	/* Receives the rest. Returns the total number of bytes. */
	for (;;) {
		ssize_t len = rrecv(s, bytes, 1 << 20, 0);
		CHECK(len >= 0);
		if (len == 0)
			break;
		got += len;
	}
	CHECK(read(steps, &sent, sizeof sent) == sizeof sent && sent == got);
	CHECK(rclose(s) == 0);
	free(bytes);
}

static void full_client(int s)
{
	size_t sent = 0;
	ssize_t len;
	char *bytes = calloc(1, 1 << 16);
	CHECK(ready(s, POLLOUT, 0) == POLLOUT);
	while ((len = rsend(s, bytes, 1 << 16, MSG_DONTWAIT)) > 0)
		sent += len;
	CHECK(errno == EAGAIN && sent > (8 << 10));
	CHECK(ready(s, POLLIN | POLLOUT, 20) == 0);
	step();
	CHECK(ready(s, POLLIN | POLLOUT, -1) == POLLOUT);
	await();
	/* A send waits if there is not enough room. */
	send_all(s, bytes, 1 << 16);
	for (int i = 0; i < 16; i++, sent += 1 << 16)
		send_all(s, bytes, 1 << 16);
	sent += 1 << 16;
	CHECK(rclose(s) == 0);
	CHECK(write(steps, &sent, sizeof sent) == sizeof sent);
	free(bytes);
}

/* --- rsockets and others together --- */

static void *write_later(void *fd)
{
	await_sleep(getpid());
	CHECK(write(*(int *)fd, "x", 1) == 1);
	return NULL;
}

static void mixed_server(int s, pid_t client)
{
	await();
	await_sleep(client);
	send_all(s, "late", 4);
	await();
	await_sleep(client);
	send_all(s, "later", 5);
	await();
	CHECK(rclose(s) == 0);
}

static void mixed_client(int s)
{
	int ends[2];
	pthread_t thread;
	char byte;
	CHECK(pipe(ends) == 0);
	struct pollfd all[3] = {{.fd = s, .events = POLLIN}, {.fd = -1, .events = POLLIN}, {.fd = ends[0], .events = POLLIN}};
	/* Nothing is ready, and waiting takes no CPU time. */
	long cpu = millis(CLOCK_PROCESS_CPUTIME_ID), wall = millis(CLOCK_MONOTONIC);
	CHECK(rpoll(all, 3, 300) == 0 && !all[0].revents && !all[1].revents && !all[2].revents);
	CHECK(millis(CLOCK_MONOTONIC) - wall >= 299);
	CHECK(millis(CLOCK_PROCESS_CPUTIME_ID) - cpu < 150);
	/* The ordinary descriptor is ready. */
	CHECK(pthread_create(&thread, NULL, write_later, &ends[1]) == 0);
	CHECK(rpoll(all, 3, -1) == 1 && all[2].revents == POLLIN && !all[0].revents);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(rpoll(&all[1], 2, -1) == 1 && all[2].revents == POLLIN);
	CHECK(read(ends[0], &byte, 1) == 1);
	/* The rsocket is ready. */
	step();
	CHECK(rpoll(all, 3, -1) == 1 && all[0].revents == POLLIN && !all[2].revents);
	/* Both are ready. */
	CHECK(write(ends[1], "x", 1) == 1);
	CHECK(rpoll(all, 3, -1) == 2 && all[0].revents == POLLIN && all[2].revents == POLLIN);
	CHECK(read(ends[0], &byte, 1) == 1);
	expect(s, "late");
	CHECK(rpoll(all, 3, 0) == 0);
	/* The same with select. */
	fd_set reads, writes;
	struct timeval time = {.tv_usec = 1000};
	int most = (s > ends[0] ? s : ends[0]) + 1;
	FD_ZERO(&reads);
	FD_SET(s, &reads);
	FD_SET(ends[0], &reads);
	CHECK(rselect(most, &reads, NULL, NULL, &time) == 0 && !FD_ISSET(s, &reads) && !FD_ISSET(ends[0], &reads));
	step();
	FD_ZERO(&writes);
	FD_SET(s, &writes);
	FD_SET(s, &reads);
	FD_SET(ends[0], &reads);
	CHECK(rselect(most, &reads, NULL, NULL, NULL) == 1 && FD_ISSET(s, &reads) && !FD_ISSET(ends[0], &reads));
	CHECK(rselect(most, &reads, &writes, NULL, NULL) == 2 && FD_ISSET(s, &writes));
	expect(s, "later");
	/* A descriptor that is closed. */
	close(ends[0]), close(ends[1]);
	CHECK(rpoll(all, 3, -1) == 1 && all[2].revents == POLLNVAL);
	CHECK(rpoll(&all[2], 1, -1) == 1 && all[2].revents == POLLNVAL);
	step();
	CHECK(rclose(s) == 0);
}

/* --- threads --- */

static void *receive_all(void *s)
{
	static char bytes[1 << 16];
	ssize_t len;
	size_t all = 0;
	while ((len = rrecv(*(int *)s, bytes, sizeof bytes, 0)) > 0)
		all += len;
	CHECK(len == 0);
	return (void *)all;
}

static void *poll_all(void *s)
{
	/* A second thread uses the same half as the thread that receives, until the end. */
	struct pollfd one = {.fd = *(int *)s, .events = POLLRDHUP};
	do
		CHECK(rpoll(&one, 1, -1) == 1);
	while (!(one.revents & POLLRDHUP) && sched_yield() == 0);
	return NULL;
}

enum { ROUNDS = 200, PIECE = 10000 };

static void exchange(int s)
{
	pthread_t receiver, poller;
	void *all;
	char bytes[PIECE] = "";
	CHECK(pthread_create(&receiver, NULL, receive_all, &s) == 0);
	CHECK(pthread_create(&poller, NULL, poll_all, &s) == 0);
	for (int i = 0; i < ROUNDS; i++)
		send_all(s, bytes, sizeof bytes);
	CHECK(rshutdown(s, SHUT_WR) == 0);
	CHECK(pthread_join(receiver, &all) == 0 && (size_t)all == (size_t)ROUNDS * PIECE);
	CHECK(pthread_join(poller, NULL) == 0);
}

static void threads_server(int s)
{
	exchange(s);
	CHECK(rclose(s) == 0);
}

static void threads_client(int s)
{
	exchange(s);
	CHECK(rclose(s) == 0);
}

/* A thread that receives is woken by the end of its direction, and by nothing else. */
static void wake_server(int s)
{
	await();
	CHECK(rclose(s) == 0);
}

static void wake_client(int s)
{
	pthread_t receiver;
	void *all;
	CHECK(pthread_create(&receiver, NULL, receive_all, &s) == 0);
	int other = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(other >= 0 && other != s && rclose(other) == 0);
	CHECK(rshutdown(s, SHUT_RD) == 0);
	CHECK(pthread_join(receiver, &all) == 0 && all == NULL);
	step();
	CHECK(rclose(s) == 0);
}

/* --- I/O maps --- */

static void maps_server(int s)
{
	unsigned char *bytes = calloc(1, 1 << 16);
	CHECK(FAILS(riomap(s, bytes, 100, PROT_READ, 0, 0), EINVAL));
	CHECK(riomap(s, bytes, 1 << 16, PROT_WRITE, 0, 1 << 20) == 1 << 20);
	send_all(s, "mapped", 6);
	/* What was written arrives before what was sent after it. */
	for (int i = 1; i <= 100; i++) {
		char byte;
		CHECK(rrecv(s, &byte, 1, 0) == 1);
		CHECK(bytes[0] == i && bytes[4464] == i && bytes[65535] == i);
		send_all(s, "", 1);
	}
	CHECK(riounmap(s, bytes, 100) == -1 && errno == EINVAL);
	CHECK(riounmap(s, bytes, 1 << 16) == 0);
	send_all(s, "unmapped", 8);
	expect(s, "end");
	CHECK(rclose(s) == 0);
	free(bytes);
}

static void maps_client(int s)
{
	unsigned char *bytes = malloc(1 << 16);
	CHECK((long)riowrite(s, bytes, 1, 0, 0) == -1 && errno == EFAULT);
	expect(s, "mapped");
	CHECK((long)riowrite(s, bytes, 1, (1 << 20) - 1, 0) == -1 && errno == EFAULT);
	CHECK(riowrite(s, bytes, 10, (1 << 20) + 65530, 0) == 6);
	for (int i = 1; i <= 100; i++) {
		char byte;
		memset(bytes, i, 1 << 16);
		CHECK(riowrite(s, bytes, 1 << 16, 1 << 20, 0) == 1 << 16);
		send_all(s, "", 1);
		CHECK(rrecv(s, &byte, 1, 0) == 1);
	}
	expect(s, "unmapped");
	CHECK((long)riowrite(s, bytes, 1, 1 << 20, 0) == -1 && errno == EFAULT);
	send_all(s, "end", 3);
	CHECK(rclose(s) == 0);
	free(bytes);
}

/* A connection without I/O maps. */
static void no_maps(int s)
{
	char bytes[8];
	CHECK(FAILS(riomap(s, bytes, 8, PROT_WRITE, 0, 0), EOPNOTSUPP));
	CHECK(FAILS(riowrite(s, bytes, 8, 0, 0), EOPNOTSUPP));
	CHECK(rclose(s) == 0);
}

/* --- a child, and the end of the other process --- */

static void last_server(int s, pid_t client)
{
	struct pollfd one = {.fd = s, .events = POLLIN};
	char byte;
	pid_t child = fork();
	if (child == 0) {
		who = "child";
		/* The child has none of its parent's rsockets, and can create its own. */
		CHECK(FAILS(rsend(s, "x", 1, 0), EBADF));
		CHECK(FAILS(rclose(s), EBADF));
		int own = rsocket(AF_INET, SOCK_STREAM, 0);
		CHECK(own >= 0 && own != s && rclose(own) == 0);
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	send_all(s, "here", 4);
	/* The client sends this, and is killed then. */
	await();
	CHECK(kill(client, SIGKILL) == 0);
	expect(s, "last");
	CHECK(rpoll(&one, 1, -1) == 1 && one.revents & POLLIN);
	CHECK(rrecv(s, &byte, 1, 0) == 0);
	CHECK(waitpid(client, &status, 0) == client && WIFSIGNALED(status));
	while (rsend(s, "x", 1, MSG_DONTWAIT) == 1)
		sched_yield();
	CHECK(errno == ECONNRESET || errno == EPIPE);
	CHECK(FAILS(rsend(s, "x", 1, 0), EPIPE));
	CHECK(rclose(s) == 0);
}

static void last_client(int s)
{
	expect(s, "here");
	send_all(s, "last", 4);
	step();
	for (;;)
		pause();
}

static int accepted(int listener)
{
	int s = raccept(listener, NULL, NULL);
	CHECK(s >= 0);
	return s;
}

int main(int count, char **arguments)
{
	int pair[2];
	CHECK(count == 3 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	int port = atoi(arguments[1]), nobody = atoi(arguments[2]);
	pid_t client = fork();
	CHECK(client >= 0);
	steps = pair[client == 0];
	close(pair[client != 0]);
	if (client == 0) {
		who = "client";
		await();
		names_client(port, nobody);
		halves_client(connected(port, 0));
		full_client(connected(port, 0));
		mixed_client(connected(port, 0));
		threads_client(connected(port, 0));
		wake_client(connected(port, 0));
		maps_client(connected(port, 4));
		no_maps(connected(port, 0));
		last_client(connected(port, 0));
	}
	struct sockaddr_in address = local(port);
	int listener = rsocket(AF_INET, SOCK_STREAM, 0), one = 1;
	CHECK(listener >= 0 && rsetsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	CHECK(rbind(listener, (struct sockaddr *)&address, sizeof address) == 0);
	CHECK(rlisten(listener, 5) == 0);
	CHECK(rfcntl(listener, F_SETFL, O_NONBLOCK) == 0);
	CHECK(FAILS(raccept(listener, NULL, NULL), EAGAIN) && ready(listener, POLLIN, 10) == 0);
	step();
	CHECK(ready(listener, POLLIN, -1) == POLLIN);
	CHECK(rfcntl(listener, F_SETFL, 0) == 0);
	names_server(listener, port);
	halves_server(accepted(listener));
	full_server(accepted(listener));
	mixed_server(accepted(listener), client);
	threads_server(accepted(listener));
	wake_server(accepted(listener));
	maps_server(accepted(listener));
	no_maps(accepted(listener));
	last_server(accepted(listener), client);
	CHECK(rclose(listener) == 0);
	/* The name is free again. */
	listener = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(rbind(listener, (struct sockaddr *)&address, sizeof address) == 0 && rlisten(listener, 5) == 0);
	CHECK(rclose(listener) == 0);
	puts("good");
	return 0;
}
