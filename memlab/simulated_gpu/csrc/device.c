// The runtime's devices: the current one, their properties, and the thread's last error.
#include "simulated.h"
#include <stdio.h>
#include <string.h>

static __thread int current;
static __thread cudaError_t last_error;

// ---- errors
static const struct {
    cudaError_t number;
    const char *name, *driver_name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED",
     "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {cudaErrorOperatingSystem, "cudaErrorOperatingSystem", "CUDA_ERROR_OPERATING_SYSTEM",
     "OS call failed or operation not supported on this OS"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE",
     "invalid resource handle"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported on a simulated GPU"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"},
};
enum { ERRORS = sizeof errors / sizeof *errors };

static int error_index(cudaError_t error) {
    for (int i = 0; i < ERRORS; i++) {
        if (errors[i].number == error)
            return i;
    }
    return ERRORS - 1;
}

cudaError_t fail(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error;
}

const char *cudaGetErrorName(cudaError_t error) {
    return errors[error_index(error)].name;
}

const char *cudaGetErrorString(cudaError_t error) {
    return errors[error_index(error)].text;
}

const char *driver_error_name(CUresult error) {
    return errors[error_index(error)].driver_name;
}

// ---- the current device
int current_device(void) {
    return current;
}

int current_physical(void) {
    return physical_of(current);
}

void set_current_device(int ordinal) {
    current = ordinal;
}

cudaError_t use_current(void) {
    return fail(use_device(current_physical()));
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = visible_count();
    return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *ordinal) {
    if (!visible_count())
        return fail(cudaErrorNoDevice);
    *ordinal = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
    cudaError_t error = fail(use_device(physical_of(ordinal)));
    if (!error)
        current = ordinal;
    return error;
}

cudaError_t cudaDeviceSynchronize(void) {
    cudaError_t error = use_current();
    return error ? error : fail(refuse_waiting_for_all());
}

// ---- what the device is
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION_ANSWERED;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION_ANSWERED;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
    if (physical_of(ordinal) < 0 || physical_of(peer) < 0)
        return fail(cudaErrorInvalidDevice);
    *can = ordinal != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    return physical_of(peer) < 0 ? fail(cudaErrorInvalidDevice) : cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int ordinal) {
    int physical = physical_of(ordinal);
    if (physical < 0)
        return fail(cudaErrorInvalidDevice);
    snprintf(text, (size_t)size, "0000:%02x:00.0", physical + 1);  // NVML finds the device by this
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) {
    return cudaSuccess;
}

cudaError_t cudaProfilerStop(void) {
    return cudaSuccess;
}

static void describe_limits(struct cudaDeviceProp *out) {
    out->regsPerBlock = 65536;
    out->regsPerMultiprocessor = 65536;
    out->warpSize = 32;
    out->memPitch = 0x7fffffff;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsDim[0] = 1024;
    out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 0x7fffffff;
    out->maxGridSize[1] = 65535;
    out->maxGridSize[2] = 65535;
    out->totalConstMem = 64 * KIB;
    out->textureAlignment = 512;
    out->texturePitchAlignment = 32;
    out->sharedMemPerBlock = 48 * KIB;
    out->asyncEngineCount = 3;
    out->memoryBusWidth = 5120;
}

static void describe_capability(struct cudaDeviceProp *out, const struct device *device) {
    const struct capability *facts = device->capability;
    out->major = device->major;
    out->minor = device->minor;
    out->clusterLaunch = device->major >= 9;
    out->l2CacheSize = (int)facts->l2_bytes;
    out->maxThreadsPerMultiProcessor = facts->threads_per_multiprocessor;
    out->maxBlocksPerMultiProcessor = facts->blocks_per_multiprocessor;
    out->sharedMemPerMultiprocessor = facts->shared_per_multiprocessor;
    out->sharedMemPerBlockOptin = facts->shared_optin;
    out->reservedSharedMemPerBlock = facts->shared_reserved;
}

static void describe_features(struct cudaDeviceProp *out) {
    out->canMapHostMemory = 1;
    out->concurrentKernels = 1;
    out->unifiedAddressing = 1;
    out->streamPrioritiesSupported = 1;
    out->globalL1CacheSupported = 1;
    out->localL1CacheSupported = 1;
    out->managedMemory = 1;
    out->concurrentManagedAccess = 1;
    out->computePreemptionSupported = 1;
    out->cooperativeLaunch = 1;
    out->canUseHostPointerForRegisteredMem = 1;
    out->hostRegisterSupported = 1;
    out->memoryPoolsSupported = 1;
    out->unifiedFunctionPointers = 1;
    out->hostNumaId = -1;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int ordinal) {
    int physical = physical_of(ordinal);
    const struct device *device = device_at(physical);
    if (!device)
        return fail(cudaErrorInvalidDevice);
    memset(out, 0, sizeof *out);
    strcpy(out->name, device->name);
    device_uuid(physical, out->uuid.bytes);
    out->totalGlobalMem = device->total;
    out->multiProcessorCount = device->multiprocessors;
    out->pciBusID = physical + 1;
    describe_limits(out);
    describe_capability(out, device);
    describe_features(out);
    return cudaSuccess;
}

// An attribute that is not listed is 0: a feature that is not there.
static int attribute_of(const struct cudaDeviceProp *device, int attribute) {
    switch (attribute) {
    case ATTR_MAX_THREADS_PER_BLOCK:
        return device->maxThreadsPerBlock;
    case ATTR_MAX_BLOCK_DIM_X:
        return device->maxThreadsDim[0];
    case ATTR_MAX_BLOCK_DIM_Y:
        return device->maxThreadsDim[1];
    case ATTR_MAX_BLOCK_DIM_Z:
        return device->maxThreadsDim[2];
    case ATTR_MAX_GRID_DIM_X:
        return device->maxGridSize[0];
    case ATTR_MAX_GRID_DIM_Y:
        return device->maxGridSize[1];
    case ATTR_MAX_GRID_DIM_Z:
        return device->maxGridSize[2];
    case ATTR_MAX_SHARED_MEMORY_PER_BLOCK:
        return (int)device->sharedMemPerBlock;
    case ATTR_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return (int)device->sharedMemPerBlockOptin;
    case ATTR_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return (int)device->sharedMemPerMultiprocessor;
    case ATTR_RESERVED_SHARED_MEMORY_PER_BLOCK:
        return (int)device->reservedSharedMemPerBlock;
    case ATTR_TOTAL_CONSTANT_MEMORY:
        return (int)device->totalConstMem;
    case ATTR_WARP_SIZE:
        return device->warpSize;
    case ATTR_MAX_PITCH:
        return (int)device->memPitch;
    case ATTR_MAX_REGISTERS_PER_BLOCK:
        return device->regsPerBlock;
    case ATTR_MAX_REGISTERS_PER_MULTIPROCESSOR:
        return device->regsPerMultiprocessor;
    case ATTR_CLOCK_RATE:
        return 1410000;
    case ATTR_MEMORY_CLOCK_RATE:
        return 1215000;
    case ATTR_MEMORY_BUS_WIDTH:
        return device->memoryBusWidth;
    case ATTR_TEXTURE_ALIGNMENT:
        return (int)device->textureAlignment;
    case ATTR_MULTIPROCESSOR_COUNT:
        return device->multiProcessorCount;
    case ATTR_L2_CACHE_SIZE:
        return device->l2CacheSize;
    case ATTR_MAX_THREADS_PER_MULTIPROCESSOR:
        return device->maxThreadsPerMultiProcessor;
    case ATTR_MAX_BLOCKS_PER_MULTIPROCESSOR:
        return device->maxBlocksPerMultiProcessor;
    case ATTR_CAPABILITY_MAJOR:
        return device->major;
    case ATTR_CAPABILITY_MINOR:
        return device->minor;
    case ATTR_PCI_BUS_ID:
        return device->pciBusID;
    case ATTR_ASYNC_ENGINE_COUNT:
        return device->asyncEngineCount;
    case ATTR_CLUSTER_LAUNCH:
        return device->clusterLaunch;
    case ATTR_CAN_MAP_HOST_MEMORY:
    case ATTR_CONCURRENT_KERNELS:
    case ATTR_UNIFIED_ADDRESSING:
    case ATTR_STREAM_PRIORITIES_SUPPORTED:
    case ATTR_MANAGED_MEMORY:
    case ATTR_CONCURRENT_MANAGED_ACCESS:
    case ATTR_COOPERATIVE_LAUNCH:
    case ATTR_HOST_REGISTER_SUPPORTED:
    case ATTR_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case ATTR_POSIX_FILE_DESCRIPTOR_HANDLE_SUPPORTED:
    case ATTR_MEMORY_POOLS_SUPPORTED:
        return 1;
    }
    return 0;
}

cudaError_t device_attribute(int *value, int attribute, int ordinal) {
    struct cudaDeviceProp device;
    cudaError_t error = cudaGetDeviceProperties(&device, ordinal);
    if (!error)
        *value = attribute_of(&device, attribute);
    return error;
}

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int ordinal) {
    return device_attribute(value, attribute, ordinal);
}
