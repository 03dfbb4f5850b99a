// The handles of libraries.  Each takes memory of the device when it is made, so that a capture refuses it as it refuses
// cudaMalloc, and the library says that it is not initialized.  PyTorch makes one of each per thread, at the first use.
#include "dnn.h"
#include <stdlib.h>

enum { NOT_INITIALIZED = 1, ALLOCATION_FAILED = 2 };

static int create(opaque *handle, int refusal) {
    if (refuse_unsafe())
        return refusal;
    *handle = calloc(1, 256);
    return *handle ? 0 : ALLOCATION_FAILED;
}

int cublasCreate_v2(opaque *handle) {
    return create(handle, NOT_INITIALIZED);
}

int cudnnCreate(opaque *handle) {
    return create(handle, DNN_NOT_INITIALIZED);
}

int cusolverDnCreate(opaque *handle) {
    return create(handle, NOT_INITIALIZED);
}

int cusparseCreate(opaque *handle) {
    return create(handle, NOT_INITIALIZED);
}
