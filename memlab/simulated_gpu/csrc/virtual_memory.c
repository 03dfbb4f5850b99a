// The driver's virtual memory, which PyTorch's expandable segments use: addresses are reserved first and memory is
// mapped into them piece by piece.  Memory counts from cuMemCreate on, and until its handle and its last mapping are
// gone.
#include "simulated.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct physical {
    uint64_t size;
    int device;  // the machine's number
    int users;   // the handle, and each place it is mapped to
};
static struct ranges pieces;

static void drop_user(struct physical *memory) {  // with the lock held
    if (--memory->users)
        return;
    discharge(memory->device, memory->size);
    count_release();
    trace(TRACE_MEMORY, "release device=%d bytes=%llu", memory->device, (unsigned long long)memory->size);
    free(memory);
}

int virtual_memory_device(const void *address) {
    lock(LOCK_VIRTUAL);
    struct range *piece = ranges_find(&pieces, (uint64_t)address);
    int device = piece ? piece->from->device : 0;
    unlock(LOCK_VIRTUAL);
    return device;
}

bool is_mapped(const void *address, size_t bytes) {
    uint64_t at = (uint64_t)address, end = at + bytes;
    struct range *piece;
    lock(LOCK_VIRTUAL);
    while (at < end && (piece = ranges_find(&pieces, at)))
        at = piece->at + piece->size;
    unlock(LOCK_VIRTUAL);
    return at >= end && end >= (uint64_t)address;
}

// ---- memory
CUresult cuMemGetAllocationGranularity(size_t *unit, const CUmemAllocationProp *wanted, int recommended) {
    *unit = GRANULE;
    return cudaSuccess;
}

static CUresult create(struct physical **out, int physical, size_t bytes) {
    CUresult error = charge(physical, bytes);
    if (error)
        return error;
    *out = malloc(sizeof **out);
    if (*out)
        **out = (struct physical){bytes, physical, 1};
    else
        discharge(physical, bytes);
    return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                     unsigned long long flags) {
    int physical = wanted->location.type == LOCATION_DEVICE ? physical_of(wanted->location.id) : -1;
    if (physical < 0)
        return cudaErrorInvalidDevice;
    if (!bytes || bytes % GRANULE)
        return cudaErrorInvalidValue;
    if (wanted->requested_handle_types & HANDLE_FABRIC)
        return cudaErrorNotSupported;  // NVML says that the device is on none
    CUresult error = use_device(physical);
    if (error)
        return error;
    struct physical *memory;
    error = create(&memory, physical, bytes);
    trace(TRACE_MEMORY, "create device=%d bytes=%zu%s", physical, bytes, error ? ": does not fit" : "");
    if (error)
        return error;
    count_allocation();
    *handle = (uintptr_t)memory;
    return cudaSuccess;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (!handle)
        return cudaErrorInvalidValue;
    lock(LOCK_VIRTUAL);
    drop_user((struct physical *)(uintptr_t)handle);
    unlock(LOCK_VIRTUAL);
    return cudaSuccess;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    lock(LOCK_VIRTUAL);
    struct range *piece = ranges_find(&pieces, (uint64_t)address);
    if (piece) {
        piece->from->users++;
        *handle = (uintptr_t)piece->from;
    }
    unlock(LOCK_VIRTUAL);
    return piece ? cudaSuccess : cudaErrorInvalidValue;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle) {
    const struct physical *memory = (const struct physical *)(uintptr_t)handle;
    memset(out, 0, sizeof *out);
    out->type = ALLOCATION_PINNED;
    out->location.type = LOCATION_DEVICE;
    out->location.id = ordinal_of(memory->device);
    return cudaSuccess;
}

static CUresult refuse_sharing(void) {
    say("memory of a simulated GPU cannot be shared between processes; copy it through the host.");
    return cudaErrorNotSupported;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                      unsigned long long flags) {
    return refuse_sharing();
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from, int type) {
    return refuse_sharing();
}

// ---- addresses
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    if (!bytes || bytes % GRANULE)
        return cudaErrorInvalidValue;
    *address = (CUdeviceptr)(uintptr_t)map_memory(REGION_VIRTUAL, bytes, GRANULE);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    if (region_of((void *)address) != REGION_VIRTUAL || !unmap_memory((void *)address))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

// Only addresses that were reserved: anything else in this process is not ours to map over.
static bool is_reserved(CUdeviceptr address, size_t bytes) {
    struct range reservation;
    return region_of((void *)address) == REGION_VIRTUAL && find_memory((void *)address, &reservation) &&
           bytes <= reservation.at + reservation.size - address;
}

// ---- memory at addresses
static CUresult map_piece(CUdeviceptr address, size_t bytes, struct physical *memory) {  // with the lock held
    int index = ranges_after(&pieces, address);
    if (index < pieces.count && pieces.items[index].at < address + bytes)
        return cudaErrorInvalidValue;
    if (mprotect((void *)address, bytes, PROT_READ | PROT_WRITE))
        return cudaErrorMemoryAllocation;
    if (!ranges_insert(&pieces, index, (struct range){.at = address, .size = bytes, .from = memory}))
        return cudaErrorMemoryAllocation;
    memory->users++;
    return cudaSuccess;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    struct physical *memory = (struct physical *)(uintptr_t)handle;
    if (!memory || !bytes || bytes % GRANULE || address % GRANULE || !is_reserved(address, bytes))
        return cudaErrorInvalidValue;
    lock(LOCK_VIRTUAL);
    CUresult error = map_piece(address, bytes, memory);
    unlock(LOCK_VIRTUAL);
    return error;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const void *access, size_t count) {
    return cudaSuccess;
}

static CUresult unmap_pieces(CUdeviceptr address, size_t bytes) {  // with the lock held
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    forget_bytes((void *)address, bytes);
    if (mmap((void *)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    madvise((void *)address, bytes, MADV_NOHUGEPAGE);
    int index = ranges_after(&pieces, address);
    while (index < pieces.count && pieces.items[index].at < address + bytes) {
        drop_user(pieces.items[index].from);
        ranges_remove(&pieces, index, 1);
    }
    return cudaSuccess;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    if (!bytes || bytes % GRANULE || address % GRANULE || !is_reserved(address, bytes))
        return cudaErrorInvalidValue;
    lock(LOCK_VIRTUAL);
    CUresult error = unmap_pieces(address, bytes);
    unlock(LOCK_VIRTUAL);
    return error;
}
