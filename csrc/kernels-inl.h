// The four kernels, once, for every instruction set: included by isa/*.cpp after a simd header.
//
// Guarantees: sums are taken in double, in sixteen lanes that are added in one fixed tree, so a
// result depends on the plane's shape and values only. Nothing outside the plane is read or
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

template <class T>
GROUPNORM_INLINE auto load(const T* p, int count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<std::size_t>(count) * sizeof(T));
  return load(lanes);
}
template <class T, class V>
GROUPNORM_INLINE void store(T* p, const V& a, int count) {
  T lanes[kLanes];
  store(lanes, a);
  std::memcpy(static_cast<void*>(p), lanes, static_cast<std::size_t>(count) * sizeof(T));
}

GROUPNORM_INLINE F32 convert(const F32& a, float) { return a; }
GROUPNORM_INLINE F64 convert(const F32& a, double) { return widen(a); }
GROUPNORM_INLINE F64 convert(const F64& a, double) { return a; }
GROUPNORM_INLINE F64 widen(const F64& a) { return a; }

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

// step(index, count) over a row: whole vectors first, then the tail.
template <class Step>
GROUPNORM_INLINE void for_each_vector(std::int64_t length, Step&& step) {
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) step(i, kLanes);
  if (i < length) step(i, static_cast<int>(length - i));
}

GROUPNORM_INLINE F64 first_lanes(const F64& a, int count) {
  alignas(64) static constexpr double index[kLanes] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                       8, 9, 10, 11, 12, 13, 14, 15};
  return select_lt(load(index), set1<F64>(count), a, set1<F64>(0.0));
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

  GROUPNORM_INLINE F64 at(std::int64_t i, int count) const {
    if (residual == nullptr) return load_as<double>(x + i, count);
    using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
    store_as(sum + i, load_as<Real>(x + i, count) + load_as<Real>(residual + i, count), count);
    return load_as<double>(sum + i, count);
  }
};

// The shift K is a mean of the first elements (of a run) or rows (of a column). Being the mean of s
// among count elements, it obeys (K - mean)^2 <= variance * count / s, so that the subtraction of
// s1^2 / count loses at most a factor count / s of double's precision, outliers or not.
constexpr int kShiftVectors = 4;
constexpr std::int64_t kShiftRows = 8;

template <class T>
PieceMoments moments_run(const MomentsPlane& plane) {
  count_call();
  const F64 zero = set1<F64>(0.0);
  const std::int64_t sampled = smaller<std::int64_t>(plane.length, kShiftVectors * kLanes);
  F64 start = zero;
  const MomentsSource<T> first(plane, 0);
  for_each_vector(sampled, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
    const F64 value = first.at(i, count);
    start = start + (count == kLanes ? value : first_lanes(value, count));
  });
  const double k = reduce_add(start) / static_cast<double>(sampled);
  const F64 shift = set1<F64>(k);
  F64 s1 = zero, s2 = zero;
  for (std::int64_t row = 0; row < plane.rows; ++row) {
    const MomentsSource<T> source(plane, row);
    for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
      F64 d = source.at(i, count) - shift;
      if (count != kLanes) d = first_lanes(d, count);
      s1 = s1 + d;
      s2 = fma(d, d, s2);
    });
  }
  const double count = static_cast<double>(plane.rows) * static_cast<double>(plane.length);
  const double sum = reduce_add(s1), offset = sum / count;
  const double m2 = reduce_add(s2) - sum * offset;
  return {count, k, offset, m2 < 0.0 ? 0.0 : m2};
}

// Rows of a column kernel that are read together: the sums wait in memory for the next ones, and so
// many rows are as many streams for the hardware's prefetcher.
constexpr std::int64_t kRowBlock = 8;

// step(first_row, end_row, column, count): blocks of rows, and in each all columns.
template <class Step>
GROUPNORM_INLINE void for_each_column_block(std::int64_t rows, std::int64_t columns, Step&& step) {
  for (std::int64_t row = 0; row < rows; row += kRowBlock) {
    const std::int64_t end = smaller(row + kRowBlock, rows);
    for_each_vector(columns, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
      step(row, end, column, count);
    });
  }
}

template <class T>
void moments_columns(const MomentsPlane& plane, double* mean, double* mean_low, double* m2) {
  count_call();
  const F64 zero = set1<F64>(0.0);
  const std::int64_t sampled = smaller(plane.rows, kShiftRows);
  const F64 sampled_inverse = set1<F64>(1.0 / static_cast<double>(sampled));
  // Until the end, mean is the shift and the other two are the sums of d and of d^2.
  for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    F64 start = zero;
    for (std::int64_t row = 0; row < sampled; ++row) {
      start = start + MomentsSource<T>(plane, row).at(column, count);
    }
    store_as(mean + column, start * sampled_inverse, count);
    store_as(mean_low + column, zero, count);
    store_as(m2 + column, zero, count);
  });
  for_each_column_block(
      plane.rows, plane.length,
      [&](std::int64_t row, std::int64_t end, std::int64_t column, int count)
          GROUPNORM_INLINE_LAMBDA {
            const F64 shift = load_as<double>(mean + column, count);
            F64 s1 = load_as<double>(mean_low + column, count);
            F64 s2 = load_as<double>(m2 + column, count);
            for (; row < end; ++row) {
              const F64 d = MomentsSource<T>(plane, row).at(column, count) - shift;
              s1 = s1 + d;
              s2 = fma(d, d, s2);
            }
            store_as(mean_low + column, s1, count);
            store_as(m2 + column, s2, count);
          });
  const F64 inverse = set1<F64>(1.0 / static_cast<double>(plane.rows));
  for_each_vector(plane.length, [&](std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
    const F64 s1 = load_as<double>(mean_low + column, count);
    const F64 s2 = load_as<double>(m2 + column, count);
    const F64 offset = s1 * inverse;
    store_as(mean_low + column, offset, count);
    store_as(m2 + column, at_least(fnma(s1, offset, s2), zero), count);
  });
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

// A finite beta stays finite in float.
template <class Real>
GROUPNORM_INLINE Real beta_as(double beta) {
  constexpr double most = std::is_same_v<Real, float> ? 0x1.fffffep127 : 0x1.fffffffffffffp1023;
  return static_cast<Real>(smaller(larger(beta, -most), most));
}

template <class Real>
GROUPNORM_INLINE const Coefficients<Real>& coefficients(const ChannelTable& table) {
  if constexpr (std::is_same_v<Real, float>) {
    return table.single;
  } else {
    return table.exact;
  }
}

// x - mean, the mean as the sum of two: the difference keeps its relative error whatever the mean.
template <bool kColumns, class Real>
struct Centering {
  Vec<Real> center, low;

  GROUPNORM_INLINE Centering(const Coefficients<Real>& c, std::int64_t at)
      : center(channel<kColumns>(c.center, at)), low(channel<kColumns>(c.center_low, at)) {}
  GROUPNORM_INLINE Vec<Real> operator()(const Vec<Real>& x) const { return (x - center) - low; }
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

template <class T, class Real, Activation A, bool kColumns>
void normalize(const NormalizePlane& plane) {
  count_call();
  constexpr bool kGuarded = is_half<T> && std::is_same_v<Real, float>;
  using V = Vec<Real>;
  const Coefficients<Real>& c = coefficients<Real>(plane.table);
  // A 16-bit result is computed again in double where v has cancelled, and in the tail of an
  // activation, which magnifies the error of v.
  constexpr bool kTail = kGuarded && A != Activation::none && A != Activation::relu;
  const V beta = set1<V>(beta_as<Real>(plane.beta));
  [[maybe_unused]] const V tail_sign = set1<V>(plane.beta < 0.0 ? Real(-1) : Real(1));
  struct Channel {
    Centering<kColumns, Real> center;
    Scaling<kColumns, Real> scale;
    V guard, tail;
  };
  const auto channel_at = [&](std::int64_t at) GROUPNORM_INLINE_LAMBDA {
    Channel ch{{c, at}, {c, at}, {}, {}};
    if constexpr (kGuarded) ch.guard = channel<kColumns>(plane.table.guard, at);
    if constexpr (kTail) ch.tail = channel<kColumns>(plane.table.tail, at);
    return ch;
  };
  const auto element = [&](const T* x, T* y, int count, const Channel& ch,
                           [[maybe_unused]] std::int64_t at) GROUPNORM_INLINE_LAMBDA {
    const V value = load_as<Real>(x, count);
    const V v = ch.scale(ch.center(value));
    if constexpr (kGuarded) {
      bool again = any_lt(abs(v), ch.guard);
      if constexpr (kTail) again = again | any_lt(v * tail_sign, ch.tail);
      if (__builtin_expect(again, 0)) {
        const F64 exact = exact_v<kColumns>(plane.table, at, widen(value));
        store_as(y, activate<A>(exact, set1<F64>(plane.beta)), count);
        return;
      }
    }
    store_as(y, activate<A>(v, beta), count);
  };
  for (std::int64_t row = 0; row < plane.rows; ++row) {
    const T* x = static_cast<const T*>(plane.x) + row * plane.x_stride;
    T* y = static_cast<T*>(plane.y) + row * plane.y_stride;
    if constexpr (kColumns) {
      for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
        element(x + i, y + i, count, channel_at(i), i);
      });
    } else {
      const Channel ch = channel_at(row);
      for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
        element(x + i, y + i, count, ch, row);
      });
    }
  }
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
  V beta, guard;

  GROUPNORM_INLINE Gradient(const ChannelTable& table_, std::int64_t at_, double beta_)
      : table(table_),
        at(at_),
        center(coefficients<Real>(table_), at_),
        scale(coefficients<Real>(table_), at_),
        beta(set1<V>(beta_as<Real>(beta_))) {
    if constexpr (kGuarded) guard = channel<kColumns>(table.guard, at);
  }

  struct Pair {
    V centred, dv;
  };
  GROUPNORM_INLINE Pair operator()(const T* dy, const T* x, int count) const {
    const V value = load_as<Real>(x, count);
    const V centred = center(value);
    V v = scale(centred);
    if constexpr (kGuarded) {
      if (__builtin_expect(any_lt(abs(v), guard), 0)) {
        v = narrow(exact_v<kColumns>(table, at, widen(value)));
      }
    }
    return {centred, through_activation<A>(load_as<Real>(dy, count), v, beta)};
  }
};

struct SumPair {
  F64 a = set1<F64>(0.0), b = set1<F64>(0.0);

  // Both factors are floats for every type but double, so the product is exact.
  template <class V>
  GROUPNORM_INLINE void add(const V& dv, const V& centred, bool with_b) {
    const F64 wide = widen(dv);
    a = a + wide;
    if (with_b) b = fma(wide, widen(centred), b);
  }
};

template <class T, class Real, Activation A, bool kColumns>
void reduce(const ReducePlane& plane) {
  count_call();
  const T* const dy = static_cast<const T*>(plane.dy);
  const T* const x = static_cast<const T*>(plane.x);
  // Without an activation the sum of dv needs no x.
  const bool with_b = plane.b != nullptr, only_dy = A == Activation::none && !with_b;
  const auto element = [&](SumPair& sums, std::int64_t row, std::int64_t i, int count,
                           const Gradient<T, Real, A, kColumns>& gradient) GROUPNORM_INLINE_LAMBDA {
    const T* dy_at = dy + row * plane.dy_stride + i;
    if (only_dy) {
      sums.a = sums.a + load_as<double>(dy_at, count);
      return;
    }
    const auto pair = gradient(dy_at, x + row * plane.x_stride + i, count);
    sums.add(pair.dv, pair.centred, with_b);
  };
  if constexpr (kColumns) {
    for_each_column_block(
        plane.rows, plane.length,
        [&](std::int64_t row, std::int64_t end, std::int64_t column, int count)
            GROUPNORM_INLINE_LAMBDA {
              const Gradient<T, Real, A, kColumns> gradient(plane.table, column, plane.beta);
              SumPair sums;
              if (row != 0) {
                sums.a = load_as<double>(plane.a + column, count);
                if (with_b) sums.b = load_as<double>(plane.b + column, count);
              }
              for (; row < end; ++row) element(sums, row, column, count, gradient);
              store_as(plane.a + column, sums.a, count);
              if (with_b) store_as(plane.b + column, sums.b, count);
            });
  } else {
    for (std::int64_t row = 0; row < plane.rows; ++row) {
      const Gradient<T, Real, A, kColumns> gradient(plane.table, row, plane.beta);
      SumPair sums;
      for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
        element(sums, row, i, count, gradient);
      });
      plane.a[row] = reduce_add(sums.a);
      if (with_b) plane.b[row] = reduce_add(sums.b);
    }
  }
}

template <class T, class Real, Activation A, bool kColumns>
void apply(const ApplyPlane& plane) {
  count_call();
  using V = Vec<Real>;
  const Coefficients<Real>& c = coefficients<Real>(plane.table);
  struct Channel {
    Gradient<T, Real, A, kColumns> gradient;
    V multiplier, offset, slope;
    std::int64_t at;
  };
  // Where dv is exact, so are the sums behind offset and slope, and 1 ulp of a 16-bit dx can be
  // kept even where its terms cancel: those vectors are computed in double.
  constexpr bool kGuarded = is_half<T> && std::is_same_v<Real, float> &&
                            (A == Activation::none || A == Activation::relu);
  [[maybe_unused]] const F32 ratio =
      set1<F32>(std::is_same_v<T, Float16> ? kGuardFloat16 : kGuardBFloat16);
  const auto channel_at = [&](std::int64_t at) GROUPNORM_INLINE_LAMBDA {
    return Channel{{plane.table, at, plane.beta},
                   channel<kColumns>(c.grad_multiplier, at),
                   channel<kColumns>(c.grad_offset, at),
                   channel<kColumns>(c.grad_slope, at),
                   at};
  };
  const auto element = [&](const T* dy, const T* x, T* dx, int count, const Channel& ch) GROUPNORM_INLINE_LAMBDA {
    const auto pair = ch.gradient(dy, x, count);
    V result = fma(pair.dv, ch.multiplier, fnma(pair.centred, ch.slope, ch.offset));
    if constexpr (kGuarded) {
      const V terms = fma(abs(pair.centred), abs(ch.slope), abs(ch.offset));
      if (__builtin_expect(any_lt(abs(result), ratio * terms), 0)) {
        const Coefficients<double>& exact = plane.table.exact;
        const F64 centred = Centering<kColumns, double>(exact, ch.at)(load_as<double>(x, count));
        const F64 mean_terms = fnma(centred, channel<kColumns>(exact.grad_slope, ch.at),
                                    channel<kColumns>(exact.grad_offset, ch.at));
        result = narrow(fma(widen(pair.dv), channel<kColumns>(exact.grad_multiplier, ch.at),
                            mean_terms));
      }
    }
    store_as(dx, result, count);
  };
  for (std::int64_t row = 0; row < plane.rows; ++row) {
    const T* dy = static_cast<const T*>(plane.dy) + row * plane.dy_stride;
    const T* x = static_cast<const T*>(plane.x) + row * plane.x_stride;
    T* dx = static_cast<T*>(plane.dx) + row * plane.dx_stride;
    if constexpr (kColumns) {
      for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
        element(dy + i, x + i, dx + i, count, channel_at(i));
      });
    } else {
      const Channel ch = channel_at(row);
      for_each_vector(plane.length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
        element(dy + i, x + i, dx + i, count, ch);
      });
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
  table.apply[t][a][first][r] = apply<T, Real, A, false>;
  table.apply[t][a][last][r] = apply<T, Real, A, true>;
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
void fill_moments(Kernels& table, DType dtype) {
  table.moments_run[static_cast<int>(dtype)] = moments_run<T>;
  table.moments_columns[static_cast<int>(dtype)] = moments_columns<T>;
}

// Without kWithDouble, the rarely used double kernels of the narrower types come from the
// portable table (dispatch.cpp puts them there).
template <bool kWithDouble>
Kernels make_kernels(const char* name) {
  Kernels table{};
  table.name = name;
  table.calls = &kernel_calls;
  fill_moments<float>(table, DType::float32);
  fill_moments<double>(table, DType::float64);
  fill_moments<Float16>(table, DType::float16);
  fill_moments<BFloat16>(table, DType::bfloat16);
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
