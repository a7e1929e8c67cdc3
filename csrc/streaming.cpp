#include "streaming.h"

#include <algorithm>
#include <atomic>

#ifdef GROUPNORM_X86
#include <cpuid.h>
#endif

namespace groupnorm {
namespace {

constexpr std::int64_t kMegabyte = std::int64_t{1} << 20;

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

std::int64_t detected_cache() {
  unsigned a, b, c, d;
  constexpr unsigned kListsCaches = 1u << 22;  // AMD's own leaf
  if (__get_cpuid(0x80000001, &a, &b, &c, &d) != 0 && (c & kListsCaches) != 0) {
    return largest_cache(0x8000001d);
  }
  return __get_cpuid_max(0, nullptr) >= 4 ? largest_cache(4) : 0;
}
#else
std::int64_t detected_cache() { return 0; }
#endif

std::atomic<std::int64_t> limit{-1};

}  // namespace

std::int64_t shared_cache_bytes() {
  static const std::int64_t found = detected_cache();
  return found == 0 ? 32 * kMegabyte : std::clamp(found, 4 * kMegabyte, 512 * kMegabyte);
}

std::int64_t stream_limit() {
  const std::int64_t set = limit.load(std::memory_order_relaxed);
  return set >= 0 ? set : shared_cache_bytes();
}

void set_stream_limit(std::int64_t bytes) { limit.store(bytes, std::memory_order_relaxed); }

}  // namespace groupnorm
