#include "scratch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <utility>

#include "groupnorm.h"

namespace groupnorm {
namespace {

constexpr std::align_val_t kLine{64};

char* allocate(std::size_t bytes) { return static_cast<char*>(::operator new(bytes, kLine)); }
void deallocate(char* memory) { ::operator delete(memory, kLine); }

std::size_t whole_lines(std::size_t bytes) {
  constexpr std::size_t line = static_cast<std::size_t>(kLine);
  const std::size_t rounded = (std::max<std::size_t>(bytes, 1) + line - 1) / line * line;
  if (rounded < bytes) throw std::bad_alloc();
  return rounded;
}

// One after the other from a single block, the last first back. A call that needs more than the block makes it
// larger for the next.
class Arena {
 public:
  // A destructor of the thread's that runs later and calls finds an arena that keeps nothing.
  ~Arena() {
    resize(0);
    closed_ = true;
  }

  void* acquire(std::size_t bytes) {
    const std::size_t size = whole_lines(bytes);
    char* const memory = size <= size_ - used_ ? block_ + used_ : allocate(size);
    if (belongs(memory)) used_ += size;
    ++pieces_;
    total_ += size;
    peak_ = std::max(peak_, total_);
    return memory;
  }

  void release(char* memory, std::size_t bytes) {
    const std::size_t size = whole_lines(bytes);
    if (!belongs(memory)) {
      deallocate(memory);
    } else if (memory + size == block_ + used_) {
      used_ -= size;
    }
    total_ -= size;
    if (--pieces_ > 0) return;
    used_ = 0;
    const std::size_t wanted = std::max(size_, std::exchange(peak_, 0));
    if (!closed_) resize(std::min(wanted, limit()));
  }

  std::size_t size() const { return size_; }

 private:
  static std::size_t limit() {
    return kScratchPerThread * static_cast<std::size_t>(get_num_threads());
  }
  bool belongs(const char* memory) const {
    return block_ != nullptr && std::less_equal<>()(block_, memory) && std::less<>()(memory, block_ + size_);
  }

  void resize(std::size_t bytes) {
    if (bytes == size_) return;
    deallocate(std::exchange(block_, nullptr));
    size_ = 0;
    if (bytes == 0) return;
    // Without memory for it, the next call asks the heap again.
    block_ = static_cast<char*>(::operator new(bytes, kLine, std::nothrow));
    if (block_ != nullptr) size_ = bytes;
  }

  char* block_ = nullptr;
  std::size_t size_ = 0, used_ = 0;               // of the block
  std::size_t pieces_ = 0, total_ = 0, peak_ = 0;  // in use, from the block and from the heap
  bool closed_ = false;
};

thread_local Arena arena;
std::atomic<int> poison{-1};

}  // namespace

void* acquire_scratch(std::size_t bytes) {
  void* const memory = arena.acquire(bytes);
  const int byte = poison.load(std::memory_order_relaxed);
  if (byte >= 0) std::memset(memory, byte, bytes);
  return memory;
}
void release_scratch(void* memory, std::size_t bytes) { arena.release(static_cast<char*>(memory), bytes); }
void poison_scratch(int byte) { poison.store(byte, std::memory_order_relaxed); }
std::size_t scratch_held() { return arena.size(); }

}  // namespace groupnorm
