// The runtime's memory: device, managed, pinned and registered, copies and fills, and the stream-ordered pool.
#include "simulated.h"
#include <stdlib.h>
#include <string.h>

static uint64_t allocations, releases;

void count_allocation(void) {
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
}

void count_release(void) {
    __atomic_add_fetch(&releases, 1, __ATOMIC_RELAXED);
}

// What the device saw, for tests through ctypes: {allocations, releases, launches, bytes now, peak bytes}.  The first
// three count all devices; `device` is the machine's number.
int memlab_simulated_counters(int device, uint64_t out[5]) {
    if (!device_at(device))
        return cudaErrorInvalidDevice;
    out[0] = __atomic_load_n(&allocations, __ATOMIC_RELAXED);
    out[1] = __atomic_load_n(&releases, __ATOMIC_RELAXED);
    out[2] = launches();
    out[3] = own_bytes(device);
    out[4] = own_peak(device);
    return cudaSuccess;
}

// ---- device memory
static cudaError_t allocate(void **address, int physical, int region, size_t bytes) {
    if (bytes > device_at(physical)->total)  // first, since rounding up a huge size would wrap around
        return cudaErrorMemoryAllocation;
    uint64_t size = round_up(bytes, GRANULE);
    cudaError_t error = charge(physical, size);
    if (error)
        return error;
    *address = map_memory(region, bytes, GRANULE);
    if (*address)
        count_allocation();
    else
        discharge(physical, size);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

static bool release(void *address) {
    int physical = device_of_region(region_of(address));
    if (physical < 0)
        return false;
    uint64_t size = unmap_memory(address);
    if (!size)
        return false;
    discharge(physical, size);
    count_release();
    trace(TRACE_MEMORY, "free device=%d bytes=%llu at %p", physical, (unsigned long long)size, address);
    return true;
}

static cudaError_t allocate_for_caller(void **address, int first_region, size_t bytes) {
    if (!address)
        return fail(cudaErrorInvalidValue);
    *address = NULL;
    cudaError_t error = use_current();
    if (error || !bytes)
        return error;
    int physical = current_physical();
    error = allocate(address, physical, first_region + physical, bytes);
    trace(TRACE_MEMORY, "malloc device=%d bytes=%zu -> %p", physical, bytes, *address);
    return fail(error);
}

cudaError_t cudaMalloc(void **address, size_t bytes) {
    cudaError_t error = fail(refuse_unsafe());
    return error ? error : allocate_for_caller(address, 0, bytes);
}

// Memory that the host reaches by address as well: it is the host's, and counts on the device.
cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned flags) {
    cudaError_t error = fail(refuse_unsafe());
    return error ? error : allocate_for_caller(address, REGION_MANAGED, bytes);
}

static cudaError_t release_for_caller(void *address) {
    cudaError_t error = use_current();  // cudaFree(0) is the customary way to create a context
    if (error || !address)
        return error;
    return release(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaFree(void *address) {
    cudaError_t error = fail(refuse_unsafe());
    return error ? error : release_for_caller(address);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    cudaError_t error = use_current();
    if (error)
        return error;
    uint64_t used = used_on(current_physical());
    *total_bytes = device_at(current_physical())->total;
    *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
    return cudaSuccess;
}

// ---- pinned memory, and memory of the program that it registers as pinned
static struct ranges registered;

cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    cudaError_t error = fail(refuse_unsafe());
    if (error)
        return error;
    *address = map_memory(REGION_HOST, bytes, PAGE);
    trace(TRACE_MEMORY, "hostalloc bytes=%zu -> %p", bytes, *address);
    return *address || !bytes ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void **address, size_t bytes) {
    return cudaHostAlloc(address, bytes, 0);
}

cudaError_t cudaFreeHost(void *address) {
    if (!address)
        return cudaSuccess;
    trace(TRACE_MEMORY, "hostfree %p", address);
    return region_of(address) == REGION_HOST && unmap_memory(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    uint64_t at = (uint64_t)address;
    cudaError_t error = cudaSuccess;
    if (!address || !bytes || at + bytes < at)
        return fail(cudaErrorInvalidValue);
    lock(LOCK_REGISTERED);
    int index = ranges_after(&registered, at);
    if (index < registered.count && registered.items[index].at < at + bytes)
        error = cudaErrorHostMemoryAlreadyRegistered;
    else if (!ranges_insert(&registered, index, (struct range){.at = at, .size = bytes}))
        error = cudaErrorMemoryAllocation;
    unlock(LOCK_REGISTERED);
    return fail(error);
}

cudaError_t cudaHostUnregister(void *address) {
    lock(LOCK_REGISTERED);
    struct range *found = ranges_find(&registered, (uint64_t)address);
    bool begins = found && found->at == (uint64_t)address;
    if (begins)
        ranges_remove(&registered, (int)(found - registered.items), 1);
    unlock(LOCK_REGISTERED);
    return begins ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

static bool is_registered(const void *address) {
    lock(LOCK_REGISTERED);
    bool found = ranges_find(&registered, (uint64_t)address) != NULL;
    unlock(LOCK_REGISTERED);
    return found;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    struct range memory;
    int region = find_memory(address, &memory) ? region_of(address) : -1;
    memset(out, 0, sizeof *out);
    if (region == REGION_HOST || (region < 0 && is_registered(address))) {
        out->type = MEMORY_HOST;
        out->device = current_device();
        out->device_pointer = (void *)address;
        out->host_pointer = (void *)address;
    } else if (region >= 0) {
        bool is_managed = region >= REGION_MANAGED && region < REGION_HOST;
        out->type = is_managed ? MEMORY_MANAGED : MEMORY_DEVICE;
        out->device = ordinal_of(region == REGION_VIRTUAL ? virtual_memory_device(address) : device_of_region(region));
        out->device_pointer = (void *)address;
        out->host_pointer = is_managed ? (void *)address : NULL;
    } else {
        out->type = MEMORY_UNREGISTERED;
        out->device = -1;
        out->host_pointer = (void *)address;
    }
    return cudaSuccess;
}

// ---- copies and fills: done when the call returns, whatever the stream

// Of our memory, only what lies in one allocation; what the program has is its own affair.
static bool is_usable(const void *at, size_t bytes) {
    struct range memory;
    int region = region_of(at);
    if (region < 0)
        return at;
    if (region == REGION_VIRTUAL)
        return is_mapped(at, bytes);
    if (!find_memory(at, &memory))
        return false;
    uint64_t offset = (uint64_t)at - memory.at;
    return offset <= memory.asked && bytes <= memory.asked - offset;
}

// A loop that waits until something on the device is true (transformers' generate does) would wait for ever in silence.
static void note_answer(bool is_true) {
    enum { MANY = 1000 };
    static int falses;
    if (is_true)
        __atomic_store_n(&falses, 0, __ATOMIC_RELAXED);
    else if (__atomic_add_fetch(&falses, 1, __ATOMIC_RELAXED) == MANY)
        say("%d truth values in a row were read, all False: a loop that waits for True on the device never ends.", MANY);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, cudaStream_t stream) {
    cudaError_t error = use_current();
    if (!error)
        error = fail(enqueue(stream));
    if (error || !bytes)
        return error;
    if (!is_usable(to, bytes) || !is_usable(from, bytes))
        return fail(cudaErrorInvalidValue);
    copy_bytes(to, from, bytes);
    if (bytes == 1 && is_device_only(from) && !is_device_only(to))
        note_answer(*(const char *)to);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    cudaError_t error = fail(refuse_unsafe());
    return error ? error : cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, 0, stream);
}

// How many bytes lie between the first and the last of some rows; false for more than there are addresses.
static bool span_rows(size_t pitch, size_t width, size_t height, size_t *bytes) {
    return width <= pitch && !__builtin_mul_overflow(height - 1, pitch, bytes) &&
           !__builtin_add_overflow(*bytes, width, bytes);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, int kind, cudaStream_t stream) {
    size_t to_bytes, from_bytes;
    cudaError_t error = use_current();
    if (!error)
        error = fail(enqueue(stream));
    if (error || !width || !height)
        return error;
    if (!span_rows(to_pitch, width, height, &to_bytes) || !span_rows(from_pitch, width, height, &from_bytes) ||
        !is_usable(to, to_bytes) || !is_usable(from, from_bytes))
        return fail(cudaErrorInvalidValue);
    for (size_t row = 0; row < height; row++)
        copy_bytes((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    cudaError_t error = use_current();
    if (!error)
        error = fail(enqueue(stream));
    if (error || !bytes)
        return error;
    if (!is_usable(at, bytes))
        return fail(cudaErrorInvalidValue);
    fill_bytes(at, value, bytes);
    return cudaSuccess;
}

// To a device or to the host: managed memory stays where it is, and counts on the device all along.
cudaError_t cudaMemPrefetchAsync(const void *at, size_t bytes, struct location to, unsigned flags, cudaStream_t stream) {
    cudaError_t error = use_current();
    if (!error)
        error = fail(enqueue(stream));
    if (error)
        return error;
    return is_usable(at, bytes) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemset(void *at, int value, size_t bytes) {
    cudaError_t error = fail(refuse_unsafe());
    return error ? error : cudaMemsetAsync(at, value, bytes, NULL);
}

// A variable of a kernel: since no kernel reads one, all share one place.
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char place[MIB];
    *address = place;
    return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, int kind) {
    return fail(refuse_unsafe());
}

// ---- the stream-ordered pool (backend:cudaMallocAsync): it never caches, so it has reserved what is used
cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream) {
    return allocate_for_caller(address, 0, bytes);
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    return release_for_caller(address);
}

static cudaMemPool_t pool_of(int physical) {
    return (cudaMemPool_t)(uintptr_t)(0x1000 + physical);
}

static int pool_device(cudaMemPool_t pool) {
    int physical = (int)((uintptr_t)pool - 0x1000);
    return device_at(physical) ? physical : -1;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int ordinal) {
    int physical = physical_of(ordinal);
    if (physical < 0)
        return fail(cudaErrorInvalidDevice);
    *pool = pool_of(physical);
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void *value) {
    int physical = pool_device(pool);
    if (physical < 0)
        return fail(cudaErrorInvalidValue);
    if (attribute < POOL_RELEASE_THRESHOLD)
        *(int *)value = 1;  // blocks may be reused along events and in any order
    else if (attribute == POOL_RESERVED_CURRENT || attribute == POOL_USED_CURRENT)
        *(uint64_t *)value = own_bytes(physical);
    else if (attribute == POOL_RESERVED_HIGH || attribute == POOL_USED_HIGH)
        *(uint64_t *)value = own_peak(physical);
    else
        *(uint64_t *)value = 0;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void *value) {
    int physical = pool_device(pool);
    if (physical < 0)
        return fail(cudaErrorInvalidValue);
    if (attribute == POOL_RESERVED_HIGH || attribute == POOL_USED_HIGH)
        reset_own_peak(physical);  // zero is the only value that CUDA takes
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const void *access, size_t count) {
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    return cudaSuccess;
}
