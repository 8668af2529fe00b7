// A fork/join thread pool for calls of a few microseconds.
//
// Items are dealt out in equal contiguous ranges, so that a thread meets the same weights call after call, and a
// thread that runs dry takes items from the others, so that a core lost to another process does not hold the call
// up. The caller works too and never waits for a thread that has not begun. Idle threads spin for a bounded time
// and then sleep. Threads are started by the first call that needs them and again after a fork.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

using ItemFunction = void (*)(void* context, int64_t item, int thread);

class Pool {
 public:
  Pool(int num_threads, int64_t spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls function(context, item, thread) for every item in [0, num_items); returns when all are done. Only while
  // holding a Session.
  void run(int64_t num_items, ItemFunction function, void* context);

  // Memory of one thread (0 is the caller), grown when needed, 64-byte aligned, content undefined. Only within run,
  // or for thread 0 while holding a Session.
  char* scratch(int thread, size_t bytes);
  // Memory that all threads of one call share; never moves while a call runs.
  char* shared_scratch(size_t bytes);

  // One op at a time uses the pool and its scratch memory.
  class Session {
   public:
    explicit Session(Pool& pool);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    Pool& pool_;
  };

 private:
  struct State;
  void start();
  static void work(State* state, int thread);

  const int num_threads_;
  const int64_t spin_us_;
  State* state_;
};

}  // namespace octavo
