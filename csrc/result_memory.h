// Memory for large results: mapped by itself, in huge pages where the system gives them, and kept for
// a while after it is freed.
//
// Why: a freshly mapped result costs more in page faults than group norm costs in work. A network asks
// for the same sizes again and again, so the blocks it has just freed are the ones it wants next.
//
// Guarantees: no Python here; at most cache_limit() bytes are kept, the least recently freed go first;
// with a limit of 0 nothing is kept. Safe to call from any thread.
#pragma once

#include <cstddef>

namespace groupnorm {

// From so many bytes on, an allocation is worth a mapping of its own.
constexpr std::size_t kLargeResult = std::size_t{1} << 20;

void* acquire_result(std::size_t bytes);  // null where there is no memory
void release_result(void* block);         // of acquire_result, or null
std::size_t result_size(void* block);     // usable bytes of a block that has not been released

std::size_t result_cache_limit();
void set_result_cache_limit(std::size_t bytes);
std::size_t result_cache_held();  // bytes kept now
void empty_result_cache();

}  // namespace groupnorm
