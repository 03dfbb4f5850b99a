// A cuDNN tensor or filter: what PyTorch set on it, to be read back.
#pragma once
#include "library_types.h"

enum { MAX_DIMENSIONS = 8 };
struct tensor {
    int type, dimensions;
    int size[MAX_DIMENSIONS], stride[MAX_DIMENSIONS];
};
