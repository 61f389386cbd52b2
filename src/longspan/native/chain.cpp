// Kernels one after the other in one call, up to a whole step of a model: nothing runs between them that would find
// cold caches, and threads meet without going to sleep.

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

long size_of_room(const Link& link, int threads) {
    switch (link.kind) {
        case kLinear:
            return longspan::size_of_room(link.linear(), threads);
        case kPaged:
            return longspan::size_of_room(link.paged());
        default:
            return 0;
    }
}

}  // namespace

// Runs kernels of which each may read what those before it wrote. Returns 0, or 1 when there is no memory.
extern "C" int longspan_run(const Link* links, long number, int threads) {
    long size = 1;
    for (long i = 0; i < number; ++i) size = std::max(size, size_of_room(links[i], threads));
    thread_local Scratch scratch;
    uint32_t* room = scratch.take(size);
    if (!room) return 1;
#pragma omp parallel num_threads(threads)
    {
        const TileRegisters registers;
        for (long i = 0; i < number; ++i) {
            switch (links[i].kind) {
                case kLinear:
                    run(links[i].linear(), room);
                    break;
                case kStore:
                    run(links[i].store());
                    break;
                default:
                    run(links[i].paged(), room);
            }
        }
    }
    return 0;
}
