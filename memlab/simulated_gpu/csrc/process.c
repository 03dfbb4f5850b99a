// This process on the machine.  What each process holds stands in its slot of the machine file; the sum over the living
// ones is what cudaMemGetInfo and NVML report, and what an allocation must fit beside.  A process clears its slot when
// it ends; the slot of one that was killed is cleared by whoever looks next.
#include "simulated.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static struct slot slots[SLOTS];  // what the machine file had when it was last locked
static struct slot own;           // zeros before the first context, and in the child of a fork
static int own_index = -1;        // its place in the file
static bool ready[MAX_DEVICES];   // this process has a context there
static bool inherited;            // the parent had a context when it forked: CUDA refuses to work in such a child
static uint64_t peak[MAX_DEVICES];

// ---- the lock: a mutex among the threads, flock among the processes
static bool file_is_shared;  // with the parent: flock belongs to the open file, which a fork does not copy

static void open_own_file(void) {
    int file = machine_file();
    if (!file_is_shared || file < 0)
        return;
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int again = open(path, O_RDWR | O_CLOEXEC);
    if (again < 0)
        return;
    dup3(again, file, O_CLOEXEC);
    close(again);
    file_is_shared = false;
}

// False: the file is no machine's any more, and the slots are those that it had.
static bool lock_machine(void) {
    lock(LOCK_MACHINE);
    open_own_file();
    while (machine_file() >= 0 && flock(machine_file(), LOCK_EX) && errno == EINTR)
        continue;
    return read_slots(slots);
}

static void unlock_machine(void) {
    if (machine_file() >= 0)
        flock(machine_file(), LOCK_UN);
    unlock(LOCK_MACHINE);
}

// ---- which processes live
// The fields of /proc/PID/stat behind the name: field 3 is the state, field 22 the start time, which tells a process
// from a later one with the same number.  Returns 0 for a process that has ended, one not yet waited for (Z) included.
static uint64_t start_time(int pid) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length > 0 ? length : 0] = 0;
    char *field = strrchr(text, ')');
    if (!field || strlen(field) < 3 || strchr("ZXx", field[2]))
        return 0;
    for (int i = 2; field && i < 22; i++)
        field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

// Numbers of processes mean nothing in another container, so what runs there counts until it clears its slot itself.
static uint32_t pid_namespace(void) {
    struct stat about;
    return stat("/proc/self/ns/pid", &about) ? 0 : (uint32_t)about.st_ino;
}

static bool slot_lives(int index) {
    const struct slot *slot = &slots[index];
    if (index == own_index)
        return true;
    if (slot->pid > 0 && slot->pid_namespace && slot->pid_namespace != pid_namespace())
        return true;
    if (slot->pid <= 0 || slot->pid == getpid())  // our number, not our slot: what this process left behind by exec
        return false;
    uint64_t started = start_time(slot->pid);
    return started && started == slot->start_time;
}

static bool in_use(int index) {  // with the lock held
    if (!slots[index].pid)
        return false;
    if (slot_lives(index))
        return true;
    memset(&slots[index], 0, sizeof slots[index]);
    write_slot(index, &slots[index]);
    return false;
}

static uint64_t sum_used(int physical) {  // with the lock held
    uint64_t sum = 0;
    for (int i = 0; i < SLOTS; i++) {
        if (i != own_index && in_use(i))
            sum += slots[i].context[physical] + slots[i].memory[physical];
    }
    return sum + own.context[physical] + own.memory[physical];
}

static bool fits(int physical, uint64_t bytes) {  // with the lock held
    uint64_t total = device_at(physical)->total, used = sum_used(physical);
    return used <= total && bytes <= total - used;
}

// ---- contexts
static bool take_slot(void) {  // with the lock held
    for (int i = 0; i < SLOTS; i++) {
        if (in_use(i))
            continue;
        own = (struct slot){.pid = getpid(), .pid_namespace = pid_namespace(), .start_time = start_time(getpid())};
        own_index = i;
        return true;
    }
    say("%d processes use this machine already; end one of them.", SLOTS);
    return false;
}

static cudaError_t create_context(int physical) {  // with the lock held
    if (ready[physical])
        return cudaSuccess;
    if (!fits(physical, device_at(physical)->context))
        return cudaErrorMemoryAllocation;
    if (own_index < 0 && !take_slot())
        return cudaErrorInitializationError;
    own.context[physical] = device_at(physical)->context;
    if (!write_slot(own_index, &own))
        return cudaErrorOperatingSystem;
    __atomic_store_n(&ready[physical], true, __ATOMIC_RELEASE);
    return cudaSuccess;
}

cudaError_t use_device(int physical) {
    if (physical < 0)
        return visible_count() ? cudaErrorInvalidDevice : cudaErrorNoDevice;
    if (__atomic_load_n(&ready[physical], __ATOMIC_ACQUIRE))
        return cudaSuccess;
    if (inherited)
        return cudaErrorInitializationError;
    cudaError_t error = lock_machine() ? create_context(physical) : cudaErrorOperatingSystem;
    unlock_machine();
    return error;
}

bool has_context(int physical) {
    return physical >= 0 && __atomic_load_n(&ready[physical], __ATOMIC_ACQUIRE);
}

// ---- memory
static cudaError_t hold(int physical, uint64_t bytes) {  // with the lock held
    if (own_index < 0 || !fits(physical, bytes))
        return cudaErrorMemoryAllocation;
    own.memory[physical] += bytes;
    if (own.memory[physical] > peak[physical])
        peak[physical] = own.memory[physical];
    return write_slot(own_index, &own) ? cudaSuccess : cudaErrorOperatingSystem;
}

cudaError_t charge(int physical, uint64_t bytes) {
    cudaError_t error = lock_machine() ? hold(physical, bytes) : cudaErrorOperatingSystem;
    unlock_machine();
    return error;
}

void discharge(int physical, uint64_t bytes) {
    bool is_whole = lock_machine();
    if (own_index >= 0) {
        own.memory[physical] -= bytes;
        if (is_whole)
            write_slot(own_index, &own);
    }
    unlock_machine();
}

uint64_t used_on(int physical) {
    lock_machine();
    uint64_t used = sum_used(physical);
    unlock_machine();
    return used;
}

uint64_t own_bytes(int physical) {
    lock(LOCK_MACHINE);
    uint64_t bytes = own.memory[physical];
    unlock(LOCK_MACHINE);
    return bytes;
}

uint64_t own_peak(int physical) {
    lock(LOCK_MACHINE);
    uint64_t bytes = peak[physical];
    unlock(LOCK_MACHINE);
    return bytes;
}

void reset_own_peak(int physical) {
    lock(LOCK_MACHINE);
    peak[physical] = own.memory[physical];
    unlock(LOCK_MACHINE);
}

int processes_on(int physical, struct process found[SLOTS]) {
    int count = 0;
    lock_machine();
    for (int i = 0; i < SLOTS; i++) {
        uint64_t bytes = slots[i].context[physical] + slots[i].memory[physical];
        if (bytes && in_use(i))
            found[count++] = (struct process){slots[i].pid, bytes};
    }
    unlock_machine();
    return count;
}

// ---- fork and exit

// In the child of a fork, with all locks held: it has no slot, and a file of its own to lock.
void leave_parent(void) {
    if (own_index >= 0)
        inherited = true;
    own_index = -1;
    memset(&own, 0, sizeof own);
    file_is_shared = true;
    memset(ready, 0, sizeof ready);
    memset(peak, 0, sizeof peak);
}

// PyTorch goes on freeing memory while the process ends, so the contexts stay and only the slot goes.  No lock: a
// thread that holds it may be gone already, and a reader that sees half of a cleared slot sees a process that is
// ending.
__attribute__((destructor)) static void leave_machine(void) {
    static const struct slot empty;
    int index = own_index;
    own_index = -1;
    if (index >= 0 && own.pid == getpid())
        write_slot(index, &empty);
}
