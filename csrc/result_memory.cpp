#include "result_memory.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __unix__
#include <pthread.h>
#endif

namespace groupnorm {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Sizes are rounded up to this: what lies behind a result is hardly ever touched.
constexpr std::size_t kGranule = std::size_t{64} << 10;

struct Block {
  void* start;
  std::size_t bytes;
};

std::size_t rounded_up(std::size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

#ifdef __linux__
// Aligned to a huge page, so that the kernel may use one: what lies before and after is given back.
void* map_block(std::size_t bytes) {
  const std::size_t span = bytes + kHugePage;
  if (span < bytes) return nullptr;
  void* mapped = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* start = static_cast<char*>(mapped);
  const auto past = reinterpret_cast<std::size_t>(start) % kHugePage;
  char* aligned = past == 0 ? start : start + (kHugePage - past);
  if (aligned != start) munmap(start, static_cast<std::size_t>(aligned - start));
  char *end = aligned + bytes, *span_end = start + span;
  if (end != span_end) munmap(end, static_cast<std::size_t>(span_end - end));
  // A refusal leaves ordinary pages.
  madvise(aligned, bytes, MADV_HUGEPAGE);
  return aligned;
}
void unmap_block(const Block& block) { munmap(block.start, block.bytes); }
#else
void* map_block(std::size_t bytes) { return std::aligned_alloc(64, bytes); }
void unmap_block(const Block& block) { std::free(block.start); }
#endif

class ResultMemory {
 public:
  void* acquire(std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::size_t wanted = rounded_up(bytes);
    if (wanted < bytes) return nullptr;
    // The most recently freed block that fits without wasting more than a quarter.
    for (std::size_t i = free_.size(); i-- > 0;) {
      if (free_[i].bytes < wanted || free_[i].bytes - wanted > wanted / 4) continue;
      const Block block = free_[i];
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      held_ -= block.bytes;
      used_.emplace(block.start, block.bytes);
      return block.start;
    }
    void* start = map_block(wanted);
    if (start != nullptr) used_.emplace(start, wanted);
    return start;
  }

  void release(void* start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(start);
    if (found == used_.end()) return;
    const Block block = {start, found->second};
    used_.erase(found);
    free_.push_back(block);
    held_ += block.bytes;
    shrink_to(limit_);
  }

  std::size_t size(void* start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find(start);
    return found == used_.end() ? 0 : found->second;
  }

  std::size_t limit() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return limit_;
  }
  void set_limit(std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    shrink_to(limit_);
  }
  std::size_t held() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }
  void empty() {
    const std::lock_guard<std::mutex> lock(mutex_);
    shrink_to(0);
  }

  // Held over a fork, so that the child does not inherit a lock that nobody will open.
  std::mutex& mutex() { return mutex_; }

 private:
  void shrink_to(std::size_t bytes) {
    std::size_t gone = 0;
    for (; held_ > bytes; ++gone) {
      held_ -= free_[gone].bytes;
      unmap_block(free_[gone]);
    }
    free_.erase(free_.begin(), free_.begin() + static_cast<std::ptrdiff_t>(gone));
  }

  std::mutex mutex_;
  std::vector<Block> free_;  // the least recently freed first
  std::unordered_map<void*, std::size_t> used_;
  std::size_t held_ = 0, limit_ = 0;
};

// Never destroyed: arrays may be freed after static objects are gone.
ResultMemory& memory() {
  static auto* instance = new ResultMemory;
  return *instance;
}

#ifdef __unix__
const int at_fork_registered = pthread_atfork([] { memory().mutex().lock(); },
                                              [] { memory().mutex().unlock(); },
                                              [] { memory().mutex().unlock(); });
#endif

}  // namespace

void* acquire_result(std::size_t bytes) { return memory().acquire(bytes); }
void release_result(void* block) {
  if (block != nullptr) memory().release(block);
}
std::size_t result_size(void* block) { return memory().size(block); }
std::size_t result_cache_limit() { return memory().limit(); }
void set_result_cache_limit(std::size_t bytes) { memory().set_limit(bytes); }
std::size_t result_cache_held() { return memory().held(); }
void empty_result_cache() { memory().empty(); }

}  // namespace groupnorm
