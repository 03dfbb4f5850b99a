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
