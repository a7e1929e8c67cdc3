#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "buffer.h"
#include "groupnorm.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __unix__
#include <pthread.h>
#endif

namespace groupnorm {
namespace {

// 0 until set_num_threads is called: then the OpenMP runtime is asked at each call.
std::atomic<int> requested_threads{0};
std::atomic<bool> in_forked_child{false};
// 0 until use_threads is called.
thread_local int threads_of_caller = 0;

// Pieces handed out at a time: enough hand-outs that a slow core does not hold up the rest.
constexpr std::int64_t kRangesPerThread = 8;

// A thread's pieces, in their order, on a cache line of its own. It is the same part of all pieces in every call,
// whose memory the thread's core may still hold from the call before; who has done his takes of the others'.
struct alignas(64) Share {
  std::atomic<std::int64_t> next;
};
constexpr std::size_t kSharesInPlace = 16;

#ifdef __unix__
const int at_fork_registered =
    pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });
#endif

}  // namespace

int get_num_threads() {
  if (in_forked_child.load()) return 1;
#ifdef _OPENMP
  const int requested = threads_of_caller > 0 ? threads_of_caller : requested_threads.load();
  return requested > 0 ? requested : std::max(1, omp_get_max_threads());
#else
  return 1;
#endif
}

int use_threads(int count) { return std::exchange(threads_of_caller, count); }

void set_num_threads(int count) { requested_threads.store(count); }

const char* threading_runtime() {
#ifdef _OPENMP
  return in_forked_child.load() ? "OpenMP, single-threaded after a fork" : "OpenMP";
#else
  return "none: built without OpenMP";
#endif
}

int threads_for(std::int64_t work) {
  if (!worth_a_thread(work)) return 1;
  return static_cast<int>(std::min<std::int64_t>(work / kWorkPerThread + 1, get_num_threads()));
}

void run_ranges(std::int64_t pieces, int threads, RangeBody body, void* context) {
  if (threads <= 1) {
    if (pieces > 0) body(context, 0, pieces, 0);
    return;
  }
#ifdef _OPENMP
  const std::int64_t step = std::max<std::int64_t>(1, pieces / (threads * kRangesPerThread));
  Buffer<Share, kSharesInPlace> shares(static_cast<std::size_t>(threads));
  for (int t = 0; t < threads; ++t) {
    shares[static_cast<std::size_t>(t)].next.store(share_begin(pieces, threads, t),
                                                   std::memory_order_relaxed);
  }
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    for (int other = 0; other < threads; ++other) {
      const int t = (thread + other) % threads;
      Share& share = shares[static_cast<std::size_t>(t)];
      const std::int64_t share_end = share_begin(pieces, threads, t + 1);
      for (;;) {
        const std::int64_t begin = share.next.fetch_add(step, std::memory_order_relaxed);
        if (begin >= share_end) break;
        body(context, begin, std::min(begin + step, share_end), thread);
      }
    }
  }
#else
  body(context, 0, pieces, 0);
#endif
}

void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  constexpr std::int64_t page = 4096;
  const std::int64_t pages = (bytes + page - 1) / page;
  const int threads = threads_for(bytes);
  // One run for each thread, as memcpy likes it.
  parallel_ranges(threads, threads, [&](std::int64_t begin, std::int64_t end, int) {
    const std::int64_t first = pages * begin / threads * page;
    const std::int64_t last = std::min(bytes, pages * end / threads * page);
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first,
                static_cast<std::size_t>(last - first));
  });
}

}  // namespace groupnorm
