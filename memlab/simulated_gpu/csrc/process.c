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
#include <unistd.h>

static struct slot *own;          // NULL before the first context, and in the child of a fork
static bool ready[MAX_DEVICES];   // this process has a context there
static bool inherited;            // the parent had a context when it forked: CUDA refuses to work in such a child
static uint64_t peak[MAX_DEVICES];

// ---- the lock: a mutex among the threads, flock among the processes
static int lock_file = -1;
static bool lock_is_shared;  // with the parent: flock belongs to the open file, which a fork does not copy

static void open_lock(void) {
    if (lock_file < 0)
        lock_file = machine_file();
    if (!lock_is_shared || lock_file < 0)
        return;
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", lock_file);
    int again = open(path, O_RDWR | O_CLOEXEC);
    if (again < 0)
        return;
    close(lock_file);
    lock_file = again;
    lock_is_shared = false;
}

static void lock_machine(void) {
    lock(LOCK_MACHINE);
    open_lock();
    while (lock_file >= 0 && flock(lock_file, LOCK_EX) && errno == EINTR)
        continue;
}

static void unlock_machine(void) {
    if (lock_file >= 0)
        flock(lock_file, LOCK_UN);
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

static bool slot_lives(const struct slot *slot) {
    if (slot == own)
        return true;
    if (slot->pid <= 0 || slot->pid == getpid())  // our number, not our slot: what this process left behind by exec
        return false;
    uint64_t started = start_time(slot->pid);
    return started && started == slot->start_time;
}

static bool in_use(struct slot *slot) {  // with the lock held
    if (!slot->pid)
        return false;
    if (slot_lives(slot))
        return true;
    memset(slot, 0, sizeof *slot);
    return false;
}

static uint64_t sum_used(int physical) {  // with the lock held
    struct slot *slots = process_slots();
    uint64_t sum = 0;
    for (int i = 0; slots && i < SLOTS; i++) {
        if (in_use(&slots[i]))
            sum += slots[i].context[physical] + slots[i].memory[physical];
    }
    return sum;
}

static bool fits(int physical, uint64_t bytes) {  // with the lock held
    uint64_t total = device_at(physical)->total, used = sum_used(physical);
    return used <= total && bytes <= total - used;
}

// ---- contexts
static struct slot *take_slot(void) {  // with the lock held
    struct slot *slots = process_slots();
    for (int i = 0; i < SLOTS; i++) {
        if (in_use(&slots[i]))
            continue;
        memset(&slots[i], 0, sizeof slots[i]);
        slots[i].start_time = start_time(getpid());
        slots[i].pid = getpid();
        return &slots[i];
    }
    say("%d processes use this machine already; end one of them.", SLOTS);
    return NULL;
}

static cudaError_t create_context(int physical) {  // with the lock held
    if (ready[physical])
        return cudaSuccess;
    if (!fits(physical, device_at(physical)->context))
        return cudaErrorMemoryAllocation;
    if (!own)
        own = take_slot();
    if (!own)
        return cudaErrorInitializationError;
    own->context[physical] = device_at(physical)->context;
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
    lock_machine();
    cudaError_t error = create_context(physical);
    unlock_machine();
    return error;
}

bool has_context(int physical) {
    return physical >= 0 && __atomic_load_n(&ready[physical], __ATOMIC_ACQUIRE);
}

// ---- memory
bool charge(int physical, uint64_t bytes) {
    lock_machine();
    bool granted = own && fits(physical, bytes);
    if (granted) {
        own->memory[physical] += bytes;
        if (own->memory[physical] > peak[physical])
            peak[physical] = own->memory[physical];
    }
    unlock_machine();
    return granted;
}

void discharge(int physical, uint64_t bytes) {
    lock_machine();
    if (own)
        own->memory[physical] -= bytes;
    unlock_machine();
}

uint64_t used_on(int physical) {
    lock_machine();
    uint64_t used = sum_used(physical);
    unlock_machine();
    return used;
}

uint64_t own_bytes(int physical) {
    lock_machine();
    uint64_t bytes = own ? own->memory[physical] : 0;
    unlock_machine();
    return bytes;
}

uint64_t own_peak(int physical) {
    lock_machine();
    uint64_t bytes = peak[physical];
    unlock_machine();
    return bytes;
}

void reset_own_peak(int physical) {
    lock_machine();
    peak[physical] = own ? own->memory[physical] : 0;
    unlock_machine();
}

int processes_on(int physical, struct process found[SLOTS]) {
    int count = 0;
    lock_machine();
    struct slot *slots = process_slots();
    for (int i = 0; slots && i < SLOTS; i++) {
        uint64_t bytes = slots[i].context[physical] + slots[i].memory[physical];
        if (bytes && in_use(&slots[i]))
            found[count++] = (struct process){slots[i].pid, bytes};
    }
    unlock_machine();
    return count;
}

// ---- fork and exit

// In the child of a fork, with all locks held: it has no slot, and a file of its own to lock.
void leave_parent(void) {
    if (own)
        inherited = true;
    own = NULL;
    lock_is_shared = true;
    memset(ready, 0, sizeof ready);
    memset(peak, 0, sizeof peak);
}

// PyTorch goes on freeing memory while the process ends, so the contexts stay and only the slot goes.  No lock: a
// thread that holds it may be gone already, and a reader that sees half of a cleared slot sees a process that is
// ending.
__attribute__((destructor)) static void leave_machine(void) {
    struct slot *slot = own;
    own = NULL;
    if (slot && slot->pid == getpid())
        memset(slot, 0, sizeof *slot);
}
