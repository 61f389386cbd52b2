// Kernels that can run in one call. All threads of a parallel region call them and leave them together.

#pragma once

#include <cstdint>

namespace longspan {

struct Linear;
struct Store;
struct Paged;

// Returns the scratch memory that the kernel needs, in numbers of 32 bits.
long scratch_size(const Linear& problem, int threads);
long scratch_size(const Paged& problem);

void run(const Linear& problem, uint32_t* memory);
void run(const Store& problem);
void run(const Paged& problem, uint32_t* memory);

}  // namespace longspan
