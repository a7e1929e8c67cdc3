// Memory of one call that is too much for the stack, kept by the calling thread for its next call.
//
// Why: half a megabyte that is mapped, touched and unmapped by every call costs a small tensor more in page
// faults than the kernels cost: (2, 2560, 8, 8) channels last spent a third of its forward there.
//
// Guarantees: no Python here; a thread keeps at most kScratchPerThread for each thread that it computes with, and
// gives it back when it ends. What is more comes from the heap and goes back there.
#pragma once

#include <cstddef>

namespace groupnorm {

constexpr std::size_t kScratchPerThread = std::size_t{2} << 20;

// Aligned to a cache line, unwritten. Throws std::bad_alloc. To be released, with the same size, by the thread that
// acquired it.
void* acquire_scratch(std::size_t bytes);
void release_scratch(void* memory, std::size_t bytes);

// For tests: what is acquired from now on is filled with this byte; negative: with nothing. No result may show it.
void poison_scratch(int byte);

// Bytes that the calling thread keeps now.
std::size_t scratch_held();

}  // namespace groupnorm
