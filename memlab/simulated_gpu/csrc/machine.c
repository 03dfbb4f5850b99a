// The machine file: what devices there are, and a slot for each process that uses them.  Python writes its header
// (memlab/simulated_gpu/machine.py has the same layout), this file reads and checks it.  Nothing in it is trusted: a
// file that is not right means one line on stderr and a machine without a device.
#include "simulated.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct device_record {
    char name[64];
    uint64_t total_bytes, context_bytes;
    uint32_t major, minor, multiprocessors;
    uint32_t zero[9];
};
struct machine_file {
    char magic[8];
    uint32_t devices, zero;
    uint64_t conv_workspace_bytes;
    char unused[40];
    struct device_record device[MAX_DEVICES];
    char unused_too[4096 - 64 - MAX_DEVICES * sizeof(struct device_record)];
    struct slot slots[SLOTS];
};
_Static_assert(sizeof(struct device_record) == 128, "the machine file has 128 bytes for a device");
_Static_assert(offsetof(struct machine_file, device) == 64, "devices begin at byte 64");
_Static_assert(offsetof(struct machine_file, slots) == 4096, "process slots begin at byte 4096");
_Static_assert(sizeof(struct slot) == 160 && sizeof(struct machine_file) == 45056, "160 bytes for a process");

// The header is copied before it is checked, so that nobody can change it afterwards.
static struct {
    int devices;
    struct device device[MAX_DEVICES];
    uint64_t conv_workspace;
    struct slot *slots;
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

static bool read_header(const struct machine_file *header, const char *path) {
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

static struct machine_file *map_file(int file, const char *path) {
    struct stat about;
    if (fstat(file, &about) || about.st_size < (off_t)sizeof(struct machine_file)) {
        say("%s is too short for a machine file (%lld bytes of %zu). No device.", path, (long long)about.st_size,
            sizeof(struct machine_file));
        return NULL;
    }
    void *mapped = mmap(NULL, sizeof(struct machine_file), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        say("cannot map %s (%s). No device.", path, strerror(errno));
        return NULL;
    }
    return mapped;
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
    struct machine_file *mapped = map_file(file, path);
    if (!mapped) {
        close(file);
        return;
    }
    struct machine_file *header = malloc(sizeof *header);
    if (header && memcpy(header, mapped, sizeof *header) && read_header(header, path)) {
        machine.slots = mapped->slots;
        machine.file = file;
        machine.devices = (int)header->devices;
    } else {
        munmap(mapped, sizeof *mapped);
        close(file);
    }
    free(header);
}

int device_count(void) {
    pthread_once(&machine_read, read_machine);
    return machine.devices;
}

const struct device *device_at(int physical) {
    return physical >= 0 && physical < device_count() ? &machine.device[physical] : NULL;
}

struct slot *process_slots(void) {
    return device_count() ? machine.slots : NULL;
}

int machine_file(void) {
    return device_count() ? machine.file : -1;
}

uint64_t conv_workspace_bytes(void) {
    return device_count() ? machine.conv_workspace : 0;
}
