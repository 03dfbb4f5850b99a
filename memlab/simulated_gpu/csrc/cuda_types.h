// The types and numbers of CUDA 13's C interface that these sources need, so that they build with a C compiler alone.
// Layouts and values are the interface; the names follow it.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define CUDA_VERSION_ANSWERED 13000

typedef struct {
    unsigned x, y, z;
} dim3;

// ---- handles: opaque to callers, ours to define
typedef struct stream *cudaStream_t;
typedef struct event *cudaEvent_t;
typedef void *cudaMemPool_t;
typedef void *cudaGraph_t;
typedef void *cudaGraphExec_t;
typedef void *cudaGraphNode_t;
typedef const void *cudaKernel_t;
typedef void *cudaLibrary_t;
typedef void *CUcontext;
typedef void *CUmodule;
typedef void *CUfunction;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;

// ---- errors: the runtime and the driver share the numbers
typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorOperatingSystem = 304,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorSymbolNotFound = 500,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
    cudaErrorStreamCaptureWrongThread = 908,
    cudaErrorUnknown = 999,
} cudaError_t;
typedef cudaError_t CUresult;

typedef void (*cudaStreamCallback_t)(cudaStream_t, cudaError_t, void *);
typedef void (*cudaHostFn_t)(void *);

// ---- device attributes: cudaDeviceAttr and CUdevice_attribute share the numbers
enum device_attribute {
    ATTR_MAX_THREADS_PER_BLOCK = 1,
    ATTR_MAX_BLOCK_DIM_X = 2,
    ATTR_MAX_BLOCK_DIM_Y = 3,
    ATTR_MAX_BLOCK_DIM_Z = 4,
    ATTR_MAX_GRID_DIM_X = 5,
    ATTR_MAX_GRID_DIM_Y = 6,
    ATTR_MAX_GRID_DIM_Z = 7,
    ATTR_MAX_SHARED_MEMORY_PER_BLOCK = 8,
    ATTR_TOTAL_CONSTANT_MEMORY = 9,
    ATTR_WARP_SIZE = 10,
    ATTR_MAX_PITCH = 11,
    ATTR_MAX_REGISTERS_PER_BLOCK = 12,
    ATTR_CLOCK_RATE = 13,
    ATTR_TEXTURE_ALIGNMENT = 14,
    ATTR_MULTIPROCESSOR_COUNT = 16,
    ATTR_CAN_MAP_HOST_MEMORY = 19,
    ATTR_CONCURRENT_KERNELS = 31,
    ATTR_PCI_BUS_ID = 33,
    ATTR_MEMORY_CLOCK_RATE = 36,
    ATTR_MEMORY_BUS_WIDTH = 37,
    ATTR_L2_CACHE_SIZE = 38,
    ATTR_MAX_THREADS_PER_MULTIPROCESSOR = 39,
    ATTR_ASYNC_ENGINE_COUNT = 40,
    ATTR_UNIFIED_ADDRESSING = 41,
    ATTR_CAPABILITY_MAJOR = 75,
    ATTR_CAPABILITY_MINOR = 76,
    ATTR_STREAM_PRIORITIES_SUPPORTED = 78,
    ATTR_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
    ATTR_MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
    ATTR_MANAGED_MEMORY = 83,
    ATTR_CONCURRENT_MANAGED_ACCESS = 89,
    ATTR_COOPERATIVE_LAUNCH = 95,
    ATTR_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    ATTR_HOST_REGISTER_SUPPORTED = 99,
    ATTR_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    ATTR_POSIX_FILE_DESCRIPTOR_HANDLE_SUPPORTED = 103,
    ATTR_MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
    ATTR_RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
    ATTR_MEMORY_POOLS_SUPPORTED = 115,
    ATTR_CLUSTER_LAUNCH = 120,
};

// ---- other numbered options
enum pool_attribute {
    POOL_RELEASE_THRESHOLD = 4,  // the ones below it are ints, it and the ones above are 64 bits wide
    POOL_RESERVED_CURRENT = 5,
    POOL_RESERVED_HIGH = 6,
    POOL_USED_CURRENT = 7,
    POOL_USED_HIGH = 8,
};
enum { ENTRY_POINT_FOUND = 0, ENTRY_POINT_NOT_FOUND = 1 };
enum { EVENT_WAIT_EXTERNAL = 1 };
enum {
    FUNCTION_MAX_THREADS_PER_BLOCK = 0,
    FUNCTION_REGISTERS = 4,
    FUNCTION_PTX_VERSION = 5,
    FUNCTION_BINARY_VERSION = 6,
};
enum { POINTER_CONTEXT = 1, POINTER_MEMORY_TYPE = 2, POINTER_DEVICE_POINTER = 3, POINTER_DEVICE_ORDINAL = 9 };
enum { DRIVER_MEMORY_HOST = 1, DRIVER_MEMORY_DEVICE = 2 };
enum { ALLOCATION_PINNED = 1, LOCATION_DEVICE = 1, HANDLE_FABRIC = 8 };

// ---- structures
typedef struct {
    unsigned char bytes[16];
} CUuuid;

enum memory_type { MEMORY_UNREGISTERED = 0, MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_MANAGED = 3 };
struct cudaPointerAttributes {
    enum memory_type type;
    int device;
    void *device_pointer;
    void *host_pointer;
    long reserved[8];
};

struct location {
    int type, id;
};

typedef struct {
    int type, requested_handle_types;
    struct location location;
    void *win32_metadata;
    unsigned char flags[8];
} CUmemAllocationProp;

typedef struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    void *attributes;
    unsigned attribute_count;
} cudaLaunchConfig_t;

typedef struct {
    dim3 grid, block;
    unsigned shared_bytes;
    cudaStream_t stream;
    void *attributes;
    unsigned attribute_count;
} CUlaunchConfig;

struct cudaFuncAttributes {
    size_t shared_bytes, const_bytes, local_bytes;
    int max_threads_per_block, registers, ptx_version, binary_version, cache_mode_ca;
    int max_dynamic_shared_bytes, preferred_carveout;
    int cluster[7];
    int reserved[16];
};

struct cudaDeviceProp {
    char name[256];
    CUuuid uuid;
    char luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem;
    size_t sharedMemPerBlock;
    int regsPerBlock;
    int warpSize;
    size_t memPitch;
    int maxThreadsPerBlock;
    int maxThreadsDim[3];
    int maxGridSize[3];
    size_t totalConstMem;
    int major;
    int minor;
    size_t textureAlignment;
    size_t texturePitchAlignment;
    int multiProcessorCount;
    int integrated;
    int canMapHostMemory;
    int texturesAndSurfaces[39];
    size_t surfaceAlignment;
    int concurrentKernels;
    int ECCEnabled;
    int pciBusID;
    int pciDeviceID;
    int pciDomainID;
    int tccDriver;
    int asyncEngineCount;
    int unifiedAddressing;
    int memoryBusWidth;
    int l2CacheSize;
    int persistingL2CacheMaxSize;
    int maxThreadsPerMultiProcessor;
    int streamPrioritiesSupported;
    int globalL1CacheSupported;
    int localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor;
    int managedMemory;
    int isMultiGpuBoard;
    int multiGpuBoardGroupID;
    int hostNativeAtomicSupported;
    int pageableMemoryAccess;
    int concurrentManagedAccess;
    int computePreemptionSupported;
    int canUseHostPointerForRegisteredMem;
    int cooperativeLaunch;
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables;
    int directManagedMemAccessFromHost;
    int maxBlocksPerMultiProcessor;
    int accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported;
    int sparseCudaArraySupported;
    int hostRegisterReadOnlySupported;
    int timelineSemaphoreInteropSupported;
    int memoryPoolsSupported;
    int gpuDirectRDMASupported;
    unsigned gpuDirectRDMAFlushWritesOptions;
    int gpuDirectRDMAWritesOrdering;
    unsigned memoryPoolSupportedHandleTypes;
    int deferredMappingCudaArraySupported;
    int ipcEventSupported;
    int clusterLaunch;
    int unifiedFunctionPointers;
    int deviceNumaConfig;
    int deviceNumaId;
    int mpsEnabled;
    int hostNumaId;
    unsigned gpuPciDeviceID;
    unsigned gpuPciSubsystemID;
    int hostNumaMultinodeIpcSupported;
    int reserved[56];
};
