// The numbers of a plane's channels in the lanes of a kernel, and the order planes are walked in.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "kernels.h"
#include "table_part.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

// How a kernel finds the numbers of its lanes: those of one channel are for all lanes (rows), those of
// sixteen channels (columns) are in the order of the lanes, or have to be brought into split order, or,
// being those of the first or the second of two vectors, into theirs; or a vector runs across the end of a row.
enum class Numbers {
  of_row, of_columns, of_columns_to_split, of_columns_to_first, of_columns_to_second, across_rows
};

template <bool kColumns>
constexpr Numbers numbers_of = kColumns ? Numbers::of_columns : Numbers::of_row;

// Of such a vector: lanes whose element is below the end have the numbers of the row, the others those of the next. They
// are made of the two rows' numbers, which are in registers: to look them up again took a third of a row's time.
template <class V>
struct AcrossRows {
  V element, end;

  GROUPNORM_INLINE V operator()(const V& row, const V& next) const { return select_lt(element, end, row, next); }
};

template <Numbers kNumbers, class Real>
GROUPNORM_INLINE Vec<Real> channel(const Real* array, std::int64_t at) {
  static_assert(kNumbers != Numbers::across_rows);
  if constexpr (kNumbers == Numbers::of_row) {
    return set1<Vec<Real>>(array[at]);
  } else if constexpr (kNumbers == Numbers::of_columns_to_first) {
    return to_split_two(load_two<false, Real>(array + at)).first;
  } else if constexpr (kNumbers == Numbers::of_columns_to_second) {
    return to_split_two(load_two<false, Real>(array + at)).second;
  } else {
    return to_lanes<kNumbers == Numbers::of_columns_to_split>(load(array + at));
  }
}

template <class Real>
GROUPNORM_INLINE const Coefficients<Real>& coefficients(const ChannelTable& table) {
  if constexpr (std::is_same_v<Real, float>) {
    return table.single;
  } else {
    return table.exact;
  }
}

// x less the mean. In double the mean is the sum of two; in float the table's other numbers have taken
// in what one float cannot hold of it (channel_table.cpp). So the difference keeps its relative error
// whatever the mean.
template <Numbers kNumbers, class Real>
struct Centering {
  using OfRow = Centering<Numbers::of_row, Real>;
  Vec<Real> center;
  std::conditional_t<std::is_same_v<Real, double>, F64, char> low{};

  GROUPNORM_INLINE Centering(const Coefficients<Real>& c, std::int64_t at) : center(channel<kNumbers>(c.center, at)) {
    if constexpr (std::is_same_v<Real, double>) low = channel<kNumbers>(c.center_low, at);
  }
  GROUPNORM_INLINE Centering(const OfRow& row, const OfRow& next, const AcrossRows<Vec<Real>>& across)
      : center(across(row.center, next.center)) {
    if constexpr (std::is_same_v<Real, double>) low = across(row.low, next.low);
  }
  GROUPNORM_INLINE Vec<Real> operator()(const Vec<Real>& x) const {
    if constexpr (std::is_same_v<Real, double>) return (x - center) - low;
    else return x - center;
  }
};

template <Numbers kNumbers, class Real>
struct Scaling {
  using OfRow = Scaling<Numbers::of_row, Real>;
  Vec<Real> multiplier, offset;

  GROUPNORM_INLINE Scaling(const Coefficients<Real>& c, std::int64_t at)
      : multiplier(channel<kNumbers>(c.multiplier, at)), offset(channel<kNumbers>(c.offset, at)) {}
  GROUPNORM_INLINE Scaling(const OfRow& row, const OfRow& next, const AcrossRows<Vec<Real>>& across)
      : multiplier(across(row.multiplier, next.multiplier)), offset(across(row.offset, next.offset)) {}
  GROUPNORM_INLINE Vec<Real> operator()(const Vec<Real>& centred) const {
    return fma(centred, multiplier, offset);
  }
};

// v by way of double, for the few vectors where float has cancelled too far. The table's numbers in
// double are in the order of the channels, whatever that of the lanes.
template <bool kColumns, bool kSplit>
GROUPNORM_INLINE F32 exact_v(const ChannelTable& table, std::int64_t at, const F32& x) {
  constexpr bool kReorder = kColumns && kSplit;
  const Centering<numbers_of<kColumns>, double> center(table.exact, at);
  const Scaling<numbers_of<kColumns>, double> scale(table.exact, at);
  return to_lanes<kReorder>(narrow(scale(center(widen(from_lanes<kReorder>(x))))));
}

template <class T, class Real>
constexpr bool in_split_order = is_split<T> && std::is_same_v<Real, float>;

// A copy of column numbers in split order, of as many channels as the first cache can well hold; with kTwo,
// in that of two vectors as long as there are two.
constexpr std::int64_t kSplitColumns = 1024;
template <int kArrays, bool kTwo>
class SplitNumbers {
 public:
  GROUPNORM_INLINE explicit SplitNumbers(std::int64_t columns) : columns_(columns) {}
  GROUPNORM_INLINE const float* copy(const float* numbers) {
    float* const to = storage_[used_++];
    std::int64_t i = 0;
    if constexpr (kTwo) {
      for (; i + 2 * kLanes <= columns_; i += 2 * kLanes) {
        store_two<false>(to + i, to_split_two(load_two<false, float>(numbers + i)));
      }
    }
    for (; i < columns_; i += kLanes) store(to + i, to_split(load(numbers + i)));
    return to;
  }

 private:
  alignas(64) float storage_[kArrays][kSplitColumns];
  std::int64_t columns_;
  int used_ = 0;
};

// A copy of column numbers with the first of them again behind the last: of rows that lie one after the other, sixteen
// can be read from any column on.
constexpr std::int64_t kMostWrappedColumns = 1024;
template <int kArrays>
class WrappedNumbers {
 public:
  // Not fewer columns than lanes.
  GROUPNORM_INLINE explicit WrappedNumbers(std::int64_t columns) : columns_(columns) {}
  GROUPNORM_INLINE const float* copy(const float* numbers) {
    float* const to = storage_[used_++];
    std::memcpy(to, numbers, static_cast<std::size_t>(columns_) * sizeof(float));
    store(to + columns_, load(numbers));
    return to;
  }

 private:
  alignas(64) float storage_[kArrays][kMostWrappedColumns + kLanes];
  std::int64_t columns_;
  int used_ = 0;
};
// Whether rows of float32 are streamed as one run, with such numbers.
template <class Plane>
GROUPNORM_INLINE bool is_one_run(const Plane& plane, std::initializer_list<std::int64_t> strides) {
  for (const std::int64_t stride : strides) {
    if (stride != plane.length) return false;
  }
  return plane.stream && plane.length >= kLanes && plane.length <= kMostWrappedColumns;
}

// body(begin, end, table) over column ranges of whole vectors, each with its numbers in the order of the
// lanes; the table belongs to channel begin. copy(numbers, table) brings what the kernel reads into order.
template <bool kSplit, bool kTwo, int kArrays, class Copy, class Body>
GROUPNORM_INLINE void for_each_column_range(const ChannelTable& table, std::int64_t whole,
                                            const Copy& copy, const Body& body) {
  if constexpr (kSplit) {
    for (std::int64_t begin = 0; begin < whole; begin += kSplitColumns) {
      const std::int64_t end = smaller(begin + kSplitColumns, whole);
      SplitNumbers<kArrays, kTwo> numbers(end - begin);
      ChannelTable part = table_from(table, begin);
      copy(numbers, part);
      body(begin, end, part);
    }
  } else {
    body(0, whole, table);
  }
}

// Short rows that lie one after the other, walked as one run in steps of two vectors, which may run across the end of
// a row: of rows of 49 elements, 49 of 64 lanes would be of use if each began anew. A row has at least two vectors,
// so no step meets more than one end, and what is left in the end is of the last row. The longer a row, the less
// there is to gain, and the backward has to read dv again for the sums of each row.
//
// Rows of whole vectors are never joined. They would gain nothing; and by this, a stride that equals the length says
// that dv was kept by a joined reduce, in the order of the elements: not joined, the 16-bit types keep it in rows of
// whole vectors. That is how reduce, apply and the driver, each of which sees other strides, agree.
constexpr std::int64_t kLongestJoined = 255, kLongestJoinedGradient = 111;
inline bool joins_rows(std::int64_t length, std::int64_t longest, std::initializer_list<std::int64_t> strides) {
  if (!kTwoVectors || length < 2 * kLanes || length > longest || length % kLanes == 0) return false;
  for (const std::int64_t stride : strides) {
    if (stride != length) return false;
  }
  return true;
}

inline bool joins_gradient_rows(std::int64_t length, std::initializer_list<std::int64_t> strides) {
  return joins_rows(length, kLongestJoinedGradient, strides);
}

// Elements of such a run before its first whole cache line of results, which are taken by themselves so that all steps
// write whole lines: what crosses two lines is done twice. None of a short run, in which a part of a vector costs more.
template <class T>
GROUPNORM_INLINE std::int64_t joined_head(const T* results, std::int64_t rows, std::int64_t length) {
  constexpr std::int64_t kLeast = 2048;
  static_assert(kLineBytes / sizeof(T) <= 2 * kLanes, "a head is less than the shortest row");
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(results) % kLineBytes;
  if (past % sizeof(T) != 0 || rows * length < kLeast) return 0;
  return static_cast<std::int64_t>((kLineBytes - past) % kLineBytes / sizeof(T));
}

class JoinedRows {
 public:
  // The head, less than a row (joined_head), is for others to take.
  GROUPNORM_INLINE JoinedRows(std::int64_t rows, std::int64_t length, std::int64_t head)
      : length_(length), place_(head), end_(length), last_row_(rows - 1) {}
  // Whether there is another step, where it begins, and how much of its row is left there: perhaps nothing. After the
  // last step that is what no step has had.
  GROUPNORM_INLINE bool more() const { return within_row() || row_ < last_row_; }
  GROUPNORM_INLINE std::int64_t place() const { return place_; }
  GROUPNORM_INLINE std::int64_t row() const { return row_; }
  GROUPNORM_INLINE std::int64_t row_left() const { return end_ - place_; }
  GROUPNORM_INLINE bool within_row() const { return row_left() >= kStep; }
  GROUPNORM_INLINE void advance() {
    if (!within_row()) {
      ++row_;
      end_ += length_;
    }
    place_ += kStep;
  }
 private:
  static constexpr std::int64_t kStep = 2 * kLanes;
  std::int64_t length_, place_, row_ = 0, end_, last_row_;
};

// Which element is in which lane of two vectors.
template <bool kSplit, class V>
GROUPNORM_INLINE Two<V> elements_of_two() {
  const V first = element_index<false, V>();
  const Two<V> in_order = {first, first + set1<V>(kLanes)};
  if constexpr (kSplit) return to_split_two(in_order);
  else return in_order;
}

// Rows of a column plane that share one load of their channels' numbers: where those are too many for the
// first cache, and where two vectors are taken at a time and the rows are close by; fewer numbers than that are
// no reason to take rows from memory side by side.
constexpr std::int64_t kColumnRows = kTwoVectors ? 2 : 4, kManyColumns = 1024;

// Rows that are channels may come from the last to the first, so many elements at a time: the first half of the work has
// read them in their order, and the last ones are still in the first cache. The 16-bit types, which are bound by
// arithmetic, lost by it.
constexpr std::int64_t kTurn = 1024;

// step(first row, number of rows as an integral constant)
template <class T, bool kColumns, class Plane, class Step>
GROUPNORM_INLINE void for_each_row_block(const Plane& plane, [[maybe_unused]] bool from_end, const Step& step) {
  constexpr std::integral_constant<int, 1> one{};
  std::int64_t row = 0;
  if constexpr (!kColumns && !is_half<T>) {
    const std::int64_t rows = from_end ? larger<std::int64_t>(1, kTurn / plane.length) : plane.rows;
    for (std::int64_t end = plane.rows; end > 0; end -= rows) {
      for (row = larger<std::int64_t>(0, end - rows); row < end; ++row) step(row, one);
    }
    return;
  }
  if constexpr (kColumns) {
    if (plane.length >= kManyColumns || (kTwoVectors && !plane.far)) {
      for (; row + kColumnRows <= plane.rows; row += kColumnRows) {
        step(row, std::integral_constant<int, kColumnRows>());
      }
    }
  }
  for (; row < plane.rows; ++row) step(row, one);
}

}  // namespace
}  // namespace groupnorm
