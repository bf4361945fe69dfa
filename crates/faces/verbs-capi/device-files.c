/* device-files.so, which `ginnel run --verbs` loads into the program. It gives each device of this library a file below
 * /dev/infiniband.
 *
 * The kernel creates such a file for an adapter. UCX accepts only devices whose file is a character device with read and write
 * permission. It checks that with stat() and access(), and never opens the file. This library's devices have no such file, and only
 * root could create one. So these two calls use /dev/null instead of a missing file of that name. libibverbs.so.1 cannot do this
 * itself: UCX makes the calls from a library that it opens at run time, and for such a library the C library's functions take
 * precedence over those of libraries that the program is not linked with.
 *
 * This is plain C, so that nothing else is loaded into every program that is started in this way. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The names that libibverbs.so.1 puts into `ibv_device.dev_name` begin with "ginnel_". */
#define PREFIX "/dev/infiniband/ginnel_"

/* For programs that were built with glibc before 2.33, whose headers call these functions instead of stat(). */
int __xstat(int version, const char *path, struct stat *to);
int __xstat64(int version, const char *path, struct stat64 *to);

/* A library that is loaded after this one may also replace these functions, as that of fakeroot does; then this library calls those.
 * The functions are looked up before the constructors of other libraries run, at the earliest; until then, this library makes the
 * system calls itself. */
static struct {
	int (*stat)(const char *, struct stat *);
	int (*xstat)(int, const char *, struct stat *);
	int (*access)(const char *, int);
} next;

__attribute__((constructor)) static void look_up(void)
{
	next.stat = (int (*)(const char *, struct stat *))dlsym(RTLD_NEXT, "stat");
	next.xstat = (int (*)(int, const char *, struct stat *))dlsym(RTLD_NEXT, "__xstat");
	next.access = (int (*)(const char *, int))dlsym(RTLD_NEXT, "access");
}

static int next_stat(const char *path, struct stat *to)
{
	return next.stat ? next.stat(path, to) : (int)syscall(SYS_newfstatat, AT_FDCWD, path, to, 0);
}

static int next_xstat(int version, const char *path, struct stat *to)
{
	return next.xstat ? next.xstat(version, path, to) : next_stat(path, to);
}

static int next_access(const char *path, int mode)
{
	return next.access ? next.access(path, mode) : (int)syscall(SYS_faccessat, AT_FDCWD, path, mode);
}

/* Returns whether /dev/null replaces a path that a call has not found. */
static int stands_in(int result, const char *path)
{
	return result != 0 && errno == ENOENT && strncmp(path, PREFIX, sizeof PREFIX - 1) == 0;
}

int stat(const char *path, struct stat *to)
{
	int result = next_stat(path, to);
	return stands_in(result, path) ? next_stat("/dev/null", to) : result;
}

int __xstat(int version, const char *path, struct stat *to)
{
	int result = next_xstat(version, path, to);
	return stands_in(result, path) ? next_xstat(version, "/dev/null", to) : result;
}

int access(const char *path, int mode)
{
	int result = next_access(path, mode);
	return stands_in(result, path) ? next_access("/dev/null", mode) : result;
}

/* On 64-bit machines, the two differ in the type only. */
int stat64(const char *path, struct stat64 *to)
{
	return stat(path, (struct stat *)to);
}

int __xstat64(int version, const char *path, struct stat64 *to)
{
	return __xstat(version, path, (struct stat *)to);
}
