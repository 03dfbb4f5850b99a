// Streams, events and graphs.  All work is done when its call returns, so a stream is a priority and a capture, an
// event a time, and a graph nothing at all.
#include "simulated.h"
#include <stdlib.h>
#include <time.h>

struct stream {
    int priority;
    unsigned flags;
    uint64_t capture;  // the capture this stream takes part in, 0 for none
    struct stream *next;
};
struct event {
    double milliseconds;
    uint64_t capture;
};
static struct stream default_stream, *streams = &default_stream;
static uint64_t captures;

// NULL, cudaStreamLegacy (1) and cudaStreamPerThread (2) are names, not addresses.
static struct stream *stream_of(cudaStream_t stream) {
    return (uintptr_t)stream < 16 ? &default_stream : stream;
}

// ---- streams
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    cudaError_t error = use_current();
    if (error)
        return error;
    struct stream *made = calloc(1, sizeof *made);
    if (!made)
        return fail(cudaErrorMemoryAllocation);
    made->flags = flags;
    made->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority;
    lock(LOCK_STREAMS);
    made->next = streams;
    streams = made;
    unlock(LOCK_STREAMS);
    *stream = made;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    struct stream *found = NULL;
    lock(LOCK_STREAMS);
    for (struct stream **link = &streams; *link && !found; link = &(*link)->next) {
        if (*link == stream && stream != &default_stream) {
            found = stream;
            *link = stream->next;
            break;
        }
    }
    unlock(LOCK_STREAMS);
    free(found);
    return found ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    *flags = stream_of(stream)->flags;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return use_current();
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

// ---- events
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    cudaError_t error = use_current();
    if (error)
        return error;
    *event = calloc(1, sizeof **event);
    return *event ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (!event)
        return fail(cudaErrorInvalidResourceHandle);
    event->milliseconds = now();
    event->capture = stream_of(stream)->capture;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start || !end)
        return fail(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(end->milliseconds - start->milliseconds);
    return cudaSuccess;
}

// A stream that waits for an event of a capture joins the capture.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (event && event->capture)
        stream_of(stream)->capture = event->capture;
    return cudaSuccess;
}

// ---- capture: a mark on the streams, which is what the allocator's private pools go by
cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    stream_of(stream)->capture = __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    uint64_t capture = stream_of(stream)->capture;
    if (!capture)
        return fail(cudaErrorInvalidValue);
    lock(LOCK_STREAMS);
    for (struct stream *each = streams; each; each = each->next) {
        if (each->capture == capture)
            each->capture = 0;
    }
    unlock(LOCK_STREAMS);
    *graph = malloc(1);
    return *graph ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status) {
    *status = stream_of(stream)->capture ? CAPTURE_ACTIVE : CAPTURE_NONE;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const void **edges, size_t *count) {
    static char graph_in_the_making;
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = stream_of(stream)->capture;
    if (graph)
        *graph = &graph_in_the_making;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return cudaSuccess;
}

// ---- graphs
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    *executable = malloc(1);
    return *executable ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    count_launch();
    return cudaSuccess;
}

// One node, which cannot be looked at: PyTorch warns of graphs without any.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = nodes ? 0 : 1;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    free(executable);
    return cudaSuccess;
}
