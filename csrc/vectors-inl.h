// Walking over memory in vectors of sixteen lanes: loads and stores of any of the four types, tails, and
// the loops over rows and columns that the kernels share.
//
// Guarantee: nothing outside the given elements is read or written. Everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "half.h"

namespace groupnorm {
namespace {

// Not std::min and std::max: an instance of those that is not inlined would be shared with the
// baseline.
template <class N>
constexpr N smaller(N a, N b) {
  return b < a ? b : a;
}
template <class N>
constexpr N larger(N a, N b) {
  return a < b ? b : a;
}

template <class T>
constexpr bool is_half = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

// Less than a vector's bytes, as two moves that may overlap: a call of memcpy would cost more than
// the vector.
template <int kBytes>
GROUPNORM_INLINE void copy_ends(void* to, const void* from, std::size_t bytes) {
  struct Block {
    unsigned char bytes[kBytes];
  } first, last;
  std::memcpy(&first, from, kBytes);
  std::memcpy(&last, static_cast<const unsigned char*>(from) + bytes - kBytes, kBytes);
  std::memcpy(to, &first, kBytes);
  std::memcpy(static_cast<unsigned char*>(to) + bytes - kBytes, &last, kBytes);
}
template <class T>
GROUPNORM_INLINE void copy_tail(void* to, const void* from, int count) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
  if (sizeof(T) == 8 && bytes >= 64) return copy_ends<64>(to, from, bytes);
  if (sizeof(T) >= 4 && bytes >= 32) return copy_ends<32>(to, from, bytes);
  if (bytes >= 16) return copy_ends<16>(to, from, bytes);
  if (bytes >= 8) return copy_ends<8>(to, from, bytes);
  if (bytes >= 4) return copy_ends<4>(to, from, bytes);
  copy_ends<2>(to, from, bytes);
}

template <class T>
GROUPNORM_INLINE auto load(const T* p, int count) {
  T lanes[kLanes] = {};
  copy_tail<T>(lanes, p, count);
  return load(lanes);
}
template <class T, class V>
GROUPNORM_INLINE void store(T* p, const V& a, int count) {
  T lanes[kLanes];
  store(lanes, a);
  copy_tail<T>(p, lanes, count);
}

GROUPNORM_INLINE F32 convert(const F32& a, float) { return a; }
GROUPNORM_INLINE F64 convert(const F32& a, double) { return widen(a); }
GROUPNORM_INLINE F64 convert(const F64& a, double) { return a; }
GROUPNORM_INLINE F64 widen(const F64& a) { return a; }
GROUPNORM_INLINE F32 narrow_to(const F64& a, float) { return narrow(a); }
GROUPNORM_INLINE F64 narrow_to(const F64& a, double) { return a; }

// count is kLanes in the body of a row, where the compiler drops the test, and less in its tail.
template <class Real, class T>
GROUPNORM_INLINE Vec<Real> load_as(const T* p, int count) {
  if constexpr (std::is_same_v<T, Float16> && std::is_same_v<Real, double>) {
    if (count == kLanes) return load_wide(p);
  }
  return count == kLanes ? convert(load(p), Real()) : convert(load(p, count), Real());
}
template <class T, class V>
GROUPNORM_INLINE void store_as(T* p, const V& a, int count) {
  const auto narrowed = [&]() GROUPNORM_INLINE_LAMBDA {
    if constexpr (std::is_same_v<V, F64> && !std::is_same_v<T, double>) {
      return narrow(a);
    } else {
      return a;
    }
  }();
  if (count == kLanes) {
    store(p, narrowed);
  } else {
    store(p, narrowed, count);
  }
}

// Whether a kernel that computes in float works on rows and columns in split order (lanes.h).
template <class T>
constexpr bool is_split = std::is_same_v<T, BFloat16>;

// In the order of the kernel's lanes: that of the elements, or split.
template <bool kSplit, class Real, class T>
GROUPNORM_INLINE Vec<Real> load_lanes(const T* p, int count) {
  if constexpr (kSplit) {
    const auto whole = [](const T* q) GROUPNORM_INLINE_LAMBDA {
      if constexpr (std::is_same_v<Real, double>) return load_split_wide(q);
      else return load_split(q);
    };
    if (count == kLanes) return whole(p);
    T lanes[kLanes] = {};
    copy_tail<T>(lanes, p, count);
    return whole(lanes);
  } else {
    return load_as<Real>(p, count);
  }
}
template <bool kSplit, class T, class V>
GROUPNORM_INLINE void store_lanes(T* p, const V& a, int count) {
  if constexpr (kSplit) {
    if (count == kLanes) return store_split(p, a);
    T lanes[kLanes];
    store_split(lanes, a);
    copy_tail<T>(p, lanes, count);
  } else {
    store_as(p, a, count);
  }
}
// Numbers of sixteen elements brought into that order, and back.
template <bool kSplit, class V>
GROUPNORM_INLINE V to_lanes(const V& a) {
  if constexpr (kSplit) return to_split(a);
  else return a;
}
template <bool kSplit, class V>
GROUPNORM_INLINE V from_lanes(const V& a) {
  if constexpr (kSplit) return from_split(a);
  else return a;
}

// step(index, count) over a row: whole vectors first, then the tail.
template <class Step>
GROUPNORM_INLINE void for_each_vector(std::int64_t length, Step&& step) {
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) step(i, kLanes);
  if (i < length) step(i, static_cast<int>(length - i));
}

// Two whole vectors in the order that is cheapest, where the lanes are in split order.
template <bool kSplit, class Real, class T>
GROUPNORM_INLINE Two<Vec<Real>> load_two(const T* p) {
  if constexpr (kSplit) return load_split_two(p);
  else return {load_as<Real>(p, kLanes), load_as<Real>(p + kLanes, kLanes)};
}
template <bool kSplit, class T, class V>
GROUPNORM_INLINE void store_two(T* p, const Two<V>& a) {
  if constexpr (kSplit) {
    store_split_two(p, a);
  } else {
    store_as(p, a.first, kLanes);
    store_as(p + kLanes, a.second, kLanes);
  }
}
// The same for numbers of which none is below the normal range, but perhaps 0.
template <bool kSplit, class T, class V>
GROUPNORM_INLINE void store_normal_two(T* p, const Two<V>& a) {
  if constexpr (kSplit) store_normal_split_two(p, a);
  else store_two<false>(p, a);
}
constexpr std::uintptr_t kLineBytes = 64;
GROUPNORM_INLINE bool begins_line(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % kLineBytes == 0; }
// Whether rows are whole cache lines, none of which another row shares.
template <class T>
GROUPNORM_INLINE bool whole_lines(const void* rows, std::int64_t stride) {
  return begins_line(rows) && static_cast<std::uintptr_t>(stride) * sizeof(T) % kLineBytes == 0;
}
// The same of the part of each row that is written: what is before and after it might share one.
template <class T>
GROUPNORM_INLINE bool are_whole_lines(const T* rows, std::int64_t stride, std::int64_t length) {
  return whole_lines<T>(rows, stride) && static_cast<std::uintptr_t>(length) * sizeof(T) % kLineBytes == 0;
}
// Two vectors to whole lines of such rows.
template <bool kSplit, class T, class V>
GROUPNORM_INLINE void stream_two(T* p, const Two<V>& a) {
  if constexpr (kSplit) {
    stream_split_two(p, a);
  } else {
    stream(p, a.first);
    stream(p + kLanes, a.second);
  }
}
// The same for numbers of which none is below the normal range, but perhaps 0.
template <bool kSplit, class T, class V>
GROUPNORM_INLINE void stream_normal_two(T* p, const Two<V>& a) {
  if constexpr (kSplit) stream_normal_split_two(p, a);
  else stream_two<false>(p, a);
}
// A row long enough to be streamed though its ends share their lines with other rows.
constexpr std::int64_t kLongRow = 1024;
// value(i, count), whole vectors from each element of a row on where a cache line of y begins: streamed there. What is
// before and after is stored as usual. No line is both: one that was just stored would first have to leave the cache.
template <class T, class Value>
GROUPNORM_INLINE void stream_row(T* y, std::int64_t length, const Value& value) {
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(y) % kLineBytes;
  if (past % sizeof(T) != 0) {
    // An array that is not aligned to its type: no line begins at an element.
    return for_each_vector(length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
      store_as(y + i, value(i, count), count);
    });
  }
  std::int64_t i = 0;
  if (past != 0) {
    i = smaller(length, static_cast<std::int64_t>((kLineBytes - past) / sizeof(T)));
    store_as(y, value(0, static_cast<int>(i)), static_cast<int>(i));
  }
  for (; i + kLanes <= length; i += kLanes) stream(y + i, value(i, kLanes));
  const auto rest = static_cast<int>(length - i);
  if (rest > 0) store_as(y + i, value(i, rest), rest);
}
// The same of rows of columns that lie one after the other: value(i, column, count), of vectors that may run across the
// end of a row.
template <class T, class Value>
GROUPNORM_INLINE void stream_run(T* y, std::int64_t rows, std::int64_t columns, const Value& value) {
  std::int64_t column = 0, last = 0;
  stream_row(y, rows * columns, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
    column += i - last;
    last = i;
    if (column >= columns) column -= columns;
    return value(i, column, count);
  });
}
// Sums of thirty-two elements brought out of that order.
template <bool kSplit, class V>
GROUPNORM_INLINE Two<V> from_two(const Two<V>& a) {
  if constexpr (kSplit) return from_split_two(a);
  else return a;
}
// The sum of both vectors, in the order of the kernel's lanes.
template <bool kSplit, class V>
GROUPNORM_INLINE V add_two(const Two<V>& a) {
  if constexpr (kSplit) return add_split_two(a);
  else return a.first + a.second;
}

// Which element is in which lane.
alignas(64) constexpr float kElements[2][kLanes] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15}};
template <bool kSplit, class V>
GROUPNORM_INLINE V element_index() {
  return convert(load(kElements[kSplit]), typename V::element());
}
// The lanes of the other elements become 0.
template <bool kSplit, class V>
GROUPNORM_INLINE V first_elements(const V& a, int count) {
  using E = typename V::element;
  return select_lt(element_index<kSplit, V>(), set1<V>(static_cast<E>(count)), a, set1<V>(0));
}
template <bool kSplit, class V>
GROUPNORM_INLINE V last_elements(const V& a, int count) {
  using E = typename V::element;
  return select_lt(element_index<kSplit, V>(), set1<V>(static_cast<E>(kLanes - count)), set1<V>(0), a);
}

// Partial sums are taken in float over so many vectors or rows, then added up in double: enough that
// the conversion costs little, few enough that the rounding stays in the last bit of a term.
constexpr std::int64_t kFloatTerms = 16;

// The lanes' sum in the order of reduce_add, with the first eight additions in float: for lanes that have
// at most half of the terms.
template <class V>
GROUPNORM_INLINE double reduce_add_halves(const V& a) {
  constexpr int half = V::kRegisters / 2;
  V sums = a;
  if constexpr (half == 0) {
    sums.v[0] = a.v[0] + __builtin_shufflevector(a.v[0], a.v[0], 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3,
                                                 4, 5, 6, 7);
  } else {
    for (int i = 0; i < half; ++i) sums.v[i] = a.v[i] + a.v[i + half];
  }
  F64 eight = widen(sums);
  for (int left = F64::kRegisters / 4; left > 0; left /= 2) {
    for (int i = 0; i < left; ++i) eight.v[i] = eight.v[i] + eight.v[i + left];
  }
  return reduce_register(eight.v[0]);
}

// step(row, begin, end) over spans of a row that are summed in float.
template <class Step>
GROUPNORM_INLINE void for_each_span(std::int64_t rows, std::int64_t length, Step&& step) {
  constexpr std::int64_t span = kFloatTerms * kLanes;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < length; i += span) step(row, i, smaller(i + span, length));
  }
}

// step(first_row, end_row, column, count, fresh): blocks of rows, and in each all columns. The sums wait
// in memory for the next block, and so many rows are as many streams for the hardware's prefetcher.
// The last vector begins as far back as it must to be whole; only its last `fresh` lanes are columns
// that the block has not had. A count below kLanes is that of a narrower plane. With kTwo, two vectors are
// taken by step_two(first_row, end_row, column) as long as there are two.
template <bool kTwo, class Step, class StepTwo>
GROUPNORM_INLINE void for_each_column_block(std::int64_t rows, std::int64_t columns, Step&& step,
                                            [[maybe_unused]] StepTwo&& step_two) {
  for (std::int64_t row = 0; row < rows; row += kFloatTerms) {
    const std::int64_t end = smaller(row + kFloatTerms, rows);
    if (columns < kLanes) {
      const int count = static_cast<int>(columns);
      step(row, end, 0, count, count);
      continue;
    }
    std::int64_t column = 0;
    if constexpr (kTwo) {
      for (; column + 2 * kLanes <= columns; column += 2 * kLanes) step_two(row, end, column);
    }
    for (; column + kLanes <= columns; column += kLanes) step(row, end, column, kLanes, kLanes);
    if (column < columns) {
      step(row, end, columns - kLanes, kLanes, static_cast<int>(columns - column));
    }
  }
}

// What lies kFloatTerms rows further on, asked for while a column block is worked on and in the order of
// memory: so many rows side by side are more streams than the hardware's prefetcher follows. Each block
// asks for as many lines as it reads, so that all blocks together ask for all of the next rows, if these lie
// one after the other; else for some of them.
template <class T>
class NextRows {
 public:
  GROUPNORM_INLINE NextRows(const void* rows, std::int64_t stride, std::int64_t row,
                            std::int64_t column)
      : next_(reinterpret_cast<std::uintptr_t>(rows) + bytes((row + kFloatTerms) * stride) +
              bytes(column * kFloatTerms)) {}
  // The i-th part of kFloatTerms, for so many vectors side by side.
  template <int kVectors = 1>
  GROUPNORM_INLINE void ask(std::int64_t i) const {
    for (std::uintptr_t line = 0; line < bytes(kVectors * kLanes); line += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(next_ + bytes(i * kVectors * kLanes) + line), 0, 2);
    }
  }

 private:
  static constexpr std::uintptr_t bytes(std::int64_t elements) {
    return static_cast<std::uintptr_t>(elements) * sizeof(T);
  }

  std::uintptr_t next_;  // no pointer: it may lie beyond the tensor
};

// Of rows: what lies so many bytes further on, for each line of so many vectors that are read here; in the next plane
// too, which mostly lies there. The hardware's prefetcher stops at the end of a page, and has to see again where a plane
// begins.
template <int kVectors, class T>
GROUPNORM_INLINE void ask_ahead(const T* p) {
  constexpr std::uintptr_t kBytesAhead = 6144, kBytes = kVectors * kLanes * sizeof(T);
  const std::uintptr_t there = reinterpret_cast<std::uintptr_t>(p) + kBytesAhead;  // as above
  for (std::uintptr_t line = 0; line < kBytes; line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(there + line));
  }
}

// The sums of a column block: all lanes, or only the fresh ones.
GROUPNORM_INLINE void store_sums(double* p, const F64& sums, int count, int fresh) {
  if (fresh == count) return store_as(p, sums, count);
  double lanes[kLanes];
  store(lanes, sums);
  const int known = kLanes - fresh;
  copy_tail<double>(p + known, lanes + known, fresh);
}

}  // namespace
}  // namespace groupnorm
