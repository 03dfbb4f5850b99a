// Streams and events.  All work is done when its call returns, so a stream is a priority and a capture, an event a time.
#include "simulated.h"
#include <stdlib.h>
#include <time.h>

// How much work of each stream of a capture comes before something: a vector clock.
enum { MOST_PLACES = 32 };  // the work of further streams is not followed
struct clock {
    uint32_t done[MOST_PLACES];
};
struct stream {
    int priority;
    unsigned flags;
    uint64_t capture;     // the capture this stream takes part in, 0 for none
    int place;            // which of its streams this is; the one that began it is 0
    struct clock before;  // what comes before the next work here
    struct stream *next;
};
struct event {
    double milliseconds;
    bool is_recorded;
    uint64_t capture;
    struct clock before;
};
static struct stream default_stream, *streams = &default_stream;

// NULL, cudaStreamLegacy (1) and cudaStreamPerThread (2) are names, not addresses.
bool is_default_stream(cudaStream_t stream) {
    return (uintptr_t)stream < 16;
}

static struct stream *stream_of(cudaStream_t stream) {
    return is_default_stream(stream) ? &default_stream : stream;
}

// ---- captures
uint64_t capture_of(cudaStream_t stream) {
    return stream_of(stream)->capture;
}

void begin_in(cudaStream_t stream, uint64_t capture) {  // with the lock held
    struct stream *origin = stream_of(stream);
    origin->capture = capture;
    origin->place = 0;
    origin->before = (struct clock){{0}};
}

void end_capture(uint64_t capture) {
    lock(LOCK_STREAMS);
    for (struct stream *each = streams; each; each = each->next) {
        if (each->capture == capture)
            each->capture = 0;
    }
    unlock(LOCK_STREAMS);
}

// Work for a stream: refused where its capture is spoilt.  What libraries do (cuBLAS, cuDNN) is not seen here.
cudaError_t enqueue(cudaStream_t stream) {
    struct stream *where = stream_of(stream);
    if (!where->capture)
        return cudaSuccess;
    cudaError_t error = refuse_spoilt(where->capture);
    if (!error && where->place < MOST_PLACES)
        where->before.done[where->place]++;
    return error;
}

// Whether all captured work comes before what the stream that began the capture would do next.
bool is_work_joined(cudaStream_t origin) {
    const struct stream *first = stream_of(origin);
    bool is_joined = true;
    lock(LOCK_STREAMS);
    for (struct stream *each = streams; each; each = each->next) {
        if (each->capture == first->capture && each->place < MOST_PLACES)
            is_joined = is_joined && each->before.done[each->place] <= first->before.done[each->place];
    }
    unlock(LOCK_STREAMS);
    return is_joined;
}

static void join_capture(struct stream *joining, uint64_t capture) {
    int place = 0;
    lock(LOCK_STREAMS);
    for (struct stream *each = streams; each; each = each->next)
        place += each->capture == capture;
    joining->capture = capture;
    joining->place = place;
    joining->before = (struct clock){{0}};
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
    cudaError_t error = refuse_waiting(stream);  // CUDA has no node for it
    if (error)
        return fail(error);
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
    cudaError_t error = refuse_spoilt(capture_of(stream));
    if (error)
        return fail(error);
    event->milliseconds = now();
    event->is_recorded = true;
    event->capture = capture_of(stream);
    event->before = stream_of(stream)->before;
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

// A stream that waits for an event of a capture joins the capture.  Which streams cannot, and what a captured stream
// cannot wait for, CUDA refuses.
static cudaError_t wait_for_captured(cudaStream_t stream, cudaEvent_t event) {
    struct stream *waiting = stream_of(stream);
    if (is_default_stream(stream))
        return spoil(event->capture, cudaErrorStreamCaptureImplicit);
    if (!is_capturing(waiting->capture))
        join_capture(waiting, event->capture);
    if (waiting->capture != event->capture) {
        spoil(waiting->capture, cudaErrorStreamCaptureMerge);
        return spoil(event->capture, cudaErrorStreamCaptureMerge);
    }
    for (int place = 0; place < MOST_PLACES; place++) {
        if (waiting->before.done[place] < event->before.done[place])
            waiting->before.done[place] = event->before.done[place];
    }
    return cudaSuccess;
}

static cudaError_t wait_for_uncaptured(uint64_t capture, cudaEvent_t event, unsigned flags) {
    bool is_nothing = !event->is_recorded || event->capture;  // an event of a capture that is over
    return is_nothing || flags & EVENT_WAIT_EXTERNAL ? cudaSuccess : spoil(capture, cudaErrorStreamCaptureIsolation);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    if (!event)
        return fail(cudaErrorInvalidResourceHandle);
    cudaError_t error = refuse_spoilt(capture_of(stream));
    if (!error)
        error = refuse_spoilt(event->capture);
    if (error)
        return fail(error);
    return fail(is_capturing(event->capture) ? wait_for_captured(stream, event)
                                             : wait_for_uncaptured(capture_of(stream), event, flags));
}
