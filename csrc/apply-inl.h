// The backward's second half: dx from dv, x and the means of the sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gradients-inl.h"
#include "narrow-inl.h"

namespace groupnorm {
namespace {

template <class Real, Activation A, Numbers kNumbers, bool kSplit>
struct ApplyChannel {
  using V = Vec<Real>;
  using OfRow = ApplyChannel<Real, A, Numbers::of_row, kSplit>;
  Gradient<Real, A, kNumbers, kSplit> gradient;
  V multiplier, offset, slope;

  GROUPNORM_INLINE ApplyChannel(const ChannelTable& table, std::int64_t at)
      : gradient(table, at),
        multiplier(channel<kNumbers>(coefficients<Real>(table).grad_multiplier, at)),
        offset(channel<kNumbers>(coefficients<Real>(table).grad_offset, at)),
        slope(channel<kNumbers>(coefficients<Real>(table).grad_slope, at)) {}
  GROUPNORM_INLINE ApplyChannel(const OfRow& row, const OfRow& next, const AcrossRows<V>& across)
      : gradient(row.gradient, next.gradient, across),
        multiplier(across(row.multiplier, next.multiplier)),
        offset(across(row.offset, next.offset)),
        slope(across(row.slope, next.slope)) {}

  GROUPNORM_INLINE V dx_of(const V& dv, const V& centred) const {
    return fma(dv, multiplier, fnma(centred, slope, offset));
  }
  GROUPNORM_INLINE V operator()(const V& dy, const V& x, const SwishRate<V>& rate) const {
    const auto pair = gradient(dy, x, rate);
    return dx_of(pair.dv, pair.centred);
  }
};
// The same of two vectors at each of several places, in place: dy becomes dx, and x is lost.
template <Activation A, class V, std::size_t kPairs, class First, class Second>
GROUPNORM_INLINE void apply_pairs(const First& first, const Second& second, Two<V> (&dy)[kPairs], Two<V> (&x)[kPairs],
                                  const SwishRate<V>& rate) {
  differentiate_pairs<A>(first.gradient, second.gradient, dy, x, rate);
  repeat<static_cast<int>(kPairs)>([&](int i) GROUPNORM_INLINE_LAMBDA {
    dy[i] = {first.dx_of(dy[i].first, x[i].first), second.dx_of(dy[i].second, x[i].second)};
  });
}

// Short rows that lie one after the other, as one run. kKept: dy is dv in float, in the order of the elements.
template <class T, class Real, Activation A, bool kKept>
GROUPNORM_INLINE void apply_joined(const ApplyPlane& plane) {
  using V = Vec<Real>;
  using Dy = std::conditional_t<kKept, float, T>;
  constexpr bool kSplit = in_split_order<T, Real>;
  using Row = ApplyChannel<Real, A, Numbers::of_row, kSplit>;
  using Across = ApplyChannel<Real, A, Numbers::across_rows, kSplit>;
  const SwishRate<V> rate(plane.beta);
  const Two<V> element = elements_of_two<kSplit, V>();
  const auto* const dy = static_cast<const Dy*>(plane.dy);
  const auto* const x = static_cast<const T*>(plane.x);
  auto* const dx = static_cast<T*>(plane.dx);
  const std::int64_t head = joined_head(dx, plane.rows, plane.length);
  const bool streams = plane.stream && begins_line(dx + head);
  const auto put_one = [&](std::int64_t i, int count, const Row& row) GROUPNORM_INLINE_LAMBDA {
    const V dy_here = [&]() GROUPNORM_INLINE_LAMBDA {
      if constexpr (kKept) return to_lanes<kSplit>(load_as<Real>(dy + i, count));
      else return load_lanes<kSplit, Real>(dy + i, count);
    }();
    store_lanes<kSplit>(dx + i, row(dy_here, load_lanes<kSplit, Real>(x + i, count), rate), count);
  };
  Row row(plane.table, 0);
  for_each_vector(head, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA { put_one(i, count, row); });
  JoinedRows at(plane.rows, plane.length, head);
  for (; at.more(); at.advance()) {
    const std::int64_t i = at.place();
    const auto put = [&](const auto& first, const auto& second) GROUPNORM_INLINE_LAMBDA {
      Two<V> result[1], x_here[] = {load_two<kSplit, Real>(x + i)};
      if constexpr (kKept) result[0] = load_kept_two<kSplit>(dy + i);
      else result[0] = load_two<kSplit, Real>(dy + i);
      apply_pairs<A>(first, second, result, x_here, rate);
      if (streams) {
        stream_two<kSplit>(dx + i, result[0]);
      } else {
        store_two<kSplit>(dx + i, result[0]);
      }
    };
    if (at.within_row()) {
      put(row, row);
    } else {
      const Row next(plane.table, at.row() + 1);
      const V end = set1<V>(static_cast<Real>(at.row_left()));
      put(Across(row, next, {element.first, end}), Across(row, next, {element.second, end}));
      row = next;
    }
  }
  for_each_vector(at.row_left(), [&](std::int64_t j, int count) GROUPNORM_INLINE_LAMBDA {
    put_one(at.place() + j, count, row);
  });
  if (streams) finish_streams();
}

template <class T, class Real, Activation A, bool kColumns>
void apply_narrow(const ApplyPlane& plane);

// kKept: dy is dv in float as reduce has kept it, perhaps in dx.
template <class T, class Real, Activation A, bool kColumns, bool kKept>
void apply(const ApplyPlane& plane) {
  count_call();
  if constexpr (!kKept) {
    if (is_narrow<kColumns>(plane.rows, plane.length, {plane.dy_stride, plane.x_stride, plane.dx_stride})) {
      return apply_narrow<T, Real, A, kColumns>(plane);
    }
  }
  using V = Vec<Real>;
  using Dy = std::conditional_t<kKept, float, T>;
  // As in normalize.
  constexpr bool kSplit = in_split_order<T, Real>, kLastSplit = kSplit && !kColumns;
  constexpr std::bool_constant<kSplit> in_order{};
  constexpr std::bool_constant<kLastSplit> last_order{};
  constexpr Numbers kNumbers = numbers_of<kColumns>;
  constexpr bool kTwo = kColumns ? takes_two_columns<A, kSplit> : kTwoVectors;
  using Channel = ApplyChannel<Real, A, kNumbers, kSplit>;
  using LastChannel = ApplyChannel<Real, A, kNumbers, kLastSplit>;
  if constexpr (kTwoVectors && !kColumns && A != Activation::relu) {
    if (joins_gradient_rows(plane.length, {plane.dy_stride, plane.x_stride, plane.dx_stride})) {
      return apply_joined<T, Real, A, kKept>(plane);
    }
  }
  const SwishRate<V> rate(plane.beta);
  // Where a row begins; not looked up in the plane for each vector, which a store might have changed for
  // all that the compiler knows.
  struct Row {
    const Dy* dy;
    const T* x;
    T* dx;
  };
  const auto row_at = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return Row{static_cast<const Dy*>(plane.dy) + row * plane.dy_stride,
               static_cast<const T*>(plane.x) + row * plane.x_stride,
               static_cast<T*>(plane.dx) + row * plane.dx_stride};
  };
  const auto dy_at = [&](auto order, const Row& row, std::int64_t i, int count)
                         GROUPNORM_INLINE_LAMBDA {
    if constexpr (kKept && kSplit) {
      return from_lanes<!order.value>(load(row.dy + kept_at<kSplit>(i)));
    } else {
      return load_lanes<order.value, Real>(row.dy + i, count);
    }
  };
  const auto x_at = [](auto order, const Row& row, std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
    return load_lanes<order.value, Real>(row.x + i, count);
  };
  const auto element = [&](auto order, const V& dy, const V& x, const Row& row, std::int64_t i, int count,
                           const auto& ch) GROUPNORM_INLINE_LAMBDA {
    store_lanes<order.value>(row.dx + i, ch(dy, x, rate), count);
  };
  [[maybe_unused]] const bool streams =
      kTwo && plane.stream && are_whole_lines(static_cast<const T*>(plane.dx), plane.dx_stride, plane.length);
  // Two whole vectors at each of several places.
  [[maybe_unused]] const auto element_pairs = [&](const auto& places, const auto& first, const auto& second)
                                                  GROUPNORM_INLINE_LAMBDA {
    constexpr int kPlaces = static_cast<int>(std::extent_v<std::remove_reference_t<decltype(places)>>);
    Two<V> result[kPlaces], x[kPlaces];
    repeat<kPlaces>([&](int k) GROUPNORM_INLINE_LAMBDA {
      result[k] = load_two<kSplit && !kKept, Real>(places[k].dy);
      x[k] = load_two<kSplit, Real>(places[k].x);
    });
    apply_pairs<A>(first, second, result, x, rate);
    repeat<kPlaces>([&](int k) GROUPNORM_INLINE_LAMBDA {
      if (streams) {
        stream_two<kSplit>(places[k].dx, result[k]);
      } else {
        store_two<kSplit>(places[k].dx, result[k]);
      }
    });
  };
  [[maybe_unused]] constexpr int kPlacesAtOnce = takes_pairs<Real, A> ? 2 : 1;
  [[maybe_unused]] const auto further = [](const Row& row, std::int64_t i) GROUPNORM_INLINE_LAMBDA {
    return Row{row.dy + i, row.x + i, row.dx + i};
  };
  const std::int64_t length = plane.length, whole = length - length % kLanes;
  const auto copy = [](auto& numbers, ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
    Coefficients<float>& c = table.single;
    c.center = numbers.copy(c.center);
    // One array, as the table has it.
    c.multiplier = c.grad_multiplier = numbers.copy(c.multiplier);
    c.grad_offset = numbers.copy(c.grad_offset);
    c.grad_slope = numbers.copy(c.grad_slope);
    if constexpr (A != Activation::none) c.offset = numbers.copy(c.offset);
    if constexpr (A == Activation::relu) table.guard = numbers.copy(table.guard);
  };
  if constexpr (kStreams && !is_half<T> && !kKept) {
    const bool in_place = plane.dx == plane.dy || plane.dx == plane.x;
    if constexpr (!kColumns) {
      if (plane.stream && !streams && length >= kLongRow && !in_place) {
        for (std::int64_t r = plane.rows - 1; r >= 0; --r) {
          const Row row = row_at(r);
          const Channel ch(plane.table, r);
          stream_row(row.dx, length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
            return ch(dy_at(in_order, row, i, count), x_at(in_order, row, i, count), rate);
          });
        }
        finish_streams();
        return;
      }
    } else if constexpr (std::is_same_v<Real, float> && A != Activation::relu) {
      // Not relu, which in doubt asks for numbers in double.
      if (!streams && !in_place && is_one_run(plane, {plane.dy_stride, plane.x_stride, plane.dx_stride})) {
        WrappedNumbers<5> numbers(length);
        ChannelTable table = plane.table;
        copy(numbers, table);
        const Row run = row_at(0);
        stream_run(run.dx, plane.rows, length,
                   [&](std::int64_t i, std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
                     return Channel(table, column)(dy_at(in_order, run, i, count), x_at(in_order, run, i, count), rate);
                   });
        finish_streams();
        return;
      }
    }
  }
  if (whole == 0) {
    const auto count = static_cast<int>(length);
    for (std::int64_t r = 0; r < plane.rows; ++r) {
      const Row row = row_at(r);
      element(last_order, dy_at(last_order, row, 0, count), x_at(last_order, row, 0, count), row, 0, count,
              LastChannel(plane.table, kColumns ? 0 : r));
    }
    return;
  }
  // Rows longer than a turn took 1.05 times as long in that order, except where dx does not take room in the cache.
  const bool from_end = length <= kTurn || plane.stream;
  for_each_column_range<kSplit && kColumns, kTwo, 6>(
      plane.table, whole, copy,
      [&](std::int64_t begin, std::int64_t end, const ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
        const bool with_tail = whole != length && end == whole;
        // As in normalize: the last dy is read before dx, which may be dy, is written. So is the last x: where
        // both lie at one place of their pages, a CPU takes the load for one of what was just stored there, and
        // waits.
        for_each_row_block<T, kColumns>(plane, from_end, [&](std::int64_t first, auto rows)
                                                GROUPNORM_INLINE_LAMBDA {
          Row row[rows];
          V last_dy[rows] = {}, last_x[rows] = {};
          for (int r = 0; r < rows; ++r) {
            row[r] = row_at(first + r);
            if (with_tail) {
              last_dy[r] = dy_at(last_order, row[r], length - kLanes, kLanes);
              last_x[r] = x_at(last_order, row[r], length - kLanes, kLanes);
            }
          }
          if constexpr (kColumns) {
            std::int64_t i = begin;
            if constexpr (kTwo) {
              for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
                const Channel one(table, i - begin), other(table, i - begin + kLanes);
                constexpr int kRows = smaller<int>(rows, kPlacesAtOnce);
                repeat<rows / kRows>([&](int turn) GROUPNORM_INLINE_LAMBDA {
                  Row places[kRows];
                  repeat<kRows>([&](int k) GROUPNORM_INLINE_LAMBDA { places[k] = further(row[turn * kRows + k], i); });
                  element_pairs(places, one, other);
                });
              }
            }
            for (; i < end; i += kLanes) {
              const Channel ch(table, i - begin);
              for (int r = 0; r < rows; ++r) {
                element(in_order, dy_at(in_order, row[r], i, kLanes), x_at(in_order, row[r], i, kLanes),
                        row[r], i, kLanes, ch);
              }
            }
          } else {
            const Channel ch(table, first);
            std::int64_t i = 0;
            if constexpr (kTwo) {
              const auto pairs = [&](auto at_once) GROUPNORM_INLINE_LAMBDA {
                constexpr std::int64_t kPair = 2 * kLanes;
                for (; i + at_once * kPair <= whole; i += at_once * kPair) {
                  Row places[at_once];
                  repeat<at_once>([&](int k) GROUPNORM_INLINE_LAMBDA { places[k] = further(row[0], i + k * kPair); });
                  element_pairs(places, ch, ch);
                }
              };
              pairs(std::integral_constant<int, kPlacesAtOnce>());
              if constexpr (kPlacesAtOnce > 1) pairs(std::integral_constant<int, 1>());
            }
            for (; i < whole; i += kLanes) {
              element(in_order, dy_at(in_order, row[0], i, kLanes), x_at(in_order, row[0], i, kLanes),
                      row[0], i, kLanes, ch);
            }
          }
          if (with_tail) {
            const LastChannel ch(plane.table, kColumns ? length - kLanes : first);
            for (int r = 0; r < rows; ++r) {
              element(last_order, last_dy[r], last_x[r], row[r], length - kLanes, kLanes, ch);
            }
          }
        });
      });
  if constexpr (kTwo) {
    if (streams) finish_streams();
  }
}

template <class T, class Real, Activation A, bool kColumns>
__attribute__((noinline)) void apply_narrow(const ApplyPlane& plane) {
  using GradientOf = Gradient<Real, A, Numbers::of_columns, false>;
  for_each_wide<kColumns>(plane.rows, plane.length, [&](std::int64_t first, std::int64_t rows, std::int64_t length,
                                                        const auto& numbers) GROUPNORM_INLINE_LAMBDA {
    WideNumbers wide;
    ApplyPlane part = plane;
    part.dy = static_cast<const T*>(plane.dy) + first * plane.dy_stride;
    part.x = static_cast<const T*>(plane.x) + first * plane.x_stride;
    part.dx = static_cast<T*>(plane.dx) + first * plane.dx_stride;
    part.rows = rows;
    part.length = part.dy_stride = part.x_stride = part.dx_stride = length;
    part.table = wide.for_apply(kColumns ? plane.table : table_from(plane.table, first), numbers,
                                std::is_same_v<Real, double>, GradientOf::kGuarded);
    if constexpr (!kColumns) part.far = part.stream = false;
    apply<T, Real, A, true, false>(part);
  });
}

}  // namespace
}  // namespace groupnorm
