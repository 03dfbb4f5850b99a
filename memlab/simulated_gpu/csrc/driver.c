// The driver's calls: devices, contexts, modules, launches, and the look-up of its entry points.
#include "simulated.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

// ---- entry points
static CUresult refuse_call(void) {
    say("a driver call that a simulated GPU does not have was made (MEMLAB_SIMULATED_TRACE=api shows which).");
    return cudaErrorNotSupported;
}

static void *find_exported(const char *name) {
    static void *self;
    Dl_info library;
    if (!self && dladdr((void *)cudaMalloc, &library))
        self = dlopen(library.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    static const char *const suffixes[] = {"", "_v2", "_v3"};
    void *found = NULL;
    for (int i = 0; i < 3 && !found; i++) {
        char symbol[128];
        snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[i]);
        found = self ? dlsym(self, symbol) : NULL;
    }
    return found;
}

// PyTorch looks all its entry points up at once, in the midst of reporting that memory has run out, and asserts that
// each is there.  So a call that nobody wrote is found too, and refuses when it is made.
static void *entry_point(const char *name) {
    void *found = find_exported(name);
    trace(TRACE_CALLS, "driver entry point %s%s", name, found ? "" : ": would refuse");
    return found || strncmp(name, "cu", 2) ? found : (void *)refuse_call;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, int *status) {
    *function = entry_point(name);
    if (status)
        *status = *function ? ENTRY_POINT_FOUND : ENTRY_POINT_NOT_FOUND;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDA_VERSION_ANSWERED, flags, status);
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    cudaGetDriverEntryPointByVersion(name, function, (unsigned)version, flags, status);
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

CUresult cuInit(unsigned flags) {
    return visible_count() ? cudaSuccess : cudaErrorNoDevice;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION_ANSWERED;
    return cudaSuccess;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString(error);
    return cudaSuccess;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = driver_error_name(error);
    return cudaSuccess;
}

// The driver's log, to which PyTorch 2.14 listens: nothing is ever written to it.
CUresult cuLogsRegisterCallback(void *callback, void *data, void **handle) {
    *handle = NULL;
    return cudaSuccess;
}

CUresult cuLogsUnregisterCallback(void *handle) {
    return cudaSuccess;
}

// ---- devices: a CUdevice is an ordinal
CUresult cuDeviceGetCount(int *count) {
    *count = visible_count();
    return cudaSuccess;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (physical_of(ordinal) < 0)
        return cudaErrorInvalidDevice;
    *device = ordinal;
    return cudaSuccess;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    const struct device *found = device_at(physical_of(device));
    if (!found)
        return cudaErrorInvalidDevice;
    snprintf(name, (size_t)size, "%s", found->name);
    return cudaSuccess;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    if (physical_of(device) < 0)
        return cudaErrorInvalidDevice;
    device_uuid(physical_of(device), uuid->bytes);
    return cudaSuccess;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    const struct device *found = device_at(physical_of(device));
    if (!found)
        return cudaErrorInvalidDevice;
    *bytes = found->total;
    return cudaSuccess;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    return device_attribute(value, attribute, device);
}

// ---- contexts: each device has its primary one, named by the ordinal
static CUcontext context_of(int ordinal) {
    return (CUcontext)(uintptr_t)(0x100 + ordinal);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (physical_of(device) < 0)
        return cudaErrorInvalidDevice;
    if (flags)
        *flags = 0;
    if (active)
        *active = has_context(physical_of(device));
    return cudaSuccess;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult error = use_device(physical_of(device));
    if (!error)
        *context = context_of(device);
    return error;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return cudaSuccess;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = has_context(current_physical()) ? context_of(current_device()) : NULL;
    return cudaSuccess;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    int ordinal = (int)((uintptr_t)context - 0x100);
    if (!context)
        return cudaSuccess;
    if (physical_of(ordinal) < 0)
        return cudaErrorInvalidValue;
    set_current_device(ordinal);
    return cudaSuccess;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    return context ? cuCtxGetCurrent(context) : cudaSuccess;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device();
    return cudaSuccess;
}

CUresult cuCtxSynchronize(void) {
    return cudaDeviceSynchronize();
}

CUresult cuCtxGetLimit(size_t *value, int limit) {
    *value = 8 * MIB;
    return cudaSuccess;
}

CUresult cuCtxSetLimit(int limit, size_t value) {
    return cudaSuccess;
}

// ---- memory
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    return cudaMemGetInfo(free_bytes, total_bytes);
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    void *memory;
    CUresult error = cudaMalloc(&memory, bytes);
    *address = (CUdeviceptr)(uintptr_t)memory;
    return error;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    return cudaFree((void *)(uintptr_t)address);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    struct range memory;
    if (!find_memory((void *)(uintptr_t)address, &memory))
        return cudaErrorInvalidValue;
    if (base)
        *base = memory.at;
    if (bytes)
        *bytes = memory.asked;
    return cudaSuccess;
}

// Any value that is not one byte over and over is rare and short: a semaphore, a flag.
CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, cudaStream_t stream) {
    unsigned *words = (unsigned *)(uintptr_t)address;
    if (count > SIZE_MAX / sizeof *words)
        return cudaErrorInvalidValue;
    CUresult error = cudaMemsetAsync(words, 0, count * sizeof *words, stream);
    if (error || !value || count * sizeof *words > MIB)
        return error;
    for (size_t i = 0; i < count; i++)
        copy_bytes(&words[i], &value, sizeof value);
    return cudaSuccess;
}

CUresult cuStreamWriteValue32_v2(cudaStream_t stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    return cudaMemcpyAsync((void *)(uintptr_t)address, &value, sizeof value, 0, stream);
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    struct cudaPointerAttributes memory;
    cudaPointerGetAttributes(&memory, (void *)(uintptr_t)address);
    if (memory.type == MEMORY_UNREGISTERED)
        return cudaErrorInvalidValue;
    if (attribute == POINTER_DEVICE_POINTER)
        *(CUdeviceptr *)value = address;
    else if (attribute == POINTER_CONTEXT)
        *(CUcontext *)value = context_of(memory.device);
    else if (attribute == POINTER_MEMORY_TYPE)
        *(int *)value = memory.type == MEMORY_HOST ? DRIVER_MEMORY_HOST : DRIVER_MEMORY_DEVICE;
    else
        *(int *)value = attribute == POINTER_DEVICE_ORDINAL ? memory.device : 0;
    return cudaSuccess;
}

// ---- modules and their functions: one of each stands for all
static char any_module, any_function;

static CUresult load_module(CUmodule *module) {
    CUresult error = refuse_unsafe();  // a module takes memory of the device
    if (!error)
        *module = &any_module;
    return error;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    return load_module(module);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    return load_module(module);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, int *options, void **values) {
    return load_module(module);
}

CUresult cuModuleUnload(CUmodule module) {
    return refuse_unsafe();
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = &any_function;
    return cudaSuccess;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name) {
    void *place;
    cudaGetSymbolAddress(&place, name);
    if (address)
        *address = (CUdeviceptr)(uintptr_t)place;
    if (bytes)
        *bytes = 64;
    return cudaSuccess;
}

CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function) {
    switch (attribute) {
    case FUNCTION_MAX_THREADS_PER_BLOCK:
        *value = 1024;
        break;
    case FUNCTION_REGISTERS:
        *value = 32;
        break;
    case FUNCTION_PTX_VERSION:
    case FUNCTION_BINARY_VERSION:
        *value = code_version();
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}

CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    return cudaSuccess;
}

CUresult cuFuncSetCacheConfig(CUfunction function, int preference) {
    return cudaSuccess;
}

// ---- launches
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, cudaStream_t stream,
                        void **arguments, void **extra) {
    return launched(function, stream, (dim3){grid_x, grid_y, grid_z}, (dim3){block_x, block_y, block_z});
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                   cudaStream_t stream, void **arguments) {
    return launched(function, stream, (dim3){grid_x, grid_y, grid_z}, (dim3){block_x, block_y, block_z});
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *configuration, CUfunction function, void **arguments, void **extra) {
    return launched(function, configuration->stream, configuration->grid, configuration->block);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                     size_t shared_bytes) {
    *blocks = blocks_per_multiprocessor(threads);
    return cudaSuccess;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *configuration) {
    const struct device *device = device_at(current_physical());
    *clusters = device ? device->multiprocessors : 1;
    return cudaSuccess;
}

CUresult cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                                const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                                int swizzle, int promotion, int out_of_bounds) {
    return cudaSuccess;
}
