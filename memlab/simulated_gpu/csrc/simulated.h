// What the files of the simulated GPU share.  The calls that programs make (cudaMalloc, cuMemCreate, nvmlInit_v2 ...)
// are the exported symbols; everything declared here stays inside the library.
//
// Two ways to name a device: `ordinal` is the caller's number (after CUDA_VISIBLE_DEVICES), `physical` the machine's.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "cuda_types.h"

// An answer to a CUDA call often ignores most of its arguments; they are named all the same, for the reader.
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define KIB (1ull << 10)
#define MIB (1ull << 20)
#define TIB (1ull << 40)
#define PAGE (4 * KIB)
#define GRANULE (2 * MIB)  // the driver hands out device memory in units of this size
#define MAX_DEVICES 8

#pragma GCC visibility push(hidden)

static inline uint64_t round_up(uint64_t bytes, uint64_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

// ---- say.c: lines on stderr
enum trace { TRACE_MEMORY = 1, TRACE_LAUNCHES = 2, TRACE_CALLS = 4 };
bool tracing(enum trace what);
void trace(enum trace what, const char *format, ...) __attribute__((format(printf, 2, 3)));
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- locks.c: in the order in which one may be taken while another is held
enum lock {
    LOCK_STREAMS,
    LOCK_REGISTERED,  // memory of the program that it registered as pinned
    LOCK_VIRTUAL,     // pieces of virtual memory
    LOCK_SPACE,       // the address space
    LOCK_MACHINE,     // this process's slot; among processes, the machine file is locked too
    LOCK_CONTENTS,    // what the host may read
    LOCK_NAMES,       // kernel names
    LOCKS,
};
void lock(enum lock which);
void unlock(enum lock which);

// ---- machine.c: the machine file's header
struct device {
    char name[65];
    uint64_t total, context;
    int major, minor, multiprocessors;
    const struct capability *capability;
};
struct slot {
    int32_t pid;
    uint32_t pid_namespace;
    uint64_t start_time;
    uint64_t context[MAX_DEVICES];
    uint64_t memory[MAX_DEVICES];
    uint64_t reserved[2];
};
enum { SLOTS = 256 };
int device_count(void);  // 0 without a machine
const struct device *device_at(int physical);
bool read_slots(struct slot slots[SLOTS]);  // false: the file is no machine's any more
bool write_slot(int index, const struct slot *slot);
int machine_file(void);  // its file descriptor
uint64_t conv_workspace_bytes(void);

// ---- capability.c: what follows from a compute capability
struct capability {
    int version;  // 10 * major + minor
    int threads_per_multiprocessor, blocks_per_multiprocessor;
    size_t shared_per_multiprocessor, shared_optin, shared_reserved;
    size_t l2_bytes;
    int code;  // the architecture whose code in PyTorch runs there
};
const struct capability *capability_of(int major, int minor);

// ---- visible.c: CUDA_VISIBLE_DEVICES
enum { UUID_TEXT = 41 };
void device_uuid(int physical, unsigned char bytes[16]);
void device_uuid_text(int physical, char text[UUID_TEXT]);
int visible_count(void);
int physical_of(int ordinal);  // -1 for a number that names no device
int ordinal_of(int physical);

// ---- process.c: this process on the machine, and the others
cudaError_t use_device(int physical);  // creates the context at the first use
bool has_context(int physical);
cudaError_t charge(int physical, uint64_t bytes);
void discharge(int physical, uint64_t bytes);
uint64_t used_on(int physical);
uint64_t own_bytes(int physical);
uint64_t own_peak(int physical);
void reset_own_peak(int physical);
void leave_parent(void);  // after a fork
struct process {
    int pid;
    uint64_t bytes;
};
int processes_on(int physical, struct process found[SLOTS]);

// ---- ranges.c: a sorted list of address ranges
struct range {
    uint64_t at, size;
    union {
        uint64_t asked;         // a mapping: the bytes the caller asked for
        struct physical *from;  // a piece of virtual memory: what is mapped there
    };
};
struct ranges {
    struct range *items;
    int count, room;
};
int ranges_after(const struct ranges *list, uint64_t address);  // index of the first range that ends behind address
struct range *ranges_find(const struct ranges *list, uint64_t address);
bool ranges_insert(struct ranges *list, int index, struct range item);
void ranges_remove(struct ranges *list, int first, int count);

// ---- address_space.c: where device and pinned memory lies
enum region { REGION_MANAGED = MAX_DEVICES, REGION_HOST = 2 * MAX_DEVICES, REGION_VIRTUAL, REGIONS };  // 0..7: devices
int region_of(const void *address);        // -1: not ours
int device_of_region(int region);          // -1: none's, or several devices'
bool is_device_only(const void *address);  // the host reaches it by copies alone
void *map_memory(int region, uint64_t bytes, uint64_t unit);
uint64_t unmap_memory(void *address);  // the bytes released, 0 if nothing begins there
bool find_memory(const void *address, struct range *found);

// ---- contents.c: the bytes in device memory
void copy_bytes(void *to, const void *from, size_t bytes);
void fill_bytes(void *at, int value, size_t bytes);
void forget_bytes(void *at, size_t bytes);
void forget_all_bytes(void);

// ---- streams.c: which streams take part in a capture
bool is_default_stream(cudaStream_t stream);
uint64_t capture_of(cudaStream_t stream);
void begin_in(cudaStream_t stream, uint64_t capture);
void end_capture(uint64_t capture);
bool is_work_joined(cudaStream_t origin);
cudaError_t enqueue(cudaStream_t stream);

// ---- graphs.c: captures, and what they refuse
bool is_capturing(uint64_t capture);
cudaError_t spoil(uint64_t capture, cudaError_t error);
cudaError_t refuse_unsafe(void);
cudaError_t refuse_waiting_for_all(void);
cudaError_t refuse_waiting(cudaStream_t stream);
cudaError_t refuse_captured(uint64_t capture);
cudaError_t refuse_spoilt(uint64_t capture);

// ---- device.c, kernels.c, virtual_memory.c, memory.c: shared between the runtime's and the driver's calls
cudaError_t fail(cudaError_t error);
cudaError_t use_current(void);
int current_device(void);
int current_physical(void);
void set_current_device(int ordinal);
cudaError_t device_attribute(int *value, int attribute, int ordinal);
cudaError_t launched(const void *function, cudaStream_t stream, dim3 grid, dim3 block);
uint64_t launches(void);
void count_launch(void);
int code_version(void);
int blocks_per_multiprocessor(int threads);
int virtual_memory_device(const void *address);
bool is_mapped(const void *address, size_t bytes);
void count_allocation(void);
void count_release(void);
const char *driver_error_name(CUresult error);

// Calls of one API that another file's answers lean on; exported, so not hidden.
#pragma GCC visibility pop
cudaError_t cudaMalloc(void **address, size_t bytes);
cudaError_t cudaFree(void *address);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address);
const char *cudaGetErrorString(cudaError_t error);
