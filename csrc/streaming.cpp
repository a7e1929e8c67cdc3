#include "streaming.h"

#include <algorithm>
#include <atomic>

#ifdef GROUPNORM_X86
#include <cpuid.h>
#endif

namespace groupnorm {
namespace {

constexpr std::int64_t kMegabyte = std::int64_t{1} << 20;

struct SharedCache {
  std::int64_t bytes = 32 * kMegabyte;
  std::int64_t limit = bytes;  // of what together is worth keeping
  bool distant = false;
};

// A cache of more is spread over so large a CPU that it is far from most of its cores. Of a distant one, tensors of so
// much together are worth keeping; of one that all cores share and that is not, twice its size is: half of what is
// written is then still there when the next call asks for the line (docs/performance.md).
constexpr std::int64_t kLargestNear = 64 * kMegabyte, kDistantLimit = 20 * kMegabyte;

#ifdef GROUPNORM_X86
// The largest cache of a leaf that lists them one by one. Not what the system library says: on some virtual
// machines that is the sum over all groups of cores.
std::int64_t largest_cache(unsigned leaf) {
  std::int64_t largest = 0;
  for (unsigned i = 0; i < 16; ++i) {
    unsigned a, b, c, d;
    __cpuid_count(leaf, i, a, b, c, d);
    if ((a & 31) == 0) break;
    const std::int64_t ways = (b >> 22) + 1, partitions = ((b >> 12) & 1023) + 1, line = (b & 4095) + 1;
    largest = std::max(largest, ways * partitions * line * (std::int64_t{c} + 1));
  }
  return largest;
}

// The CPUs that have AMD's leaf have a cache for each group of up to sixteen cores; with others all cores share one.
SharedCache detected_cache() {
  unsigned a, b, c, d;
  constexpr unsigned kListsCaches = 1u << 22;  // AMD's own leaf
  const bool grouped = __get_cpuid(0x80000001, &a, &b, &c, &d) != 0 && (c & kListsCaches) != 0;
  if (!grouped && __get_cpuid_max(0, nullptr) < 4) return {};
  const std::int64_t found = largest_cache(grouped ? 0x8000001d : 4);
  if (found == 0) return {};
  const std::int64_t bytes = std::clamp(found, 4 * kMegabyte, 512 * kMegabyte);
  if (grouped) return {bytes, bytes, false};
  return bytes > kLargestNear ? SharedCache{bytes, kDistantLimit, true} : SharedCache{bytes, 2 * bytes, false};
}
#else
SharedCache detected_cache() { return {}; }
#endif

const SharedCache& shared_cache() {
  static const SharedCache found = detected_cache();
  return found;
}

std::atomic<std::int64_t> limit{-1};

}  // namespace

std::int64_t shared_cache_bytes() { return shared_cache().bytes; }

std::int64_t stream_limit() {
  const std::int64_t set = limit.load(std::memory_order_relaxed);
  if (set >= 0) return set;
  return shared_cache().limit;
}

bool shared_cache_is_distant() { return limit.load(std::memory_order_relaxed) >= 0 || shared_cache().distant; }

void set_stream_limit(std::int64_t bytes) { limit.store(bytes, std::memory_order_relaxed); }

}  // namespace groupnorm
