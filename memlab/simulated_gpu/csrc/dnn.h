// cuDNN's errors, and a tensor or filter of it: what PyTorch set on it, to be read back.
#pragma once
#include "library_types.h"

enum { DNN_NOT_INITIALIZED = 1001, DNN_OUT_OF_MEMORY = 1002 };
enum { MAX_DIMENSIONS = 8 };
struct tensor {
    int type, dimensions;
    int size[MAX_DIMENSIONS], stride[MAX_DIMENSIONS];
};
