/* Records or fails the calls of a process on files below one directory. tools/crash.py compiles, loads and arms it.

   It stands before the C library (LD_PRELOAD), so it reaches the calls of Python, and of libraries in C, C++ and Rust
   that call the C library. Renames reach it also where the C library is not called, as in safetensors: they are trapped
   by seccomp. It does not reach: what the C library does for itself (what stdio reads and writes, except the opening),
   other system calls without the C library, reading and writing through a memory map, and io_uring. Linux on x86-64. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

enum { OPEN = 1, CREATE = 2, READ = 4, WRITE = 8, SYNC = 16, CLOSE = 32, NAME = 64, REMOVE = 128, MAP = 256, LOCK = 512,
       LIST = 1024 };
enum { OFF, RECORDING, FAILING };
typedef char Path[PATH_MAX];

static int mode, log_fd, error_number, for_good;
static unsigned kinds;
static long nth, seen;
static char root[PATH_MAX];
static size_t root_length;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

#define REAL(name, type) static __typeof__(type) real; if (!real) real = (__typeof__(type))dlsym(RTLD_NEXT, #name)

/* ------------------------------------------------------------------------------------------------------- what is armed */

static void trap_renames(void);

static void arm(int new_mode, const char *directory, int fd) {
    trap_renames();
    strncpy(root, directory, sizeof root - 1);
    root_length = strlen(root);
    log_fd = fd;
    seen = 0;
    mode = new_mode;
}

/* Writes an event for each change of the disk. No file is really synced. */
void calls_record(const char *directory, int fd) { arm(RECORDING, directory, fd); }

/* Fails the n-th call of some kinds, counted from 0, and those after it if `always`. Writes what it failed to fd. */
void calls_fail(const char *directory, int fd, long n, int error, int always, unsigned of_kinds) {
    nth = n, error_number = error, for_good = always, kinds = of_kinds;
    arm(FAILING, directory, fd);
}

void calls_off(void) { mode = OFF; }

/* --------------------------------------------------------------------------------------------------------------- paths */

static int is_below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int of_fd(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return is_below(path);
}

static int of_name(int directory, const char *name, char *path) {
    size_t size = 0;
    if (name[0] != '/') {
        if (directory == AT_FDCWD)
            size = syscall(SYS_getcwd, path, PATH_MAX) > 0 ? strlen(path) : 0;
        else
            of_fd(directory, path), size = strlen(path);
        path[size++] = '/';
    }
    snprintf(path + size, PATH_MAX - size, "%s", name);
    return is_below(path);
}

/* -------------------------------------------------------------------------------------------------------------- events */

struct event { int32_t op, flags; int64_t offset, size; int32_t first, second; };

static void say(const void *data, size_t size) {
    while (size) {
        long done = syscall(SYS_write, log_fd, data, size);
        if (done <= 0) return;
        data = (const char *)data + done, size -= done;
    }
}

static void record(char op, int flags, int64_t offset, const char *first, const char *second, int source, int64_t size) {
    struct event event = {op, flags, offset, size, strlen(first), second ? strlen(second) : 0};
    char data[1 << 16];
    say(&event, sizeof event);
    say(first, event.first);
    if (second) say(second, event.second);
    while (size > 0) {
        long count = syscall(SYS_pread64, source, data, size < (long)sizeof data ? size : (long)sizeof data, offset);
        if (count <= 0) { memset(data, 0, sizeof data); count = size < (long)sizeof data ? size : (long)sizeof data; }
        say(data, count);
        offset += count, size -= count;
    }
}

/* What was just written to a file, read back. */
static void record_written(int fd, const char *path, int64_t offset, int64_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int source = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
    record('w', 0, offset, path, NULL, source, size);
    syscall(SYS_close, source);
}

static int64_t place_of(int fd) {
    if (syscall(SYS_fcntl, fd, F_GETFL) & O_APPEND) {
        struct stat status;
        return fstat(fd, &status) ? 0 : status.st_size;
    }
    return syscall(SYS_lseek, fd, 0, SEEK_CUR);
}

/* Whether this call fails; errno is then set. */
static int fails(unsigned kind, const char *name, const char *path) {
    if (!(kind & kinds)) return 0;
    pthread_mutex_lock(&lock);
    long number = seen++;
    int is_failing = number == nth || (for_good && number > nth);
    if (number == nth) {
        Path line;
        int size = snprintf(line, sizeof line, "%u %s %s\n", kind, name, path);
        say(line, size < (int)sizeof line ? size : (int)sizeof line - 1);
    }
    pthread_mutex_unlock(&lock);
    if (is_failing) errno = error_number;
    return is_failing;
}

/* `call` with the events of `events` if it succeeds; nothing else happens to the disk between the two. */
#define CALL(kind, name, path, failed, call, succeeded, events)                    \
    if (mode == FAILING && fails(kind, name, path)) return failed;                 \
    if (mode != RECORDING) return call;                                            \
    pthread_mutex_lock(&lock);                                                     \
    __typeof__(call) result = call;                                                \
    int kept = errno;                                                              \
    if (succeeded) { events; }                                                     \
    errno = kept;                                                                  \
    pthread_mutex_unlock(&lock);                                                   \
    return result

/* ------------------------------------------------------------------------------------------------------------- opening */

typedef int (*Open)(const char *, int, ...);
typedef int (*OpenAt)(int, const char *, int, ...);

static int opening(OpenAt real, int directory, const char *name, int flags, mode_t permissions) {
    Path path;
    if (mode == OFF || !of_name(directory, name, path)) return real(directory, name, flags, permissions);
    int changes = (flags & O_CREAT) || ((flags & O_TRUNC) && (flags & O_ACCMODE) != O_RDONLY);
    CALL(flags & O_CREAT ? CREATE : OPEN, "open", path, -1, real(directory, name, flags, permissions),
         result >= 0 && changes, record('o', flags & O_TRUNC ? 1 : 0, 0, path, NULL, -1, 0));
}

#define PERMISSIONS                                                \
    mode_t permissions = 0;                                        \
    if (flags & (O_CREAT | O_TMPFILE)) {                           \
        va_list list;                                              \
        va_start(list, flags);                                     \
        permissions = va_arg(list, mode_t);                        \
        va_end(list);                                              \
    }

static int real_open(int directory, const char *name, int flags, ...) {
    PERMISSIONS
    return syscall(SYS_openat, directory, name, flags | O_LARGEFILE, permissions);
}

int open(const char *name, int flags, ...) { PERMISSIONS return opening(real_open, AT_FDCWD, name, flags, permissions); }
int open64(const char *name, int flags, ...) { PERMISSIONS return opening(real_open, AT_FDCWD, name, flags, permissions); }
int openat(int at, const char *name, int flags, ...) { PERMISSIONS return opening(real_open, at, name, flags, permissions); }
int openat64(int at, const char *name, int flags, ...) { PERMISSIONS return opening(real_open, at, name, flags, permissions); }
int __open_2(const char *name, int flags) { return opening(real_open, AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return opening(real_open, AT_FDCWD, name, flags, 0); }
int __openat64_2(int at, const char *name, int flags) { return opening(real_open, at, name, flags, 0); }

static FILE *opening_stream(FILE *(*real)(const char *, const char *), const char *name, const char *how) {
    Path path;
    if (mode == OFF || !of_name(AT_FDCWD, name, path)) return real(name, how);
    CALL(how[0] == 'r' ? OPEN : CREATE, "fopen", path, NULL, real(name, how), result && how[0] != 'r',
         record('o', how[0] == 'w', 0, path, NULL, -1, 0));
}
FILE *fopen(const char *name, const char *how) { REAL(fopen, FILE * (*)(const char *, const char *)); return opening_stream(real, name, how); }
FILE *fopen64(const char *name, const char *how) { REAL(fopen64, FILE * (*)(const char *, const char *)); return opening_stream(real, name, how); }

DIR *opendir(const char *name) {
    REAL(opendir, DIR * (*)(const char *));
    Path path;
    if (mode == FAILING && of_name(AT_FDCWD, name, path) && fails(LIST, "opendir", path)) return NULL;
    return real(name);
}

/* ----------------------------------------------------------------------------------------------------- reading, closing */

#define READING(kind, name, type, parameters, arguments, failed)                    \
    type name parameters {                                                           \
        REAL(name, type(*) parameters);                                              \
        Path path;                                                                   \
        if (mode == FAILING && of_fd(fd, path) && fails(kind, #name, path)) return failed; \
        return real arguments;                                                       \
    }
READING(READ, read, ssize_t, (int fd, void *to, size_t size), (fd, to, size), -1)
READING(READ, readv, ssize_t, (int fd, const struct iovec *to, int count), (fd, to, count), -1)
READING(READ, pread, ssize_t, (int fd, void *to, size_t size, off_t offset), (fd, to, size, offset), -1)
READING(READ, pread64, ssize_t, (int fd, void *to, size_t size, off64_t offset), (fd, to, size, offset), -1)
READING(READ, preadv64v2, ssize_t, (int fd, const struct iovec *to, int count, off64_t offset, int flags), (fd, to, count, offset, flags), -1)
READING(READ, __read_chk, ssize_t, (int fd, void *to, size_t size, size_t most), (fd, to, size, most), -1)
READING(READ, __pread64_chk, ssize_t, (int fd, void *to, size_t size, off64_t offset, size_t most), (fd, to, size, offset, most), -1)
READING(LOCK, flock, int, (int fd, int how), (fd, how), -1)

int close(int fd) {
    REAL(close, int (*)(int));
    Path path;
    if (mode == FAILING && of_fd(fd, path) && fails(CLOSE, "close", path)) {
        int kept = errno;
        real(fd); /* as Linux does */
        errno = kept;
        return -1;
    }
    return real(fd);
}

#define MAPPING(name, Offset)                                                                            \
    void *name(void *at, size_t size, int protection, int flags, int fd, Offset offset) {               \
        REAL(name, void *(*)(void *, size_t, int, int, int, Offset));                                    \
        Path path;                                                                                       \
        if (mode == OFF || fd < 0 || !of_fd(fd, path)) return real(at, size, protection, flags, fd, offset); \
        int writes = (protection & PROT_WRITE) && (flags & MAP_SHARED);                                  \
        CALL(MAP, #name, path, MAP_FAILED, real(at, size, protection, flags, fd, offset),                \
             result != MAP_FAILED && writes, record('m', 0, 0, path, NULL, -1, 0));                      \
    }
MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)

/* ------------------------------------------------------------------------------------------------------------- writing */

#define WRITING(name, parameters, arguments, offset)                                       \
    ssize_t name parameters {                                                              \
        REAL(name, ssize_t(*) parameters);                                                 \
        Path path;                                                                         \
        if (mode == OFF || !of_fd(fd, path)) return real arguments;                        \
        int64_t place = offset;                                                            \
        CALL(WRITE, #name, path, -1, real arguments, result > 0, record_written(fd, path, place, result)); \
    }
WRITING(write, (int fd, const void *from, size_t size), (fd, from, size), place_of(fd))
WRITING(writev, (int fd, const struct iovec *from, int count), (fd, from, count), place_of(fd))
WRITING(pwrite, (int fd, const void *from, size_t size, off_t offset), (fd, from, size, offset), offset)
WRITING(pwrite64, (int fd, const void *from, size_t size, off64_t offset), (fd, from, size, offset), offset)
WRITING(sendfile, (int fd, int source, off_t *at, size_t size), (fd, source, at, size), place_of(fd))
WRITING(sendfile64, (int fd, int source, off64_t *at, size_t size), (fd, source, at, size), place_of(fd))

ssize_t copy_file_range(int source, off64_t *from, int fd, off64_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range, ssize_t(*)(int, off64_t *, int, off64_t *, size_t, unsigned));
    Path path;
    if (mode == OFF || !of_fd(fd, path)) return real(source, from, fd, to, size, flags);
    int64_t place = to ? *to : place_of(fd);
    CALL(WRITE, "copy_file_range", path, -1, real(source, from, fd, to, size, flags), result > 0,
         record_written(fd, path, place, result));
}

#define CUTTING(name, Offset)                                                              \
    int name(int fd, Offset size) {                                                        \
        REAL(name, int (*)(int, Offset));                                                  \
        Path path;                                                                         \
        if (mode == OFF || !of_fd(fd, path)) return real(fd, size);                        \
        CALL(WRITE, #name, path, -1, real(fd, size), !result, record('t', 0, size, path, NULL, -1, 0)); \
    }
CUTTING(ftruncate, off_t)
CUTTING(ftruncate64, off64_t)

/* A recorded run waits for no disk: what is lost is computed, and not tried. */
#define SYNCING(name)                                                                      \
    int name(int fd) {                                                                     \
        REAL(name, int (*)(int));                                                          \
        Path path;                                                                         \
        if (mode == OFF || !of_fd(fd, path)) return real(fd);                              \
        CALL(SYNC, #name, path, -1, 0, 1, record('s', 0, 0, path, NULL, -1, 0));           \
    }
SYNCING(fsync)
SYNCING(fdatasync)

/* --------------------------------------------------------------------------------------------------------------- names */

static int naming(char op, const char *name, int from_at, const char *from, int to_at, const char *to, int (*real)(int, const char *, int, const char *)) {
    Path one, two;
    if (mode == OFF || !(of_name(to_at, to, two) | of_name(from_at, from, one))) return real(from_at, from, to_at, to);
    CALL(NAME, name, two, -1, real(from_at, from, to_at, to), !result, record(op, 0, 0, one, two, -1, 0));
}

static int linking(const char *name, const char *target, int at, const char *link) {
    Path path;
    if (mode == OFF || !of_name(at, link, path)) return syscall(SYS_symlinkat, target, at, link);
    CALL(NAME, name, path, -1, (int)syscall(SYS_symlinkat, target, at, link), !result, record('y', 0, 0, path, target, -1, 0));
}
int symlink(const char *target, const char *link) { return linking("symlink", target, AT_FDCWD, link); }
int symlinkat(const char *target, int at, const char *link) { return linking("symlinkat", target, at, link); }

/* The only rename that is not trapped: between the two labels. */
extern const char renaming_begins[], renaming_ends[];
static __attribute__((noinline)) int real_rename(int a, const char *from, int b, const char *to) {
    register long at asm("r10") = (long)to;
    long result;
    asm volatile(".global renaming_begins\nrenaming_begins: syscall\n.global renaming_ends\nrenaming_ends:"
                 : "=a"(result)
                 : "a"(SYS_renameat), "D"(a), "S"(from), "d"(b), "r"(at)
                 : "rcx", "r11", "memory");
    if (result < 0) errno = -result;
    return result < 0 ? -1 : 0;
}
static int real_link(int a, const char *from, int b, const char *to) { return syscall(SYS_linkat, a, from, b, to, 0); }
int rename(const char *from, const char *to) { return naming('r', "rename", AT_FDCWD, from, AT_FDCWD, to, real_rename); }
int renameat(int a, const char *from, int b, const char *to) { return naming('r', "renameat", a, from, b, to, real_rename); }
int link(const char *from, const char *to) { return naming('l', "link", AT_FDCWD, from, AT_FDCWD, to, real_link); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return naming('l', "linkat", a, from, b, to, real_link); }

static int removing(const char *name, int at, const char *gone, int flags) {
    Path path;
    if (mode == OFF || !of_name(at, gone, path)) return syscall(SYS_unlinkat, at, gone, flags);
    CALL(REMOVE, name, path, -1, (int)syscall(SYS_unlinkat, at, gone, flags), !result,
         record('u', 0, 0, path, NULL, -1, 0));
}
int unlink(const char *name) { return removing("unlink", AT_FDCWD, name, 0); }
int unlinkat(int at, const char *name, int flags) { return removing("unlinkat", at, name, flags); }
int rmdir(const char *name) { return removing("rmdir", AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    int result = removing("remove", AT_FDCWD, name, 0);
    return result && errno == EISDIR ? removing("remove", AT_FDCWD, name, AT_REMOVEDIR) : result;
}

static int making(int at, const char *name, mode_t permissions) {
    Path path;
    if (mode == OFF || !of_name(at, name, path)) return syscall(SYS_mkdirat, at, name, permissions);
    CALL(NAME, "mkdir", path, -1, (int)syscall(SYS_mkdirat, at, name, permissions), !result,
         record('d', 0, 0, path, NULL, -1, 0));
}
int mkdir(const char *name, mode_t permissions) { return making(AT_FDCWD, name, permissions); }
int mkdirat(int at, const char *name, mode_t permissions) { return making(at, name, permissions); }

/* ----------------------------------------------------------------------------------- renames without the C library */

static void trapped(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int kept = errno, is_plain = info->si_syscall == SYS_rename;
    const char *from = (const char *)registers[is_plain ? REG_RDI : REG_RSI];
    const char *to = (const char *)registers[is_plain ? REG_RSI : REG_R10];
    int a = is_plain ? AT_FDCWD : (int)registers[REG_RDI], b = is_plain ? AT_FDCWD : (int)registers[REG_RDX];
    registers[REG_RAX] = renameat(a, from, b, to) ? -errno : 0;
    errno = kept;
}

static void trap_renames(void) {
    static int is_done;
    if (is_done++) return;
    uint64_t begin = (uint64_t)renaming_begins, end = (uint64_t)renaming_ends;
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rename, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(begin >> 32), 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (uint32_t)begin, 0, 2),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, (uint32_t)end, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSYS, &action, NULL);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        dprintf(2, "calls.c: renames are not trapped: %s\n", strerror(errno));
}
