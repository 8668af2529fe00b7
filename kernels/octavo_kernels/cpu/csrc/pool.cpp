#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "buffer.h"

namespace octavo {
namespace {

std::atomic<uint64_t> fork_generation{0};

void after_fork_in_child() { fork_generation.fetch_add(1, std::memory_order_relaxed); }

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, after_fork_in_child); });
}

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct alignas(64) Range {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

constexpr uint64_t kOpen = uint64_t{1} << 16;      // a call takes threads in
constexpr uint64_t kInside = kOpen - 1;            // threads inside the call
constexpr int kEpochShift = 32;

}  // namespace

struct Pool::State {
  State(int num_threads, int64_t spin_us)
      : generation(fork_generation.load()), spin(spin_us), ranges(num_threads), buffers(num_threads) {}

  const uint64_t generation;
  const std::chrono::microseconds spin;
  std::mutex session;

  alignas(64) std::atomic<uint64_t> gate{0};  // epoch << 32 | open | inside
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex sleep_mutex;
  std::condition_variable wake;
  std::vector<std::thread> threads;

  ItemFunction function = nullptr;
  void* context = nullptr;
  std::atomic<bool> failed{false};
  std::vector<Range> ranges;
  std::vector<Buffer> buffers;
  Buffer shared;

  void drain(int thread) {
    const int count = static_cast<int>(ranges.size());
    for (int i = 0; i < count; ++i) {
      int victim = thread + i;
      if (victim >= count) victim -= count;
      Range& range = ranges[victim];
      while (range.next.load(std::memory_order_relaxed) < range.end) {
        const int64_t item = range.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= range.end) break;
        try {
          function(context, item, thread);
        } catch (const std::bad_alloc&) {
          failed.store(true, std::memory_order_relaxed);
        }
      }
    }
  }

  bool called(uint64_t seen) const {
    const uint64_t now = gate.load(std::memory_order_seq_cst);
    return (now & kOpen) != 0 && (now >> kEpochShift) != seen;
  }
};

Pool::Pool(int num_threads, int64_t spin_us)
    : num_threads_(num_threads), spin_us_(spin_us), state_(new State(num_threads, spin_us)) {
  watch_forks();
}

Pool::~Pool() {
  // In a forked child the threads do not exist and the locks may be held for ever: leave them behind.
  if (state_->generation != fork_generation.load()) return;
  {
    std::lock_guard<std::mutex> lock(state_->sleep_mutex);
    state_->stop.store(true);
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

Pool::Session::Session(Pool& pool) : pool_(pool) {
  if (pool_.state_->generation != fork_generation.load(std::memory_order_relaxed)) {
    pool_.state_ = new State(pool_.num_threads_, pool_.spin_us_);
  }
  pool_.state_->session.lock();
}

Pool::Session::~Session() { pool_.state_->session.unlock(); }

void Pool::start() {
  // Signals belong to the process's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string problem;
  while (problem.empty() && static_cast<int>(state_->threads.size()) + 1 < num_threads_) {
    const int number = static_cast<int>(state_->threads.size()) + 1;
    try {
      state_->threads.emplace_back(work, state_, number);
    } catch (const std::system_error& error) {
      problem = "cannot start compute thread " + std::to_string(number + 1) + " of " + std::to_string(num_threads_) +
                ": " + error.code().message();
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!problem.empty()) throw std::runtime_error(problem);
}

void Pool::work(State* state, int thread) {
  uint64_t seen = 0;
  for (;;) {
    const auto deadline = std::chrono::steady_clock::now() + state->spin;
    bool called = state->called(seen);
    while (!called && std::chrono::steady_clock::now() < deadline) {
      for (int i = 0; i < 32 && !called; ++i) {
        pause_cpu();
        called = state->called(seen);
      }
      if (!called) std::this_thread::yield();
    }
    if (!called) {
      std::unique_lock<std::mutex> lock(state->sleep_mutex);
      state->sleepers.fetch_add(1, std::memory_order_seq_cst);
      state->wake.wait(lock, [&] { return state->stop.load() || state->called(seen); });
      state->sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
    if (state->stop.load(std::memory_order_relaxed)) return;
    uint64_t gate = state->gate.load(std::memory_order_acquire);
    if ((gate & kOpen) == 0 || (gate >> kEpochShift) == seen) continue;
    if (!state->gate.compare_exchange_strong(gate, gate + 1, std::memory_order_acq_rel)) continue;
    seen = gate >> kEpochShift;
    state->drain(thread);
    state->gate.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::run(int64_t num_items, ItemFunction function, void* context) {
  if (num_threads_ == 1 || num_items == 1) {
    for (int64_t item = 0; item < num_items; ++item) function(context, item, 0);
    return;
  }
  if (num_items <= 0) return;
  State& state = *state_;
  if (static_cast<int>(state.threads.size()) + 1 < num_threads_) start();
  state.function = function;
  state.context = context;
  state.failed.store(false, std::memory_order_relaxed);
  for (int i = 0; i < num_threads_; ++i) {
    state.ranges[i].next.store(num_items * i / num_threads_, std::memory_order_relaxed);
    state.ranges[i].end = num_items * (i + 1) / num_threads_;
  }
  uint64_t epoch = (state.gate.load(std::memory_order_relaxed) >> kEpochShift) + 1;
  epoch = (epoch & 0xffffffffu) == 0 ? 1 : epoch;  // 0 is what a fresh thread has seen
  state.gate.store(epoch << kEpochShift | kOpen, std::memory_order_seq_cst);
  if (state.sleepers.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> lock(state.sleep_mutex); }
    state.wake.notify_all();
  }
  state.drain(0);
  uint64_t gate = state.gate.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (gate & kInside) != 0; ++spins) {
    if (spins < 2000) {
      pause_cpu();
    } else {
      std::this_thread::yield();
    }
    gate = state.gate.load(std::memory_order_acquire);
  }
  if (state.failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

char* Pool::scratch(int thread, size_t bytes) { return state_->buffers[thread].grow(bytes); }

char* Pool::shared_scratch(size_t bytes) { return state_->shared.grow(bytes); }

}  // namespace octavo
