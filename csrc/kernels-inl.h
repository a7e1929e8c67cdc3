// The kernels, once, for every instruction set: included by isa/*.cpp after a simd header.
//
// Guarantees: sums are taken in double, or in float over a few terms and in double over those, in
// sixteen lanes that are added in one fixed tree, so a result depends on the plane's shape and values
// only. Nothing outside the plane is read or
// written. y may be x. Everything has internal linkage, so that no code built for a newer CPU can
// be linked into the baseline.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "activations-inl.h"
#include "kernels.h"

namespace groupnorm {
namespace {

std::uint64_t kernel_calls = 0;

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

GROUPNORM_INLINE void count_call() { __atomic_fetch_add(&kernel_calls, 1, __ATOMIC_RELAXED); }

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

// step(index, count) over a row whose elements may be worked on twice: the last vector begins as far
// back as it must to be whole. Only a row shorter than a vector has count < kLanes.
template <class Step>
GROUPNORM_INLINE void for_each_whole_vector(std::int64_t length, Step&& step) {
  if (length < kLanes) {
    if (length > 0) step(0, static_cast<int>(length));
    return;
  }
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) step(i, kLanes);
  if (i < length) step(length - kLanes, kLanes);
}

// step(index, count) over a row: whole vectors first, then the tail.
template <class Step>
GROUPNORM_INLINE void for_each_vector(std::int64_t length, Step&& step) {
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) step(i, kLanes);
  if (i < length) step(i, static_cast<int>(length - i));
}

alignas(64) constexpr float kLaneIndex[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                  8, 9, 10, 11, 12, 13, 14, 15};
template <class V>
GROUPNORM_INLINE V lane_index() {
  return convert(load(kLaneIndex), typename V::element());
}
// The other lanes become 0.
template <class V>
GROUPNORM_INLINE V first_lanes(const V& a, int count) {
  using E = typename V::element;
  return select_lt(lane_index<V>(), set1<V>(static_cast<E>(count)), a, set1<V>(0));
}
template <class V>
GROUPNORM_INLINE V last_lanes(const V& a, int count) {
  using E = typename V::element;
  return select_lt(lane_index<V>(), set1<V>(static_cast<E>(kLanes - count)), set1<V>(0), a);
}

// x, or the sum of x and the residual as it was stored.
template <class T>
struct MomentsSource {
  const T* x;
  const T* residual;
  T* sum;

  GROUPNORM_INLINE MomentsSource(const MomentsPlane& plane, std::int64_t row)
      : x(static_cast<const T*>(plane.x) + row * plane.x_stride),
        residual(plane.residual == nullptr
                     ? nullptr
                     : static_cast<const T*>(plane.residual) + row * plane.residual_stride),
        sum(plane.sum == nullptr ? nullptr
                                 : static_cast<T*>(plane.sum) + row * plane.sum_stride) {}

  template <class Real>
  GROUPNORM_INLINE Vec<Real> at(std::int64_t i, int count) const {
    if (residual == nullptr) return load_as<Real>(x + i, count);
    using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
    store_as(sum + i, load_as<Sum>(x + i, count) + load_as<Sum>(residual + i, count), count);
    return load_as<Real>(sum + i, count);
  }
};

// Sums are taken of differences from a shift near the data: in a run in float each lane has its own, made
// from its first elements; a column's is the mean of its first rows.
constexpr std::int64_t kShiftRows = 8;

// Partial sums are taken in float over so many vectors or rows, then added up in double: enough that
// the conversion costs little, few enough that the rounding stays in the last bit of a term.
constexpr std::int64_t kFloatTerms = 16;

template <class V>
GROUPNORM_INLINE V first_lanes_if(const V& a, int count) {
  return count == kLanes ? a : first_lanes(a, count);
}

// step(row, begin, end) over spans of a row that are summed in float.
template <class Step>
GROUPNORM_INLINE void for_each_span(std::int64_t rows, std::int64_t length, Step&& step) {
  constexpr std::int64_t span = kFloatTerms * kLanes;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < length; i += span) step(row, i, smaller(i + span, length));
  }
}

// Whether squares taken in float neither left its range nor lost their difference to a bad shift;
// written so that a NaN is not trusted.
GROUPNORM_INLINE bool trusted(double count, double squares, double m2) {
  return (squares < 0x1p120) & (squares > count * 0x1p-100) & (m2 > squares * 0x1p-4);
}

// The lanes of a run together: count elements in each, less a shift of its own, with sum s1 and sum of
// squares s2.
GROUPNORM_INLINE PieceMoments join_lanes(const F64& count, const F64& shift, const F64& s1,
                                         const F64& s2) {
  const double base = first_lane(shift);
  const F64 delta = shift - set1<F64>(base), moved = count * delta;
  const double elements = reduce_add(count), sum = reduce_add(s1 + moved);
  const double squares = reduce_add(fma(delta, s1 + s1 + moved, s2));
  const double offset = sum / elements, m2 = squares - sum * offset;
  return {elements, base, offset, m2 < 0.0 ? 0.0 : m2};
}

GROUPNORM_INLINE F64 lane_counts(const MomentsPlane& plane) {
  const auto rows = static_cast<double>(plane.rows);
  const F64 whole = set1<F64>(rows * static_cast<double>(plane.length / kLanes));
  return whole + first_lanes(set1<F64>(rows), static_cast<int>(plane.length % kLanes));
}

// The whole run in double: for float64, and for the rare floats whose squares are not trusted.
template <class T>
PieceMoments moments_run_in_double(const MomentsPlane& plane) {
  // The mean of the first elements: being one of s among count, it obeys (shift - mean)^2 <= variance *
  // count / s, so that subtracting it loses at most that factor of double's precision, outliers or not.
  const std::int64_t sampled = smaller<std::int64_t>(plane.length, 4 * kLanes);
  F64 start = set1<F64>(0.0);
  const MomentsSource<T> first(plane, 0);
  for_each_vector(sampled, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
    start = start + first_lanes_if(first.template at<double>(i, count), count);
  });
  const F64 shift = set1<F64>(reduce_add(start) / static_cast<double>(sampled));
  F64 s1 = set1<F64>(0.0), s2 = s1;
  for (std::int64_t row = 0; row < plane.rows; ++row) {
    const MomentsSource<T> source(plane, row);
    for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
      const F64 d = first_lanes_if(source.template at<double>(i, count) - shift, count);
      s1 = s1 + d;
      s2 = fma(d, d, s2);
    });
  }
  return join_lanes(lane_counts(plane), shift, s1, s2);
}

// The shift of a float in few bits, so that x less the shift is exact: were its low bits below those of
// x, every difference would be rounded the same way, and the mean with them. Eight bits, unless x is
// close to it: then the difference is exact anyway, and may be far smaller than what is cut off.
GROUPNORM_INLINE F32 short_shift(const F32& shift, const F32& distance) {
  return select_lt(distance * set1<F32>(64.0f), abs(shift), shift, upper_half(shift));
}

// float32 is summed in float over a few terms; 16-bit inputs in double throughout, differences
// included: 1 ulp of a result that cancels needs the statistics to more than float's precision.
template <class T>
PieceMoments moments_run(const MomentsPlane& plane) {
  count_call();
  if constexpr (std::is_same_v<T, double>) {
    return moments_run_in_double<T>(plane);
  } else {
    const F32 zero = set1<F32>(0.0f);
    const MomentsSource<T> first(plane, 0);
    const int of_first = static_cast<int>(smaller<std::int64_t>(plane.length, kLanes));
    const F32 start = first.template at<float>(0, of_first);
    F32 distance = zero;
    if (plane.length >= 2 * kLanes) distance = abs(first.template at<float>(kLanes, kLanes) - start);
    const F32 shift = is_half<T> ? start : short_shift(start, distance);
    const F64 wide_shift = widen(shift);
    F64 s1 = set1<F64>(0.0), s2 = s1;
    for_each_span(
        plane.rows, plane.length,
        [&](std::int64_t row, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
          const MomentsSource<T> source(plane, row);
          // Two of each, because one would wait for its last addition.
          F32 d1 = zero, d2 = zero, q1 = zero, q2 = zero;
          const auto term = [&](F32& d_sum, F32& q_sum, std::int64_t i, int count)
                                GROUPNORM_INLINE_LAMBDA {
            const F32 value = source.template at<float>(i, count);
            if constexpr (is_half<T>) {
              const F64 d = first_lanes_if(widen(value) - wide_shift, count);
              s1 = s1 + d;
              s2 = fma(d, d, s2);
            } else {
              const F32 d = first_lanes_if(value - shift, count);
              d_sum = d_sum + d;
              q_sum = fma(d, d, q_sum);
            }
          };
          std::int64_t i = begin;
          for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
            term(d1, q1, i, kLanes);
            term(d2, q2, i + kLanes, kLanes);
          }
          for_each_vector(end - i, [&](std::int64_t j, int count) GROUPNORM_INLINE_LAMBDA {
            term(d1, q1, i + j, count);
          });
          if constexpr (!is_half<T>) {
            s1 = s1 + widen(d1 + d2);
            s2 = s2 + widen(q1 + q2);
          }
        });
    const PieceMoments result = join_lanes(lane_counts(plane), wide_shift, s1, s2);
    if constexpr (!is_half<T>) {
      if (!trusted(result.count, reduce_add(s2), result.m2)) return moments_run_in_double<T>(plane);
    }
    return result;
  }
}

// step(first_row, end_row, column, count, fresh): blocks of rows, and in each all columns. The sums wait
// in memory for the next block, and so many rows are as many streams for the hardware's prefetcher.
// The last vector begins as far back as it must to be whole; only its last `fresh` lanes are columns
// that the block has not had. A count below kLanes is that of a narrower plane.
template <class Step>
GROUPNORM_INLINE void for_each_column_block(std::int64_t rows, std::int64_t columns, Step&& step) {
  for (std::int64_t row = 0; row < rows; row += kFloatTerms) {
    const std::int64_t end = smaller(row + kFloatTerms, rows);
    if (columns < kLanes) {
      const int count = static_cast<int>(columns);
      step(row, end, 0, count, count);
      continue;
    }
    std::int64_t column = 0;
    for (; column + kLanes <= columns; column += kLanes) step(row, end, column, kLanes, kLanes);
    if (column < columns) {
      step(row, end, columns - kLanes, kLanes, static_cast<int>(columns - column));
    }
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

// Real is what differences and short sums are taken in. In float, columns whose squares are not trusted
// get a negative m2.
template <class T, class Real>
void moments_columns_in(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  using V = Vec<Real>;
  constexpr bool kWide = std::is_same_v<Real, double>;
  const V zero = set1<V>(0);
  const std::int64_t sampled = smaller(plane.rows, kShiftRows);
  const V sampled_inverse = set1<V>(static_cast<Real>(1.0 / static_cast<double>(sampled)));
  // Until the end, mean is the shift and the other two are the sums of d and of d^2.
  for_each_whole_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    V start = zero;
    for (std::int64_t row = 0; row < sampled; ++row) {
      start = start + MomentsSource<T>(plane, row).template at<Real>(column, count);
    }
    V shift = start * sampled_inverse;
    if constexpr (!kWide) {
      V distance = zero;
      for (std::int64_t row = 0; row < sampled; ++row) {
        distance = distance + abs(MomentsSource<T>(plane, row).template at<Real>(column, count) - shift);
      }
      shift = short_shift(shift, distance);
    }
    store_as(mean + column, widen(shift), count);
    store_as(mean_low + column, set1<F64>(0.0), count);
    store_as(m2 + column, set1<F64>(0.0), count);
  });
  for_each_column_block(
      plane.rows, plane.length,
      [&](std::int64_t row, std::int64_t end, std::int64_t column, int count, int fresh)
          GROUPNORM_INLINE_LAMBDA {
            const V shift = narrow_to(load_as<double>(mean + column, count), Real());
            // Two of each, because one would wait for its last addition.
            V d1 = zero, d2 = zero, q1 = zero, q2 = zero;
            const auto term = [&](V& d_sum, V& q_sum, std::int64_t at) GROUPNORM_INLINE_LAMBDA {
              const V d = MomentsSource<T>(plane, at).template at<Real>(column, count) - shift;
              d_sum = d_sum + d;
              q_sum = fma(d, d, q_sum);
            };
            for (; row + 2 <= end; row += 2) {
              term(d1, q1, row);
              term(d2, q2, row + 1);
            }
            if (row < end) term(d1, q1, row);
            store_sums(mean_low + column,
                       load_as<double>(mean_low + column, count) + widen(d1 + d2), count, fresh);
            store_sums(m2 + column, load_as<double>(m2 + column, count) + widen(q1 + q2), count,
                       fresh);
          });
  const double rows = static_cast<double>(plane.rows), inverse = 1.0 / rows;
  for (std::int64_t c = 0; c < plane.length; ++c) {
    const double sum = mean_low[c], squares = m2[c], offset = sum * inverse;
    const double difference = squares - sum * offset;
    mean_low[c] = offset;
    // A NaN stays one.
    const double usable = difference < 0.0 ? 0.0 : difference;
    m2[c] = kWide || trusted(rows, squares, difference) ? usable : -1.0;
  }
}

template <class T>
void moments_columns(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  count_call();
  if constexpr (!std::is_same_v<T, float>) {
    moments_columns_in<T, double>(plane, mean, mean_low, m2);
  } else {
    moments_columns_in<T, float>(plane, mean, mean_low, m2);
    // Vector by vector, and of each only the columns that need it: what one holds must not show in
    // the bits of another.
    for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
      bool usable = true;
      for (int i = 0; i < count; ++i) usable = usable & (m2[column + i] >= 0.0);
      if (__builtin_expect(usable, 1)) return;
      double again[3][kLanes];
      moments_columns_in<T, double>(columns_of<T>(plane, column, count), again[0], again[1],
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

// The numbers of one channel in all lanes (rows), or of sixteen channels (columns).
template <bool kColumns, class Real>
GROUPNORM_INLINE Vec<Real> channel(const Real* array, std::int64_t at) {
  if constexpr (kColumns) {
    return load(array + at);
  } else {
    return set1<Vec<Real>>(array[at]);
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
template <bool kColumns, class Real>
struct Centering {
  Vec<Real> center;
  std::conditional_t<std::is_same_v<Real, double>, F64, char> low;

  GROUPNORM_INLINE Centering(const Coefficients<Real>& c, std::int64_t at)
      : center(channel<kColumns>(c.center, at)) {
    if constexpr (std::is_same_v<Real, double>) low = channel<kColumns>(c.center_low, at);
  }
  GROUPNORM_INLINE Vec<Real> operator()(const Vec<Real>& x) const {
    if constexpr (std::is_same_v<Real, double>) return (x - center) - low;
    else return x - center;
  }
};

template <bool kColumns, class Real>
struct Scaling {
  Vec<Real> multiplier, offset;

  GROUPNORM_INLINE Scaling(const Coefficients<Real>& c, std::int64_t at)
      : multiplier(channel<kColumns>(c.multiplier, at)), offset(channel<kColumns>(c.offset, at)) {}
  GROUPNORM_INLINE Vec<Real> operator()(const Vec<Real>& centred) const {
    return fma(centred, multiplier, offset);
  }
};

// v in double, for the few vectors where float has cancelled too far.
template <bool kColumns>
GROUPNORM_INLINE F64 exact_v(const ChannelTable& table, std::int64_t at, const F64& x) {
  const Centering<kColumns, double> center(table.exact, at);
  const Scaling<kColumns, double> scale(table.exact, at);
  return scale(center(x));
}

// Rows of a column plane that share one load of their channels' numbers, where those numbers are too
// many for the first cache.
constexpr std::int64_t kColumnRows = 4, kManyColumns = 1024;

// step(first row, number of rows as an integral constant)
template <bool kColumns, class Plane, class Step>
GROUPNORM_INLINE void for_each_row_block(const Plane& plane, const Step& step) {
  std::int64_t row = 0;
  if constexpr (kColumns) {
    if (plane.length >= kManyColumns) {
      for (; row + kColumnRows <= plane.rows; row += kColumnRows) {
        step(row, std::integral_constant<int, kColumnRows>());
      }
    }
  }
  for (; row < plane.rows; ++row) step(row, std::integral_constant<int, 1>());
}

// Lanes of y again in double, where v has cancelled (|v| < guard) or lies in an activation's tail. Only
// those lanes: what one holds must not show in the bits of its neighbours. Not inlined: it would take
// the registers of the loop that seldom needs it.
template <class T, Activation A, bool kColumns>
__attribute__((noinline, cold)) void mend_lanes(const NormalizePlane& plane, const float* value,
                                                const float* v, T* y, int count, std::int64_t at) {
  const F64 exact = exact_v<kColumns>(plane.table, at, widen(load(value)));
  T lanes[kLanes];
  store_as(lanes, activate<A>(exact, SwishRate<F64>(plane.beta)), kLanes);
  for (int i = 0; i < count; ++i) {
    const std::int64_t c = kColumns ? at + i : at;
    const float magnitude = v[i] < 0.0f ? -v[i] : v[i];
    const bool in_tail = is_smooth(A) && v[i] < plane.table.tail[c];
    if (magnitude < plane.table.guard[c] || in_tail) y[i] = lanes[i];
  }
}

template <class T, class Real, Activation A, bool kColumns>
void normalize(const NormalizePlane& plane) {
  count_call();
  constexpr bool kGuarded = is_half<T> && std::is_same_v<Real, float>;
  using V = Vec<Real>;
  const Coefficients<Real>& c = coefficients<Real>(plane.table);
  // The tail of an activation magnifies the error of v.
  constexpr bool kTail = kGuarded && is_smooth(A);
  const SwishRate<V> rate(plane.beta);
  struct Channel {
    Centering<kColumns, Real> center;
    Scaling<kColumns, Real> scale;
    V guard, tail;
    std::int64_t at;
  };
  const auto channel_at = [&](std::int64_t at) GROUPNORM_INLINE_LAMBDA {
    Channel ch{{c, at}, {c, at}, {}, {}, at};
    if constexpr (kGuarded) ch.guard = channel<kColumns>(plane.table.guard, at);
    if constexpr (kTail) ch.tail = channel<kColumns>(plane.table.tail, at);
    return ch;
  };
  const auto element = [&](const V& value, T* y, int count, const Channel& ch)
                           GROUPNORM_INLINE_LAMBDA {
    const V v = ch.scale(ch.center(value));
    store_as(y, activate<A>(v, rate), count);
    if constexpr (kGuarded) {
      const bool again = kTail ? any_lt<kColumns>(abs(v), ch.guard, v, ch.tail)
                               : any_lt<kColumns>(abs(v), ch.guard);
      if (__builtin_expect(again, 0)) {
        float values[kLanes], vs[kLanes];
        store(values, value);
        store(vs, v);
        mend_lanes<T, A, kColumns>(plane, values, vs, y, count, ch.at);
      }
    }
  };
  const std::int64_t length = plane.length, tail = length % kLanes, whole = length - tail;
  const auto x_row = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return static_cast<const T*>(plane.x) + row * plane.x_stride;
  };
  const auto y_row = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return static_cast<T*>(plane.y) + row * plane.y_stride;
  };
  if (whole == 0) {
    const auto count = static_cast<int>(tail);
    for (std::int64_t row = 0; row < plane.rows; ++row) {
      element(load_as<Real>(x_row(row), count), y_row(row), count, channel_at(kColumns ? 0 : row));
    }
    return;
  }
  // So many rows together, an integral constant. The last vector of a row begins as far back as it must
  // to be whole. It is read before y, which may be x, is written.
  const auto rows_from = [&](std::int64_t first, auto count) GROUPNORM_INLINE_LAMBDA {
    const T* x[count];
    T* y[count];
    V last[count];
    for (int r = 0; r < count; ++r) {
      x[r] = x_row(first + r);
      y[r] = y_row(first + r);
      last[r] = load_as<Real>(x[r] + length - kLanes, kLanes);
    }
    if constexpr (kColumns) {
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        const Channel ch = channel_at(i);
        for (int r = 0; r < count; ++r) element(load_as<Real>(x[r] + i, kLanes), y[r] + i, kLanes, ch);
      }
    } else {
      const Channel ch = channel_at(first);
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        element(load_as<Real>(x[0] + i, kLanes), y[0] + i, kLanes, ch);
      }
    }
    if (tail != 0) {
      const Channel ch = channel_at(kColumns ? length - kLanes : first);
      for (int r = 0; r < count; ++r) element(last[r], y[r] + length - kLanes, kLanes, ch);
    }
  };
  for_each_row_block<kColumns>(plane, rows_from);
}

// dv and x - mean of one vector.
template <class T, class Real, Activation A, bool kColumns>
struct Gradient {
  using V = Vec<Real>;
  // relu's derivative jumps at 0: near it, the sign of v is settled in double.
  static constexpr bool kGuarded = A == Activation::relu && std::is_same_v<Real, float>;

  const ChannelTable& table;
  std::int64_t at;
  Centering<kColumns, Real> center;
  Scaling<kColumns, Real> scale;
  V guard;

  GROUPNORM_INLINE Gradient(const ChannelTable& table_, std::int64_t at_)
      : table(table_),
        at(at_),
        center(coefficients<Real>(table_), at_),
        scale(coefficients<Real>(table_), at_) {
    if constexpr (kGuarded) guard = channel<kColumns>(table.guard, at);
  }

  struct Pair {
    V centred, dv;
  };
  GROUPNORM_INLINE Pair operator()(const V& dy, const V& value, const SwishRate<V>& rate) const {
    const V centred = center(value);
    V v = scale(centred);
    if constexpr (kGuarded) {
      if (__builtin_expect(any_lt<kColumns>(abs(v), guard), 0)) {
        v = narrow(exact_v<kColumns>(table, at, widen(value)));
      }
    }
    return {centred, through_activation<A>(dy, v, rate)};
  }
};

// Sums of dv and of dv * xhat: Real for a few terms, double in between.
template <class Real>
struct GradientSums {
  using V = Vec<Real>;
  V a = set1<V>(0), b = a;

  GROUPNORM_INLINE void add(const V& dv, const V& xhat, bool with_b) {
    a = a + dv;
    if (with_b) b = fma(dv, xhat, b);
  }
};

// kKeep: dv is written to plane.dv, for an apply that then needs neither dy nor the activation.
template <class T, class Real, Activation A, bool kColumns, bool kKeep>
GROUPNORM_INLINE void reduce_plane(const ReducePlane& plane) {
  using V = Vec<Real>;
  const T* const dy = static_cast<const T*>(plane.dy);
  const T* const x = static_cast<const T*>(plane.x);
  const Coefficients<Real>& c = coefficients<Real>(plane.table);
  const SwishRate<V> rate(plane.beta);
  // Without an activation the sum of dv needs no x.
  const bool with_b = plane.b != nullptr, only_dy = A == Activation::none && !with_b;
  // Only the last `fresh` lanes count; those past a row's end hold dy = 0.
  const auto element = [&](GradientSums<Real>& sums, std::int64_t row, std::int64_t i, int count,
                           int fresh, const Gradient<T, Real, A, kColumns>& gradient,
                           const V& rstd) GROUPNORM_INLINE_LAMBDA {
    V dy_lanes = load_as<Real>(dy + row * plane.dy_stride + i, count);
    if (only_dy) {
      sums.a = sums.a + (fresh == kLanes ? dy_lanes : last_lanes(dy_lanes, fresh));
      return;
    }
    const auto pair =
        gradient(dy_lanes, load_as<Real>(x + row * plane.x_stride + i, count), rate);
    if constexpr (kKeep) store_as(plane.dv + row * plane.dv_stride + i, pair.dv, count);
    const V dv = fresh == kLanes ? pair.dv : last_lanes(pair.dv, fresh);
    sums.add(dv, pair.centred * rstd, with_b);
  };
  if constexpr (kColumns) {
    for_each_column_block(
        plane.rows, plane.length,
        [&](std::int64_t row, std::int64_t end, std::int64_t column, int count, int fresh)
            GROUPNORM_INLINE_LAMBDA {
              const Gradient<T, Real, A, kColumns> gradient(plane.table, column);
              const V rstd = channel<kColumns>(c.rstd, column);
              F64 a = set1<F64>(0.0), b = a;
              if (row != 0) {
                a = load_as<double>(plane.a + column, count);
                if (with_b) b = load_as<double>(plane.b + column, count);
              }
              GradientSums<Real> sums;
              for (; row < end; ++row) element(sums, row, column, count, kLanes, gradient, rstd);
              store_sums(plane.a + column, a + widen(sums.a), count, fresh);
              if (with_b) store_sums(plane.b + column, b + widen(sums.b), count, fresh);
            });
  } else {
    for (std::int64_t row = 0; row < plane.rows; ++row) {
      const Gradient<T, Real, A, kColumns> gradient(plane.table, row);
      const V rstd = channel<kColumns>(c.rstd, row);
      F64 a = set1<F64>(0.0), b = a;
      const auto fold = [&](const GradientSums<Real>& sums) GROUPNORM_INLINE_LAMBDA {
        a = a + widen(sums.a);
        if (with_b) b = b + widen(sums.b);
      };
      const std::int64_t tail = plane.length % kLanes, whole = plane.length - tail;
      for (std::int64_t begin = 0; begin < whole; begin += kFloatTerms * kLanes) {
        GradientSums<Real> sums;
        const std::int64_t end = smaller(begin + kFloatTerms * kLanes, whole);
        for (std::int64_t i = begin; i < end; i += kLanes) {
          element(sums, row, i, kLanes, kLanes, gradient, rstd);
        }
        fold(sums);
      }
      if (tail != 0) {
        GradientSums<Real> sums;
        const auto rest = static_cast<int>(tail);
        if (whole != 0) {
          element(sums, row, plane.length - kLanes, kLanes, rest, gradient, rstd);
        } else {
          element(sums, row, 0, rest, kLanes, gradient, rstd);
        }
        fold(sums);
      }
      plane.a[row] = reduce_add(a);
      if (with_b) plane.b[row] = reduce_add(b);
    }
  }
}

template <class T, class Real, Activation A, bool kColumns>
void reduce(const ReducePlane& plane) {
  count_call();
  constexpr bool kKeepable = is_smooth(A) && std::is_same_v<Real, float>;
  if (kKeepable && plane.dv != nullptr) {
    reduce_plane<T, Real, A, kColumns, kKeepable>(plane);
  } else {
    reduce_plane<T, Real, A, kColumns, false>(plane);
  }
}

// Dy is T, or float where dy is dv as reduce has kept it.
template <class T, class Dy, class Real, Activation A, bool kColumns>
void apply(const ApplyPlane& plane) {
  count_call();
  using V = Vec<Real>;
  const Coefficients<Real>& c = coefficients<Real>(plane.table);
  const SwishRate<V> rate(plane.beta);
  struct Channel {
    Gradient<T, Real, A, kColumns> gradient;
    V multiplier, offset, slope;
  };
  const auto channel_at = [&](std::int64_t at) GROUPNORM_INLINE_LAMBDA {
    return Channel{{plane.table, at},
                   channel<kColumns>(c.grad_multiplier, at),
                   channel<kColumns>(c.grad_offset, at),
                   channel<kColumns>(c.grad_slope, at)};
  };
  const auto element = [&](const Dy* dy, const T* x, T* dx, int count, const Channel& ch)
                           GROUPNORM_INLINE_LAMBDA {
    const auto pair = ch.gradient(load_as<Real>(dy, count), load_as<Real>(x, count), rate);
    store_as(dx, fma(pair.dv, ch.multiplier, fnma(pair.centred, ch.slope, ch.offset)), count);
  };
  const auto at_row = [&](std::int64_t row, std::int64_t i, int count, const Channel& ch)
                          GROUPNORM_INLINE_LAMBDA {
    element(static_cast<const Dy*>(plane.dy) + row * plane.dy_stride + i,
            static_cast<const T*>(plane.x) + row * plane.x_stride + i,
            static_cast<T*>(plane.dx) + row * plane.dx_stride + i, count, ch);
  };
  for_each_row_block<kColumns>(plane, [&](std::int64_t first, auto rows) GROUPNORM_INLINE_LAMBDA {
    if constexpr (kColumns) {
      for_each_whole_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
        const Channel ch = channel_at(i);
        for (int r = 0; r < rows; ++r) at_row(first + r, i, count, ch);
      });
    } else {
      const Channel ch = channel_at(first);
      for_each_whole_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
        at_row(first, i, count, ch);
      });
    }
  });
}

// One number of each sample, a stride apart; the lanes past the last sample are 0.
template <class T>
GROUPNORM_INLINE F64 gather(const T* first, std::int64_t stride, std::int64_t samples) {
  T lanes[kLanes] = {};
  for (std::int64_t s = 0; s < samples; ++s) lanes[s] = first[s * stride];
  return load_as<double>(lanes, kLanes);
}
template <class T>
GROUPNORM_INLINE void scatter(T* first, std::int64_t stride, std::int64_t samples, const F64& a) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    // One by one: parameters and statistics may hold any NaN, whose payload a vector's rounding could
    // carry over into the sign.
    float lanes[kLanes];
    store_as(lanes, a, kLanes);
    for (std::int64_t s = 0; s < samples; ++s) first[s * stride] = to_bfloat16(lanes[s]);
  } else {
    T lanes[kLanes];
    store_as(lanes, a, kLanes);
    for (std::int64_t s = 0; s < samples; ++s) first[s * stride] = lanes[s];
  }
}

// In double for float64; else in float, which knows swish for beta >= 0 only.
template <class T, class Step>
GROUPNORM_INLINE F64 activation_lanes(const SamplesPlane& plane, const F64& v, const Step& step) {
  if constexpr (!std::is_same_v<T, double>) {
    if (plane.beta >= 0.0) return widen(step(narrow(v), SwishRate<F32>(plane.beta)));
  }
  return step(v, SwishRate<F64>(plane.beta));
}

template <class T, Activation A>
void samples_forward(const SamplesPlane& plane) {
  count_call();
  const T* x = static_cast<const T*>(plane.x);
  T* y = static_cast<T*>(plane.result);
  F64 values[kLaneChannels];
  for (std::int64_t k = 0; k < plane.groups; ++k) {
    const std::int64_t begin = plane.group_begin[k], channels = plane.group_begin[k + 1] - begin;
    const F64 count = set1<F64>(static_cast<double>(channels));
    F64 sum = set1<F64>(0.0), rest = sum, m2 = sum;
    for (std::int64_t c = 0; c < channels; ++c) {
      values[c] = gather(x + begin + c, plane.x_stride, plane.samples);
      sum = sum + values[c];
    }
    const F64 mean = sum / count;
    for (std::int64_t c = 0; c < channels; ++c) {
      values[c] = values[c] - mean;
      rest = rest + values[c];
      m2 = fma(values[c], values[c], m2);
    }
    // What the mean's rounding left.
    const F64 low = rest / count;
    // Squares that overflow must not turn into zeros: infinity times 0 is NaN.
    const F64 exact_m2 = at_least(fnma(rest, low, m2), set1<F64>(0.0));
    const F64 variance = fma(set1<F64>(0.0), exact_m2, exact_m2 / count);
    const F64 rstd = set1<F64>(1.0) / sqrt(variance + set1<F64>(plane.eps));
    scatter(plane.mean + k, plane.groups, plane.samples, mean + low);
    scatter(plane.rstd + k, plane.groups, plane.samples, rstd);
    for (std::int64_t c = 0; c < channels; ++c) {
      const F64 v = fma((values[c] - low) * rstd, set1<F64>(plane.gain[begin + c]),
                        set1<F64>(plane.offset[begin + c]));
      const F64 result =
          A == Activation::none
              ? v
              : activation_lanes<T>(plane, v, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                  return activate<A>(u, rate);
                });
      scatter(y + begin + c, plane.result_stride, plane.samples, result);
    }
  }
}

template <class T, Activation A>
void samples_backward(const SamplesPlane& plane) {
  count_call();
  const T* x = static_cast<const T*>(plane.x);
  const T* dy = static_cast<const T*>(plane.dy);
  T* dx = static_cast<T*>(plane.result);
  F64 xhats[kLaneChannels], dvs[kLaneChannels];
  for (std::int64_t k = 0; k < plane.groups; ++k) {
    const std::int64_t begin = plane.group_begin[k], channels = plane.group_begin[k + 1] - begin;
    const F64 mean = gather(plane.mean + k, plane.groups, plane.samples);
    const F64 rstd = gather(plane.rstd + k, plane.groups, plane.samples);
    F64 p = set1<F64>(0.0), q = p;
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t at = begin + c;
      const F64 gain = set1<F64>(plane.gain[at]);
      const F64 xhat = (gather(x + at, plane.x_stride, plane.samples) - mean) * rstd;
      const F64 slope_at = fma(xhat, gain, set1<F64>(plane.offset[at]));
      F64 dv = gather(dy + at, plane.dy_stride, plane.samples);
      if constexpr (A == Activation::relu) {
        dv = through_activation<A>(dv, slope_at, SwishRate<F64>(plane.beta));
      } else if constexpr (A != Activation::none) {
        dv = dv * activation_lanes<T>(
                      plane, slope_at,
                      [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                        return through_activation<A>(set1<std::decay_t<decltype(u)>>(1), u, rate);
                      });
      }
      const F64 product = dv * xhat;
      // A lane without a sample may hold 0 times infinity.
      const int samples = static_cast<int>(plane.samples);
      plane.a[at] = reduce_add(first_lanes_if(dv, samples));
      if (plane.b != nullptr) plane.b[at] = reduce_add(first_lanes_if(product, samples));
      p = fma(gain, dv, p);
      q = fma(gain, product, q);
      xhats[c] = xhat;
      dvs[c] = dv;
    }
    if (dx == nullptr) continue;
    const F64 inverse = set1<F64>(1.0 / static_cast<double>(channels));
    p = p * inverse;
    q = q * inverse;
    for (std::int64_t c = 0; c < channels; ++c) {
      const F64 gain = set1<F64>(plane.gain[begin + c]);
      const F64 terms = fnma(xhats[c], q, fma(gain, dvs[c], set1<F64>(0.0) - p));
      scatter(dx + begin + c, plane.result_stride, plane.samples, rstd * terms);
    }
  }
}

template <class T, class Real, Activation A>
void fill_kernels(Kernels& table, DType dtype, bool in_double) {
  const auto t = static_cast<int>(dtype), a = static_cast<int>(A), r = static_cast<int>(in_double);
  constexpr auto first = static_cast<int>(Layout::channels_first);
  constexpr auto last = static_cast<int>(Layout::channels_last);
  table.normalize[t][a][first][r] = normalize<T, Real, A, false>;
  table.normalize[t][a][last][r] = normalize<T, Real, A, true>;
  table.reduce[t][a][first][r] = reduce<T, Real, A, false>;
  table.reduce[t][a][last][r] = reduce<T, Real, A, true>;
  // The plain version of a type fills in what knows no other.
  if (in_double == std::is_same_v<T, double>) {
    table.samples_forward[t][a] = samples_forward<T, A>;
    table.samples_backward[t][a] = samples_backward<T, A>;
  }
  table.apply[t][a][first][r] = apply<T, T, Real, A, false>;
  table.apply[t][a][last][r] = apply<T, T, Real, A, true>;
}

template <class T, class Real>
void fill_activations(Kernels& table, DType dtype, bool in_double) {
  fill_kernels<T, Real, Activation::none>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::relu>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::swish>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::gelu>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::gelu_tanh>(table, dtype, in_double);
}

template <class T>
void fill_plain(Kernels& table, DType dtype) {
  const auto t = static_cast<int>(dtype);
  table.moments_run[t] = moments_run<T>;
  table.moments_columns[t] = moments_columns<T>;
  if constexpr (!std::is_same_v<T, double>) {
    table.apply_kept[t][static_cast<int>(Layout::channels_first)] =
        apply<T, float, float, Activation::none, false>;
    table.apply_kept[t][static_cast<int>(Layout::channels_last)] =
        apply<T, float, float, Activation::none, true>;
  }
}

// Without kWithDouble, the rarely used double kernels of the narrower types come from the
// portable table (dispatch.cpp puts them there).
template <bool kWithDouble>
Kernels make_kernels(const char* name) {
  Kernels table{};
  table.name = name;
  table.calls = &kernel_calls;
  fill_plain<float>(table, DType::float32);
  fill_plain<double>(table, DType::float64);
  fill_plain<Float16>(table, DType::float16);
  fill_plain<BFloat16>(table, DType::bfloat16);
  fill_activations<float, float>(table, DType::float32, false);
  fill_activations<double, double>(table, DType::float64, true);
  fill_activations<Float16, float>(table, DType::float16, false);
  fill_activations<BFloat16, float>(table, DType::bfloat16, false);
  if constexpr (kWithDouble) {
    fill_activations<float, double>(table, DType::float32, true);
    fill_activations<Float16, double>(table, DType::float16, true);
    fill_activations<BFloat16, double>(table, DType::bfloat16, true);
  }
  return table;
}

}  // namespace
}  // namespace groupnorm
