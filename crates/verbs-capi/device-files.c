/* device-files.so, which `ginnel run --verbs` loads into the program: each device of ours has a file below /dev/infiniband.
 *
 * The kernel makes such a file for an adapter, and UCX only takes devices whose file is a character device that it may read and write. It
 * asks with stat() and access(), and never opens the file. Ours have none, and only root could make one, so for these two calls
 * /dev/null stands in where there is no file of that name. libibverbs.so.1 cannot do this itself: UCX asks from a library that it
 * opens at run time, and there the C library's functions come before those of libraries that the program is not linked with.
 *
 * This is plain C so that nothing else comes into every program that is started this way.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* What libibverbs.so.1 puts into `ibv_device.dev_name` begins with "ginnel_". */
#define PREFIX "/dev/infiniband/ginnel_"

/* For programs that were built with glibc before 2.33, whose headers call these in place of stat(). */
int __xstat(int version, const char *path, struct stat *to);
int __xstat64(int version, const char *path, struct stat64 *to);

/* A library that is loaded after this one may have such functions too, as fakeroot's has; then they are what is called from here. Until
 * they are known, which is before the constructors of others at the earliest, the system calls are. */
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

/* Whether /dev/null stands in for a path that a call has not found. */
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

/* They differ in the type alone on a machine of 64 bits. */
int stat64(const char *path, struct stat64 *to)
{
	return stat(path, (struct stat *)to);
}

int __xstat64(int version, const char *path, struct stat64 *to)
{
	return __xstat(version, path, (struct stat *)to);
}
