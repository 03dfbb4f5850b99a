// The machine file: what devices there are, and a slot for each process that uses them.  Python writes its header
// (memlab/simulated_gpu/machine.py has the same layout), this file reads and checks it.  Nothing in it is trusted: a
// file that is not right means one line on stderr and a machine without a device.
#include "simulated.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct device_record {
    char name[64];
    uint64_t total_bytes, context_bytes;
    uint32_t major, minor, multiprocessors;
    uint32_t zero[9];
};
struct header {
    char magic[8];
    uint32_t devices, zero;
    uint64_t conv_workspace_bytes;
    char unused[40];
    struct device_record device[MAX_DEVICES];
    char unused_too[4096 - 64 - MAX_DEVICES * sizeof(struct device_record)];
};
_Static_assert(sizeof(struct device_record) == 128, "the machine file has 128 bytes for a device");
_Static_assert(offsetof(struct header, device) == 64, "devices begin at byte 64");
_Static_assert(sizeof(struct header) == 4096, "process slots begin at byte 4096");
_Static_assert(sizeof(struct slot) == 160, "160 bytes for a process");
#define FILE_SIZE (sizeof(struct header) + SLOTS * sizeof(struct slot))

static struct {
    struct header header;  // a copy, so that nobody can change what was checked
    int devices;
    struct device device[MAX_DEVICES];
    uint64_t conv_workspace;
    int file;
} machine = {.file = -1};
static pthread_once_t machine_read = PTHREAD_ONCE_INIT;

static bool read_device(int index, const struct device_record *record) {
    if (record->total_bytes < GRANULE || record->total_bytes > TIB) {
        say("device %d has total_bytes %llu; a device has between 2 MiB and 1 TiB. No device.", index,
            (unsigned long long)record->total_bytes);
        return false;
    }
    if (record->context_bytes > record->total_bytes) {
        say("device %d has context_bytes %llu, more than its total_bytes %llu. No device.", index,
            (unsigned long long)record->context_bytes, (unsigned long long)record->total_bytes);
        return false;
    }
    if (record->major < 1 || record->major > 99 || record->minor > 9) {
        say("device %d has compute capability %u.%u, such as 8.9 was expected. No device.", index, record->major,
            record->minor);
        return false;
    }
    if (record->multiprocessors < 1 || record->multiprocessors > 4096) {
        say("device %d has %u multiprocessors; give between 1 and 4096. No device.", index, record->multiprocessors);
        return false;
    }
    struct device *device = &machine.device[index];
    memcpy(device->name, record->name, sizeof record->name);  // the 65th byte of ours ends a name without an end
    device->total = record->total_bytes;
    device->context = record->context_bytes;
    device->major = (int)record->major;
    device->minor = (int)record->minor;
    device->multiprocessors = (int)record->multiprocessors;
    device->capability = capability_of(device->major, device->minor);
    return true;
}

static bool check_header(const struct header *header, const char *path) {
    if (memcmp(header->magic, "MEMLSIM1", 8)) {
        say("%s is not a machine file (it does not begin with MEMLSIM1). No device.", path);
        return false;
    }
    if (header->devices < 1 || header->devices > MAX_DEVICES) {
        say("%s asks for %u devices; a machine has 1 to %d. No device.", path, header->devices, MAX_DEVICES);
        return false;
    }
    for (unsigned i = 0; i < header->devices; i++) {
        if (!read_device((int)i, &header->device[i]))
            return false;
    }
    machine.conv_workspace = header->conv_workspace_bytes;
    return true;
}

static bool read_header(int file, const char *path) {
    struct stat about = {.st_size = 0};
    if (fstat(file, &about) || about.st_size < (off_t)FILE_SIZE ||
        pread(file, &machine.header, sizeof machine.header, 0) != sizeof machine.header) {
        say("%s is too short for a machine file (%lld bytes of %zu). No device.", path, (long long)about.st_size,
            FILE_SIZE);
        return false;
    }
    return check_header(&machine.header, path);
}

static void read_machine(void) {
    const char *path = getenv("MEMLAB_SIMULATED_GPU");
    if (!path || !*path) {
        say("MEMLAB_SIMULATED_GPU names no machine; start the program with: memlab simulate -- COMMAND. No device.");
        return;
    }
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        say("cannot open the machine %s (%s). No device.", path, strerror(errno));
        return;
    }
    if (!read_header(file, path)) {
        close(file);
        return;
    }
    machine.file = file;
    machine.devices = (int)machine.header.devices;
}

int device_count(void) {
    pthread_once(&machine_read, read_machine);
    return machine.devices;
}

const struct device *device_at(int physical) {
    return physical >= 0 && physical < device_count() ? &machine.device[physical] : NULL;
}

int machine_file(void) {
    return device_count() ? machine.file : -1;
}

uint64_t conv_workspace_bytes(void) {
    return device_count() ? machine.conv_workspace : 0;
}

// ---- the slots: read and written, not mapped, since a mapped file that is cut short kills those who look at it
static bool is_as_before(void) {
    struct header now;
    return pread(machine.file, &now, sizeof now, 0) == sizeof now && !memcmp(&now, &machine.header, sizeof now);
}

bool read_slots(struct slot slots[SLOTS]) {
    static bool said;
    const ssize_t bytes = SLOTS * sizeof *slots;
    if (machine_file() < 0)
        return false;
    if (is_as_before() && pread(machine.file, slots, (size_t)bytes, sizeof(struct header)) == bytes)
        return true;
    if (!__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
        say("the machine's file was overwritten or cut short while in use: end its programs, and make it anew.");
    return false;
}

bool write_slot(int index, const struct slot *slot) {
    off_t at = (off_t)(sizeof(struct header) + (size_t)index * sizeof *slot);
    return is_as_before() && pwrite(machine.file, slot, sizeof *slot, at) == sizeof *slot;
}
