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
#include "moments-inl.h"
#include "samples-inl.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

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

// Lanes of y from v in double, where v has cancelled (|v| < guard) or lies in an activation's tail. Only
// those lanes: what one holds must not show in the bits of its neighbours. Not inlined: it would take
// the registers of the loop that seldom needs it.
struct Doubtful {
  float x[kLanes], v[kLanes];
};
template <class T, Activation A, bool kColumns>
__attribute__((noinline, cold)) void mend_lanes(const NormalizePlane& plane, const Doubtful& lanes, T* y,
                                          int count, std::int64_t at) {
  // Only v is in doubt: the activation of a rounded v is still right to far less than half an ulp.
  const SwishRate<F32> rate(plane.beta);
  const F32 exact = narrow(exact_v<kColumns>(plane.table, at, widen(load(lanes.x))));
  const F32 v = load(lanes.v), better = activate<A>(exact, rate), plain = activate<A>(v, rate);
  F32 mended = select_lt(abs(v), channel<kColumns>(plane.table.guard, at), better, plain);
  if constexpr (is_smooth(A)) {
    mended = select_lt(v, channel<kColumns>(plane.table.tail, at), better, mended);
  }
  store_as(y, mended, count);
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
        Doubtful lanes;
        store(lanes.x, value);
        store(lanes.v, v);
        mend_lanes<T, A, kColumns>(plane, lanes, y, count, ch.at);
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
      constexpr std::int64_t span = kFloatTerms * kLanes;
      const auto add_span = [&](GradientSums<Real>& sums, std::int64_t begin) GROUPNORM_INLINE_LAMBDA {
        const std::int64_t end = smaller(begin + span, whole);
        for (std::int64_t i = begin; i < end; i += kLanes) {
          element(sums, row, i, kLanes, kLanes, gradient, rstd);
        }
      };
      const auto add_tail = [&](GradientSums<Real>& sums) GROUPNORM_INLINE_LAMBDA {
        const auto rest = static_cast<int>(tail);
        if (whole != 0) {
          element(sums, row, plane.length - kLanes, kLanes, rest, gradient, rstd);
        } else {
          element(sums, row, 0, rest, kLanes, gradient, rstd);
        }
      };
      // The tail joins the last span, which saves short rows a conversion; in the loop of a smooth
      // activation it would cost the others more than that.
      constexpr bool kApart = is_smooth(A);
      for (std::int64_t begin = 0; begin < (kApart ? whole : plane.length); begin += span) {
        GradientSums<Real> sums;
        add_span(sums, begin);
        if (!kApart && tail != 0 && begin + span >= plane.length) add_tail(sums);
        fold(sums);
      }
      if (kApart && tail != 0) {
        GradientSums<Real> sums;
        add_tail(sums);
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

// Dy is T, or float where dy is dv as reduce has kept it, perhaps in dx.
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
  const auto dy_row = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return static_cast<const Dy*>(plane.dy) + row * plane.dy_stride;
  };
  const auto element = [&](const V& dy, std::int64_t row, std::int64_t i, int count,
                           const Channel& ch) GROUPNORM_INLINE_LAMBDA {
    const T* const x = static_cast<const T*>(plane.x) + row * plane.x_stride + i;
    T* const dx = static_cast<T*>(plane.dx) + row * plane.dx_stride + i;
    const auto pair = ch.gradient(dy, load_as<Real>(x, count), rate);
    store_as(dx, fma(pair.dv, ch.multiplier, fnma(pair.centred, ch.slope, ch.offset)), count);
  };
  const std::int64_t length = plane.length, whole = length - length % kLanes;
  if (whole == 0) {
    const auto count = static_cast<int>(length);
    for (std::int64_t row = 0; row < plane.rows; ++row) {
      element(load_as<Real>(dy_row(row), count), row, 0, count, channel_at(kColumns ? 0 : row));
    }
    return;
  }
  // As in normalize: the last dy is read before dx, which may be dy, is written.
  for_each_row_block<kColumns>(plane, [&](std::int64_t first, auto rows) GROUPNORM_INLINE_LAMBDA {
    const Dy* dy[rows];
    V last[rows];
    for (int r = 0; r < rows; ++r) {
      dy[r] = dy_row(first + r);
      last[r] = load_as<Real>(dy[r] + length - kLanes, kLanes);
    }
    if constexpr (kColumns) {
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        const Channel ch = channel_at(i);
        for (int r = 0; r < rows; ++r) {
          element(load_as<Real>(dy[r] + i, kLanes), first + r, i, kLanes, ch);
        }
      }
    } else {
      const Channel ch = channel_at(first);
      for (std::int64_t i = 0; i < whole; i += kLanes) {
        element(load_as<Real>(dy[0] + i, kLanes), first, i, kLanes, ch);
      }
    }
    if (whole != length) {
      const Channel ch = channel_at(kColumns ? length - kLanes : first);
      for (int r = 0; r < rows; ++r) element(last[r], first + r, length - kLanes, kLanes, ch);
    }
  });
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
