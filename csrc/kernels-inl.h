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

// Elements of one vector or two, some of them in doubt (1, the others 0): v has cancelled (|v| < guard) or lies
// in an activation's tail.
struct Doubtful {
  int count;
  float x[2 * kLanes], in_doubt[2 * kLanes];
};

// Those elements of y again, from v in double. No others: what one holds must not show in the bits of its
// neighbours. Not inlined: it would take the registers of the loop that seldom needs it.
template <class T, Activation A, bool kColumns>
__attribute__((noinline, cold)) void mend(const ChannelTable& table, double beta,
                                          const Doubtful& doubtful, T* y, std::int64_t at) {
  // Only v is in doubt: the activation of a rounded v is still right to far less than half an ulp.
  const SwishRate<F32> rate(beta);
  const F32 no = set1<F32>(0.0f);
  for_each_vector(doubtful.count, [&](std::int64_t first, int count) GROUPNORM_INLINE_LAMBDA {
    const F32 in_doubt = load(doubtful.in_doubt + first);
    if (!any_lt<true>(no, in_doubt)) return;
    const F32 v = exact_v<kColumns, false>(table, kColumns ? at + first : at, load(doubtful.x + first));
    const F32 known = load_as<float>(y + first, count);
    store_as(y + first, select_lt(no, in_doubt, activate<A>(v, rate), known), count);
  });
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
    V guard, tail, watch;
    std::int64_t at;
  };
  const auto channel_at = [](const ChannelTable& table, std::int64_t at) GROUPNORM_INLINE_LAMBDA {
    const Coefficients<Real>& c = coefficients<Real>(table);
    Channel ch{{c, at}, {c, at}, {}, {}, {}, at};
    if constexpr (kGuarded) {
      ch.guard = channel<numbers_of<kColumns>>(table.guard, at);
      ch.watch = channel<numbers_of<kColumns>>(table.watch, at);
    }
    if constexpr (kTail) ch.tail = channel<numbers_of<kColumns>>(table.tail, at);
    return ch;
  };
  [[maybe_unused]] const auto in_doubt = [](const V& v, const Channel& ch) GROUPNORM_INLINE_LAMBDA {
    const V no = set1<V>(0), yes = set1<V>(1), cancelled = select_lt(abs(v), ch.guard, yes, no);
    return kTail ? select_lt(v, ch.tail, yes, cancelled) : cancelled;
  };
  // order: whether the lanes are in split order, an integral constant.
  const auto element = [&](auto order, const V& value, T* y, int count, const ChannelTable& table,
                           const Channel& ch) GROUPNORM_INLINE_LAMBDA {
    const V v = ch.scale(ch.center(value));
    store_lanes<order.value>(y, activate_near<T, A>(v, rate), count);
    if constexpr (kGuarded) {
      const bool again = kTail ? any_lt<kColumns>(abs(v), ch.guard, v, ch.tail)
                               : any_lt<kColumns>(abs(v), ch.guard);
      if (__builtin_expect(again, 0)) {
        Doubtful doubtful;
        doubtful.count = count;
        store(doubtful.x, from_lanes<order.value>(value));
        store(doubtful.in_doubt, from_lanes<order.value>(in_doubt(v, ch)));
        mend<T, A, kColumns>(table, plane.beta, doubtful, y, ch.at);
      }
    }
  };
  // Two whole vectors; returns whether some are in doubt, and which.
  [[maybe_unused]] const auto element_two =
      [&](const T* x, T* y, const Channel& first, const Channel& second, Doubtful& doubtful)
          GROUPNORM_INLINE_LAMBDA {
        const Two<V> value = load_two<kSplit, Real>(x);
        const Two<V> v = {first.scale(first.center(value.first)),
                          second.scale(second.center(value.second))};
        const Two<V> result = {activate_near<T, A>(v.first, rate), activate_near<T, A>(v.second, rate)};
        if constexpr (kGuarded) {
          const Two<V>& watched = A == Activation::relu ? v : result;
          const Two<V> watch = {first.watch, second.watch}, tail = {first.tail, second.tail};
          if (__builtin_expect(kTail ? none_below<kColumns>(watched, watch, v, tail)
                                     : !any_magnitude_lt<kColumns>(watched, watch), 1)) {
            store_normal_two<kSplit>(y, result);
            return false;
          }
        }
        store_two<kSplit>(y, result);
        bool again = false;
        if constexpr (kGuarded) {
          again = any_magnitude_lt<kColumns>(v, {first.guard, second.guard});
          if constexpr (kTail) again |= any_lt<kColumns>(v, {first.tail, second.tail});
          if (again) {
            doubtful.count = 2 * kLanes;
            store_two<false>(doubtful.x, from_two<kSplit>(value));
            store_two<false>(doubtful.in_doubt, from_two<kSplit>(Two<V>{in_doubt(v.first, first),
                                                                        in_doubt(v.second, second)}));
          }
        }
        return again;
      };
  // at: where the numbers of y are in the plane's table.
  [[maybe_unused]] const auto mend_two = [&](const Doubtful& doubtful, T* y, std::int64_t at)
                                             GROUPNORM_INLINE_LAMBDA {
    if constexpr (kGuarded) mend<T, A, kColumns>(plane.table, plane.beta, doubtful, y, at);
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
  if constexpr (kStreams && !is_half<T>) {
    // What is in cache because it was just read, as x in place is, is not written around it. Lines that two rows
    // share are stored as usual, between others that are streamed: that made short rows five times slower.
    const bool few_shared = whole_lines<T>(plane.y, plane.y_stride) || (!kColumns && length >= kLongRow);
    if (plane.stream && plane.x != plane.y && few_shared) {
      for (std::int64_t row = 0; row < plane.rows; ++row) {
        const T* const x = x_row(row);
        const Channel of_row = channel_at(plane.table, kColumns ? 0 : row);
        stream_row(y_row(row), length, [&](std::int64_t i) GROUPNORM_INLINE_LAMBDA {
          const V value = load_as<Real>(x + i, kLanes);
          if constexpr (kColumns) {
            const Channel ch = channel_at(plane.table, i);
            return activate_near<T, A>(ch.scale(ch.center(value)), rate);
          } else {
            return activate_near<T, A>(of_row.scale(of_row.center(value)), rate);
          }
        });
      }
      finish_streams();
      return;
    }
  }
  const auto copy = [](auto& numbers, ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
    Coefficients<float>& c = table.single;
    c.center = numbers.copy(c.center);
    c.multiplier = numbers.copy(c.multiplier);
    c.offset = numbers.copy(c.offset);
    table.guard = numbers.copy(table.guard);
    table.watch = numbers.copy(table.watch);
    if constexpr (kTail) table.tail = numbers.copy(table.tail);
  };
  for_each_column_range<kSplit && kColumns, kTwoVectors, 6>(
      plane.table, whole, copy,
      [&](std::int64_t begin, std::int64_t end, const ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
        const bool with_tail = tail != 0 && end == whole;
        // So many rows together, an integral constant. The last vector of a row begins as far back as it
        // must to be whole. It is read before y, which may be x, is written.
        for_each_row_block<kColumns>(plane, [&](std::int64_t first, auto count)
                                                GROUPNORM_INLINE_LAMBDA {
          const T* x[count];
          T* y[count];
          V last[count] = {};
          for (int r = 0; r < count; ++r) {
            x[r] = x_row(first + r);
            y[r] = y_row(first + r);
            if (with_tail) last[r] = load_lanes<last_order.value, Real>(x[r] + length - kLanes, kLanes);
          }
          if constexpr (kColumns) {
            std::int64_t i = begin;
            if constexpr (kTwoVectors) {
              for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
                const Channel one = channel_at(table, i - begin);
                const Channel other = channel_at(table, i - begin + kLanes);
                repeat<count>([&](int r) GROUPNORM_INLINE_LAMBDA {
                  Doubtful doubtful;
                  const bool again = element_two(x[r] + i, y[r] + i, one, other, doubtful);
                  if (__builtin_expect(again, 0)) mend_two(doubtful, y[r] + i, i);
                });
              }
            }
            for (; i < end; i += kLanes) {
              const Channel ch = channel_at(table, i - begin);
              for (int r = 0; r < count; ++r) {
                element(in_order, load_lanes<kSplit, Real>(x[r] + i, kLanes), y[r] + i, kLanes, table,
                        ch);
              }
            }
          } else {
            const Channel ch = channel_at(table, first);
            std::int64_t i = 0;
            if constexpr (kTwoVectors) {
              // Mending is outside the inner loop: a call in it would cost the loop its registers.
              while (i + 2 * kLanes <= whole) {
                Doubtful doubtful;
                bool again = false;
                for (; !again && i + 2 * kLanes <= whole; i += 2 * kLanes) {
                  again = element_two(x[0] + i, y[0] + i, ch, ch, doubtful);
                }
                if (again) mend_two(doubtful, y[0] + i - 2 * kLanes, first);
              }
            }
            for (; i < whole; i += kLanes) {
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
