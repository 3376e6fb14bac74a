// Parallel loops for kernels on plain pointers. The extension implements `run_parallel` with torch's thread pool
// (csrc/bindings/module.cpp); other programs (csrc/sanitize) have their own implementation.
#pragma once
#include <atomic>
#include <cstdint>

namespace specdec {

using RangeFunction = void (*)(int64_t begin, int64_t end, void* context);

// Runs function over disjoint pieces of [begin, end) of at least `grain` items; returns when all are done.
void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context);

// The number of threads that run_parallel may use.
int thread_count();

// Runs body(begin, end) over pieces of [begin, end), or on the calling thread if the range fits into one grain. Starting
// threads costs ten microseconds or far more on a loaded machine, so a grain must be substantial work.
template <class Body>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (begin >= end) return;
  if (end - begin <= grain) {
    body(begin, end);
    return;
  }
  run_parallel(
      begin, end, grain, [](int64_t b, int64_t e, void* context) { (*static_cast<const Body*>(context))(b, e); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// The first i below `count` for which test(i) holds, or count. With `together`, threads take items in order, so a few items
// after the result may be tested too.
template <class Test>
inline int64_t first_in_order(int64_t count, bool together, const Test& test) {
  std::atomic<int64_t> next{0}, found{count};
  const int64_t threads = together ? thread_count() : 1;
  parallel_for(0, threads < count ? threads : count, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < found; i = next++)
      if (test(i)) {
        int64_t best = found;
        while (i < best && !found.compare_exchange_weak(best, i)) {
        }
      }
  });
  return found;
}

}  // namespace specdec
