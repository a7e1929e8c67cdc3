// Memory of one call that is too much for the stack, kept by the calling thread for its next call.
//
// Why: half a megabyte that is mapped, touched and unmapped by every call costs a small tensor more in page
// faults than the kernels cost: (2, 2560, 8, 8) channels last spent a third of its forward there.
//
// Each thread that a call computes with has a lane of its own, whose memory no other one uses in any call: a line that
// one core has written costs another as much as many numbers, and more where they share no cache.
//
// Guarantees: no Python here; a thread keeps at most about kScratchPerThread for each thread that it computes with (the
// first lane's share is set anew when its last piece is released), and gives it back when it ends. What is more comes
// from the heap and goes back there.
#pragma once

#include <cstddef>

namespace groupnorm {

constexpr std::size_t kScratchPerThread = std::size_t{2} << 20;

// What is acquired and released while it lives is of this lane; else of the first, the calling thread's own.
class ScratchLane {
 public:
  explicit ScratchLane(std::size_t lane);
  ~ScratchLane();
  ScratchLane(const ScratchLane&) = delete;
  ScratchLane& operator=(const ScratchLane&) = delete;

 private:
  std::size_t previous_;
};

// Aligned to a cache line, unwritten. Throws std::bad_alloc. To be released, with the same size and in the same lane,
// by the thread that acquired it.
void* acquire_scratch(std::size_t bytes);
void release_scratch(void* memory, std::size_t bytes);

// For tests: what is acquired from now on is filled with this byte; negative: with nothing. No result may show it.
void poison_scratch(int byte);

// Bytes that the calling thread keeps now.
std::size_t scratch_held();

}  // namespace groupnorm
