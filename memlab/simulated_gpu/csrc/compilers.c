// NVRTC, which compiles kernels at run time, and CUPTI, through which the profiler watches the device: a kernel's code
// is empty, and there was no activity.
#include "library_types.h"

int nvrtcVersion(int *major, int *minor) {
    *major = CUDA_VERSION_ANSWERED / 1000;
    *minor = CUDA_VERSION_ANSWERED % 1000 / 10;
    return 0;
}

const char *nvrtcGetErrorString(int error) {
    return error ? "NVRTC_ERROR (simulated GPU)" : "NVRTC_SUCCESS";
}

static int empty_text(char *text) {
    *text = 0;
    return 0;
}

static int empty_text_size(size_t *bytes) {
    *bytes = 1;
    return 0;
}

int nvrtcGetPTXSize(opaque program, size_t *bytes) {
    return empty_text_size(bytes);
}

int nvrtcGetCUBINSize(opaque program, size_t *bytes) {
    return empty_text_size(bytes);
}

int nvrtcGetProgramLogSize(opaque program, size_t *bytes) {
    return empty_text_size(bytes);
}

int nvrtcGetPTX(opaque program, char *text) {
    return empty_text(text);
}

int nvrtcGetCUBIN(opaque program, char *text) {
    return empty_text(text);
}

int nvrtcGetProgramLog(opaque program, char *text) {
    return empty_text(text);
}

int nvrtcGetLoweredName(opaque program, const char *name, const char **out) {
    *out = name;
    return 0;
}

// ---- CUPTI
enum { CUPTI_NO_MORE_RECORDS = 12 };

int cuptiGetVersion(uint32_t *version) {
    *version = 130000;
    return 0;
}

int cuptiGetResultString(int error, const char **text) {
    *text = error ? "CUPTI_ERROR (simulated GPU)" : "CUPTI_SUCCESS";
    return 0;
}

int cuptiSubscribe(opaque *subscriber, opaque callback, opaque data) {
    static char any;
    *subscriber = &any;
    return 0;
}

int cuptiActivityGetNextRecord(opaque buffer, size_t bytes, opaque *record) {
    *record = NULL;
    return CUPTI_NO_MORE_RECORDS;
}

int cuptiActivityGetNumDroppedRecords(opaque context, uint32_t stream, size_t *count) {
    *count = 0;
    return 0;
}

int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
    if (last)
        *last = 0;
    return 0;
}
