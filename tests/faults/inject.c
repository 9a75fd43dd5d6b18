/* LD_PRELOAD: make the n-th file call of this process fail or kill it.

   inject_arm(n, mode): from now on count calls that open for writing, make, write, sync, truncate, rename or remove
   files. KILL: die by SIGKILL before the n-th (a write puts down half of its bytes first, like a torn write).
   FULL: every call from the n-th on that needs space, and every fsync, fails with ENOSPC; removing still works.
   ONCE: the n-th call fails with EIO, removing excepted.
   inject_disarm(): back to normal; returns how many calls failed, as inject_fired() does before. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { OFF, KILL, FULL, ONCE };
static int mode, target, count, fired;

void inject_arm(int n, int how) { target = n; mode = how; count = fired = 0; }
int inject_disarm(void) { mode = OFF; return fired; }
int inject_fired(void) { return fired; }

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

/* 1: the call shall fail, errno is set. */
static int hit(int removes) {
    if (mode == OFF) return 0;
    count++;
    if (mode == KILL && count == target) die();
    if (removes) return 0;
    if ((mode == FULL && count >= target) || (mode == ONCE && count == target)) {
        fired++;
        errno = mode == FULL ? ENOSPC : EIO;
        return 1;
    }
    return 0;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define PASS(kind, name, params, args, removes) \
    kind name params { REAL(name); return hit(removes) ? -1 : real args; }
#define OPEN(name, lead, args) \
    int name lead { \
        REAL(name); mode_t bits = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); bits = va_arg(more, mode_t); va_end(more); } \
        return (flags & (O_WRONLY | O_RDWR)) && hit(0) ? -1 : real args; }

OPEN(open, (const char *path, int flags, ...), (path, flags, bits))
OPEN(open64, (const char *path, int flags, ...), (path, flags, bits))
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, bits))
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, bits))
PASS(int, mkdir, (const char *path, mode_t bits), (path, bits), 0)
PASS(int, fsync, (int fd), (fd), 0)
PASS(int, fdatasync, (int fd), (fd), 0)
PASS(int, ftruncate, (int fd, off_t size), (fd, size), 0)
PASS(int, ftruncate64, (int fd, off64_t size), (fd, size), 0)
PASS(int, rename, (const char *from, const char *to), (from, to), 0)
PASS(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), 0)
PASS(int, unlink, (const char *path), (path), 1)
PASS(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), 1)
PASS(int, rmdir, (const char *path), (path), 1)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    struct stat status;
    if (mode == OFF || fstat(fd, &status) || !S_ISREG(status.st_mode)) return real(fd, data, size);  /* a socket, a pipe */
    if (mode == KILL && count + 1 == target) real(fd, data, size / 2);
    return hit(0) ? -1 : real(fd, data, size);
}
