// NCCL without a wire: no rank hears of another, and every collective answers as if all of them held what this one
// holds. So sizes and memory are those of a real job, and sums are not.
#include "library_types.h"
#include <stdlib.h>
#include <string.h>

enum { NCCL_SYSTEM_ERROR = 2, NCCL_INVALID_ARGUMENT = 4 };

struct communicator {
    int ranks, rank;
};
struct unique_id {
    char bytes[128];
};

static int create(struct communicator **out, int ranks, int rank) {
    static bool said;
    if (ranks > 1 && !__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
        say("NCCL connects no ranks: each of the %d works as if all held what it holds.", ranks);
    *out = malloc(sizeof **out);
    if (!*out)
        return NCCL_SYSTEM_ERROR;
    **out = (struct communicator){ranks, rank};
    return 0;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

int ncclGetUniqueId(struct unique_id *id) {
    memset(id, 7, sizeof *id);
    return 0;
}

const char *ncclGetErrorString(int error) {
    return error ? "not supported on a simulated GPU" : "no error";
}

const char *ncclGetLastError(struct communicator *communicator) {
    return "not supported on a simulated GPU";
}

// ---- communicators
int ncclCommInitRank(struct communicator **out, int ranks, struct unique_id id, int rank) {
    return create(out, ranks, rank);
}

int ncclCommInitRankConfig(struct communicator **out, int ranks, struct unique_id id, int rank, opaque configuration) {
    return create(out, ranks, rank);
}

int ncclCommInitRankScalable(struct communicator **out, int ranks, int rank, int id_count, opaque ids,
                             opaque configuration) {
    return create(out, ranks, rank);
}

int ncclCommInitAll(struct communicator **out, int ranks, const int *devices) {
    int error = 0;
    for (int rank = 0; rank < ranks && !error; rank++)
        error = create(&out[rank], ranks, rank);
    return error;
}

// Who else has this color only the others know, so the part is as large as the whole.
int ncclCommSplit(struct communicator *communicator, int color, int key, struct communicator **out,
                  opaque configuration) {
    *out = NULL;
    return color < 0 ? 0 : create(out, communicator->ranks, communicator->rank);
}

int ncclCommCount(struct communicator *communicator, int *ranks) {
    *ranks = communicator->ranks;
    return 0;
}

int ncclCommUserRank(struct communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}

int ncclCommDestroy(struct communicator *communicator) {
    free(communicator);
    return 0;
}

// PyTorch aborts from one thread while another may still ask, so the few bytes stay.
int ncclCommAbort(struct communicator *communicator) {
    return 0;
}

int ncclCommGetAsyncError(struct communicator *communicator, int *error) {
    *error = 0;
    return 0;
}

int ncclCommRegister(struct communicator *communicator, opaque buffer, size_t bytes, opaque *handle) {
    static char any;
    *handle = &any;
    return 0;
}

int ncclRedOpCreatePreMulSum(int *operation, opaque scalar, int type, int residence,
                             struct communicator *communicator) {
    *operation = 6;
    return 0;
}

int ncclMemAlloc(void **address, size_t bytes) {
    return cudaMalloc(address, bytes) ? NCCL_SYSTEM_ERROR : 0;
}

int ncclMemFree(void *address) {
    return cudaFree(address) ? NCCL_INVALID_ARGUMENT : 0;
}

// ---- collectives
static size_t element_size(int type) {
    static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 4;
}

static int hand_over(const void *from, void *to, size_t count, int type) {
    if (from != to)
        copy_bytes(to, from, count * element_size(type));
    return 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation,
                  struct communicator *communicator, cudaStream_t stream) {
    return hand_over(from, to, count, type);
}

int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
               struct communicator *communicator, cudaStream_t stream) {
    return communicator->rank == root ? hand_over(from, to, count, type) : 0;  // elsewhere `to` may be NULL
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *communicator,
                  cudaStream_t stream) {
    return from ? hand_over(from, to, count, type) : 0;
}

int ncclReduceScatter(const char *from, char *to, size_t count, int type, int operation,
                      struct communicator *communicator, cudaStream_t stream) {
    size_t bytes = count * element_size(type);
    return hand_over(from + (size_t)communicator->rank * bytes, to, count, type);
}

int ncclAllGather(const char *from, char *to, size_t count, int type, struct communicator *communicator,
                  cudaStream_t stream) {
    size_t bytes = count * element_size(type);
    for (int rank = 0; rank < communicator->ranks; rank++)
        hand_over(from, to + (size_t)rank * bytes, count, type);
    return 0;
}

int ncclBcast(void *data, size_t count, int type, int root, struct communicator *communicator, cudaStream_t stream) {
    return 0;
}

int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct communicator *communicator,
                 cudaStream_t stream) {
    return hand_over(from, to, count * (size_t)communicator->ranks, type);
}

// What another rank would send has the right size and no content.
int ncclSend(const void *from, size_t count, int type, int peer, struct communicator *communicator,
             cudaStream_t stream) {
    return 0;
}

int ncclRecv(void *to, size_t count, int type, int peer, struct communicator *communicator, cudaStream_t stream) {
    fill_bytes(to, 0, count * element_size(type));
    return 0;
}
