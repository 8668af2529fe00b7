#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{64} << 20;

struct Chunk {
  void* mapping = nullptr;
  size_t mapped = 0;
  uintptr_t next = 0;
  uintptr_t end = 0;
  size_t pieces = 0;
};

struct Arena {
  std::mutex mutex;
  std::map<uintptr_t, Chunk> chunks;  // by first address
  uintptr_t current = 0;
};

Arena& arena() {
  static Arena* instance = new Arena();  // never destroyed: layers may outlive static destruction
  return *instance;
}

uintptr_t round_up(uintptr_t value, size_t step) { return (value + step - 1) / step * step; }

// Zeroed by the kernel, touched only when used.
Chunk map_chunk(size_t bytes) {
  Chunk chunk;
  chunk.mapped = round_up(bytes, kHugePage) + kHugePage;
  chunk.mapping = mmap(nullptr, chunk.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (chunk.mapping == MAP_FAILED) throw std::bad_alloc();
  chunk.next = round_up(reinterpret_cast<uintptr_t>(chunk.mapping), kHugePage);
  chunk.end = reinterpret_cast<uintptr_t>(chunk.mapping) + chunk.mapped;
#if defined(MADV_HUGEPAGE)
  // A kernel without huge pages refuses; ordinary pages serve as well, more slowly.
  (void)madvise(reinterpret_cast<void*>(chunk.next), chunk.end - chunk.next, MADV_HUGEPAGE);
#endif
  return chunk;
}

}  // namespace

void* arena_allocate(size_t bytes) {
  Arena& pool = arena();
  bytes = round_up(std::max<size_t>(bytes, 64), 64);
  std::lock_guard<std::mutex> lock(pool.mutex);
  auto found = pool.chunks.find(pool.current);
  if (found == pool.chunks.end() || found->second.end - found->second.next < bytes) {
    Chunk chunk = map_chunk(std::max(bytes, kChunk));
    const uintptr_t first = chunk.next;
    found = pool.chunks.emplace(first, chunk).first;
    if (bytes < kChunk) pool.current = first;
  }
  Chunk& chunk = found->second;
  void* memory = reinterpret_cast<void*>(chunk.next);
  chunk.next += bytes;
  ++chunk.pieces;
  return memory;
}

void arena_free(void* memory) {
  if (memory == nullptr) return;
  Arena& pool = arena();
  std::lock_guard<std::mutex> lock(pool.mutex);
  auto found = std::prev(pool.chunks.upper_bound(reinterpret_cast<uintptr_t>(memory)));
  if (--found->second.pieces > 0) return;
  if (found->first == pool.current) pool.current = 0;
  munmap(found->second.mapping, found->second.mapped);
  pool.chunks.erase(found);
}

}  // namespace octavo
