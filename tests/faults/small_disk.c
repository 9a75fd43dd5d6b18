/* LD_PRELOAD: the folder DISK is a disk of as many bytes as the file DISK_SIZE says; without that file it is large.

   What would grow a file over that puts down what fits, or fails with ENOSPC. To overwrite, rename and remove works;
   names cost nothing, unless DISK_SIZE says 0: then no file or folder can be made either. Whatever refused something
   appends a byte to DISK_SIZE with ".refused" behind its name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static __thread long long used;

static int add(const char *path, const struct stat *status, int kind, struct FTW *where) {
    (void)path; (void)where;
    if (kind == FTW_F) used += status->st_size;
    return 0;
}

static int real_open(const char *path, int flags) {
    static int (*real)(const char *, int, ...);
    if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    return real(path, flags, 0644);
}

static ssize_t real_write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    return real(fd, data, size);
}

/* Bytes of the disk, -1: large. */
static long long capacity(void) {
    const char *name = getenv("DISK_SIZE");
    if (!name || !getenv("DISK")) return -1;
    int fd = real_open(name, O_RDONLY);
    if (fd < 0) return -1;
    char text[32] = "";
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    return got > 0 ? atoll(text) : -1;
}

static int on_disk(const char *path) {
    const char *disk = getenv("DISK");
    char full[PATH_MAX];
    if (!disk) return 0;
    if (path[0] != '/') {
        if (!getcwd(full, sizeof full)) return 0;
    } else snprintf(full, sizeof full, "%s", path);
    return strncmp(full, disk, strlen(disk)) == 0;
}

static void refused(void) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.refused", getenv("DISK_SIZE"));
    int fd = real_open(name, O_WRONLY | O_CREAT | O_APPEND);
    if (fd >= 0) { if (real_write(fd, ".", 1)) {} close(fd); }
    errno = ENOSPC;
}

/* How many of `size` bytes, to be written at `place`, -1: where `fd` is, fit. */
static size_t fits(int fd, size_t size, long long place) {
    char link[64], path[PATH_MAX];
    struct stat status;
    long long limit = capacity();
    if (limit < 0 || !size || fstat(fd, &status) || !S_ISREG(status.st_mode)) return size;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return size;
    path[length] = 0;
    if (!on_disk(path)) return size;
    long long at = (fcntl(fd, F_GETFL) & O_APPEND) ? status.st_size : (long long)lseek(fd, 0, SEEK_CUR);
    if (place >= 0) at = place;
    long long grows = at + (long long)size - status.st_size;
    if (grows <= 0) return size;
    used = 0;
    nftw(getenv("DISK"), add, 16, FTW_PHYS);
    long long room = limit - used > 0 ? limit - used : 0;
    if (grows <= room) return size;
    long long most = (long long)size - grows + room;
    if (most <= 0) refused();
    return most > 0 ? (size_t)most : 0;
}

ssize_t write(int fd, const void *data, size_t size) {
    size_t most = fits(fd, size, -1);
    return size && !most ? -1 : real_write(fd, data, most);
}

#define PWRITE(name, kind) \
    ssize_t name(int fd, const void *data, size_t size, kind place) { \
        REAL(name); \
        size_t most = fits(fd, size, place); \
        return size && !most ? -1 : real(fd, data, most, place); }

PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    size_t most = fits(fd, size, -1);
    if (most == size) return real(fd, parts, count);
    return most ? real_write(fd, parts[0].iov_base, most < parts[0].iov_len ? most : parts[0].iov_len) : -1;
}

/* A disk without room for a name. */
static int no_names(const char *path) {
    if (capacity() != 0 || !on_disk(path)) return 0;
    refused();
    return 1;
}

#define OPEN(name, lead, args, path) \
    int name lead { \
        REAL(name); mode_t bits = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); bits = va_arg(more, mode_t); va_end(more); } \
        if ((flags & O_CREAT) && access(path, F_OK) && no_names(path)) return -1; \
        return real args; }

OPEN(open, (const char *path, int flags, ...), (path, flags, bits), path)
OPEN(open64, (const char *path, int flags, ...), (path, flags, bits), path)
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, bits), path)
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, bits), path)

int mkdir(const char *path, mode_t bits) {
    REAL(mkdir);
    return no_names(path) ? -1 : real(path, bits);
}
