// cuBLAS, cuBLASLt and cuFFT: the calls that give something back.  Their work (gemm, a transform) does nothing, and the
// calls for it are generated (stubs.py).  PyTorch allocates cuBLAS's workspaces itself, so those are real.
#include "library_types.h"
#include <string.h>

int cublasGetMathMode(opaque handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(opaque handle, int *mode) {
    *mode = 0;  // scalars lie on the host
    return 0;
}

size_t cublasLtGetVersion(void) {
    return 130100;
}

struct matmul_choice {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

// One algorithm, which needs no workspace.
int cublasLtMatmulAlgoGetHeuristic(opaque handle, opaque operation, opaque a, opaque b, opaque c, opaque d,
                                   opaque preference, int wanted, struct matmul_choice *choices, int *found) {
    *found = wanted > 0;
    if (*found)
        memset(&choices[0], 0, sizeof choices[0]);
    return 0;
}

// ---- batches of matrices: these two report on the host whether an argument was wrong
static int report_success(int *info) {
    count_launch();
    *info = 0;
    return 0;
}

#define BATCHED(letter)                                                                                              \
    int cublas##letter##geqrfBatched(opaque handle, int rows, int columns, opaque matrices, int leading, opaque tau, \
                                     int *info, int count) {                                                         \
        return report_success(info);                                                                                 \
    }                                                                                                                \
    int cublas##letter##getrsBatched(opaque handle, int operation, int size, int right_sides, opaque matrices,       \
                                     int leading, opaque pivots, opaque right, int right_leading, int *info,         \
                                     int count) {                                                                    \
        return report_success(info);                                                                                 \
    }
BATCHED(S)
BATCHED(D)
BATCHED(C)
BATCHED(Z)

// ---- cuFFT: a plan is a number
int cufftCreate(int *plan) {
    static int plans;
    *plan = __atomic_add_fetch(&plans, 1, __ATOMIC_RELAXED);
    return 0;
}

int cufftXtMakePlanMany(int plan, int rank, int64_t *sizes, int64_t *in_embed, int64_t in_stride, int64_t in_distance,
                        int in_type, int64_t *out_embed, int64_t out_stride, int64_t out_distance, int out_type,
                        int64_t batch, size_t *workspace, int compute_type) {
    *workspace = 0;
    return 0;
}
