/* LD_PRELOAD: the folder DISK is a disk of as many bytes as the file DISK_SIZE says; without that file it is large.

   What would grow a file over that puts down what fits, or fails with ENOSPC. To overwrite, rename and remove works;
   names cost nothing, unless DISK_SIZE says 0: then no file or folder can be made either. Instead of a number it may say
   "names": there is room for bytes, and none for a name (a disk without inodes); "readonly": nothing can be changed, nor
   what is open (a file system that was remounted after an error); "parts": to rename is several calls, between which
   a process can be killed (what stands under the new name is removed first, and a folder is moved file by file).
   Whatever refused something, or was done in parts, appends a byte to DISK_SIZE with ".refused" behind its name. */
#define _GNU_SOURCE
#include <dirent.h>
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

enum { NAMES = -2, READONLY = -3, PARTS = -4 };

/* Bytes of the disk, -1: large; or what else is the matter with it. */
static long long capacity(void) {
    const char *name = getenv("DISK_SIZE");
    if (!name || !getenv("DISK")) return -1;
    int fd = real_open(name, O_RDONLY);
    if (fd < 0) return -1;
    char text[32] = "";
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return -1;
    return *text == 'n' ? NAMES : *text == 'r' ? READONLY : *text == 'p' ? PARTS : atoll(text);
}

/* Where an open file is; 0: not known. */
static int place_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length >= 0) path[length] = 0;
    return length >= 0;
}

static int on_disk_at(int at, const char *path) {
    const char *disk = getenv("DISK");
    char full[PATH_MAX];
    if (!disk) return 0;
    if (path[0] == '/') snprintf(full, sizeof full, "%s", path);
    else if (at != AT_FDCWD) {
        if (!place_of(at, full)) return 0;
    } else if (!getcwd(full, sizeof full)) return 0;
    else strncat(strncat(full, "/", sizeof full - strlen(full) - 1), path, sizeof full - strlen(full) - 1);
    return strncmp(full, disk, strlen(disk)) == 0;
}

static int on_disk(const char *path) { return on_disk_at(AT_FDCWD, path); }

static void refused(void) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.refused", getenv("DISK_SIZE"));
    int fd = real_open(name, O_WRONLY | O_CREAT | O_APPEND);
    if (fd >= 0) { if (real_write(fd, ".", 1)) {} close(fd); }
    errno = ENOSPC;
}

/* How many of `size` bytes, to be written at `place`, -1: where `fd` is, fit. */
static size_t fits(int fd, size_t size, long long place) {
    char path[PATH_MAX];
    struct stat status;
    long long limit = capacity();
    if ((limit < 0 && limit != READONLY) || !size || fstat(fd, &status) || !S_ISREG(status.st_mode)) return size;
    if (!place_of(fd, path) || !on_disk(path)) return size;
    if (limit == READONLY) { refused(); errno = EROFS; return 0; }
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

/* 1, and errno: what is at `path` cannot be made, or changed in any way. */
static int closed_at(int at, const char *path, int makes) {
    long long limit = capacity();
    if (limit != READONLY && !(makes && (limit == 0 || limit == NAMES))) return 0;
    if (!on_disk_at(at, path)) return 0;
    refused();
    errno = limit == READONLY ? EROFS : ENOSPC;
    return 1;
}

static int missing_at(int at, const char *path) { struct stat status; return fstatat(at, path, &status, AT_SYMLINK_NOFOLLOW); }

#define OPEN(name, lead, args, at, path) \
    int name lead { \
        REAL(name); mode_t bits = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); bits = va_arg(more, mode_t); va_end(more); } \
        if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && closed_at(at, path, (flags & O_CREAT) && missing_at(at, path))) return -1; \
        return real args; }

OPEN(open, (const char *path, int flags, ...), (path, flags, bits), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), (path, flags, bits), AT_FDCWD, path)
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, bits), at, path)
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, bits), at, path)

#define CHANGE(name, params, args, at, path, makes) \
    int name params { REAL(name); return closed_at(at, path, makes) ? -1 : real args; }

CHANGE(mkdir, (const char *path, mode_t bits), (path, bits), AT_FDCWD, path, 1)
CHANGE(mkdirat, (int at, const char *path, mode_t bits), (at, path, bits), at, path, 1)
CHANGE(unlink, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path, 0)
CHANGE(rmdir, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(chmod, (const char *path, mode_t bits), (path, bits), AT_FDCWD, path, 0)

#define CUT(name, kind) \
    int name(int fd, kind size) { \
        REAL(name); char path[PATH_MAX]; \
        return capacity() == READONLY && place_of(fd, path) && closed_at(AT_FDCWD, path, 0) ? -1 : real(fd, size); }

CUT(ftruncate, off_t)
CUT(ftruncate64, off64_t)

/* A rename in parts: through the table of symbols, so that another preloaded library counts and kills. */
static int in_parts(const char *from, const char *to) {
    REAL(rename);
    char source[PATH_MAX], target[PATH_MAX];
    struct stat status;
    if (lstat(from, &status)) return -1;
    if (!S_ISDIR(status.st_mode)) return (!missing_at(AT_FDCWD, to) && unlink(to)) ? -1 : real(from, to);
    if (missing_at(AT_FDCWD, to) && mkdir(to, 0755)) return -1;
    DIR *folder = opendir(from);
    if (!folder) return -1;
    for (struct dirent *each; (each = readdir(folder));) {
        if (!strcmp(each->d_name, ".") || !strcmp(each->d_name, "..")) continue;
        snprintf(source, sizeof source, "%s/%s", from, each->d_name);
        snprintf(target, sizeof target, "%s/%s", to, each->d_name);
        if (real(source, target)) { closedir(folder); return -1; }
    }
    closedir(folder);
    return rmdir(from);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (closed_at(AT_FDCWD, from, 0)) return -1;
    if (capacity() != PARTS || !on_disk(from)) return real(from, to);
    refused();
    return in_parts(from, to);
}
