// cuDNN: its version, tensors and filters, and sizes of workspaces.  cuDNN alone knows its true workspaces; here they
// are 0.
#include "dnn.h"
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DNN_MAJOR = 9 };

// ---- the library
// PyTorch refuses a cuDNN older than the one that it was compiled with, and chooses kernels by the version.  So the answer
// is that of the wheel's own cuDNN (its requirement nvidia-cudnn-cu13); for an unknown PyTorch, newer than all known.
static int dnn_minor(int torch_minor) {
    static const int minors[] = {[11] = 19, [12] = 20, [13] = 20, [14] = 24, [15] = 26};
    int known = torch_minor >= 0 && torch_minor < (int)(sizeof minors / sizeof *minors) ? minors[torch_minor] : 0;
    return known ? known : 99;
}

// The 12 of PyTorch 2.12, read from version.py beside the folder of the library that has this code; -1 if there is none.
static int torch_minor(const void *code) {
    Dl_info found;
    char path[PATH_MAX], line[256];
    if (!dladdr(code, &found) || !strrchr(found.dli_fname, '/'))
        return -1;
    int folder = (int)(strrchr(found.dli_fname, '/') - found.dli_fname);
    if (snprintf(path, sizeof path, "%.*s/../version.py", folder, found.dli_fname) >= (int)sizeof path)
        return -1;
    FILE *file = fopen(path, "re");
    int minor = -1;
    while (file && minor < 0 && fgets(line, sizeof line, file))
        sscanf(line, "__version__ = %*['\"]2.%d", &minor);
    if (file)
        fclose(file);
    return minor;
}

static int minor_for(const void *caller) {
    static int known = -1;
    int minor = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (minor < 0) {
        minor = dnn_minor(torch_minor(caller));
        __atomic_store_n(&known, minor, __ATOMIC_RELAXED);
    }
    return minor;
}

size_t cudnnGetVersion(void) {
    return 10000 * DNN_MAJOR + 100 * (size_t)minor_for(__builtin_return_address(0));
}

size_t cudnnGetCudartVersion(void) {
    return CUDA_VERSION_ANSWERED;
}

int cudnnGetProperty(int property, int *value) {
    *value = property == 0 ? DNN_MAJOR : property == 1 ? minor_for(__builtin_return_address(0)) : 0;
    return 0;
}

const char *cudnnGetErrorString(int error) {
    if (error == DNN_NOT_INITIALIZED)
        return "CUDNN_STATUS_NOT_INITIALIZED";
    return error ? "CUDNN_STATUS_NOT_SUPPORTED (simulated GPU)" : "CUDNN_STATUS_SUCCESS";
}

void cudnnGetLastErrorString(char *text, size_t size) {
    if (size)
        snprintf(text, size, "not supported on a simulated GPU");
}

int cudnnGetStream(opaque handle, opaque *stream) {
    *stream = NULL;
    return 0;
}

// ---- tensors and filters
static int create_tensor(struct tensor **out) {
    *out = calloc(1, sizeof **out);
    return *out ? 0 : DNN_OUT_OF_MEMORY;
}

int cudnnCreateTensorDescriptor(struct tensor **out) {
    return create_tensor(out);
}

int cudnnCreateFilterDescriptor(struct tensor **out) {
    return create_tensor(out);
}

int cudnnDestroyTensorDescriptor(struct tensor *tensor) {
    free(tensor);
    return 0;
}

int cudnnDestroyFilterDescriptor(struct tensor *tensor) {
    free(tensor);
    return 0;
}

static void set_tensor(struct tensor *tensor, int type, int dimensions, const int *size, const int *stride) {
    tensor->type = type;
    tensor->dimensions = dimensions < MAX_DIMENSIONS ? dimensions : MAX_DIMENSIONS;
    for (int i = 0; i < tensor->dimensions; i++) {
        tensor->size[i] = size[i];
        tensor->stride[i] = stride ? stride[i] : 0;
    }
}

static void get_tensor(const struct tensor *tensor, int wanted, int *size, int *stride) {
    for (int i = 0; i < wanted && i < tensor->dimensions; i++) {
        size[i] = tensor->size[i];
        if (stride)
            stride[i] = tensor->stride[i];
    }
}

int cudnnSetTensorNdDescriptor(struct tensor *tensor, int type, int dimensions, const int *size, const int *stride) {
    set_tensor(tensor, type, dimensions, size, stride);
    return 0;
}

int cudnnSetFilterNdDescriptor(struct tensor *tensor, int type, int format, int dimensions, const int *size) {
    set_tensor(tensor, type, dimensions, size, NULL);
    return 0;
}

int cudnnGetTensorNdDescriptor(struct tensor *tensor, int wanted, int *type, int *dimensions, int *size, int *stride) {
    *type = tensor->type;
    *dimensions = tensor->dimensions;
    get_tensor(tensor, wanted, size, stride);
    return 0;
}

int cudnnGetFilterNdDescriptor(struct tensor *tensor, int wanted, int *type, int *format, int *dimensions, int *size) {
    *type = tensor->type;
    *format = 0;
    *dimensions = tensor->dimensions;
    get_tensor(tensor, wanted, size, NULL);
    return 0;
}

// ---- sizes
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(opaque handle, int mode, int operations, opaque x,
                                                             opaque z, opaque y, opaque scale, opaque activation,
                                                             size_t *bytes) {
    *bytes = 0;
    return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(opaque handle, int mode, int operations, opaque x, opaque y,
                                                      opaque dy, opaque dz, opaque dx, opaque scale,
                                                      opaque activation, size_t *bytes) {
    *bytes = 0;
    return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(opaque handle, int mode, int operations, opaque activation,
                                                         opaque x, size_t *bytes) {
    *bytes = 0;
    return 0;
}
