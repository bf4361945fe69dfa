/* Sends bytes to a socket in unusual ways, and checks that they are in the stream. Both ends are in this process. */
#define _GNU_SOURCE
#include <aio.h>
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                                                    \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			fprintf(stderr, "line %d: %s: errno %d\n", __LINE__, #what, errno);                            \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

ssize_t __read(int, void *, size_t);
ssize_t __write(int, const void *, size_t);
ssize_t __send(int, const void *, size_t, int);
int __close(int);
int __dup2(int, int);
int __poll(struct pollfd *, nfds_t, int);
int __fcntl(int, int, ...);

static int a, b;

static int listener_at(struct sockaddr_in *address)
{
	*address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof *address;
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	CHECK(listener >= 0 && !bind(listener, (void *)address, len) && !listen(listener, 1));
	CHECK(!getsockname(listener, (void *)address, &len));
	return listener;
}

static void connection_by(int listener, const struct sockaddr_in *address, void (*begun)(void))
{
	a = socket(AF_INET, SOCK_STREAM, 0);
	begun();
	CHECK(!connect(a, (const void *)address, sizeof *address));
	b = accept(listener, NULL, NULL);
	CHECK(b >= 0);
	/* Both directions carry a few bytes first, and change over with them. */
	CHECK(write(a, "begin", 5) == 5);
	CHECK(write(b, "begin", 5) == 5);
	char bytes[5];
	CHECK(recv(a, bytes, 5, MSG_WAITALL) == 5 && recv(b, bytes, 5, MSG_WAITALL) == 5);
}

static void nothing(void)
{
}

/* `begun` runs before the socket is connected. */
static void connection_after(void (*begun)(void))
{
	struct sockaddr_in address;
	int listener = listener_at(&address);
	connection_by(listener, &address, begun);
	CHECK(!close(listener));
}

static void connection(void)
{
	connection_after(nothing);
}

/* Checks that exactly this text has arrived at the other end. */
static void comes(const char *text)
{
	char bytes[4096];
	size_t len = strlen(text);
	CHECK(recv(b, bytes, len, MSG_WAITALL) == (ssize_t)len);
	if (memcmp(bytes, text, len)) {
		fprintf(stderr, "%.*s instead of %s\n", (int)len, bytes, text);
		exit(1);
	}
	CHECK(recv(b, bytes, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

__attribute__((format(printf, 2, 3))) static int by_list(int fd, const char *format, ...)
{
	va_list list;
	va_start(list, format);
	int len = vdprintf(fd, format, list);
	va_end(list);
	return len;
}

static void formatted(void)
{
	const char *words[] = {"one", "two", "three", "four", "five", "six", "seven", "eight"};
	const char *expected = "one 1 1.5 two 2 2.5 three 3 3.5 four 4 4.5 five 5.5 6.5 7.5 8.5 9.5 -1";
	connection();
	CHECK(dprintf(a, "plain\n") == 6);
	comes("plain\n");
	/* More arguments than fit into registers, integers and floating-point numbers in turn. */
	CHECK(dprintf(a, "%s %d %.1f %s %d %.1f %s %d %.1f %s %d %.1f %s %.1f %.1f %.1f %.1f %.1f %ld", words[0], 1, 1.5,
	              words[1], 2, 2.5, words[2], 3, 3.5, words[3], 4, 4.5, words[4], 5.5, 6.5, 7.5, 8.5, 9.5,
	              -1L) == (int)strlen(expected));
	comes(expected);
}

static void lists(void)
{
	connection();
	CHECK(by_list(a, "%s %d %.1f %Lf", "list", 7, 7.5, 1.0L) == 19);
	comes("list 7 7.5 1.000000");
	/* A file that is not a connection. */
	int pipes[2];
	char bytes[16];
	CHECK(!pipe(pipes) && dprintf(pipes[1], "%d", 42) == 2 && read(pipes[0], bytes, 16) == 2);
	CHECK(!memcmp(bytes, "42", 2));
}

static void aliases(void)
{
	char bytes[16];
	connection();
	CHECK(__write(a, "one", 3) == 3 && __send(a, "two", 3, 0) == 3);
	CHECK(__read(b, bytes, 6) == 6 && !memcmp(bytes, "onetwo", 6));
	struct pollfd poll = {.fd = b, .events = POLLIN};
	CHECK(__poll(&poll, 1, 0) == 0);
	CHECK(__fcntl(b, F_SETFL, O_NONBLOCK) == 0);
	CHECK(__read(b, bytes, 1) == -1 && errno == EAGAIN);
	int copy = open("/dev/null", O_RDONLY);
	CHECK(__dup2(a, copy) == copy && !__close(a) && __write(copy, "three", 5) == 5);
	CHECK(__poll(&poll, 1, -1) == 1 && __read(b, bytes, 16) == 5 && !__close(copy));
	CHECK(__poll(&poll, 1, -1) == 1 && __read(b, bytes, 16) == 0);
}

static void system_calls(void)
{
	char bytes[64];
	connection();
	CHECK(syscall(SYS_write, a, "one", 3) == 3);
	comes("one");
	struct iovec pieces[2] = {{"two", 3}, {"three", 5}};
	CHECK(syscall(SYS_writev, a, pieces, 2) == 8);
	comes("twothree");
	CHECK(syscall(SYS_sendto, a, "four", 4, MSG_NOSIGNAL, NULL, 0) == 4);
	struct pollfd poll = {.fd = b, .events = POLLIN};
	CHECK(syscall(SYS_poll, &poll, 1, -1) == 1 && poll.revents == POLLIN);
	CHECK(syscall(SYS_recvfrom, b, bytes, 64, MSG_PEEK, NULL, NULL) == 4);
	CHECK(syscall(SYS_read, b, bytes, 64) == 4 && !memcmp(bytes, "four", 4));
	struct timespec none = {0, 0};
	CHECK(syscall(SYS_ppoll, &poll, 1, &none, NULL, 8) == 0);
	fd_set set;
	FD_ZERO(&set);
	FD_SET(b, &set);
	sigset_t mask;
	struct {
		const void *mask;
		size_t len;
	} masked = {&mask, 8};
	sigemptyset(&mask);
	CHECK(syscall(SYS_pselect6, b + 1, &set, NULL, NULL, &none, &masked) == 0);
	int epoll = syscall(SYS_epoll_create1, 0);
	struct epoll_event event = {.events = EPOLLIN, .data.fd = b};
	CHECK(epoll >= 0 && !syscall(SYS_epoll_ctl, epoll, EPOLL_CTL_ADD, b, &event));
	CHECK(syscall(SYS_epoll_pwait, epoll, &event, 1, 0, NULL, 8) == 0);
	CHECK(syscall(SYS_pwritev2, a, pieces, 2, -1L, -1L, 0) == 8);
	CHECK(syscall(SYS_epoll_wait, epoll, &event, 1, -1) == 1 && event.data.fd == b);
	comes("twothree");
	CHECK(syscall(SYS_fcntl, b, F_SETFL, O_NONBLOCK) == 0);
	CHECK(syscall(SYS_read, b, bytes, 1) == -1 && errno == EAGAIN);
	/* System calls that do not concern sockets, with six arguments, and with errors. */
	CHECK(syscall(SYS_getpid) == getpid());
	char *memory = (char *)syscall(SYS_mmap, NULL, 8192L, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
	CHECK(memory != MAP_FAILED && (memory[8191] = 1));
	CHECK(syscall(SYS_munmap, memory + 1, 1) == -1 && errno == EINVAL);
	CHECK(syscall(SYS_io_uring_setup, 1, NULL) == -1 && errno == ENOSYS);
	/* A call that returns twice. */
	long child = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
	if (child == 0)
		_exit(7);
	int status;
	CHECK(child > 0 && waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
	CHECK(syscall(SYS_dup3, a, epoll, 0) == epoll && !syscall(SYS_close, a) && syscall(SYS_write, epoll, "end", 3) == 3);
	CHECK(syscall(SYS_poll, &poll, 1, -1) == 1);
	comes("end");
}

/* A child that may make only the system calls that its connection needs, and is killed by any other. The parent talks to it. */
static void confined(void)
{
	static char sent[200000], got[200000];
	const int allowed[] = {SYS_read, SYS_write, SYS_poll, SYS_futex, SYS_clock_gettime, SYS_close, SYS_exit_group,
	                       SYS_rt_sigreturn, SYS_brk, SYS_mmap, SYS_munmap, SYS_getpid};
	struct sock_filter filter[2 * sizeof allowed / sizeof *allowed + 2];
	size_t len = 0;
	filter[len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++) {
		filter[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
		filter[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	filter[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	struct sock_fprog program = {.len = len, .filter = filter};
	int pipes[2];
	connection();
	for (size_t i = 0; i < sizeof sent; i++)
		sent[i] = (char)(i * 7 + (i >> 8));
	CHECK(!pipe(pipes));
	pid_t child = fork();
	if (child == 0) {
		close(a);
		CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
		for (;;) {
			/* Receives a length and as many bytes, and sends the bytes back. */
			uint32_t n = 0;
			struct pollfd input = {b, POLLIN, 0};
			if (poll(&input, 1, 60000) != 1)
				_exit(5);
			for (size_t at = 0; at < sizeof n;) {
				ssize_t some = read(b, (char *)&n + at, sizeof n - at);
				if (some <= 0)
					_exit(some == 0 && at == 0 ? 0 : 2);
				at += some;
			}
			for (size_t at = 0; at < n;) {
				ssize_t some = read(b, got + at, n - at);
				if (some <= 0)
					_exit(3);
				at += some;
			}
			for (size_t at = 0; at < n;) {
				ssize_t some = write(b, got + at, n - at);
				if (some <= 0)
					_exit(4);
				at += some;
			}
		}
	}
	CHECK(child > 0 && !close(b));
	const uint32_t lens[] = {1, 10, 1000, 3000, 4096, 5000, 60000, 200000};
	for (size_t turn = 0; turn < 40; turn++) {
		uint32_t n = lens[turn % 8];
		CHECK(write(a, &n, sizeof n) == sizeof n && write(a, sent, n) == (ssize_t)n);
		CHECK(recv(a, got, n, MSG_WAITALL) == (ssize_t)n && !memcmp(got, sent, n));
	}
	int status;
	CHECK(!close(a) && waitpid(child, &status, 0) == child);
	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		fprintf(stderr, "the child has ended by signal %d, or with %d\n", WTERMSIG(status), WEXITSTATUS(status));
		exit(1);
	}
}

static void spawned(void)
{
	char *arguments[] = {"sh", "-c", "echo spawned", NULL}, *environment[] = {NULL};
	posix_spawn_file_actions_t actions;
	pid_t child;
	int status;
	connection();
	CHECK(!posix_spawn_file_actions_init(&actions));
	CHECK(!posix_spawn_file_actions_adddup2(&actions, a, 1));
	CHECK(!posix_spawn(&child, "/bin/sh", &actions, NULL, arguments, environment));
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	comes("spawned\n");
	CHECK(write(a, "end", 3) == 3);
	comes("end");
}

/* The child continues its connection in another program, which gets more arguments than fit into registers. */
static void executes(int way)
{
	char script[] = "echo \"$0 $1 $2 $3 $4 $5 $WAY\"", *environment[] = {"WAY=its own", NULL};
	char *arguments[] = {"sh", "-c", script, "0", "1", "2", "3", "4", "5", NULL};
	CHECK(dup2(a, 1) == 1 && !close(b));
	switch (way) {
	case 0:
		execl("/bin/sh", "sh", "-c", script, "0", "1", "2", "3", "4", "5", NULL);
		break;
	case 1:
		execlp("sh", "sh", "-c", script, "0", "1", "2", "3", "4", "5", NULL);
		break;
	case 2:
		execle("/bin/sh", "sh", "-c", script, "0", "1", "2", "3", "4", "5", NULL, environment);
		break;
	case 3:
		execveat(AT_FDCWD, "/bin/sh", arguments, environment, 0);
		break;
	default:
		syscall(SYS_execveat, AT_FDCWD, "/bin/sh", arguments, environment, 0);
	}
	_exit(9);
}

static void executed(void)
{
	CHECK(execl("/nowhere", "nowhere", NULL) == -1 && errno == ENOENT);
	CHECK(execlp("nowhere-at-all", "nowhere", "1", "2", "3", "4", "5", "6", NULL) == -1 && errno == ENOENT);
	CHECK(!setenv("WAY", "the parent's", 1));
	for (int way = 0; way < 5; way++) {
		int status;
		connection();
		pid_t child = fork();
		if (child == 0)
			executes(way);
		CHECK(child > 0 && !close(a));
		const char *text = way < 2 ? "0 1 2 3 4 5 the parent's\n" : "0 1 2 3 4 5 its own\n";
		char bytes[100];
		CHECK(recv(b, bytes, strlen(text), MSG_WAITALL) == (ssize_t)strlen(text));
		CHECK(!memcmp(bytes, text, strlen(text)) && recv(b, bytes, 1, 0) == 0);
		CHECK(waitpid(child, &status, 0) == child && status == 0 && !close(b));
	}
}

static int leave(void *unused)
{
	(void)unused;
	close(a);
	dup2(0, a);
	_exit(close(a));
}

static void ends(pid_t child)
{
	int status;
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static void leave_by_vfork(void)
{
	pid_t child = vfork();
	if (!child)
		leave(NULL);
	ends(child);
}

static void leave_by_clone(void)
{
	static char stack[1 << 16] __attribute__((aligned(16)));
	ends(clone(leave, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL));
}

/* A child that shares this process's memory closes a connection before it is connected, and after it has changed over. */
static void born(void (*leave_by)(void))
{
	connection_after(leave_by);
	for (int turn = 0; turn < 3; turn++) {
		leave_by();
		CHECK(write(a, "still", 5) == 5);
		comes("still");
	}
}

static void vforked(void)
{
	born(leave_by_vfork);
}

static void cloned(void)
{
	born(leave_by_clone);
}

static void asynchronous(void)
{
	char bytes[3] = "aio";
	connection();
	struct aiocb control = {.aio_fildes = a, .aio_buf = bytes, .aio_nbytes = 3};
	struct aiocb *list[] = {&control};
	CHECK(aio_write(&control) == -1 && errno == ENOSYS);
	CHECK(aio_read(&control) == -1 && errno == ENOSYS);
	control.aio_lio_opcode = LIO_WRITE;
	CHECK(lio_listio(LIO_WAIT, list, 1, NULL) == -1 && errno == ENOSYS);
	CHECK(write(a, "end", 3) == 3);
	comes("end");
	/* A file that is not a connection. */
	FILE *file = tmpfile();
	control.aio_fildes = fileno(file);
	CHECK(!aio_write(&control));
	const struct aiocb *wait[] = {&control};
	CHECK(!aio_suspend(wait, 1, NULL) && aio_return(&control) == 3);
}

/* A C library stream over a connection that has changed over; closing the stream closes the connection and frees its number. */
static void streams(void)
{
	char line[100], path[] = "streamXXXXXX";
	connection();
	FILE *in = fdopen(dup(b), "r"), *out = fdopen(a, "w");
	CHECK(in && out && fileno(out) == a);
	for (int turn = 0; turn < 200; turn++) {
		CHECK(fprintf(out, "line %d\n", turn) > 0 && !fflush(out));
		CHECK(fgets(line, sizeof line, in) && atoi(line + 5) == turn);
	}
	CHECK(!fclose(out));
	/* The file that has the number now is not a connection. */
	int file = mkstemp(path);
	CHECK(file == a && write(file, "in the file", 11) == 11);
	CHECK(pread(file, line, sizeof line, 0) == 11 && !memcmp(line, "in the file", 11));
	CHECK(!fgets(line, sizeof line, in) && feof(in));
	CHECK(!fclose(in) && !close(file));
	/* The same with a connection that the C library itself has closed. */
	connection();
	CHECK(send(a, "x", 1, 0) == 1);
	comes("x");
	FILE *other = fdopen(dup(0), "r");
	CHECK(other && !fclose(other));
	CHECK(send(a, "y", 1, 0) == 1);
	comes("y");
}

/* A call in a thread, of which the test must know whether it sleeps. */
struct sleeper {
	pthread_t thread;
	_Atomic pid_t tid;
	int fd, sends;
	ssize_t result;
	int error;
	char bytes[100];
};

static void *sleeps(void *argument)
{
	static char much[16 << 20];
	struct sleeper *sleeper = argument;
	sleeper->tid = gettid();
	if (sleeper->sends)
		sleeper->result = send(sleeper->fd, much, sizeof much, MSG_NOSIGNAL);
	else
		sleeper->result = recv(sleeper->fd, sleeper->bytes, sizeof sleeper->bytes, 0);
	sleeper->error = errno;
	return NULL;
}

static void begin_to_sleep(struct sleeper *sleeper, int fd, int sends)
{
	char path[100], text[2000];
	*sleeper = (struct sleeper){.fd = fd, .sends = sends};
	CHECK(!pthread_create(&sleeper->thread, NULL, sleeps, sleeper));
	/* It must sleep at several checks in a row, because a thread that waits for room wakes now and then. */
	for (int looks = 0; looks < 20; looks++) {
		usleep(1000);
		if (!sleeper->tid) {
			looks = 0;
			continue;
		}
		snprintf(path, sizeof path, "/proc/self/task/%d/stat", sleeper->tid);
		FILE *file = fopen(path, "r");
		CHECK(file && fgets(text, sizeof text, file) && !fclose(file));
		if (strrchr(text, ')')[2] != 'S')
			looks = 0;
	}
}

/* Checks that bytes written to and read from a file do not mix with those of the connection whose number it has now. */
static void untouched(int fd, int other)
{
	char bytes[100];
	CHECK(recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) == 9 && !memcmp(bytes, "the files", 9));
	CHECK(recv(other, bytes, sizeof bytes, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

/* Another thread sleeps in a call on a connection whose number is given to another file, or is closed. */
static void replaced(void)
{
	for (int way = 0; way < 6; way++) {
		struct sleeper sleeper;
		int files[2], sends = way % 2;
		connection();
		CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, files) && write(files[1], "the files", 9) == 9);
		begin_to_sleep(&sleeper, b, sends);
		if (way < 2)
			CHECK(dup2(files[0], b) == b);
		else if (way < 4)
			CHECK(dup3(files[0], b, O_CLOEXEC) == b);
		else
			CHECK(!close(b) && fcntl(files[0], F_DUPFD, b) == b);
		/* The peer wakes the thread, or closes its end. */
		char bytes[100];
		while (sends && recv(a, bytes, sizeof bytes, 0) > 0)
			;
		CHECK(!close(a) && !pthread_join(sleeper.thread, NULL));
		untouched(b, files[1]);
		CHECK(sends || sleeper.result <= 0);
		CHECK(!close(b) && !close(files[0]) && !close(files[1]));
	}
	/* A connection that has another number continues to work under that. */
	struct sleeper sleeper;
	int files[2];
	connection();
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, files) && write(files[1], "the files", 9) == 9);
	int copy = dup(b);
	begin_to_sleep(&sleeper, b, 0);
	CHECK(copy >= 0 && dup2(files[0], b) == b && write(a, "for the sleeper", 15) == 15);
	CHECK(!pthread_join(sleeper.thread, NULL) && sleeper.result == 15);
	CHECK(!memcmp(sleeper.bytes, "for the sleeper", 15));
	untouched(b, files[1]);
	CHECK(write(a, "by the copy", 11) == 11 && recv(copy, sleeper.bytes, 11, MSG_WAITALL) == 11);
	/* If the call fails, the connection stays as it is. */
	CHECK(dup2(-1, copy) == -1 && errno == EBADF && dup3(a, copy, -1) == -1 && errno == EINVAL);
	CHECK(write(a, "still there", 11) == 11 && recv(copy, sleeper.bytes, 11, MSG_WAITALL) == 11);
	CHECK(!memcmp(sleeper.bytes, "still there", 11));
	CHECK(!close(a) && recv(copy, sleeper.bytes, 1, 0) == 0 && !close(b) && !close(copy));
}

/* Threads make calls while the number is given to another file, again and again: no bytes get into the wrong file. */
static _Atomic int racing, peer_racing, pausing, pauses, peers_sent, peers_got, sent, got;

static void *race(void *unused)
{
	char bytes[64];
	while (racing) {
		if (pausing) {
			pauses = 1;
			while (pausing)
				sched_yield();
			pauses = 0;
		}
		struct pollfd one = {.fd = b, .events = POLLIN};
		poll(&one, 1, 1);
		ssize_t n = recv(b, bytes, sizeof bytes, MSG_DONTWAIT);
		for (ssize_t i = 0; i < n; i++) {
			CHECK(bytes[i] == 'p' || bytes[i] == 'f');
			got += bytes[i] == 'p';
		}
		if (send(b, "m", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1)
			sent++;
	}
	return unused;
}

static void peer_gets(int flags)
{
	char bytes[64];
	ssize_t n = recv(a, bytes, sizeof bytes, flags);
	for (ssize_t i = 0; i < n; i++)
		CHECK(bytes[i] == 'm');
	if (n > 0)
		peers_got += n;
}

static void *race_with(void *unused)
{
	while (peer_racing) {
		if (send(a, "p", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1)
			peers_sent++;
		struct pollfd one = {.fd = a, .events = POLLIN};
		poll(&one, 1, 1);
		peer_gets(MSG_DONTWAIT);
	}
	return unused;
}

static void races(void)
{
	struct sleeper idle[4];
	int files[2], others = 0;
	pthread_t threads[2];
	char bytes[4096];
	/* These threads occupy all slots at the doorbell, so all others are woken by bytes. */
	for (int i = 0; i < 4; i++) {
		connection();
		begin_to_sleep(&idle[i], b, 0);
	}
	connection();
	int copy = dup(b);
	CHECK(copy >= 0 && !socketpair(AF_UNIX, SOCK_STREAM, 0, files));
	racing = peer_racing = 1;
	CHECK(!pthread_create(&threads[0], NULL, race, NULL) && !pthread_create(&threads[1], NULL, race_with, NULL));
	for (int turn = 0; turn < 3000; turn++) {
		for (volatile int i = 0; i < turn * 37 % 20000; i++)
			;
		CHECK(write(files[1], "f", 1) == 1 && dup2(files[0], b) == b);
		/* The number is given back while no thread makes a call; otherwise a call on the other file could end after that. */
		pausing = 1;
		while (!pauses)
			sched_yield();
		ssize_t n = recv(files[1], bytes, sizeof bytes, MSG_DONTWAIT);
		for (ssize_t i = 0; i < n; i++)
			CHECK(bytes[i] == 'm');
		if (n > 0)
			others += n;
		CHECK(dup2(copy, b) == b);
		pausing = 0;
		while (pauses)
			sched_yield();
	}
	racing = 0;
	CHECK(!pthread_join(threads[0], NULL));
	peer_racing = 0;
	CHECK(!pthread_join(threads[1], NULL));
	/* No byte is lost or received twice. */
	struct pollfd ends[2] = {{.fd = a, .events = POLLIN}, {.fd = copy, .events = POLLIN}};
	while (peers_got + others < sent && poll(&ends[0], 1, 10000) == 1)
		peer_gets(MSG_DONTWAIT);
	while (got < peers_sent && poll(&ends[1], 1, 10000) == 1)
		got += recv(copy, bytes, 1, MSG_DONTWAIT) == 1;
	if (peers_got + others != sent || got != peers_sent) {
		fprintf(stderr, "%d + %d of %d, %d of %d\n", peers_got, others, sent, got, peers_sent);
		exit(1);
	}
	CHECK(recv(a, bytes, 1, MSG_DONTWAIT) == -1 && recv(copy, bytes, 1, MSG_DONTWAIT) == -1);
	CHECK(peers_got + others == sent && got == peers_sent);
	exit(0);
}

/* A thread sleeps in a call on a connection that is closed meanwhile. Later connections are not affected. */
static void reused(void)
{
	for (int way = 0; way < 4; way++) {
		struct sleeper sleepers[2];
		int later[4][2], first[2];
		char bytes[4];
		struct sockaddr_in address;
		int listener = listener_at(&address);
		connection_by(listener, &address, nothing);
		first[0] = a, first[1] = b;
		begin_to_sleep(&sleepers[0], first[1], way % 2);
		begin_to_sleep(&sleepers[1], first[1], 0);
		int null = open("/dev/null", O_RDWR);
		CHECK(null >= 0 && (way < 2 ? !close(first[1]) : dup2(null, first[1]) == first[1]));
		for (int i = 0; i < 4; i++) {
			connection_by(listener, &address, nothing);
			later[i][0] = a, later[i][1] = b;
			CHECK(write(a, "new", 3) == 3 && write(b, "too", 3) == 3);
		}
		shutdown(first[0], SHUT_RDWR);
		CHECK(!close(first[0]));
		for (int i = 0; i < 2; i++) {
			CHECK(!pthread_join(sleepers[i].thread, NULL));
			CHECK(sleepers[i].sends || sleepers[i].result <= 0);
		}
		for (int i = 0; i < 4; i++) {
			CHECK(recv(later[i][1], bytes, 4, 0) == 3 && !memcmp(bytes, "new", 3));
			CHECK(recv(later[i][0], bytes, 4, 0) == 3 && !memcmp(bytes, "too", 3));
			CHECK(recv(later[i][0], bytes, 4, MSG_DONTWAIT) == -1 && errno == EAGAIN);
			/* A thread that sleeps on the new connection is woken. */
			begin_to_sleep(&sleepers[0], later[i][1], 0);
			CHECK(write(later[i][0], "up", 2) == 2 && !pthread_join(sleepers[0].thread, NULL));
			CHECK(sleepers[0].result == 2 && !memcmp(sleepers[0].bytes, "up", 2));
			CHECK(!close(later[i][0]) && !close(later[i][1]));
		}
		CHECK(!close(null) && !close(listener) && (way < 2 || !close(first[1])));
	}
}

static sigjmp_buf back;
static volatile sig_atomic_t may_jump;

static void jump(int signal)
{
	(void)signal;
	if (may_jump)
		siglongjmp(back, 1);
}

static void *drain(void *end)
{
	/* Receives until 64 marks in a row. */
	static char bytes[1 << 16];
	size_t marks = 0;
	while (marks < 64) {
		ssize_t n = recv(b, bytes, sizeof bytes, 0);
		CHECK(n > 0);
		for (ssize_t i = 0; i < n; i++)
			marks = bytes[i] == '!' ? marks + 1 : 0;
	}
	return end;
}

/* A signal handler jumps out of calls that send or wait, at any point. */
static void jumps(void)
{
	static char block[8000];
	pthread_t reader;
	struct itimerval often = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
	memset(block, '.', sizeof block);
	connection();
	signal(SIGALRM, jump);
	sigset_t alarm;
	sigemptyset(&alarm);
	sigaddset(&alarm, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &alarm, NULL);
	CHECK(!pthread_create(&reader, NULL, drain, NULL));
	pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
	CHECK(!setitimer(ITIMER_REAL, &often, NULL));
	for (volatile int turn = 0; turn < 400; turn++) {
		if (sigsetjmp(back, 1) == 0) {
			may_jump = 1;
			for (;;) {
				CHECK(send(a, block, sizeof block, 0) > 0);
				struct pollfd poll_one = {.fd = a, .events = turn % 2 ? POLLIN : POLLOUT};
				poll(&poll_one, 1, turn % 4 == 1 ? 2 : 0);
			}
		}
		may_jump = 0;
	}
	CHECK(!setitimer(ITIMER_REAL, &never, NULL));
	memset(block, '!', 64);
	CHECK(send(a, block, 64, 0) == 64);
	CHECK(!pthread_join(reader, NULL));
	for (int turn = 0; turn < 1000; turn++) {
		CHECK(send(a, "after", 5, 0) == 5);
		comes("after");
	}
}

static void *sends(void *unused)
{
	static const char block[5000];
	for (;;)
		send(a, block, sizeof block, MSG_NOSIGNAL);
	return unused;
}

static void *receives(void *unused)
{
	static char block[5000];
	for (;;)
		recv(b, block, sizeof block, 0);
	return unused;
}

/* The program exits while threads are in calls. */
static void exits(void)
{
	connection();
	for (int i = 0; i < 3; i++) {
		pthread_t thread;
		CHECK(!pthread_create(&thread, NULL, sends, NULL) && !pthread_create(&thread, NULL, receives, NULL));
	}
	usleep(20000);
	exit(0);
}

/* This program's own allocator, which counts and then calls that of the C library. */
static __thread int allocations;
static void *(*next_malloc)(size_t);
static char early[1 << 16];
static size_t early_used;

void *malloc(size_t size)
{
	static int asking;
	allocations++;
	if (!next_malloc) {
		if (asking) {
			/* dlsym allocates. */
			void *piece = early + early_used;
			early_used += (size + 15) / 16 * 16;
			return early_used <= sizeof early ? piece : NULL;
		}
		asking = 1;
		*(void **)&next_malloc = dlsym(RTLD_NEXT, "malloc");
		asking = 0;
		/* This may call the preload library before it is initialised. */
		if (write(-1, "", 0) != -1)
			abort();
	}
	return next_malloc(size);
}

void free(void *piece)
{
	static void (*next_free)(void *);
	if ((char *)piece >= early && (char *)piece < early + sizeof early)
		return;
	if (!next_free)
		*(void **)&next_free = dlsym(RTLD_NEXT, "free");
	next_free(piece);
}

static void allocates(void)
{
	char bytes[100] = "", got[100];
	connection();
	for (int turn = 0; turn < 2000; turn++) {
		if (turn == 1000)
			allocations = 0;
		CHECK(send(a, bytes, 1 + turn % 100, 0) == 1 + turn % 100);
		CHECK(recv(b, got, 1 + turn % 100, MSG_WAITALL) == 1 + turn % 100);
		CHECK(recv(b, got, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
	}
	if (allocations) {
		fprintf(stderr, "%d allocations in 1,000 round trips\n", allocations);
		exit(1);
	}
}

/* A setuid program: no library is preloaded, and it works. */
static void privileged(void)
{
	Dl_info info;
	if (!getauxval(AT_SECURE)) {
		puts("no rights of others here");
		return;
	}
	CHECK(dladdr(dlsym(RTLD_DEFAULT, "recv"), &info) && strstr(info.dli_fname, "libc.so"));
	connection();
	CHECK(send(a, "x", 1, 0) == 1);
	comes("x");
}

static volatile sig_atomic_t faults;
static char *missing;

static void on_fault(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	CHECK(info->si_addr == missing);
	faults++;
	mmap(missing, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

/* The program sets its own handler for memory faults after the library has set one. It is called for the program's memory. */
static void faulting(void)
{
	char path[] = "faultXXXXXX";
	connection();
	int file = mkstemp(path);
	CHECK(file >= 0);
	missing = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
	CHECK(missing != MAP_FAILED && !sigaction(SIGBUS, &action, NULL));
	for (int turn = 0; turn < 100; turn++) {
		CHECK(send(a, "before", 6, 0) == 6);
		comes("before");
		if (turn == 50)
			*(volatile char *)missing = 1;
	}
	CHECK(faults == 1);
}

int main(int count, char **arguments)
{
	struct {
		const char *name;
		void (*run)(void);
	} traps[] = {{"formatted", formatted},       {"lists", lists},
	             {"aliases", aliases},           {"system_calls", system_calls},
	             {"asynchronous", asynchronous}, {"confined", confined},
	             {"spawned", spawned},           {"executed", executed},
	             {"replaced", replaced},         {"races", races},
	             {"reused", reused},             {"streams", streams},
	             {"jumps", jumps},               {"exits", exits},
	             {"allocates", allocates},       {"faulting", faulting},
	             {"vforked", vforked},           {"cloned", cloned},
	             {"privileged", privileged}};
	for (size_t i = 0; count == 2 && i < sizeof traps / sizeof *traps; i++)
		if (!strcmp(arguments[1], traps[i].name)) {
			traps[i].run();
			return 0;
		}
	return 2;
}
