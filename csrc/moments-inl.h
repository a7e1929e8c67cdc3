// Count, mean and m2 of runs of memory and of columns.
//
// Guarantees: sums are taken in double, or of float32 in float over a few terms and in double over those;
// where that would cost more than rounding they are taken again in double, which depends on the values
// only. float32 and float64 are summed less a shift near the data; the 16-bit types as they are, which is
// exact where a shift would matter (moments_of_sums). A residual is added on the way, and the sum is
// stored as it is measured.
#pragma once

#include "kernels.h"
#include "narrow-inl.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

std::uint64_t kernel_calls = 0;

// Not one addition: that would wait for all loads and stores before it. Of calls at the same time only one may
// be counted.
GROUPNORM_INLINE void count_call() {
  __atomic_store_n(&kernel_calls, __atomic_load_n(&kernel_calls, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

// x, or the sum of x and the residual as it was stored, in the order of the kernel's lanes. Whether there
// is a residual is a matter of types: its code in the loop would take the other's registers.
template <class T, bool kResidual, bool kSplit>
struct MomentsSource {
  const T* x;
  const T* residual;
  T* sum;

  GROUPNORM_INLINE MomentsSource(const MomentsPlane& plane, std::int64_t row)
      : x(static_cast<const T*>(plane.x) + row * plane.x_stride) {
    if constexpr (kResidual) {
      residual = static_cast<const T*>(plane.residual) + row * plane.residual_stride;
      sum = static_cast<T*>(plane.sum) + row * plane.sum_stride;
    }
  }

  template <class Real>
  GROUPNORM_INLINE Vec<Real> at(std::int64_t i, int count) const {
    if constexpr (!kResidual) {
      return load_lanes<kSplit, Real>(x + i, count);
    } else {
      using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
      const Vec<Sum> exact =
          load_lanes<kSplit, Sum>(x + i, count) + load_lanes<kSplit, Sum>(residual + i, count);
      store_lanes<kSplit>(sum + i, exact, count);
      return load_lanes<kSplit, Real>(sum + i, count);
    }
  }
  // The vector that ends where the row does; the elements before its last `fresh` have been had.
  template <class Real>
  GROUPNORM_INLINE Vec<Real> last(std::int64_t end, int fresh) const {
    if constexpr (kResidual) at<Real>(end - fresh, fresh);
    return load_lanes<kSplit, Real>((kResidual ? sum : x) + end - kLanes, kLanes);
  }
};

// Sums are taken of differences from a shift near the data: in a run in float each lane has its own, made
// from its first elements; a column's is the mean of its first rows.
constexpr std::int64_t kShiftRows = 8;

// Whether squares taken in float neither left its range nor lost their difference to a bad shift;
// written so that a NaN is not trusted.
constexpr double kMostSquares = 0x1p120, kLeastSquare = 0x1p-100, kLeastShare = 0x1p-4;
GROUPNORM_INLINE bool trusted(double count, double squares, double m2) {
  return (squares < kMostSquares) & (squares > count * kLeastSquare) & (m2 > squares * kLeastShare);
}
// The lanes of a run together: count elements in each, so many in all, less a shift of its own, with sum
// s1 and sum of squares s2.
GROUPNORM_INLINE PieceMoments join_lanes(double elements, const F64& count, const F64& shift,
                                         const F64& s1, const F64& s2) {
  const double base = first_lane(shift);
  const F64 delta = shift - set1<F64>(base), moved = count * delta;
  const double sum = reduce_add(s1 + moved);
  const double squares = reduce_add(fma(delta, s1 + s1 + moved, s2));
  const double offset = sum / elements, m2 = squares - sum * offset;
  return {elements, base, offset, m2 < 0.0 ? 0.0 : m2};
}

// Moments from the sums of 16-bit numbers and of their squares, without a shift. Their squares have 16 or
// 22 bits, so sums of them in double are exact as long as magnitudes differ by less than about 2^9; and
// where they differ by more, the variance is not small beside the squares (docs/numerics.md). Only the
// square of the sum needs more bits than a double has.
template <class V>
struct MeanAndM2 {
  V mean, mean_low, m2;
};
// V is F64, or double for one number.
GROUPNORM_INLINE double select_lt(double a, double b, double yes, double no) { return a < b ? yes : no; }
GROUPNORM_INLINE double abs(double a) { return __builtin_fabs(a); }
GROUPNORM_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class V>
GROUPNORM_INLINE MeanAndM2<V> moments_of_sums(const V& count, const V& sum, const V& squares) {
  const auto all = [](double value) GROUPNORM_INLINE_LAMBDA -> V {
    if constexpr (std::is_same_v<V, double>) return value;
    else return set1<V>(value);
  };
  const V nothing = all(0.0), mean = sum / count;
  V low = fused(nothing - mean, count, sum) / count;
  low = select_lt(abs(low), all(0x1p1000), low, nothing);  // of a mean that is not finite
  const V product = sum * mean, rest = fused(sum, mean, nothing - product);
  const V m2 = (squares - product) - (rest + sum * low);
  return {mean, low, select_lt(m2, nothing, nothing, m2)};
}

GROUPNORM_INLINE double elements_of(const MomentsPlane& plane) {
  return static_cast<double>(plane.rows * plane.length);
}
// Elements in each lane, the rest of a row being in its first lanes or in its last.
template <bool kSplit, bool kRestInLast>
GROUPNORM_INLINE F64 lane_counts(const MomentsPlane& plane) {
  const auto rows = static_cast<double>(plane.rows);
  const F64 whole = set1<F64>(rows * static_cast<double>(plane.length / kLanes));
  const auto rest = static_cast<int>(plane.length % kLanes);
  if (rest == 0) return whole;
  const F64 once = set1<F64>(rows);
  return whole + (kRestInLast ? last_elements<kSplit>(once, rest) : first_elements<kSplit>(once, rest));
}

// The whole run in double: for float64, and for the rare floats whose squares are not trusted.
template <class T, bool kResidual>
PieceMoments moments_run_in_double(const MomentsPlane& plane) {
  // The mean of the first elements: being one of s among count, it obeys (shift - mean)^2 <= variance *
  // count / s, so that subtracting it loses at most that factor of double's precision, outliers or not.
  const std::int64_t sampled = smaller<std::int64_t>(plane.length, 4 * kLanes);
  F64 start = set1<F64>(0.0);
  const MomentsSource<T, kResidual, false> first(plane, 0);
  const auto counted = [](const F64& lanes, int count) GROUPNORM_INLINE_LAMBDA {
    return count == kLanes ? lanes : first_elements<false>(lanes, count);
  };
  for_each_vector(sampled, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
    start = start + counted(first.template at<double>(i, count), count);
  });
  const F64 shift = set1<F64>(reduce_add(start) / static_cast<double>(sampled));
  F64 s1 = set1<F64>(0.0), s2 = s1;
  for (std::int64_t row = 0; row < plane.rows; ++row) {
    const MomentsSource<T, kResidual, false> source(plane, row);
    for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
      const F64 d = counted(source.template at<double>(i, count) - shift, count);
      s1 = s1 + d;
      s2 = fma(d, d, s2);
    });
  }
  return join_lanes(elements_of(plane), lane_counts<false, false>(plane), shift, s1, s2);
}

// The shift of a float in few bits, so that x less the shift is exact: were its low bits below those of
// x, every difference would be rounded the same way, and the mean with them. Eight bits, unless x is
// close to it: then the difference is exact anyway, and may be far smaller than what is cut off.
GROUPNORM_INLINE F32 short_shift(const F32& shift, const F32& distance) {
  return select_lt(distance * set1<F32>(64.0f), abs(shift), shift, upper_half(shift));
}

// Sums of differences and of their squares in sixteen lanes. float32: in float over a span.
struct FloatSums {
  F64 s1 = set1<F64>(0.0), s2 = s1;
  // Two of each, because one would wait for its last addition.
  F32 d1 = set1<F32>(0.0f), d2 = d1, q1 = d1, q2 = d1;

  GROUPNORM_INLINE void add(const F32& a, const F32& b) {
    add(a);
    d2 = d2 + b;
    q2 = fma(b, b, q2);
  }
  GROUPNORM_INLINE void add(const F32& a) {
    d1 = d1 + a;
    q1 = fma(a, a, q1);
  }
  GROUPNORM_INLINE void end_span() {
    s1 = s1 + widen(d1 + d2);
    s2 = s2 + widen(q1 + q2);
    d1 = d2 = q1 = q2 = set1<F32>(0.0f);
  }
};

// The 16-bit types: in double throughout. 1 ulp of a result that cancels needs the statistics to more than
// float's precision.
struct DoubleSums {
  // Two sums of squares, because one would wait for its last multiply-add.
  F64 s1 = set1<F64>(0.0), s2 = s1, other_s2 = s1;

  GROUPNORM_INLINE void add(const F64& a, const F64& b) {
    add(a);
    s1 = s1 + b;
    other_s2 = fma(b, b, other_s2);
  }
  GROUPNORM_INLINE void add(const F64& a) {
    s1 = s1 + a;
    s2 = fma(a, a, s2);
  }
  GROUPNORM_INLINE void end_span() {}
};

template <class T, bool kResidual>
PieceMoments moments_run_of(const MomentsPlane& plane) {
  if constexpr (std::is_same_v<T, double>) {
    return moments_run_in_double<T, kResidual>(plane);
  } else {
    constexpr bool kSplit = is_split<T>;
    const MomentsSource<T, kResidual, kSplit> first(plane, 0);
    const bool whole_vectors = plane.length >= kLanes;
    F32 shift = set1<F32>(0.0f);
    if constexpr (!is_half<T>) {
      const int of_first = static_cast<int>(smaller<std::int64_t>(plane.length, kLanes));
      const F32 start = first.template at<float>(0, of_first);
      F32 distance = set1<F32>(0.0f);
      if (plane.length >= 2 * kLanes) distance = abs(first.template at<float>(kLanes, kLanes) - start);
      shift = short_shift(start, distance);
    }
    // What is summed: the 16-bit types in double, float32 in float.
    using Term = std::conditional_t<is_half<T>, double, float>;
    const auto less_shift = [&](const Vec<Term>& value) GROUPNORM_INLINE_LAMBDA {
      if constexpr (is_half<T>) return value;
      else return value - shift;
    };
    std::conditional_t<is_half<T>, DoubleSums, FloatSums> sums;
    for_each_span(
        plane.rows, plane.length,
        [&](std::int64_t row, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
          const MomentsSource<T, kResidual, kSplit> source(plane, row);
          const auto difference = [&](std::int64_t i) GROUPNORM_INLINE_LAMBDA {
            return less_shift(source.template at<Term>(i, kLanes));
          };
          std::int64_t i = begin;
          for (; i + 2 * kLanes <= end; i += 2 * kLanes) sums.add(difference(i), difference(i + kLanes));
          if (i + kLanes <= end) {
            sums.add(difference(i));
            i += kLanes;
          }
          if (i < end) {
            const auto rest = static_cast<int>(end - i);
            sums.add(whole_vectors
                         ? last_elements<kSplit>(less_shift(source.template last<Term>(end, rest)), rest)
                         : first_elements<kSplit>(less_shift(source.template at<Term>(i, rest)), rest));
          }
          sums.end_span();
        });
    if constexpr (is_half<T>) {
      const double count = elements_of(plane);
      const auto found = moments_of_sums(count, reduce_add(sums.s1), reduce_add(sums.s2 + sums.other_s2));
      return {count, found.mean, found.mean_low, found.m2};
    } else {
      const F64 counts =
          whole_vectors ? lane_counts<kSplit, true>(plane) : lane_counts<kSplit, false>(plane);
      // One object to return: copied as a whole, it would wait for its parts to be stored.
      PieceMoments result = join_lanes(elements_of(plane), counts, widen(shift), sums.s1, sums.s2);
      if (!trusted(result.count, reduce_add(sums.s2), result.m2)) {
        result = moments_run_in_double<T, kResidual>(plane);
      }
      return result;
    }
  }
}

template <class T>
PieceMoments moments_run(const MomentsPlane& plane) {
  count_call();
  return plane.residual == nullptr ? moments_run_of<T, false>(plane) : moments_run_of<T, true>(plane);
}

template <class T>
GROUPNORM_INLINE MomentsPlane columns_of(MomentsPlane plane, std::int64_t column, int count) {
  plane.x = static_cast<const T*>(plane.x) + column;
  if (plane.residual != nullptr) {
    plane.residual = static_cast<const T*>(plane.residual) + column;
    plane.sum = static_cast<T*>(plane.sum) + column;
  }
  plane.length = count;
  return plane;
}

// The sums of sixteen columns from split order into that of the columns.
GROUPNORM_INLINE void columns_from_split(double* sums) {
  double split[kLanes];
  std::memcpy(split, sums, sizeof split);
  for (int lane = 0; lane < kLanes; ++lane) sums[split_element(lane)] = split[lane];
}

// Real is what differences and short sums are taken in. In float, columns whose squares are not trusted
// get a negative m2.
template <class T, class Real, bool kResidual>
void moments_columns_in(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  using V = Vec<Real>;
  constexpr bool kWide = std::is_same_v<Real, double>, kSplit = is_split<T>, kShifted = !is_half<T>;
  const V zero = set1<V>(0);
  // Two rows keep the shift close enough to be trusted almost always; the rest and float64 have no other
  // chance.
  constexpr std::int64_t kSampled = kWide ? kShiftRows : 2;
  const std::int64_t sampled = smaller(plane.rows, kSampled);
  const V sampled_inverse = set1<V>(static_cast<Real>(1.0 / static_cast<double>(sampled)));
  // Until the end, mean is the shift if there is one, and the other two are the sums of d and of d^2. Whole
  // vectors are in split order until then, and the last columns, which are no whole vector, in their own:
  // `order` is whether it is the split one.
  const auto start = [&](auto order, std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    using Source = MomentsSource<T, kResidual, order.value>;
    if constexpr (kShifted) {
      V sum = zero;
      for (std::int64_t row = 0; row < sampled; ++row) {
        sum = sum + Source(plane, row).template at<Real>(column, count);
      }
      V shift = sum * sampled_inverse;
      if constexpr (!kWide) {
        V distance = zero;
        for (std::int64_t row = 0; row < sampled; ++row) {
          distance = distance + abs(Source(plane, row).template at<Real>(column, count) - shift);
        }
        shift = short_shift(shift, distance);
      }
      store_as(mean + column, widen(shift), count);
    }
    store_as(mean_low + column, set1<F64>(0.0), count);
    store_as(m2 + column, set1<F64>(0.0), count);
  };
  const auto add_block = [&](auto order, std::int64_t row, std::int64_t end, std::int64_t column,
                             int count, int fresh) GROUPNORM_INLINE_LAMBDA {
    V shift = zero;
    if constexpr (kShifted) shift = narrow_to(load_as<double>(mean + column, count), Real());
    const auto difference = [&](std::int64_t at) GROUPNORM_INLINE_LAMBDA {
      const V value =
          MomentsSource<T, kResidual, order.value>(plane, at).template at<Real>(column, count);
      if constexpr (kShifted) return value - shift;
      else return value;
    };
    // In float two of each, because one would wait for its last addition; in double one is four
    // registers.
    V d1 = zero, d2 = zero, q1 = zero, q2 = zero;
    const NextRows<T> next_x(plane.x, plane.x_stride, row, column);
    const NextRows<T> next_residual(plane.residual, plane.residual_stride, row, column);
    const NextRows<T> next_sum(plane.sum, plane.sum_stride, row, column);
    const std::int64_t first = row;
    const auto term = [&](V& d_sum, V& q_sum, std::int64_t at) GROUPNORM_INLINE_LAMBDA {
      if (plane.far) {
        next_x.ask(at - first);
        if constexpr (kResidual) {
          next_residual.ask(at - first);
          next_sum.ask(at - first);
        }
      }
      const V d = difference(at);
      d_sum = d_sum + d;
      q_sum = fma(d, d, q_sum);
    };
    if constexpr (!kWide) {
      for (; row + 2 <= end; row += 2) {
        term(d1, q1, row);
        term(d2, q2, row + 1);
      }
    }
    for (; row < end; ++row) term(d1, q1, row);
    store_sums(mean_low + column, load_as<double>(mean_low + column, count) + widen(d1 + d2), count,
               fresh);
    store_sums(m2 + column, load_as<double>(m2 + column, count) + widen(q1 + q2), count, fresh);
  };
  // Thirty-two columns without a shift, whose sums do not wait for each other.
  [[maybe_unused]] const auto add_two_blocks = [&](std::int64_t row, std::int64_t end,
                                                   std::int64_t column) GROUPNORM_INLINE_LAMBDA {
    const auto add_to = [](double* p, const V& sum) GROUPNORM_INLINE_LAMBDA {
      store(p, load(p) + widen(sum));
    };
    Two<V> d = {zero, zero}, q = d;
    const NextRows<T> next_x(plane.x, plane.x_stride, row, column);
    for (std::int64_t first = row; row < end; ++row) {
      if (plane.far) next_x.template ask<2>(row - first);
      const MomentsSource<T, kResidual, kSplit> source(plane, row);
      const V one = source.template at<Real>(column, kLanes);
      const V other = source.template at<Real>(column + kLanes, kLanes);
      d = {d.first + one, d.second + other};
      q = {fma(one, one, q.first), fma(other, other, q.second)};
    }
    add_to(mean_low + column, d.first);
    add_to(mean_low + column + kLanes, d.second);
    add_to(m2 + column, q.first);
    add_to(m2 + column + kLanes, q.second);
  };
  constexpr std::bool_constant<kSplit> in_split{};
  constexpr std::bool_constant<false> in_own{};
  for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    if (count == kLanes) {
      start(in_split, column, kLanes);
    } else {
      start(in_own, column, count);
    }
  });
  for_each_column_block<kTwoVectors && !kShifted && !kResidual>(
      plane.rows, plane.length,
      [&](std::int64_t row, std::int64_t end, std::int64_t column, int count, int fresh)
          GROUPNORM_INLINE_LAMBDA {
            if (count == kLanes && fresh == kLanes) {
              add_block(in_split, row, end, column, kLanes, kLanes);
            } else {
              add_block(in_own, row, end, column, count, fresh);
            }
          },
      add_two_blocks);
  const double rows = static_cast<double>(plane.rows);
  if constexpr (!kShifted) {
    for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
      if (kSplit && count == kLanes) {
        columns_from_split(mean_low + column);
        columns_from_split(m2 + column);
      }
      const auto found = moments_of_sums(set1<F64>(rows), load_as<double>(mean_low + column, count),
                                         load_as<double>(m2 + column, count));
      store_as(mean + column, found.mean, count);
      store_as(mean_low + column, found.mean_low, count);
      store_as(m2 + column, found.m2, count);
    });
    return;
  }
  const F64 all_rows = set1<F64>(rows), nothing = set1<F64>(0.0), not_trusted = set1<F64>(-1.0);
  const F64 least = set1<F64>(rows * kLeastSquare), most = set1<F64>(kMostSquares);
  for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    const F64 sum = load_as<double>(mean_low + column, count);
    const F64 squares = load_as<double>(m2 + column, count);
    // Divided, so that a mean that is a number of the type is that number.
    const F64 offset = sum / all_rows, difference = squares - sum * offset;
    store_as(mean_low + column, offset, count);
    // A NaN stays one.
    F64 usable = select_lt(difference, nothing, nothing, difference);
    if constexpr (!kWide) {
      usable = select_lt(squares * set1<F64>(kLeastShare), difference, usable, not_trusted);
      usable = select_lt(squares, most, select_lt(least, squares, usable, not_trusted), not_trusted);
    }
    store_as(m2 + column, usable, count);
  });
}

template <class T, bool kResidual>
void moments_columns_of(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  if constexpr (!std::is_same_v<T, float>) {
    moments_columns_in<T, double, kResidual>(plane, mean, mean_low, m2);
  } else {
    moments_columns_in<T, float, kResidual>(plane, mean, mean_low, m2);
    // Vector by vector, and of each only the columns that need it: what one holds must not show in
    // the bits of another.
    for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
      bool usable = true;
      for (int i = 0; i < count; ++i) usable = usable & (m2[column + i] >= 0.0);
      if (__builtin_expect(usable, 1)) return;
      double again[3][kLanes];
      moments_columns_in<T, double, kResidual>(columns_of<T>(plane, column, count), again[0], again[1],
                                    again[2]);
      for (int i = 0; i < count; ++i) {
        if (m2[column + i] >= 0.0) continue;
        mean[column + i] = again[0][i];
        mean_low[column + i] = again[1][i];
        m2[column + i] = again[2][i];
      }
    });
  }
}

// The moments of columns of wide rows, and of those each channel's, as the driver merges those of pieces.
template <class T, bool kResidual>
__attribute__((noinline)) void moments_narrow(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  const std::int64_t columns = plane.length, in_one = rows_in_one(plane.rows, columns);
  const std::int64_t whole = plane.rows / in_one, rest = plane.rows % in_one;
  double means[kMostWide], lows[kMostWide], squares[kMostWide];
  MomentsPlane wide = plane;
  wide.rows = whole;
  wide.length = wide.x_stride = wide.residual_stride = wide.sum_stride = in_one * columns;
  moments_columns_of<T, kResidual>(wide, means, lows, squares);
  if (rest != 0) {
    MomentsPlane left = plane;
    left.x = static_cast<const T*>(plane.x) + whole * in_one * columns;
    if constexpr (kResidual) {
      left.residual = static_cast<const T*>(plane.residual) + whole * in_one * columns;
      left.sum = static_cast<T*>(plane.sum) + whole * in_one * columns;
    }
    left.rows = rest;
    moments_columns_of<T, kResidual>(left, mean, mean_low, m2);
  }
  const double rows = static_cast<double>(whole), parts = static_cast<double>(in_one), count = rows * parts;
  const double others = static_cast<double>(rest), total = count + others;
  for (std::int64_t c = 0; c < columns; ++c) {
    const double base = means[c];
    const auto from_base = [&](std::int64_t i) GROUPNORM_INLINE_LAMBDA { return (means[i] - base) + lows[i]; };
    double sum = 0.0, between = 0.0, within = 0.0;
    for (std::int64_t i = c; i < in_one * columns; i += columns) sum += from_base(i);
    const double average = sum / parts;
    for (std::int64_t i = c; i < in_one * columns; i += columns) {
      const double delta = from_base(i) - average;
      between += delta * delta;
      within += squares[i];
    }
    double low = average, all = within + rows * between;
    if (rest != 0) {
      const double delta = (mean[c] - base) + (mean_low[c] - average);
      low += delta * (others / total);
      all += m2[c] + delta * delta * (count * others / total);
    }
    mean[c] = base;
    mean_low[c] = low;
    m2[c] = all;
  }
}

template <class T>
void moments_columns(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  count_call();
  // Enough rows for one of them wide.
  const bool many = plane.rows >= rows_in_one(plane.rows, plane.length);
  if (plane.residual == nullptr) {
    if (many && is_narrow<true>(plane.rows, plane.length, {plane.x_stride})) {
      return moments_narrow<T, false>(plane, mean, mean_low, m2);
    }
    moments_columns_of<T, false>(plane, mean, mean_low, m2);
  } else {
    if (many && is_narrow<true>(plane.rows, plane.length, {plane.x_stride, plane.residual_stride, plane.sum_stride})) {
      return moments_narrow<T, true>(plane, mean, mean_low, m2);
    }
    moments_columns_of<T, true>(plane, mean, mean_low, m2);
  }
}

}  // namespace
}  // namespace groupnorm
