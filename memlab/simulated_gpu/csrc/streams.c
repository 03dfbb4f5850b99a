// Streams and events.  All work is done when its call returns, so a stream is a priority and a capture, an event a time.
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

// NULL, cudaStreamLegacy (1) and cudaStreamPerThread (2) are names, not addresses.
static struct stream *stream_of(cudaStream_t stream) {
    return (uintptr_t)stream < 16 ? &default_stream : stream;
}

uint64_t capture_of(cudaStream_t stream) {
    return stream_of(stream)->capture;
}

void join_capture(cudaStream_t stream, uint64_t capture) {
    stream_of(stream)->capture = capture;
}

void end_capture(uint64_t capture) {
    lock(LOCK_STREAMS);
    for (struct stream *each = streams; each; each = each->next) {
        if (each->capture == capture)
            each->capture = 0;
    }
    unlock(LOCK_STREAMS);
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
    return fail(refuse_waiting(stream));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    cudaError_t error = use_current();
    return error ? error : fail(refuse_waiting(stream));
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
    cudaError_t error = refuse_unsafe();
    return fail(error || !event ? error : refuse_captured(event->capture));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return fail(event ? refuse_captured(event->capture) : cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (!start || !end)
        return fail(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)(end->milliseconds - start->milliseconds);
    return cudaSuccess;
}

// A stream that waits for an event of a capture joins the capture.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (event && is_capturing(event->capture))
        join_capture(stream, event->capture);
    return cudaSuccess;
}
