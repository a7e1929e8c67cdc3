// Count, mean and m2 of runs of memory and of columns.
//
// Guarantees: sums are taken in double, or in float over a few terms and in double over those; squares of
// bfloat16 in float with what each addition loses. Where that would cost more than rounding they are taken
// again in double, which depends on the values only. A residual is added on the way, and the sum is stored
// as it is measured.
#pragma once

#include "kernels.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

std::uint64_t kernel_calls = 0;

GROUPNORM_INLINE void count_call() { __atomic_fetch_add(&kernel_calls, 1, __ATOMIC_RELAXED); }

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

// What is summed in float at first. 1 ulp of a 16-bit result that cancels needs mean and variance to far
// more than float's precision. Differences of bfloat16 have so few bits that a short sum of them loses next
// to nothing, and what squares lose is had exactly by a fused multiply-add; the bits of float16 are too many.
template <class T>
constexpr bool in_float_first =
    std::is_same_v<T, float> || (std::is_same_v<T, BFloat16> && kFusedMultiplyAdd);

// Whether squares taken in float neither left its range nor lost their difference to a bad shift;
// written so that a NaN is not trusted.
constexpr double kMostSquares = 0x1p120, kLeastSquare = 0x1p-100, kLeastShare = 0x1p-4;
GROUPNORM_INLINE bool trusted(double count, double squares, double m2) {
  return (squares < kMostSquares) & (squares > count * kLeastSquare) & (m2 > squares * kLeastShare);
}
// And whether there are outliers so far beyond what is typical that a sum with one of them would lose the
// others' bits, which matters to a mean that is to be right for results of 16 bits. Typical is the square
// of a difference, 0 where it is not known.
constexpr double kMostOutlying = 0x1p12;
GROUPNORM_INLINE bool without_outliers(double count, double squares, double typical) {
  return !(squares > count * typical * kMostOutlying) | (typical == 0.0);
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

// The whole run in double: where nothing is summed in float, and where squares in float are not trusted.
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

// A mean of bfloat16 as a shift: its eight leading bits, so that x less the shift is exact, or 0 where they
// would lie below those of most x.
GROUPNORM_INLINE float shift_near(double mean, double magnitude) {
  if (mean * 16.0 < magnitude && -mean * 16.0 < magnitude) return 0.0f;
  const float value = static_cast<float>(mean), spread = value * 65537.0f;
  return spread - (spread - value);
}

// Sums of differences and of their squares in sixteen lanes, of float32: in float over a span.
struct PlainSums {
  F64 s1 = set1<F64>(0.0), s2 = s1;
  // Two of each, because one would wait for its last addition.
  F32 d1 = set1<F32>(0.0f), d2 = d1, q1 = d1, q2 = d1;

  GROUPNORM_INLINE explicit PlainSums(const F32&) {}
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
  GROUPNORM_INLINE F64 squares() const { return s2; }
};

// A sum of squares in float and what its additions have lost. Sum and square give the loss exactly where
// the sum is the larger, so it starts at an anchor above most squares; where one is larger still, that
// addition loses what it would lose in float.
struct SquareSum {
  F32 sum, lost = set1<F32>(0.0f);

  GROUPNORM_INLINE explicit SquareSum(const F32& anchor) : sum(anchor) {}
  GROUPNORM_INLINE F32 add(const F32& d) {
    const F32 before = sum;
    sum = fma(d, d, before);
    return fma(d, d, before - sum);
  }
};

// The same of bfloat16: squares throughout with what they lose.
struct BFloat16Sums {
  F32 anchor, d = set1<F32>(0.0f), lost = d;
  SquareSum q1, q2;
  F64 s1 = set1<F64>(0.0);

  GROUPNORM_INLINE explicit BFloat16Sums(const F32& anchor_) : anchor(anchor_), q1(anchor_), q2(anchor_) {}
  GROUPNORM_INLINE void add(const F32& a, const F32& b) {
    d = d + (a + b);
    lost = lost + (q1.add(a) + q2.add(b));
  }
  GROUPNORM_INLINE void add(const F32& a) {
    d = d + a;
    lost = lost + q1.add(a);
  }
  GROUPNORM_INLINE void end_span() {
    s1 = s1 + widen(d);
    d = set1<F32>(0.0f);
  }
  GROUPNORM_INLINE F64 squares() const {
    const F64 start = widen(anchor);
    return ((widen(q1.sum) - start) + (widen(q2.sum) - start)) + widen(lost);
  }
};

// The mean of the middle two of four, lane by lane: what an outlier among them does not move.
template <class V>
GROUPNORM_INLINE V middle(const V (&x)[4]) {
  const V lower = at_least(at_most(x[0], x[1]), at_most(x[2], x[3]));
  const V upper = at_most(at_least(x[0], x[1]), at_least(x[2], x[3]));
  return (lower + upper) * set1<V>(0.5f);
}

// What four vectors of a run of bfloat16, spread over it, say of the rest: a shift near the mean, so that a
// span's sum stays small and loses few bits of its terms; an anchor above most squares; and what a square is
// like where it is least of the four, outliers or not.
struct RunSample {
  float shift;
  F32 anchor;
  double typical;
};
template <class T, bool kResidual>
GROUPNORM_INLINE RunSample sampled(const MomentsPlane& plane) {
  const std::int64_t in_row = larger<std::int64_t>(1, plane.length / kLanes), all = in_row * plane.rows;
  const int count = static_cast<int>(smaller<std::int64_t>(plane.length, kLanes));
  F32 x[4], sizes[4], squares = set1<F32>(0.0f), least = set1<F32>(0x1p127f);
  for (int i = 0; i < 4; ++i) {
    const std::int64_t place = i * all / 4;
    const MomentsSource<T, kResidual, is_split<T>> source(plane, place / in_row);
    x[i] = source.template at<float>(place % in_row * kLanes, count);
    sizes[i] = abs(x[i]);
  }
  const double elements = static_cast<double>(count);
  const float shift = shift_near(reduce_add(widen(middle(x))) / elements,
                                 reduce_add(widen(middle(sizes))) / elements);
  for (const F32& value : x) {
    // Lanes without an element hold 0, which is as well.
    const F32 d = value - set1<F32>(shift);
    squares = fma(d, d, squares);
    least = at_most(d * d, least);
  }
  return {shift, squares * set1<F32>(32.0f), reduce_add(widen(least)) / kLanes};
}

template <class T, bool kResidual>
PieceMoments moments_run_of(const MomentsPlane& plane) {
  if constexpr (!in_float_first<T>) {
    return moments_run_in_double<T, kResidual>(plane);
  } else {
    constexpr bool kSplit = is_split<T>;
    const bool whole_vectors = plane.length >= kLanes;
    [[maybe_unused]] const MomentsSource<T, kResidual, kSplit> first(plane, 0);
    [[maybe_unused]] const int of_first =
        static_cast<int>(smaller<std::int64_t>(plane.length, kLanes));
    F32 shift, anchor = set1<F32>(0.0f);
    double typical = 0.0;
    if constexpr (is_half<T>) {
      const RunSample sample = sampled<T, kResidual>(plane);
      shift = set1<F32>(sample.shift);
      anchor = sample.anchor;
      typical = sample.typical;
    } else {
      const F32 start = first.template at<float>(0, of_first);
      F32 distance = anchor;
      if (plane.length >= 2 * kLanes) distance = abs(first.template at<float>(kLanes, kLanes) - start);
      shift = short_shift(start, distance);
    }
    std::conditional_t<is_half<T>, BFloat16Sums, PlainSums> sums(anchor);
    for_each_span(
        plane.rows, plane.length,
        [&](std::int64_t row, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
          const MomentsSource<T, kResidual, kSplit> source(plane, row);
          const auto difference = [&](std::int64_t i) GROUPNORM_INLINE_LAMBDA {
            return source.template at<float>(i, kLanes) - shift;
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
                         ? last_elements<kSplit>(source.template last<float>(end, rest) - shift, rest)
                         : first_elements<kSplit>(source.template at<float>(i, rest) - shift, rest));
          }
          sums.end_span();
        });
    const F64 counts =
        whole_vectors ? lane_counts<kSplit, true>(plane) : lane_counts<kSplit, false>(plane);
    const F64 squares = sums.squares();
    const PieceMoments result =
        join_lanes(elements_of(plane), counts, widen(shift), sums.s1, squares);
    const double all_squares = reduce_add(squares);
    if (trusted(result.count, all_squares, result.m2) &&
        without_outliers(result.count, all_squares, typical)) {
      return result;
    }
    return moments_run_in_double<T, kResidual>(plane);
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
  constexpr bool kWide = std::is_same_v<Real, double>, kSplit = is_split<T> && !kWide;
  const V zero = set1<V>(0);
  // Two rows keep the shift close enough to be trusted almost always; the rest and float64 have no other
  // chance. Of bfloat16 four, spread over all, which show what is typical as well.
  constexpr bool kSpread = is_half<T> && !kWide;
  constexpr std::int64_t kSampled = kSpread ? 4 : kWide && !is_half<T> ? kShiftRows : 2;
  const std::int64_t sampled = kSpread ? kSampled : smaller(plane.rows, kSampled);
  const auto sampled_row = [&](std::int64_t i) GROUPNORM_INLINE_LAMBDA {
    return kSpread ? i * plane.rows / kSampled : i;
  };
  const V sampled_inverse = set1<V>(static_cast<Real>(1.0 / static_cast<double>(sampled)));
  // Until the end, mean is the shift and the other two are the sums of d and of d^2. Whole vectors are in
  // split order until then, and the last columns, which are no whole vector, in their own: `order` is
  // whether it is the split one.
  const auto start = [&](auto order, std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    using Source = MomentsSource<T, kResidual, order.value>;
    V x[kSampled], shift = zero;
    for (std::int64_t i = 0; i < sampled; ++i) {
      x[i] = Source(plane, sampled_row(i)).template at<Real>(column, count);
      shift = shift + x[i];
    }
    shift = shift * sampled_inverse;
    if constexpr (kSpread) {
      shift = middle(x);
      for (V& value : x) value = abs(value - shift);
      const V distance = middle(x);
      // As in shift_near.
      shift = select_lt(abs(shift) * set1<V>(16.0f), distance, zero, short_shift(shift, distance));
    } else if constexpr (!kWide) {
      V distance = zero;
      for (std::int64_t i = 0; i < sampled; ++i) distance = distance + abs(x[i] - shift);
      shift = short_shift(shift, distance);
    }
    store_as(mean + column, widen(shift), count);
    store_as(mean_low + column, set1<F64>(0.0), count);
    store_as(m2 + column, set1<F64>(0.0), count);
  };
  const auto add_block = [&](auto order, std::int64_t row, std::int64_t end, std::int64_t column,
                             int count, int fresh) GROUPNORM_INLINE_LAMBDA {
    const V shift = narrow_to(load_as<double>(mean + column, count), Real());
    const auto difference = [&](std::int64_t at) GROUPNORM_INLINE_LAMBDA {
      return MomentsSource<T, kResidual, order.value>(plane, at).template at<Real>(column, count) -
             shift;
    };
    F64 sum, squares;
    if constexpr (is_half<T> && !kWide) {
      // An anchor above most squares of the block.
      const V d0 = difference(row), d1 = difference(smaller(row + 1, end - 1));
      const V d2 = difference(smaller(row + 2, end - 1));
      const V anchor = fma(d0, d0, fma(d1, d1, d2 * d2)) * set1<V>(64.0f);
      SquareSum q(anchor);
      V lost = zero;
      sum = set1<F64>(0.0);
      // Shorter sums of differences, which lose fewer of their bits.
      while (row < end) {
        V d_sum = zero;
        for (const std::int64_t until = smaller(row + kFloatTerms / 2, end); row < until; ++row) {
          const V d = difference(row);
          d_sum = d_sum + d;
          lost = lost + q.add(d);
        }
        sum = sum + widen(d_sum);
      }
      squares = (widen(q.sum) - widen(anchor)) + widen(lost);
    } else {
      // Two of each, because one would wait for its last addition.
      V d1 = zero, d2 = zero, q1 = zero, q2 = zero;
      const auto term = [&](V& d_sum, V& q_sum, std::int64_t at) GROUPNORM_INLINE_LAMBDA {
        const V d = difference(at);
        d_sum = d_sum + d;
        q_sum = fma(d, d, q_sum);
      };
      for (; row + 2 <= end; row += 2) {
        term(d1, q1, row);
        term(d2, q2, row + 1);
      }
      if (row < end) term(d1, q1, row);
      sum = widen(d1 + d2);
      squares = widen(q1 + q2);
    }
    store_sums(mean_low + column, load_as<double>(mean_low + column, count) + sum, count, fresh);
    store_sums(m2 + column, load_as<double>(m2 + column, count) + squares, count, fresh);
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
  // Longer blocks where each has more to convert.
  constexpr std::int64_t kRows = is_half<T> && !kWide ? 2 * kFloatTerms : kFloatTerms;
  for_each_column_block<kRows>(
      plane.rows, plane.length,
      [&](std::int64_t row, std::int64_t end, std::int64_t column, int count, int fresh)
          GROUPNORM_INLINE_LAMBDA {
            if (count == kLanes && fresh == kLanes) {
              add_block(in_split, row, end, column, kLanes, kLanes);
            } else {
              add_block(in_own, row, end, column, count, fresh);
            }
          });
  const double rows = static_cast<double>(plane.rows);
  const F64 inverse = set1<F64>(1.0 / rows), nothing = set1<F64>(0.0), not_trusted = set1<F64>(-1.0);
  const F64 least = set1<F64>(rows * kLeastSquare), most = set1<F64>(kMostSquares);
  for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    const F64 sum = load_as<double>(mean_low + column, count);
    const F64 squares = load_as<double>(m2 + column, count);
    const F64 offset = sum * inverse, difference = squares - sum * offset;
    store_as(mean_low + column, offset, count);
    // A NaN stays one.
    F64 usable = select_lt(difference, nothing, nothing, difference);
    if constexpr (!kWide) {
      usable = select_lt(squares * set1<F64>(kLeastShare), difference, usable, not_trusted);
      usable = select_lt(squares, most, select_lt(least, squares, usable, not_trusted), not_trusted);
    }
    if constexpr (kSpread) {
      // What is typical of a column is the middle of its sample, because its least may be next to 0.
      const V shift = narrow(load_as<double>(mean + column, count));
      const auto typical_squares = [&](auto order, int width) GROUPNORM_INLINE_LAMBDA {
        V d[kSampled];
        for (std::int64_t i = 0; i < sampled; ++i) {
          const MomentsSource<T, kResidual, order.value> source(plane, sampled_row(i));
          d[i] = source.template at<Real>(column, width) - shift;
          d[i] = d[i] * d[i];
        }
        return widen(middle(d));
      };
      const F64 typical =
          count == kLanes ? typical_squares(in_split, kLanes) : typical_squares(in_own, count);
      const F64 limit = typical * set1<F64>(rows * kMostOutlying);
      usable = select_lt(nothing, typical, select_lt(limit, squares, not_trusted, usable), usable);
    }
    store_as(m2 + column, usable, count);
    if (kSplit && count == kLanes) {
      columns_from_split(mean + column);
      columns_from_split(mean_low + column);
      columns_from_split(m2 + column);
    }
  });
}

template <class T, bool kResidual>
void moments_columns_of(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  if constexpr (!in_float_first<T>) {
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

template <class T>
void moments_columns(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  count_call();
  if (plane.residual == nullptr) {
    moments_columns_of<T, false>(plane, mean, mean_low, m2);
  } else {
    moments_columns_of<T, true>(plane, mean, mean_low, m2);
  }
}

}  // namespace
}  // namespace groupnorm
