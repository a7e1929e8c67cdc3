// The kernels, once, for every instruction set: included by isa/*.cpp after a simd header.
//
// Guarantees: sums are taken in double, or in float over a few terms and in double over those, in
// sixteen lanes that are added in one fixed tree, so a result depends on the plane's shape and values
// only. Nothing outside the plane is read or
// written. y may be x. Everything has internal linkage, so that no code built for a newer CPU can
// be linked into the baseline.
#pragma once

#include <cstdint>
#include <type_traits>

#include "activations-inl.h"
#include "channels-inl.h"
#include "gradients-inl.h"
#include "kernels.h"
#include "moments-inl.h"
#include "samples-inl.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

// Lanes of y from v in double, where v has cancelled (|v| < guard) or lies in an activation's tail. Only
// those lanes: what one holds must not show in the bits of its neighbours. Not inlined: it would take
// the registers of the loop that seldom needs it.
struct Doubtful {
  float x[kLanes], v[kLanes];
};
template <class T, Activation A, bool kColumns, bool kSplit>
__attribute__((noinline, cold)) void mend_lanes(const ChannelTable& table, double beta,
                                                const Doubtful& lanes, T* y, int count,
                                                std::int64_t at) {
  // Only v is in doubt: the activation of a rounded v is still right to far less than half an ulp.
  constexpr Numbers kNumbers = numbers_of<kColumns>;
  const SwishRate<F32> rate(beta);
  const F32 exact = exact_v<kColumns, kSplit>(table, at, load(lanes.x));
  const F32 v = load(lanes.v), better = activate<A>(exact, rate), plain = activate<A>(v, rate);
  F32 mended = select_lt(abs(v), channel<kNumbers>(table.guard, at), better, plain);
  if constexpr (is_smooth(A)) {
    mended = select_lt(v, channel<kNumbers>(table.tail, at), better, mended);
  }
  store_lanes<kSplit>(y, mended, count);
}

template <class T, class Real, Activation A, bool kColumns>
void normalize(const NormalizePlane& plane) {
  count_call();
  constexpr bool kSplit = in_split_order<T, Real>;
  constexpr bool kGuarded = is_half<T> && std::is_same_v<Real, float>;
  using V = Vec<Real>;
  // The tail of an activation magnifies the error of v.
  constexpr bool kTail = kGuarded && is_smooth(A);
  const SwishRate<V> rate(plane.beta);
  struct Channel {
    Centering<numbers_of<kColumns>, Real> center;
    Scaling<numbers_of<kColumns>, Real> scale;
    V guard, tail;
    std::int64_t at;
  };
  const auto channel_at = [](const ChannelTable& table, std::int64_t at) GROUPNORM_INLINE_LAMBDA {
    const Coefficients<Real>& c = coefficients<Real>(table);
    Channel ch{{c, at}, {c, at}, {}, {}, at};
    if constexpr (kGuarded) ch.guard = channel<numbers_of<kColumns>>(table.guard, at);
    if constexpr (kTail) ch.tail = channel<numbers_of<kColumns>>(table.tail, at);
    return ch;
  };
  // order: whether the lanes are in split order, an integral constant.
  const auto element = [&](auto order, const V& value, T* y, int count, const ChannelTable& table,
                           const Channel& ch) GROUPNORM_INLINE_LAMBDA {
    const V v = ch.scale(ch.center(value));
    store_lanes<order.value>(y, activate<A>(v, rate), count);
    if constexpr (kGuarded) {
      const bool again = kTail ? any_lt<kColumns>(abs(v), ch.guard, v, ch.tail)
                               : any_lt<kColumns>(abs(v), ch.guard);
      if (__builtin_expect(again, 0)) {
        Doubtful lanes;
        store(lanes.x, value);
        store(lanes.v, v);
        mend_lanes<T, A, kColumns, order.value>(table, plane.beta, lanes, y, count, ch.at);
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
  // The last vector of a column plane is not where the numbers have been brought into order.
  constexpr std::bool_constant<kSplit> in_order{};
  constexpr std::bool_constant<kSplit && !kColumns> last_order{};
  if (whole == 0) {
    const auto count = static_cast<int>(tail);
    for (std::int64_t row = 0; row < plane.rows; ++row) {
      element(last_order, load_lanes<last_order.value, Real>(x_row(row), count), y_row(row), count,
              plane.table, channel_at(plane.table, kColumns ? 0 : row));
    }
    return;
  }
  const auto copy = [](auto& numbers, ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
    Coefficients<float>& c = table.single;
    c.center = numbers.copy(c.center);
    c.multiplier = numbers.copy(c.multiplier);
    c.offset = numbers.copy(c.offset);
    table.guard = numbers.copy(table.guard);
    if constexpr (kTail) table.tail = numbers.copy(table.tail);
  };
  for_each_column_range<kSplit && kColumns, 5>(
      plane.table, whole, copy,
      [&](std::int64_t begin, std::int64_t end, const ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
        const bool with_tail = tail != 0 && end == whole;
        // So many rows together, an integral constant. The last vector of a row begins as far back as it
        // must to be whole. It is read before y, which may be x, is written.
        for_each_row_block<kColumns>(plane, [&](std::int64_t first, auto count)
                                                GROUPNORM_INLINE_LAMBDA {
          const T* x[count];
          T* y[count];
          V last[count];
          for (int r = 0; r < count; ++r) {
            x[r] = x_row(first + r);
            y[r] = y_row(first + r);
            last[r] = load_lanes<last_order.value, Real>(x[r] + length - kLanes, kLanes);
          }
          if constexpr (kColumns) {
            for (std::int64_t i = begin; i < end; i += kLanes) {
              const Channel ch = channel_at(table, i - begin);
              for (int r = 0; r < count; ++r) {
                element(in_order, load_lanes<kSplit, Real>(x[r] + i, kLanes), y[r] + i, kLanes, table,
                        ch);
              }
            }
          } else {
            const Channel ch = channel_at(table, first);
            for (std::int64_t i = 0; i < whole; i += kLanes) {
              element(in_order, load_lanes<kSplit, Real>(x[0] + i, kLanes), y[0] + i, kLanes, table, ch);
            }
          }
          if (with_tail) {
            const Channel ch = channel_at(plane.table, kColumns ? length - kLanes : first);
            for (int r = 0; r < count; ++r) {
              element(last_order, last[r], y[r] + length - kLanes, kLanes, plane.table, ch);
            }
          }
        });
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
  table.apply[t][a][first][r] = apply<T, Real, A, false, false>;
  table.apply[t][a][last][r] = apply<T, Real, A, true, false>;
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
        apply<T, float, Activation::none, false, true>;
    table.apply_kept[t][static_cast<int>(Layout::channels_last)] =
        apply<T, float, Activation::none, true, true>;
  }
}

// What a table has of its own; dispatch.cpp takes the rest from other tables. The kernels that compute
// narrower types in double are seldom used and exist once; AVX512_BF16 has nothing for the other types.
enum class Contents { all_but_narrow_in_double, narrow_in_double, bfloat16 };

template <Contents kContents>
Kernels make_kernels(const char* name) {
  Kernels table{};
  table.name = name;
  table.calls = &kernel_calls;
  if constexpr (kContents == Contents::narrow_in_double) {
    fill_activations<float, double>(table, DType::float32, true);
    fill_activations<Float16, double>(table, DType::float16, true);
    fill_activations<BFloat16, double>(table, DType::bfloat16, true);
  } else {
    fill_plain<BFloat16>(table, DType::bfloat16);
    fill_activations<BFloat16, float>(table, DType::bfloat16, false);
  }
  if constexpr (kContents == Contents::all_but_narrow_in_double) {
    fill_plain<float>(table, DType::float32);
    fill_plain<double>(table, DType::float64);
    fill_plain<Float16>(table, DType::float16);
    fill_activations<float, float>(table, DType::float32, false);
    fill_activations<double, double>(table, DType::float64, true);
    fill_activations<Float16, float>(table, DType::float16, false);
  }
  return table;
}

}  // namespace
}  // namespace groupnorm
