// Planes whose rows are shorter than a vector, as planes of wide rows.
//
// Such rows lie one after the other. Where they are channels (of 2 x 2 positions, say) several of them are one row of
// columns, each with its channel's numbers; where they are positions (of three channels) several are one row, with the
// channels' numbers again and again. The kernels for columns do the rest. A row by itself costs as much as two vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "channels-inl.h"
#include "kernels.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

constexpr std::int64_t kMostWide = 512;

// One row of columns is as wide as it can be. One that is a channel is taken as many of them are, so that no bit shows
// whether a channel had others beside it.
template <bool kColumns>
bool is_narrow(std::int64_t rows, std::int64_t length, std::initializer_list<std::int64_t> strides) {
  if ((kColumns && rows < 2) || length >= kNarrow) return false;
  for (const std::int64_t stride : strides) {
    if (stride != length) return false;
  }
  return true;
}

// Each channel's numbers for each of its positions, for rows of so many positions: a register of them is one load from
// where the first of their channels is, permuted.
class NumbersOfRows {
 public:
  std::int64_t channels = 0;
  const std::int64_t positions;

  GROUPNORM_INLINE explicit NumbersOfRows(std::int64_t positions_) : positions(positions_) {
    int channel = 0;
    std::int64_t left = positions;
    for (int i = 0; i < 2 * kLanes; ++i) {
      channel_of_[i] = wide_channel_of_[i] = channel;
      if (--left > 0) continue;
      ++channel;
      left = positions;
    }
  }

  // Array by array: all of them in one loop, which knows their number at run time only, took a quarter longer.
  template <class E>
  GROUPNORM_INLINE void operator()(E* to, const E* from) const {
    using R = std::remove_reference_t<decltype(Vec<E>().v[0])>;
    constexpr std::int64_t kRegister = sizeof(R) / sizeof(E);
    const std::int64_t total = channels * positions, step = kRegister / positions, rest = kRegister % positions;
    std::int64_t channel = 0, position = 0, i = 0;
    for (; i < total; i += kRegister) {
      R numbers;
      std::memcpy(&numbers, from + channel, sizeof numbers);
      numbers = permute_register(numbers, places(E()) + position);
      std::memcpy(to + i, &numbers, sizeof numbers);
      channel += step;
      position += rest;
      if (position >= positions) {
        position -= positions;
        ++channel;
      }
    }
    store(to + i, set1<Vec<E>>(0));
  }

 private:
  GROUPNORM_INLINE const std::int32_t* places(float) const { return channel_of_; }
  GROUPNORM_INLINE const std::int64_t* places(double) const { return wide_channel_of_; }

  // Of elements counted from a channel's first.
  std::int32_t channel_of_[2 * kLanes];
  std::int64_t wide_channel_of_[2 * kLanes];
};

// The numbers of so many channels so many times.
struct NumbersOfColumns {
  std::int64_t channels, times;

  template <class E>
  GROUPNORM_INLINE void operator()(E* to, const E* from) const {
    for (std::int64_t i = 0; i < times; ++i) store(to + i * channels, load(from));
    store(to + times * channels, set1<Vec<E>>(0));
  }
};

// How many rows of so few columns are one: whole vectors, and at least four rows of them if there are enough.
inline std::int64_t rows_in_one(std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kWidest = 128;
  std::int64_t unit = kLanes;
  for (std::int64_t even = columns; even % 2 == 0 && unit > 1; even /= 2) unit /= 2;
  return unit * larger<std::int64_t>(1, smaller(kWidest / (unit * columns), rows / (4 * unit)));
}

// Tables of wide rows. What a kernel does not read is left out. in_double: the numbers in double are read; guarded: single
// vectors may be looked at again in double.
class WideNumbers {
 public:
  template <class Copy>
  GROUPNORM_INLINE ChannelTable for_normalize(const ChannelTable& table, const Copy& copy, bool in_double,
                                              bool guarded, bool tail) {
    ChannelTable result = common(table, copy, in_double, guarded);
    if (guarded) {
      result.guard = take(table.guard, copy);
      result.watch = take(table.watch, copy);
      if (tail) result.tail = take(table.tail, copy);
    }
    return result;
  }
  template <class Copy>
  GROUPNORM_INLINE ChannelTable for_reduce(const ChannelTable& table, const Copy& copy, bool in_double, bool guarded) {
    ChannelTable result = common(table, copy, in_double, guarded);
    if (guarded) result.guard = take(table.guard, copy);
    if (in_double) result.exact.rstd = take(table.exact.rstd, copy);
    else result.single.rstd = take(table.single.rstd, copy);
    return result;
  }
  template <class Copy>
  GROUPNORM_INLINE ChannelTable for_apply(const ChannelTable& table, const Copy& copy, bool in_double, bool guarded) {
    ChannelTable result = common(table, copy, in_double, guarded);
    if (guarded) result.guard = take(table.guard, copy);
    if (in_double) add_means(result.exact, table.exact, copy);
    else add_means(result.single, table.single, copy);
    return result;
  }

 private:
  template <class Copy>
  GROUPNORM_INLINE ChannelTable common(const ChannelTable& table, const Copy& copy, bool in_double, bool guarded) {
    ChannelTable result;
    if (!in_double) add_scaling(result.single, table.single, copy);
    if (in_double || guarded) {
      add_scaling(result.exact, table.exact, copy);
      result.exact.center_low = take(table.exact.center_low, copy);
    }
    return result;
  }
  template <class Real, class Copy>
  GROUPNORM_INLINE void add_scaling(Coefficients<Real>& to, const Coefficients<Real>& from, const Copy& copy) {
    to.center = take(from.center, copy);
    to.multiplier = take(from.multiplier, copy);
    to.offset = take(from.offset, copy);
  }
  template <class Real, class Copy>
  GROUPNORM_INLINE void add_means(Coefficients<Real>& to, const Coefficients<Real>& from, const Copy& copy) {
    to.grad_multiplier = to.multiplier;  // one array, as the table has it
    to.grad_offset = take(from.grad_offset, copy);
    to.grad_slope = take(from.grad_slope, copy);
  }
  template <class Copy>
  GROUPNORM_INLINE const float* take(const float* from, const Copy& copy) {
    float* const to = floats_[used_floats_++];
    copy(to, from);
    return to;
  }
  template <class Copy>
  GROUPNORM_INLINE const double* take(const double* from, const Copy& copy) {
    double* const to = doubles_[used_doubles_++];
    copy(to, from);
    return to;
  }

  // A last register may be written whole, and sixteen numbers are read from any column on.
  alignas(64) float floats_[6][kMostWide + 2 * kLanes];
  alignas(64) double doubles_[6][kMostWide + 2 * kLanes];
  int used_floats_ = 0, used_doubles_ = 0;
};

// body(first row, rows, length, numbers) for wide planes that together are one of so many narrow rows; numbers make their
// tables, of rows from the plane's table from that row on.
template <bool kColumns, class Body>
GROUPNORM_INLINE void for_each_wide(std::int64_t rows, std::int64_t length, const Body& body) {
  if constexpr (kColumns) {
    const std::int64_t in_one = rows_in_one(rows, length), whole = rows / in_one, rest = rows % in_one;
    if (whole != 0) body(0, whole, in_one * length, NumbersOfColumns{length, in_one});
    if (rest != 0) body(whole * in_one, 1, rest * length, NumbersOfColumns{length, rest});
  } else {
    const std::int64_t in_one = kMostWide / length;
    NumbersOfRows numbers(length);
    for (std::int64_t first = 0; first < rows; first += in_one) {
      numbers.channels = smaller(in_one, rows - first);
      body(first, 1, numbers.channels * length, numbers);
    }
  }
}

}  // namespace
}  // namespace groupnorm
