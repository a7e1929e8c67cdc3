// Results that go past the caches: from which size on, and how large the cache is that cores share.
//
// Why: a store to memory that is not in cache first reads it. A result that leaves the cache anyway is better
// written around it, which also leaves room there for what is read twice.
#pragma once

#include <cstdint>

namespace groupnorm {

// The last level of cache, of one group of cores that share it; a guess where the CPU does not say.
std::int64_t shared_cache_bytes();

// What is taken for its size: results that would leave a cache of so many bytes are streamed. Only speed depends on it.
// Less than its size where the cache is distant: a large one that all cores share is so far away that a store which has
// to fetch a line from it costs more than one around it. More where all cores share a small one.
std::int64_t stream_limit();
void set_stream_limit(std::int64_t bytes);  // negative: back to what the cache says

// Whether results are streamed that would gain nothing by it where the cache is close. Also where a limit was set.
bool shared_cache_is_distant();

}  // namespace groupnorm
