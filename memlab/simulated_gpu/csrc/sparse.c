// cuSPARSE: the calls that give something back.  The work on sparse matrices does nothing, and the calls for it are
// generated (stubs.py), as far as PyTorch's own code decides what it allocates.
#include "library_types.h"

// PyTorch allocates this much for a product with a dense matrix; only cuSPARSE knows how much that is.
int cusparseSpMM_bufferSize(opaque handle, int op_a, int op_b, opaque alpha, opaque a, opaque b, opaque beta, opaque c,
                            int type, int algorithm, size_t *size) {
    *size = 0;
    return 0;
}

const char *cusparseGetErrorString(int error) {
    return error == 1 ? "initialization error" : error ? "not supported on a simulated GPU" : "success";
}
