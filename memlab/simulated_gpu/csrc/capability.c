// What follows from a compute capability alone (CUDA C++ Programming Guide, technical specifications).  The size of the
// L2 cache differs from card to card; the figure is that of the largest common card.
#include "simulated.h"

// `code`: PyTorch's builds carry code for 7.5, 8.0, 8.6, 9.0, 10.0 and 12.0.  CUB refuses to work when a kernel claims
// an architecture that is not among them, so each capability names the one whose code a real driver would pick.
static const struct capability table[] = {
    // version, threads, blocks, shared memory: of a multiprocessor, of one block at most, reserved; L2; code
    {75, 1024, 16, 64 * KIB, 64 * KIB, 0, 4 * MIB, 75},
    {80, 2048, 32, 164 * KIB, 163 * KIB, KIB, 40 * MIB, 80},
    {86, 1536, 16, 100 * KIB, 99 * KIB, KIB, 6 * MIB, 86},
    {87, 1536, 16, 164 * KIB, 163 * KIB, KIB, 4 * MIB, 86},
    {89, 1536, 24, 100 * KIB, 99 * KIB, KIB, 72 * MIB, 86},
    {90, 2048, 32, 228 * KIB, 227 * KIB, KIB, 50 * MIB, 90},
    {100, 2048, 32, 228 * KIB, 227 * KIB, KIB, 126 * MIB, 100},
    {120, 1536, 24, 100 * KIB, 99 * KIB, KIB, 96 * MIB, 120},
};

const struct capability *capability_of(int major, int minor) {
    const struct capability *best = &table[0];
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++) {
        if (table[i].version <= 10 * major + minor)
            best = &table[i];
    }
    return best;
}
