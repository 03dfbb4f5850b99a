// NVML: the machine as nvidia-smi sees it.  It knows all devices whatever CUDA_VISIBLE_DEVICES says, and all processes
// on them.  A device's handle is its number plus one.  What a chip would have to measure (load, heat, power) is 0.
#include "simulated.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    NVML_SUCCESS = 0,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_VERSION_MISMATCH = 25,
};
typedef void *nvmlDevice;

static int number_of(nvmlDevice handle) {
    uintptr_t number = (uintptr_t)handle - 1;
    return number < (uintptr_t)device_count() ? (int)number : -1;
}

static nvmlDevice handle_of(int physical) {
    return (nvmlDevice)(uintptr_t)(physical + 1);
}

// One figure for a device that exists.
static int answer(nvmlDevice handle, unsigned *out, unsigned value) {
    if (number_of(handle) < 0)
        return NVML_INVALID_ARGUMENT;
    *out = value;
    return NVML_SUCCESS;
}

static int answer_text(char *out, unsigned size, const char *text) {
    if (strlen(text) >= size)
        return NVML_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

// ---- the library
int nvmlInit_v2(void) {
    return device_count() ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED;
}

int nvmlInit(void) {
    return nvmlInit_v2();
}

int nvmlInitWithFlags(unsigned flags) {
    return nvmlInit_v2();
}

int nvmlShutdown(void) {
    return NVML_SUCCESS;
}

const char *nvmlErrorString(int error) {
    switch (error) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_NOT_FOUND:
        return "Not Found";
    case NVML_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_VERSION_MISMATCH:
        return "Argument Version Mismatch";
    }
    return "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    return answer_text(text, size, "580.0 (simulated)");
}

int nvmlSystemGetNVMLVersion(char *text, unsigned size) {
    return answer_text(text, size, "13.580.0 (simulated)");
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = CUDA_VERSION_ANSWERED;
    return NVML_SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) {
    char path[40];
    snprintf(path, sizeof path, "/proc/%u/exe", pid);
    ssize_t length = size ? readlink(path, name, size - 1) : -1;
    if (length < 0)
        return NVML_NOT_FOUND;
    name[length] = 0;
    return NVML_SUCCESS;
}

// ---- devices
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)device_count();
    return NVML_SUCCESS;
}

int nvmlDeviceGetCount(unsigned *count) {
    return nvmlDeviceGetCount_v2(count);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice *handle) {
    if (index >= (unsigned)device_count())
        return NVML_INVALID_ARGUMENT;
    *handle = handle_of((int)index);
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice *handle) {
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice *handle) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2 || bus < 1 || bus > (unsigned)device_count())
        return NVML_NOT_FOUND;
    *handle = handle_of((int)bus - 1);
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice *handle) {
    return nvmlDeviceGetHandleByPciBusId_v2(text, handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice *handle) {
    for (int i = 0; i < device_count(); i++) {
        char text[UUID_TEXT];
        device_uuid_text(i, text);
        if (!strcmp(text, uuid)) {
            *handle = handle_of(i);
            return NVML_SUCCESS;
        }
    }
    return NVML_NOT_FOUND;
}

int nvmlDeviceGetUUID(nvmlDevice handle, char *text, unsigned size) {
    char uuid[UUID_TEXT];
    if (number_of(handle) < 0)
        return NVML_INVALID_ARGUMENT;
    device_uuid_text(number_of(handle), uuid);
    return answer_text(text, size, uuid);
}

int nvmlDeviceGetIndex(nvmlDevice handle, unsigned *index) {
    return answer(handle, index, (unsigned)number_of(handle));
}

int nvmlDeviceGetMinorNumber(nvmlDevice handle, unsigned *number) {
    return answer(handle, number, (unsigned)number_of(handle));
}

int nvmlDeviceGetName(nvmlDevice handle, char *name, unsigned size) {
    const struct device *device = device_at(number_of(handle));
    return device ? answer_text(name, size, device->name) : NVML_INVALID_ARGUMENT;
}

int nvmlDeviceGetCudaComputeCapability(nvmlDevice handle, int *major, int *minor) {
    const struct device *device = device_at(number_of(handle));
    if (!device)
        return NVML_INVALID_ARGUMENT;
    *major = device->major;
    *minor = device->minor;
    return NVML_SUCCESS;
}

struct pci_info {
    char short_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

int nvmlDeviceGetPciInfo_v3(nvmlDevice handle, struct pci_info *out) {
    if (number_of(handle) < 0)
        return NVML_INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)number_of(handle) + 1;
    snprintf(out->short_id, sizeof out->short_id, "0000:%02X:00.0", out->bus & 0xff);
    snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", out->bus & 0xff);
    return NVML_SUCCESS;
}

// ---- memory
struct memory_info {
    unsigned long long total, free, used;
};
struct memory_info_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo(nvmlDevice handle, struct memory_info *out) {
    const struct device *device = device_at(number_of(handle));
    if (!device)
        return NVML_INVALID_ARGUMENT;
    out->total = device->total;
    out->used = used_on(number_of(handle));
    out->free = out->used < out->total ? out->total - out->used : 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(nvmlDevice handle, struct memory_info_v2 *out) {
    struct memory_info memory;
    int error = nvmlDeviceGetMemoryInfo(handle, &memory);
    if (error)
        return error;
    out->total = memory.total;
    out->reserved = 0;
    out->free = memory.free;
    out->used = memory.used;
    return NVML_SUCCESS;
}

int nvmlDeviceGetBAR1MemoryInfo(nvmlDevice handle, struct memory_info *out) {
    if (number_of(handle) < 0)
        return NVML_INVALID_ARGUMENT;
    *out = (struct memory_info){.total = 256 * MIB, .free = 255 * MIB, .used = MIB};
    return NVML_SUCCESS;
}

// ---- processes
struct process_info_v1 {
    unsigned pid;
    unsigned long long used;
};
struct process_info {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};
#define NO_INSTANCE 0xffffffffu  // not a slice of a device

static int list_processes(nvmlDevice handle, unsigned *count, char *out, size_t size) {
    struct process found[SLOTS];
    int physical = number_of(handle);
    if (physical < 0)
        return NVML_INVALID_ARGUMENT;
    unsigned room = out ? *count : 0, total = (unsigned)processes_on(physical, found);
    for (unsigned i = 0; i < total && i < room; i++) {
        struct process_info info = {(unsigned)found[i].pid, found[i].bytes, NO_INSTANCE, NO_INSTANCE};
        memcpy(out + i * size, &info, size);  // the older structure is the beginning of the newer one
    }
    *count = total;
    return total > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(nvmlDevice handle, unsigned *count, void *out) {
    return list_processes(handle, count, out, sizeof(struct process_info_v1));
}

int nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice handle, unsigned *count, void *out) {
    return list_processes(handle, count, out, sizeof(struct process_info));
}

int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice handle, unsigned *count, void *out) {
    return list_processes(handle, count, out, sizeof(struct process_info));
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice handle, unsigned *count, void *out) {
    return answer(handle, count, 0);
}

// ---- what nobody measures
int nvmlDeviceGetUtilizationRates(nvmlDevice handle, unsigned *out) {
    int error = answer(handle, &out[0], 0);  // of the multiprocessors, and of the memory
    return error ? error : answer(handle, &out[1], 0);
}

int nvmlDeviceGetTemperature(nvmlDevice handle, int sensor, unsigned *celsius) {
    return answer(handle, celsius, 0);
}

struct temperature {
    unsigned version;
    int sensor, celsius;
};

int nvmlDeviceGetTemperatureV(nvmlDevice handle, struct temperature *out) {
    if (number_of(handle) < 0)
        return NVML_INVALID_ARGUMENT;
    out->celsius = 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetPowerUsage(nvmlDevice handle, unsigned *milliwatts) {
    return answer(handle, milliwatts, 0);
}

int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice handle, unsigned *milliwatts) {
    return answer(handle, milliwatts, 400000);
}

int nvmlDeviceGetPowerManagementLimit(nvmlDevice handle, unsigned *milliwatts) {
    return answer(handle, milliwatts, 400000);
}

int nvmlDeviceGetClockInfo(nvmlDevice handle, int clock, unsigned *megahertz) {
    return answer(handle, megahertz, 1410);
}

int nvmlDeviceGetMaxClockInfo(nvmlDevice handle, int clock, unsigned *megahertz) {
    return answer(handle, megahertz, 1410);
}

int nvmlDeviceGetComputeMode(nvmlDevice handle, unsigned *mode) {
    return answer(handle, mode, 0);
}

int nvmlDeviceGetPersistenceMode(nvmlDevice handle, unsigned *mode) {
    return answer(handle, mode, 1);
}

// ---- what the device does not have
int nvmlDeviceGetFanSpeed(nvmlDevice handle, unsigned *percent) {
    return NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetMigMode(nvmlDevice handle, unsigned *current, unsigned *pending) {
    return NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice handle, unsigned link, int *type) {
    return NVML_NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice handle, unsigned link, void *out) {
    return NVML_NOT_SUPPORTED;
}

// The question whether the device is on a fabric of NVLink switches is answered, and no is the answer: not an error,
// at which PyTorch 2.13 would refuse to make an expandable segment.  In all versions of the structure 0 says it (the
// state "not supported", no cluster, no clique), and an H200 in a machine of its own with driver 580 answers just so.
enum {
    FABRIC_INFO_BYTES = 28,  // of the first version, which does not begin with its number
    FABRIC_INFO_V2 = 0x02000024,  // the number, and the bytes
    FABRIC_INFO_V3 = 0x03000028,
};

int nvmlDeviceGetGpuFabricInfo(nvmlDevice handle, void *out) {
    if (number_of(handle) < 0)
        return NVML_INVALID_ARGUMENT;
    memset(out, 0, FABRIC_INFO_BYTES);
    return NVML_SUCCESS;
}

int nvmlDeviceGetGpuFabricInfoV(nvmlDevice handle, unsigned *out) {
    unsigned version = out[0];
    if (number_of(handle) < 0)
        return NVML_INVALID_ARGUMENT;
    if (version != FABRIC_INFO_V2 && version != FABRIC_INFO_V3)
        return NVML_VERSION_MISMATCH;
    memset(&out[1], 0, (version & 0xffffff) - sizeof version);
    return NVML_SUCCESS;
}

int nvmlDeviceGetP2PStatus(nvmlDevice one, nvmlDevice other, int capability, int *status) {
    if (number_of(one) < 0 || number_of(other) < 0)
        return NVML_INVALID_ARGUMENT;
    *status = 0;  // they can, as cudaDeviceCanAccessPeer says
    return NVML_SUCCESS;
}
