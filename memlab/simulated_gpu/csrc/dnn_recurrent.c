// cuDNN's recurrent networks.  The weights are laid out our way: all matrices, layer after layer, then all biases;
// PyTorch asks for each one's place.  The sizes of weights are exact, and so are reserve and states of dropout on an H200; the
// workspace is the lowest of what memlab.fake_cuda.recurrent predicts, which has the figures too.
#include "dnn.h"
#include <stdlib.h>

enum { CELL_LSTM = 2, CELL_GRU = 3 };
enum { TYPE_FLOAT = 0, TYPE_DOUBLE = 1 };

struct network {
    int cell, directions, type, inputs, hidden, projection, layers;
    bool drops;
};
struct dropout {
    float share;
};
struct sequences {
    int longest, batch;
};
struct matrix {
    size_t at;  // in elements
    size_t rows, columns;
};

static int create(void **out, size_t bytes) {
    *out = calloc(1, bytes);
    return *out ? 0 : 1002;
}

int cudnnCreateRNNDescriptor(void **out) {
    return create(out, sizeof(struct network));
}

int cudnnDestroyRNNDescriptor(struct network *network) {
    free(network);
    return 0;
}

int cudnnCreateRNNDataDescriptor(void **out) {
    return create(out, sizeof(struct sequences));
}

int cudnnDestroyRNNDataDescriptor(struct sequences *sequences) {
    free(sequences);
    return 0;
}

int cudnnSetRNNDescriptor_v8(struct network *network, int algorithm, int cell, int bias, int direction, int input_mode,
                             int type, int precision, int math, int inputs, int hidden, int projection, int layers,
                             const struct dropout *dropout, unsigned flags) {
    bool drops = dropout && dropout->share > 0;
    *network = (struct network){cell, direction ? 2 : 1, type, inputs, hidden, projection, layers, drops};
    return 0;
}

int cudnnSetRNNDataDescriptor(struct sequences *sequences, int type, int layout, int longest, int batch, int width,
                              const int *lengths, opaque padding) {
    sequences->longest = longest;
    sequences->batch = batch;
    return 0;
}

static size_t gates(const struct network *network) {
    return network->cell == CELL_LSTM ? 4 : network->cell == CELL_GRU ? 3 : 1;
}

static size_t element_size(const struct network *network) {
    return network->type == TYPE_DOUBLE ? 8 : network->type == TYPE_FLOAT ? 4 : 2;
}

static size_t outputs(const struct network *network) {
    return (size_t)(network->projection ? network->projection : network->hidden);
}

static bool projects(const struct network *network) {
    return outputs(network) != (size_t)network->hidden;
}

// A layer and direction has a matrix for the input and one for the state in each gate, then perhaps the projection's.
static size_t matrix_count(const struct network *network) {
    return 2 * gates(network) + projects(network);
}

static struct matrix matrix_shape(const struct network *network, int pseudo_layer, size_t id) {
    size_t hidden = (size_t)network->hidden, directions = (size_t)network->directions;
    bool first_layer = pseudo_layer < network->directions;
    if (id == 2 * gates(network))
        return (struct matrix){0, outputs(network), hidden};
    if (id >= gates(network))
        return (struct matrix){0, hidden, outputs(network)};
    return (struct matrix){0, hidden, first_layer ? (size_t)network->inputs : outputs(network) * directions};
}

// The place of a matrix.  The one after the last (layer `layers * directions`, id 0) is where the biases begin.
static struct matrix find_matrix(const struct network *network, int pseudo_layer, size_t id) {
    size_t at = 0;
    for (int layer = 0; layer <= pseudo_layer; layer++) {
        size_t before = layer < pseudo_layer ? matrix_count(network) : id;
        for (size_t each = 0; each < before; each++) {
            struct matrix shape = matrix_shape(network, layer, each);
            at += shape.rows * shape.columns;
        }
    }
    struct matrix found = matrix_shape(network, pseudo_layer, id);
    found.at = at;
    return found;
}

static size_t find_bias(const struct network *network, int pseudo_layer, size_t id) {
    size_t first = find_matrix(network, network->layers * network->directions, 0).at;
    return first + ((size_t)pseudo_layer * 2 * gates(network) + id) * (size_t)network->hidden;
}

int cudnnGetRNNWeightSpaceSize(opaque handle, const struct network *network, size_t *bytes) {
    *bytes = find_bias(network, network->layers * network->directions, 0) * element_size(network);
    return 0;
}

static void describe(struct tensor *out, int type, size_t rows, size_t columns) {
    int size[] = {1, (int)rows, (int)columns};
    *out = (struct tensor){.type = type, .dimensions = 3};
    for (int i = 0; i < 3; i++)
        out->size[i] = size[i];
    out->stride[0] = size[1] * size[2];
    out->stride[1] = size[2];
    out->stride[2] = 1;
}

// PyTorch asks for the matrix or for the bias and passes NULL for the other.
int cudnnGetRNNWeightParams(opaque handle, const struct network *network, int pseudo_layer, size_t bytes, char *weights,
                            int id, struct tensor *matrix, void **matrix_at, struct tensor *bias, void **bias_at) {
    bool has_matrix = id >= 0 && (size_t)id < matrix_count(network);
    bool has_bias = has_matrix && (size_t)id < 2 * gates(network);
    struct matrix found = has_matrix ? find_matrix(network, pseudo_layer, (size_t)id) : (struct matrix){0, 0, 0};
    if (matrix_at)
        *matrix_at = has_matrix ? weights + found.at * element_size(network) : NULL;
    if (bias_at)
        *bias_at = has_bias ? weights + find_bias(network, pseudo_layer, (size_t)id) * element_size(network) : NULL;
    if (matrix)
        *matrix = (struct tensor){0};
    if (matrix && has_matrix)
        describe(matrix, network->type, found.rows, found.columns);
    if (bias)
        *bias = (struct tensor){0};
    if (bias && has_bias)
        describe(bias, network->type, (size_t)network->hidden, 1);
    return 0;
}

int cudnnGetRNNTempSpaceSizes(opaque handle, const struct network *network, int training,
                              const struct sequences *input, size_t *workspace, size_t *reserve) {
    size_t layers = (size_t)network->layers, directions = (size_t)network->directions, each = element_size(network);
    size_t rows = (size_t)input->longest * (size_t)input->batch;
    size_t states = rows * (size_t)network->hidden * directions, layer = states * each;
    size_t kept = network->cell == CELL_LSTM ? 5 : network->cell == CELL_GRU ? 6 : 1;
    size_t masks = network->drops ? (states + 255) / 256 * 32 * directions * (layers - 1) : 0;
    const struct device *device = device_at(current_physical());
    if (workspace && device && device->major == 9) {
        size_t weights;
        cudnnGetRNNWeightSpaceSize(handle, network, &weights);
        double more = 3.5 * (double)layer + 0.25 * (double)(layer * gates(network));
        double read = 0.6 * (double)(rows * (size_t)network->inputs * each);
        *workspace = 8 * MIB * layers * directions + (size_t)(more + (double)weights + read);
    } else if (workspace) {
        *workspace = layer * gates(network);
    }
    if (reserve)
        *reserve = training ? (layer * (kept * layers + layers - 1) + masks + 256 + 31) / 32 * 32 : 0;
    return 0;
}

// ---- dropout
int cudnnCreateDropoutDescriptor(void **out) {
    return create(out, sizeof(struct dropout));
}

int cudnnDestroyDropoutDescriptor(struct dropout *dropout) {
    free(dropout);
    return 0;
}

int cudnnSetDropoutDescriptor(struct dropout *dropout, opaque handle, float share, void *states, size_t bytes,
                              unsigned long long seed) {
    dropout->share = share;
    return 0;
}

int cudnnRestoreDropoutDescriptor(struct dropout *dropout, opaque handle, float share, void *states, size_t bytes,
                                  unsigned long long seed) {
    dropout->share = share;
    return 0;
}

// A generator for each thread that the GPU can run at a time.
int cudnnDropoutGetStatesSize(opaque handle, size_t *bytes) {
    const struct device *device = device_at(current_physical());
    int threads = device ? device->multiprocessors * device->capability->threads_per_multiprocessor : 0;
    *bytes = 24 * (size_t)threads;
    return 0;
}
