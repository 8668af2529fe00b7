// What the C interface's units share: a backend's state, its errors, and the checks of what a wrong caller could get
// wrong in a batch.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "buffer.h"
#include "common.h"
#include "pool.h"

#define OCTAVO_API extern "C" __attribute__((visibility("default")))

namespace octavo {

enum Status : int32_t { kOk = 0, kRefused = 1, kOutOfMemory = 2, kFailed = 3 };

// Of the thread's last call that gave a status other than kOk.
extern thread_local std::string last_error;

// A caller's mistake.
struct Refused {
  std::string message;
};

[[noreturn]] __attribute__((format(printf, 1, 2))) void refuse(const char* format, ...);

// Runs a function of the interface; what it throws becomes a status and a message.
template <class Function>
int32_t guarded(const Function& function) {
  try {
    function();
    return kOk;
  } catch (const Refused& refused) {
    last_error = refused.message;
    return kRefused;
  } catch (const std::bad_alloc&) {
    last_error = "the cpu backend is out of memory";
    return kOutOfMemory;
  } catch (const std::exception& error) {
    last_error = error.what();
    return kFailed;
  }
}

// One backend: an instruction set and its threads.
struct Context {
  const Kernels* kernels;
  Pool pool;
  Buffer activations;  // between the ops of one layer, and what an op finds; only while holding a Pool::Session

  Context(const Kernels* chosen, int num_threads, int64_t spin_us) : kernels(chosen), pool(num_threads, spin_us) {}

  void linear(const LinearArgs& args) {
    const int32_t bits = args.layer->bits;
    (bits == 4 ? kernels->linear_int4 : bits == 8 ? kernels->linear_int8 : kernels->linear)(pool, args);
  }
};

// Each of these refuses what does not hold.
void check_rotary_positions(const int32_t* positions, int64_t tokens, int64_t max_positions);
void check_slots(const PagedKV& kv, const int32_t* slots, int64_t tokens);
void check_batch(const PagedKV& kv, int64_t tokens, int64_t sequences, const int32_t* positions,
                 const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                 int64_t table_stride, int64_t table_columns);

}  // namespace octavo
