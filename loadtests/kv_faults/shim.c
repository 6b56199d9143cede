/* Faults of a disk, injected between a program and libc (LD_PRELOAD), for files below one folder.

   At most one fault is armed: it lets `after` matching calls pass, then hits the next `times` ones. Threads share it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BLOCKS = 1, INDEX = 2 };                                              /* which files */
enum { OPEN = 1, READ = 2, WRITE = 4, SYNC = 8, TRUNCATE = 16, RENAME = 32, UNLINK = 64 }; /* which calls */
enum { FAIL = 1, TORN, FLIP, SLOW, KILL };                                   /* what happens */

#define MAX_FD 65536
static _Atomic unsigned char place_of[MAX_FD];
static char root[4096];
static size_t root_length;

static _Atomic int kind, files, calls, argument;
static _Atomic long after, times, fired;
static _Atomic uint64_t draws;

void kv_fault_watch(const char *folder) {
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
}

/* Returns how many calls were hit since it was armed. */
long kv_fault_disarm(void) {
    kind = 0;
    return atomic_exchange(&fired, 0);
}

/* `what_argument`: the errno of FAIL, the milliseconds of SLOW. */
void kv_fault_arm(int what, int which_files, int which_calls, long pass, long hits, int what_argument, uint64_t seed) {
    kind = 0;
    files = which_files;
    calls = which_calls;
    argument = what_argument;
    after = pass;
    times = hits;
    fired = 0;
    draws = seed;
    kind = what;
}

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = (draws += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static int place(const char *path) {
    if (!root_length || strncmp(path, root, root_length) || path[root_length] != '/') return 0;
    if (!strncmp(path + root_length, "/blocks", 7)) return BLOCKS;
    return strncmp(path + root_length, "/index.sqlite3", 14) ? 0 : INDEX;
}

static int place_at(int fd) { return fd >= 0 && fd < MAX_FD ? place_of[fd] : 0; }

/* What happens to this call: 0, or the armed kind. SLOW and what of KILL needs no data happen here. */
static int hit(int where, int call) {
    int what = kind;
    if (!what || !(where & files) || !(call & calls)) return 0;
    if (atomic_fetch_sub(&after, 1) > 0) return 0;
    if (atomic_fetch_sub(&times, 1) <= 0) return 0;
    fired++;
    if (what == SLOW) {
        struct timespec pause = {argument / 1000, argument % 1000 * 1000000L};
        nanosleep(&pause, NULL);
        return 0;
    }
    if (what == KILL && call != WRITE) kill(getpid(), SIGKILL);
    if (what == FAIL) errno = argument;
    return what;
}

#define REAL(name) ((__typeof__(&name))real(&name##_pointer, #name))
static void *real(void **pointer, const char *name) {
    if (!*pointer) *pointer = dlsym(RTLD_NEXT, name);
    return *pointer;
}
#define POINTER(name) static void *name##_pointer

/* --- opening and closing --- */

#define OPENER(name, declare, pass, path)                                      \
    POINTER(name);                                                             \
    int name declare {                                                         \
        mode_t mode = 0;                                                       \
        if (flags & (O_CREAT | O_TMPFILE)) {                                   \
            va_list rest;                                                      \
            va_start(rest, flags);                                             \
            mode = va_arg(rest, mode_t);                                       \
            va_end(rest);                                                      \
        }                                                                      \
        int where = place(path);                                               \
        if (hit(where, OPEN) == FAIL) return -1;                               \
        int fd = REAL(name) pass;                                              \
        if (fd >= 0 && fd < MAX_FD) place_of[fd] = (unsigned char)where;       \
        return fd;                                                             \
    }
OPENER(open, (const char *name, int flags, ...), (name, flags, mode), name)
OPENER(open64, (const char *name, int flags, ...), (name, flags, mode), name)
OPENER(openat, (int folder, const char *name, int flags, ...), (folder, name, flags, mode), name)
OPENER(openat64, (int folder, const char *name, int flags, ...), (folder, name, flags, mode), name)

POINTER(close);
int close(int fd) {
    if (fd >= 0 && fd < MAX_FD) place_of[fd] = 0;
    return REAL(close)(fd);
}

/* --- reading --- */

static void flip_one_bit(struct iovec *parts, int count, ssize_t length) {
    if (length <= 0) return;
    size_t at = draw() % (size_t)length;
    for (int i = 0; i < count; at -= parts[i++].iov_len)
        if (at < parts[i].iov_len) {
            ((unsigned char *)parts[i].iov_base)[at] ^= (unsigned char)(1u << (draw() & 7));
            return;
        }
}

#define READER(name, declare, pass, ...)                                       \
    POINTER(name);                                                             \
    ssize_t name declare {                                                     \
        int what = hit(place_at(fd), READ);                                    \
        if (what == FAIL) return -1;                                           \
        ssize_t done = REAL(name) pass;                                        \
        if (what == FLIP) flip_one_bit(__VA_ARGS__, done);                     \
        return done;                                                           \
    }
#define ONE (&(struct iovec){data, size}), 1
READER(read, (int fd, void *data, size_t size), (fd, data, size), ONE)
READER(pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at), ONE)
READER(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at), ONE)
#define MANY (struct iovec *)parts, count
READER(preadv, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at), MANY)
READER(preadv64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at), MANY)
READER(preadv2, (int fd, const struct iovec *parts, int count, off_t at, int flags), (fd, parts, count, at, flags), MANY)
READER(preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags), (fd, parts, count, at, flags), MANY)

/* --- writing --- */

/* Part of the data is written, of whole sectors where there is more than one. */
static size_t part_of(size_t size) { return size > 512 ? draw() % ((size + 511) / 512) * 512 : draw() % size; }

#define WRITER(name, declare, write_some)                                      \
    POINTER(name);                                                             \
    ssize_t name declare {                                                     \
        int what = size ? hit(place_at(fd), WRITE) : 0;                        \
        if (what == FAIL) return -1;                                           \
        if (what == TORN || what == KILL) {                                    \
            size_t all = size, part = part_of(size);                           \
            size = part;                                                       \
            if (part && (write_some) < 0) return -1;                           \
            if (what == KILL) kill(getpid(), SIGKILL);                         \
            return (ssize_t)all;                                               \
        }                                                                      \
        if (what == FLIP) {                                                    \
            void *copy = malloc(size);                                         \
            memcpy(copy, data, size);                                          \
            flip_one_bit(&(struct iovec){copy, size}, 1, (ssize_t)size);       \
            data = copy;                                                       \
            ssize_t done = (write_some);                                       \
            free(copy);                                                        \
            return done;                                                       \
        }                                                                      \
        return (write_some);                                                   \
    }
WRITER(write, (int fd, const void *data, size_t size), REAL(write)(fd, data, size))
WRITER(pwrite, (int fd, const void *data, size_t size, off_t at), REAL(pwrite)(fd, data, size, at))
WRITER(pwrite64, (int fd, const void *data, size_t size, off64_t at), REAL(pwrite64)(fd, data, size, at))

#define SIMPLE(name, declare, pass, where, call)                               \
    POINTER(name);                                                             \
    int name declare { return hit(where, call) == FAIL ? -1 : REAL(name) pass; }
SIMPLE(fsync, (int fd), (fd), place_at(fd), SYNC)
SIMPLE(fdatasync, (int fd), (fd), place_at(fd), SYNC)
SIMPLE(ftruncate, (int fd, off_t size), (fd, size), place_at(fd), TRUNCATE)
SIMPLE(ftruncate64, (int fd, off64_t size), (fd, size), place_at(fd), TRUNCATE)
SIMPLE(rename, (const char *from, const char *to), (from, to), place(from), RENAME)
SIMPLE(unlink, (const char *name), (name), place(name), UNLINK)
