/* Faults at a process's file operations, for kill_matrix.py: loaded before the C library (LD_PRELOAD).

   Operations that change something below FAULT_FOLDER are counted, over all processes that share FAULT_COUNTER, a file
   of a page. What comes at number FAULT_AT, and up to FAULT_LAST, meets FAULT_KIND: "kill" before it is done, "torn"
   (half of what a write was to write, then a kill), or the number of an error. FAULT_NAME: only operations on paths
   with these characters count; FAULT_RANK: only those of this rank. FAULT_TRACE: a file that gets a line for each.
   Locks are counted apart: FAULT_LOCKS is the error of each of them, "nfs" that of an exclusive lock of what is open
   for reading alone.  gcc -shared -fPIC -o file_faults.so file_faults.c -ldl -pthread */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct page {
    atomic_int count;
    atomic_int met;      /* operations that met the fault */
    int process;         /* of the first that did */
    char text[4000];     /* what it was about to do */
};

static struct page *page;
static const char *folder, *part_of_name, *kind;
static int at, last, trace = -1, is_counted = 1;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int begin(void) {
    if (page) return 1;
    const char *counter = variable("FAULT_COUNTER");
    if (!counter) return 0;
    pthread_mutex_lock(&starting);
    if (!page) {
        const char *rank = variable("FAULT_RANK"), *ours = variable("RANK"), *path = variable("FAULT_TRACE");
        folder = variable("FAULT_FOLDER");
        part_of_name = variable("FAULT_NAME");
        kind = variable("FAULT_KIND");
        at = variable("FAULT_AT") ? atoi(getenv("FAULT_AT")) : 0;
        last = variable("FAULT_LAST") ? atoi(getenv("FAULT_LAST")) : at;
        is_counted = folder && (!rank || (ours && !strcmp(rank, ours)));
        if (path) trace = REAL(open)(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
        int fd = REAL(open)(counter, O_RDWR | O_CLOEXEC);
        void *memory = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd >= 0) close(fd);
        if (memory == MAP_FAILED) abort();
        page = memory;
    }
    pthread_mutex_unlock(&starting);
    return 1;
}

static void absolute(int dir, const char *path, char *out) {
    char link[64];
    ssize_t size = 0;
    if (path && path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (dir == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    size = readlink(link, out, PATH_MAX - 1);
    out[size > 0 ? size : 0] = 0;
    if (path) snprintf(out + strlen(out), PATH_MAX - strlen(out), "/%s", path);
}

/* Returns 0 where the operation may be done, 1 where errno says why not, 2 where half of it may be done before the end. */
static int meets(const char *what, int dir, const char *path, const void *data, size_t size) {
    char place[PATH_MAX], line[PATH_MAX + 200];
    int saved = errno;
    if (!begin() || !is_counted) return 0;
    absolute(dir, path, place);
    if (strncmp(place, folder, strlen(folder)) || (part_of_name && !strstr(place + strlen(folder) - 1, part_of_name))) {
        errno = saved;
        return 0;
    }
    int is_full = kind && (atoi(kind) == ENOSPC || atoi(kind) == EDQUOT);
    if (is_full && (!strcmp(what, "rename") || !strcmp(what, "unlink") || !strcmp(what, "rmdir"))) return 0;
    int number = atomic_fetch_add(&page->count, 1) + 1, shown = data ? (int)(size < 60 ? size : 60) : 0;
    int length = snprintf(line, sizeof line, "%s %s %.*s", what, place + strlen(folder) - 1, shown, data ? (const char *)data : "");
    for (int i = 0; i < length; i++)
        if (line[i] == '\n') line[i] = ' ';
    if (trace >= 0) {
        line[length] = '\n';
        (void)!REAL(write)(trace, line, length + 1);
        line[length] = 0;
    }
    errno = saved;
    if (!at || number < at || number > last) return 0;
    if (!atomic_fetch_add(&page->met, 1)) {
        page->process = getpid();
        snprintf(page->text, sizeof page->text, "%.3900s", line);
    }
    if (!strcmp(kind, "torn") && data && size > 1) return 2;
    if (!strcmp(kind, "kill") || !strcmp(kind, "torn")) kill(getpid(), SIGKILL);
    errno = atoi(kind);
    return 1;
}

#define CHANGES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define OPEN(name, dir, path, flags, call)                                   \
    mode_t mode = 0;                                                         \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                   \
        va_list more;                                                        \
        va_start(more, flags);                                               \
        mode = va_arg(more, mode_t);                                         \
        va_end(more);                                                        \
    }                                                                        \
    if (CHANGES(flags) && meets("open", dir, path, NULL, 0)) return -1;      \
    return call;

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, path, flags, REAL(open)(path, flags, mode)) }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, path, flags, REAL(open64)(path, flags, mode)) }
int openat(int dir, const char *path, int flags, ...) { OPEN(openat, dir, path, flags, REAL(openat)(dir, path, flags, mode)) }
int openat64(int dir, const char *path, int flags, ...) { OPEN(openat64, dir, path, flags, REAL(openat64)(dir, path, flags, mode)) }

#define WRITE(data, size, half, whole)                                       \
    int met = meets("write", fd, NULL, data, size);                          \
    if (met == 2) {                                                          \
        (void)!half;                                                         \
        kill(getpid(), SIGKILL);                                             \
    }                                                                        \
    return met ? -1 : whole;

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = REAL(write);
    WRITE(data, size, real(fd, data, size / 2), real(fd, data, size))
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t to) { WRITE(data, size, REAL(pwrite)(fd, data, size / 2, to), REAL(pwrite)(fd, data, size, to)) }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t to) { WRITE(data, size, REAL(pwrite64)(fd, data, size / 2, to), REAL(pwrite64)(fd, data, size, to)) }
ssize_t writev(int fd, const struct iovec *parts, int count) { return meets("write", fd, NULL, NULL, 0) ? -1 : REAL(writev)(fd, parts, count); }
ssize_t sendfile(int fd, int from, off_t *at_, size_t size) { return meets("write", fd, NULL, NULL, 0) ? -1 : REAL(sendfile)(fd, from, at_, size); }
ssize_t sendfile64(int fd, int from, off64_t *at_, size_t size) { return meets("write", fd, NULL, NULL, 0) ? -1 : REAL(sendfile64)(fd, from, at_, size); }
ssize_t copy_file_range(int from, off64_t *a, int fd, off64_t *b, size_t size, unsigned flags) { return meets("write", fd, NULL, NULL, 0) ? -1 : REAL(copy_file_range)(from, a, fd, b, size, flags); }
int rename(const char *from, const char *to) { return meets("rename", AT_FDCWD, from, NULL, 0) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { return meets("rename", a, from, NULL, 0) ? -1 : REAL(renameat)(a, from, b, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return meets("rename", a, from, NULL, 0) ? -1 : REAL(renameat2)(a, from, b, to, flags); }
int link(const char *from, const char *to) { return meets("link", AT_FDCWD, to, NULL, 0) ? -1 : REAL(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return meets("link", b, to, NULL, 0) ? -1 : REAL(linkat)(a, from, b, to, flags); }
int symlink(const char *from, const char *to) { return meets("symlink", AT_FDCWD, to, NULL, 0) ? -1 : REAL(symlink)(from, to); }
int unlink(const char *path) { return meets("unlink", AT_FDCWD, path, NULL, 0) ? -1 : REAL(unlink)(path); }
int unlinkat(int dir, const char *path, int flags) { return meets("unlink", dir, path, NULL, 0) ? -1 : REAL(unlinkat)(dir, path, flags); }
int rmdir(const char *path) { return meets("rmdir", AT_FDCWD, path, NULL, 0) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { return meets("mkdir", AT_FDCWD, path, NULL, 0) ? -1 : REAL(mkdir)(path, mode); }
int mkdirat(int dir, const char *path, mode_t mode) { return meets("mkdir", dir, path, NULL, 0) ? -1 : REAL(mkdirat)(dir, path, mode); }
int truncate(const char *path, off_t size) { return meets("truncate", AT_FDCWD, path, NULL, 0) ? -1 : REAL(truncate)(path, size); }
int ftruncate(int fd, off_t size) { return meets("truncate", fd, NULL, NULL, 0) ? -1 : REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { return meets("truncate", fd, NULL, NULL, 0) ? -1 : REAL(ftruncate64)(fd, size); }
int fsync(int fd) { return meets("fsync", fd, NULL, NULL, 0) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return meets("fsync", fd, NULL, NULL, 0) ? -1 : REAL(fdatasync)(fd); }

int flock(int fd, int operation) {
    const char *error = variable("FAULT_LOCKS");
    if (error && strcmp(error, "nfs")) {
        errno = atoi(error);
        return -1;
    }
    if (error && operation & LOCK_EX && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) {
        struct stat about;
        if (!fstat(fd, &about) && S_ISREG(about.st_mode)) {
            errno = EBADF;
            return -1;
        }
    }
    return REAL(flock)(fd, operation);
}
