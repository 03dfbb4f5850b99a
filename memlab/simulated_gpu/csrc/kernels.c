// Kernels: they are registered, asked about and launched, and none runs.
#include "simulated.h"
#include <stdlib.h>
#include <string.h>

static uint64_t launch_count;

uint64_t launches(void) {
    return __atomic_load_n(&launch_count, __ATOMIC_RELAXED);
}

void count_launch(void) {
    __atomic_add_fetch(&launch_count, 1, __ATOMIC_RELAXED);
    forget_all_bytes();  // any of them might be what the kernel writes
}

// ---- names, kept under MEMLAB_SIMULATED_TRACE=launch only: a hash table from the host's function to the kernel's name
enum { NAMES = 1 << 19 };
static struct {
    const void *function;
    const char *name;
} *names;
static int name_count;

static unsigned place_of(const void *function) {  // with the lock held: the function's place, or a free one
    unsigned place = (unsigned)((uint64_t)function * 0x9E3779B97F4A7C15ull >> 45);
    while (names[place].function && names[place].function != function)
        place = (place + 1) % NAMES;
    return place;
}

static void keep_name(const void *function, const char *name) {
    lock(LOCK_NAMES);
    if (!names)
        names = calloc(NAMES, sizeof *names);
    if (names && name_count < NAMES / 2) {
        unsigned place = place_of(function);
        names[place].function = function;
        names[place].name = name;
        name_count++;
    }
    unlock(LOCK_NAMES);
}

static const char *kernel_name(const void *function) {
    lock(LOCK_NAMES);
    const char *name = names ? names[place_of(function)].name : NULL;
    unlock(LOCK_NAMES);
    return name ? name : "?";
}

// ---- registration, by the code that nvcc puts into a library
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {
}

void __cudaUnregisterFatBinary(void **handle) {
}

char __cudaInitModule(void **handle) {
    return 1;
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                       int constant, int global) {
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread,
                            void *block, dim3 *block_size, dim3 *grid_size, int *warps) {
    if (tracing(TRACE_LAUNCHES))
        keep_name(host, name);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = function;
    return cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, void *jit_options, void **jit_values,
                                unsigned jit_count, void *options, void **values, unsigned count) {
    static char any;
    *library = &any;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = library;
    return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
    return cudaSuccess;
}

// ---- launches
cudaError_t launched(const void *function, cudaStream_t stream, dim3 grid, dim3 block) {
    cudaError_t error = use_current();
    if (!error)
        error = fail(enqueue(stream));
    if (error)
        return error;
    count_launch();
    if (tracing(TRACE_LAUNCHES))
        trace(TRACE_LAUNCHES, "launch %s grid=%u,%u,%u block=%u,%u,%u", kernel_name(function), grid.x, grid.y, grid.z,
              block.x, block.y, block.z);
    return cudaSuccess;
}

// kernel<<<grid, block>>>(...) pushes its configuration, and the function it then calls pops it.
static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared_bytes = shared_bytes;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, cudaStream_t *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_bytes = pushed.shared_bytes;
    *stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
    return launched(kernel, stream, grid, block);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
    return launched(function, stream, grid, block);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
    return launched(function, stream, grid, block);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) {
    return launched(function, configuration->stream, configuration->grid, configuration->block);
}

// ---- attributes and occupancy
static const struct capability *current_capability(void) {
    const struct device *device = device_at(current_physical());
    return device ? device->capability : capability_of(8, 0);
}

int code_version(void) {
    return current_capability()->code;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->max_threads_per_block = 1024;
    out->registers = 32;
    out->ptx_version = code_version();
    out->binary_version = code_version();
    out->max_dynamic_shared_bytes = 48 * (int)KIB;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value) {
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, int attribute, int value, int ordinal) {
    return cudaSuccess;
}

int blocks_per_multiprocessor(int threads) {
    const struct capability *facts = current_capability();
    int blocks = facts->threads_per_multiprocessor / (threads > 0 ? threads : 1);
    return blocks < 1 ? 1 : blocks < facts->blocks_per_multiprocessor ? blocks : facts->blocks_per_multiprocessor;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared_bytes) {
    *blocks = blocks_per_multiprocessor(threads);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared_bytes, unsigned flags) {
    *blocks = blocks_per_multiprocessor(threads);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function,
                                           const cudaLaunchConfig_t *configuration) {
    const struct device *device = device_at(current_physical());
    *clusters = device ? device->multiprocessors : 1;
    return cudaSuccess;
}
