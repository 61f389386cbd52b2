// Several kernels in one call, up to a whole step of a model. No other code runs between them with cold caches, and
// threads synchronise without going to sleep.

#include "kernels.h"
#include "tiles.h"

namespace {

using namespace longspan;

enum Kind : long { kLinear, kStore, kPaged };

struct Link {
    long kind;
    const void* problem;

    const Linear& linear() const { return *static_cast<const Linear*>(problem); }
    const Store& store() const { return *static_cast<const Store*>(problem); }
    const Paged& paged() const { return *static_cast<const Paged*>(problem); }
};

long scratch_size(const Link& link, int threads) {
    switch (link.kind) {
        case kLinear:
            return longspan::scratch_size(link.linear(), threads);
        case kPaged:
            return longspan::scratch_size(link.paged());
        default:
            return 0;
    }
}

}  // namespace

// Runs kernels in order. Each may read the results of earlier ones. Returns 0, or 1 if there is no memory.
extern "C" int longspan_run(const Link* links, long number, int threads) {
    long size = 1;
    for (long i = 0; i < number; ++i) size = std::max(size, scratch_size(links[i], threads));
    thread_local Scratch scratch;
    uint32_t* memory = scratch.take(size);
    if (!memory) return 1;
#pragma omp parallel num_threads(threads)
    {
        const TileRegisters registers;
        for (long i = 0; i < number; ++i) {
            switch (links[i].kind) {
                case kLinear:
                    run(links[i].linear(), memory);
                    break;
                case kStore:
                    run(links[i].store());
                    break;
                default:
                    run(links[i].paged(), memory);
            }
        }
    }
    return 0;
}
