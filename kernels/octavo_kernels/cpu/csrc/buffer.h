// Scratch memory that grows.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace octavo {

struct Buffer {
  Buffer() = default;
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // 64-byte aligned, content undefined; what an earlier call gave is gone if it was smaller. Throws std::bad_alloc.
  char* grow(size_t wanted) {
    if (wanted > bytes) {
      std::free(data);
      data = nullptr;
      bytes = 0;
      const size_t rounded = (wanted + wanted / 4 + 4095) & ~size_t{4095};
      void* fresh = nullptr;
      if (posix_memalign(&fresh, 64, rounded) != 0) throw std::bad_alloc();
      data = static_cast<char*>(fresh);
      bytes = rounded;
    }
    return data;
  }

 private:
  char* data = nullptr;
  size_t bytes = 0;
};

}  // namespace octavo
