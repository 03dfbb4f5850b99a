// Captures and graphs.  A capture is a mark on its streams, which is what the allocator's private pools go by, and a graph
// is nothing at all.  What CUDA refuses during a capture is refused here, and spoils the capture as there.
#include "simulated.h"
#include <stdlib.h>

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALID = 2 };

struct capture {
    uint64_t id;
    int mode;
    const int *thread;  // where the thread that began it has its mode
    cudaStream_t origin;
    bool is_invalid;
    struct capture *next;
};
static struct capture *captures;
static int capture_count;
static __thread int thread_mode;

static bool are_any_open(void) {
    return __atomic_load_n(&capture_count, __ATOMIC_ACQUIRE) > 0;
}

static struct capture *find_capture(uint64_t id) {  // with the lock held
    struct capture *each = captures;
    while (each && each->id != id)
        each = each->next;
    return each;
}

static int status_of(uint64_t id) {
    if (!id || !are_any_open())
        return CAPTURE_NONE;
    lock(LOCK_STREAMS);
    const struct capture *found = find_capture(id);
    int status = !found ? CAPTURE_NONE : found->is_invalid ? CAPTURE_INVALID : CAPTURE_ACTIVE;
    unlock(LOCK_STREAMS);
    return status;
}

bool is_capturing(uint64_t capture) {
    return status_of(capture) != CAPTURE_NONE;
}

// ---- what is refused
static bool spoil_if(bool (*is_meant)(const struct capture *, uint64_t), uint64_t id) {
    bool any = false;
    if (!are_any_open())
        return false;
    lock(LOCK_STREAMS);
    for (struct capture *each = captures; each; each = each->next) {
        if (is_meant(each, id))
            each->is_invalid = any = true;
    }
    unlock(LOCK_STREAMS);
    return any;
}

static bool is_any(const struct capture *capture, uint64_t id) {
    return true;
}

static bool is_this(const struct capture *capture, uint64_t id) {
    return capture->id == id;
}

static bool forbids_unsafe_calls(const struct capture *capture, uint64_t id) {
    if (thread_mode == MODE_RELAXED || capture->mode == MODE_RELAXED)
        return false;
    return capture->thread == &thread_mode || (thread_mode == MODE_GLOBAL && capture->mode == MODE_GLOBAL);
}

// A call that may depend on work that is being captured, such as cudaMalloc: the modes of the capture and of the thread
// tell whether it is allowed.
cudaError_t refuse_unsafe(void) {
    return spoil_if(forbids_unsafe_calls, 0) ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t refuse_waiting_for_all(void) {
    return spoil_if(is_any, 0) ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

// An error that spoils a capture, if that is under way.
cudaError_t spoil(uint64_t capture, cudaError_t error) {
    return capture && spoil_if(is_this, capture) ? error : cudaSuccess;
}

cudaError_t refuse_waiting(cudaStream_t stream) {
    return are_any_open() ? spoil(capture_of(stream), cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t refuse_captured(uint64_t capture) {
    return spoil(capture, cudaErrorCapturedEvent);
}

cudaError_t refuse_spoilt(uint64_t capture) {
    return status_of(capture) == CAPTURE_INVALID ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

// ---- captures
cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = thread_mode;
    if (*mode < MODE_GLOBAL || *mode > MODE_RELAXED)
        return fail(cudaErrorInvalidValue);
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    static uint64_t last_id;
    if (is_default_stream(stream) || is_capturing(capture_of(stream)))  // and not twice
        return fail(cudaErrorStreamCaptureUnsupported);
    struct capture *capture = calloc(1, sizeof *capture);
    if (!capture)
        return fail(cudaErrorMemoryAllocation);
    lock(LOCK_STREAMS);
    *capture = (struct capture){
        .id = ++last_id, .mode = mode, .thread = &thread_mode, .origin = stream, .next = captures};
    captures = capture;
    __atomic_add_fetch(&capture_count, 1, __ATOMIC_RELEASE);
    begin_in(stream, capture->id);
    unlock(LOCK_STREAMS);
    return cudaSuccess;
}

static void remove_capture(uint64_t id) {
    lock(LOCK_STREAMS);
    struct capture **link = &captures;
    while (*link && (*link)->id != id)
        link = &(*link)->next;
    struct capture *found = *link;
    if (found) {
        *link = found->next;
        __atomic_sub_fetch(&capture_count, 1, __ATOMIC_RELEASE);
    }
    unlock(LOCK_STREAMS);
    free(found);
}

// Where and by whom a capture may not be ended: then it stays, and is spoilt.
static cudaError_t refuse_end(cudaStream_t stream, uint64_t id) {
    lock(LOCK_STREAMS);
    const struct capture *found = find_capture(id);
    bool is_other_thread = found && found->mode != MODE_RELAXED && found->thread != &thread_mode;
    bool is_other_stream = found && found->origin != stream;
    unlock(LOCK_STREAMS);
    if (is_other_thread)
        return spoil(id, cudaErrorStreamCaptureWrongThread);
    return is_other_stream ? spoil(id, cudaErrorStreamCaptureUnmatched) : cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    uint64_t capture = capture_of(stream);
    int status = status_of(capture);
    *graph = NULL;
    if (status == CAPTURE_NONE)
        return fail(cudaErrorInvalidValue);
    cudaError_t error = refuse_end(stream, capture);
    if (error)
        return fail(error);
    bool is_joined = is_work_joined(stream);
    end_capture(capture);
    remove_capture(capture);
    if (status == CAPTURE_INVALID)
        return fail(cudaErrorStreamCaptureInvalidated);
    if (!is_joined)
        return fail(cudaErrorStreamCaptureUnjoined);
    *graph = malloc(1);
    return *graph ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status) {
    *status = status_of(capture_of(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const void **edges, size_t *count) {
    static char graph_in_the_making;
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = capture_of(stream);
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
    cudaError_t error = enqueue(stream);
    if (error)
        return fail(error);
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
