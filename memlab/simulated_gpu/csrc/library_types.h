// The arguments that the calls of cuBLAS, cuDNN, NCCL and the compilers share.  Only those an answer needs have a type
// of their own: an opaque pointer stands for the rest, which the calling convention does not tell apart.
#pragma once
#include "simulated.h"

typedef void *opaque;
