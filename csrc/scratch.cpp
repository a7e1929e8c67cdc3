#include "scratch.h"

#include <algorithm>
#include <functional>
#include <new>
#include <utility>

#include "groupnorm.h"

namespace groupnorm {
namespace {

constexpr std::align_val_t kLine{64};

char* allocate(std::size_t bytes) { return static_cast<char*>(::operator new(bytes, kLine)); }
void deallocate(char* memory) { ::operator delete(memory, kLine); }

// One after the other from a single block, which starts anew when nothing of it is in use. A call that needs
// more than the block makes it larger for the next.
class Arena {
 public:
  ~Arena() { deallocate(block_); }

  void* acquire(std::size_t bytes) {
    constexpr std::size_t line = static_cast<std::size_t>(kLine);
    const std::size_t rounded = (bytes + line - 1) / line * line;
    if (rounded < bytes) throw std::bad_alloc();
    char* const memory = rounded <= size_ - used_ ? block_ + used_ : allocate(rounded);
    if (belongs(memory)) used_ += rounded;
    // Bounded, so that it cannot overflow; more than the limit is not kept anyway.
    wanted_ = std::min(wanted_ + std::min(rounded, limit()), 2 * limit());
    ++in_use_;
    return memory;
  }

  void release(void* memory) {
    if (!belongs(static_cast<char*>(memory))) deallocate(static_cast<char*>(memory));
    if (--in_use_ > 0) return;
    used_ = 0;
    grow(std::min(std::exchange(wanted_, 0), limit()));
  }

  std::size_t size() const { return size_; }

 private:
  static std::size_t limit() {
    return kScratchPerThread * static_cast<std::size_t>(get_num_threads());
  }
  bool belongs(const char* memory) const {
    return block_ != nullptr && std::less_equal<>()(block_, memory) && std::less<>()(memory, block_ + size_);
  }

  void grow(std::size_t bytes) {
    if (bytes <= size_) return;
    deallocate(std::exchange(block_, nullptr));
    size_ = 0;
    // Without memory for it, the next call asks the heap again.
    block_ = static_cast<char*>(::operator new(bytes, kLine, std::nothrow));
    if (block_ != nullptr) size_ = bytes;
  }

  char* block_ = nullptr;
  std::size_t size_ = 0, used_ = 0, wanted_ = 0, in_use_ = 0;
};

thread_local Arena arena;

}  // namespace

void* acquire_scratch(std::size_t bytes) { return arena.acquire(bytes); }
void release_scratch(void* memory) { arena.release(memory); }
std::size_t scratch_held() { return arena.size(); }

}  // namespace groupnorm
