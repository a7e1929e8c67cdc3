#include "scratch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
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
  void* acquire(std::size_t bytes) {
    const std::size_t size = whole_lines(bytes);
    char* const memory = size <= size_ - used_ ? block_ + used_ : allocate(size);
    if (belongs(memory)) used_ += size;
    ++pieces_;
    total_ += size;
    peak_ = std::max(peak_, total_);
    return memory;
  }

  // Whether it was the last piece.
  bool release(char* memory, std::size_t bytes) {
    const std::size_t size = whole_lines(bytes);
    if (!belongs(memory)) {
      deallocate(memory);
    } else if (memory + size == block_ + used_) {
      used_ -= size;
    }
    total_ -= size;
    if (--pieces_ > 0) return false;
    used_ = 0;
    return true;
  }

  // Without a piece in use: as much as the last calls needed, within a limit.
  void keep(std::size_t limit) { resize(std::min(std::max(size_, std::exchange(peak_, 0)), limit)); }
  void clear() { resize(0); }
  std::size_t size() const { return size_; }

 private:
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
};

// The calling thread's, one for each thread that it computes with. Made without asking the heap: an exception from the
// constructor of a thread's variable would leave it half made.
class Lanes {
 public:
  constexpr Lanes() = default;

  Arena& operator[](std::size_t lane) {
    if (lane == 0) return first_;
    if (others_ == nullptr) others_ = std::make_unique<std::deque<Arena>>();
    while (others_->size() < lane) others_->emplace_back();
    return (*others_)[lane - 1];
  }

  // After the last piece of a lane: the first, which is done last and has what all threads share, may keep what the
  // others leave.
  void keep(std::size_t lane) {
    const auto threads = static_cast<std::size_t>(get_num_threads());
    if (lane > 0) return (*this)[lane].keep(lane < threads ? kScratchPerThread : 0);
    for_each_other([&](Arena& arena, std::size_t other) {
      if (other >= threads) arena.clear();
    });
    const std::size_t others = held() - first_.size(), limit = kScratchPerThread * threads;
    first_.keep(limit - std::min(limit, others));
  }

  std::size_t held() const {
    std::size_t bytes = first_.size();
    for_each_other([&](const Arena& arena, std::size_t) { bytes += arena.size(); });
    return bytes;
  }

  // A destructor of the thread's that runs later and calls finds that nothing is kept.
  static bool closed() { return closed_; }
  ~Lanes() {
    first_.clear();
    for_each_other([](Arena& arena, std::size_t) { arena.clear(); });
    closed_ = true;
  }

 private:
  // body(arena, lane)
  template <class Body>
  void for_each_other(const Body& body) const {
    if (others_ == nullptr) return;
    for (std::size_t i = 0; i < others_->size(); ++i) body((*others_)[i], i + 1);
  }

  Arena first_;
  std::unique_ptr<std::deque<Arena>> others_;  // whose places stay what they are
  static thread_local bool closed_;
};

thread_local bool Lanes::closed_ = false;
thread_local Lanes lanes;
thread_local std::size_t current_lane = 0;
std::atomic<int> poison{-1};

}  // namespace

ScratchLane::ScratchLane(std::size_t lane) : previous_(std::exchange(current_lane, lane)) {}
ScratchLane::~ScratchLane() { current_lane = previous_; }

void* acquire_scratch(std::size_t bytes) {
  void* const memory = Lanes::closed() ? allocate(whole_lines(bytes)) : lanes[current_lane].acquire(bytes);
  const int byte = poison.load(std::memory_order_relaxed);
  if (byte >= 0) std::memset(memory, byte, bytes);
  return memory;
}
void release_scratch(void* memory, std::size_t bytes) {
  if (Lanes::closed()) return deallocate(static_cast<char*>(memory));
  const std::size_t lane = current_lane;
  if (lanes[lane].release(static_cast<char*>(memory), bytes)) lanes.keep(lane);
}
void poison_scratch(int byte) { poison.store(byte, std::memory_order_relaxed); }
std::size_t scratch_held() { return Lanes::closed() ? 0 : lanes.held(); }

}  // namespace groupnorm
