// Kernels that can follow each other in one call. All threads of a parallel region call them, and leave together.

#pragma once

#include <cstdint>

namespace longspan {

struct Linear;
struct Store;
struct Paged;

// Returns how many numbers of 32 bits the kernel needs as room.
long size_of_room(const Linear& problem, int threads);
long size_of_room(const Paged& problem);

void run(const Linear& problem, uint32_t* room);
void run(const Store& problem);
void run(const Paged& problem, uint32_t* room);

}  // namespace longspan
