// How work is split over threads. The only header that knows of them.
//
// Guarantees: each index is passed to the body exactly once; which thread gets it never shows in a
// result, because bodies write to places of their own. Work too small to be worth waking a thread
// for runs where it is. In a forked child everything runs on the calling thread, because the
// OpenMP runtime's pool does not survive a fork.
#pragma once

#include <cstdint>

namespace groupnorm {

// A second thread costs 4 to 9 microseconds: it is woken, data come to it from the core that has them, and the first
// waits for it. One core takes nearly twenty for a call with this much.
constexpr std::int64_t kWorkPerThread = 360 * 1024;
inline bool worth_a_thread(std::int64_t work) { return work >= kWorkPerThread; }

// Threads worth using for so much work, in bytes of plain float32.
int threads_for(std::int64_t work);

// Whether whole units (groups or samples), all of one size, can be handed to single threads without
// idle ones.
inline bool shares_well(std::int64_t units, int threads) {
  return units >= 4 * threads || units % threads == 0;
}

// A thread begins with its share of the pieces, which is the same in every call: [share_begin(t), share_begin(t + 1)).
inline std::int64_t share_begin(std::int64_t pieces, int threads, int thread) {
  return pieces * thread / threads;
}
// The i-th piece if each share is taken from its end: where the last pass over the same pieces ended, its memory is
// still in the thread's cache.
inline std::int64_t from_share_end(std::int64_t i, std::int64_t pieces, int threads) {
  int thread = 0;
  while (share_begin(pieces, threads, thread + 1) <= i) ++thread;
  return share_begin(pieces, threads, thread) + share_begin(pieces, threads, thread + 1) - 1 - i;
}

using RangeBody = void (*)(void* context, std::int64_t begin, std::int64_t end, int thread);
void run_ranges(std::int64_t pieces, int threads, RangeBody body, void* context);

// body(begin, end, thread) over ranges that cover [0, pieces); 0 <= thread < threads.
template <class Body>
void parallel_ranges(std::int64_t pieces, int threads, Body&& body) {
  run_ranges(
      pieces, threads,
      [](void* context, std::int64_t begin, std::int64_t end, int thread) {
        (*static_cast<Body*>(context))(begin, end, thread);
      },
      &body);
}

}  // namespace groupnorm
