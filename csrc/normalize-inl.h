// The forward's second half: y = act(v) of each element, and elements in doubt again in double.
#pragma once

#include <cstdint>
#include <type_traits>

#include "activations-inl.h"
#include "channels-inl.h"
#include "kernels.h"
#include "narrow-inl.h"
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

// The numbers of a channel, or of the channels of a vector's lanes.
template <class T, class Real, Activation A, Numbers kNumbers>
struct NormalizeChannel {
  using V = Vec<Real>;
  using OfRow = NormalizeChannel<T, Real, A, Numbers::of_row>;
  static constexpr bool kGuarded = is_half<T> && std::is_same_v<Real, float>;
  // The tail of an activation magnifies the error of v.
  static constexpr bool kTail = kGuarded && is_smooth(A);
  static constexpr bool kVaries = kNumbers != Numbers::of_row;

  Centering<kNumbers, Real> center;
  Scaling<kNumbers, Real> scale;
  // What a kernel has no use for stays zero, and costs nothing.
  V guard{}, tail{}, watch{};

  GROUPNORM_INLINE NormalizeChannel(const ChannelTable& table, std::int64_t at)
      : center(coefficients<Real>(table), at), scale(coefficients<Real>(table), at) {
    if constexpr (kGuarded) {
      guard = channel<kNumbers>(table.guard, at);
      watch = channel<kNumbers>(table.watch, at);
    }
    if constexpr (kTail) tail = channel<kNumbers>(table.tail, at);
  }
  GROUPNORM_INLINE NormalizeChannel(const OfRow& row, const OfRow& next, const AcrossRows<V>& across)
      : center(row.center, next.center, across), scale(row.scale, next.scale, across) {
    if constexpr (kGuarded) {
      guard = across(row.guard, next.guard);
      watch = across(row.watch, next.watch);
    }
    if constexpr (kTail) tail = across(row.tail, next.tail);
  }
  GROUPNORM_INLINE V operator()(const V& value) const { return scale(center(value)); }
  // 1 or 0 in each lane.
  GROUPNORM_INLINE V in_doubt(const V& v) const {
    const V no = set1<V>(0), yes = set1<V>(1), cancelled = select_lt(abs(v), guard, yes, no);
    return kTail ? select_lt(v, tail, yes, cancelled) : cancelled;
  }
};

// Two whole vectors at each of several places; returns at which of them some are in doubt, a bit for each.
template <class T, class Real, Activation A, Numbers kNumbers, std::size_t kPairs>
GROUPNORM_INLINE unsigned normalize_pairs(const T* const (&x)[kPairs], T* const (&y)[kPairs],
                                          const NormalizeChannel<T, Real, A, kNumbers>& first,
                                          const NormalizeChannel<T, Real, A, kNumbers>& second,
                                          const SwishRate<Vec<Real>>& rate, bool stream,
                                          [[maybe_unused]] Doubtful (&doubtful)[kPairs]) {
  using Channel = NormalizeChannel<T, Real, A, kNumbers>;
  using V = Vec<Real>;
  constexpr bool kSplit = in_split_order<T, Real>;
  [[maybe_unused]] constexpr bool kVaries = Channel::kVaries;
  Two<V> value[kPairs], v[kPairs], results[kPairs];
  repeat<static_cast<int>(kPairs)>([&](int i) GROUPNORM_INLINE_LAMBDA {
    value[i] = load_two<kSplit, Real>(x[i]);
    v[i] = {first(value[i].first), second(value[i].second)};
    results[i] = v[i];
  });
  activate_pairs<T, A>(results, rate);
  unsigned again = 0;
  repeat<static_cast<int>(kPairs)>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const Two<V>& result = results[i];
    if constexpr (Channel::kGuarded) {
      const Two<V>& watched = A == Activation::relu ? v[i] : result;
      const Two<V> watch = {first.watch, second.watch}, tail = {first.tail, second.tail};
      if (__builtin_expect(Channel::kTail ? none_below<kVaries>(watched, watch, v[i], tail)
                                          : !any_magnitude_lt<kVaries>(watched, watch), 1)) {
        if (stream) {
          stream_normal_two<kSplit>(y[i], result);
        } else {
          store_normal_two<kSplit>(y[i], result);
        }
        return;
      }
    }
    if constexpr (!Channel::kGuarded) {
      if (stream) {
        stream_two<kSplit>(y[i], result);
        return;
      }
    }
    // Not around the caches: what is in doubt is about to be written again.
    store_two<kSplit>(y[i], result);
    if constexpr (Channel::kGuarded) {
      bool here = any_magnitude_lt<kVaries>(v[i], {first.guard, second.guard});
      if constexpr (Channel::kTail) here |= any_lt<kVaries>(v[i], {first.tail, second.tail});
      if (here) {
        again |= 1u << i;
        doubtful[i].count = 2 * kLanes;
        store_two<false>(doubtful[i].x, from_two<kSplit>(value[i]));
        store_two<false>(doubtful[i].in_doubt,
                         from_two<kSplit>(Two<V>{first.in_doubt(v[i].first), second.in_doubt(v[i].second)}));
      }
    }
  });
  return again;
}
// Places that are taken side by side.
template <class Real, Activation A>
constexpr int kPairsAtOnce = takes_pairs<Real, A> ? 2 : 1;

// One vector, or a tail of so many elements, mended at once. at: where its numbers are in the table.
template <bool kSplit, bool kColumns, class T, class Real, Activation A>
GROUPNORM_INLINE void normalize_one(const Vec<Real>& value, T* y, int count, const ChannelTable& table,
                                    std::int64_t at,
                                    const NormalizeChannel<T, Real, A, numbers_of<kColumns>>& ch,
                                    const SwishRate<Vec<Real>>& rate, [[maybe_unused]] double beta) {
  using Channel = NormalizeChannel<T, Real, A, numbers_of<kColumns>>;
  const Vec<Real> v = ch(value);
  store_lanes<kSplit>(y, activate_near<T, A>(v, rate), count);
  if constexpr (Channel::kGuarded) {
    const bool again = Channel::kTail ? any_lt<kColumns>(abs(v), ch.guard, v, ch.tail)
                                      : any_lt<kColumns>(abs(v), ch.guard);
    if (__builtin_expect(again, 0)) {
      Doubtful doubtful;
      doubtful.count = count;
      store(doubtful.x, from_lanes<kSplit>(value));
      store(doubtful.in_doubt, from_lanes<kSplit>(ch.in_doubt(v)));
      mend<T, A, kColumns>(table, beta, doubtful, y, at);
    }
  }
}

// Elements of two vectors of which the first `end` belong to a row and the others to the next.
template <class T, Activation A>
__attribute__((noinline, cold)) void mend_across(const ChannelTable& table, double beta, const Doubtful& doubtful,
                                                 T* y, std::int64_t row, std::int64_t end) {
  for (int next = 0; next < 2; ++next) {
    Doubtful part = doubtful;
    for (std::int64_t i = 0; i < part.count; ++i) {
      if ((i < end) == (next == 1)) part.in_doubt[i] = 0.0f;
    }
    mend<T, A, false>(table, beta, part, y, row + next);
    if (end >= part.count) return;
  }
}

// Short rows that lie one after the other, as one run.
template <class T, class Real, Activation A>
GROUPNORM_INLINE void normalize_joined(const NormalizePlane& plane) {
  using V = Vec<Real>;
  constexpr bool kSplit = in_split_order<T, Real>;
  using Row = NormalizeChannel<T, Real, A, Numbers::of_row>;
  using Across = NormalizeChannel<T, Real, A, Numbers::across_rows>;
  const SwishRate<V> rate(plane.beta);
  const Two<V> element = elements_of_two<kSplit, V>();
  const auto* const x = static_cast<const T*>(plane.x);
  auto* const y = static_cast<T*>(plane.y);
  const std::int64_t head = joined_head(y, plane.rows, plane.length);
  const bool streams = plane.stream && x != y && begins_line(y + head);
  const auto put_one = [&](std::int64_t i, int count, std::int64_t number, const Row& row) GROUPNORM_INLINE_LAMBDA {
    normalize_one<kSplit, false, T, Real, A>(load_lanes<kSplit, Real>(x + i, count), y + i, count, plane.table,
                                             number, row, rate, plane.beta);
  };
  Row row(plane.table, 0);
  for_each_vector(head, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA { put_one(i, count, 0, row); });
  JoinedRows at(plane.rows, plane.length, head);
  while (true) {
    Doubtful doubtful[1];
    unsigned again = 0;
    std::int64_t row_here = 0, left_here = 0;
    // As with single rows, mending is outside the inner loop.
    while (again == 0 && at.more()) {
      const std::int64_t i = at.place();
      const T* const x_here[] = {x + i};
      T* const y_here[] = {y + i};
      row_here = at.row();
      left_here = at.row_left();
      if (at.within_row()) {
        again = normalize_pairs(x_here, y_here, row, row, rate, streams, doubtful);
      } else {
        const Row next(plane.table, row_here + 1);
        const V end = set1<V>(static_cast<Real>(left_here));
        again = normalize_pairs(x_here, y_here, Across(row, next, {element.first, end}),
                                Across(row, next, {element.second, end}), rate, streams, doubtful);
        row = next;
      }
      at.advance();
    }
    if (again == 0) break;
    if constexpr (Row::kGuarded) {
      mend_across<T, A>(plane.table, plane.beta, doubtful[0], y + at.place() - 2 * kLanes, row_here, left_here);
    }
  }
  for_each_vector(at.row_left(), [&](std::int64_t j, int count) GROUPNORM_INLINE_LAMBDA {
    put_one(at.place() + j, count, plane.rows - 1, row);
  });
  if (streams) finish_streams();
}

template <class T, class Real, Activation A, bool kColumns>
void normalize_narrow(const NormalizePlane& plane);

template <class T, class Real, Activation A, bool kColumns>
void normalize(const NormalizePlane& plane) {
  count_call();
  if (is_narrow<kColumns>(plane.rows, plane.length, {plane.x_stride, plane.y_stride})) {
    return normalize_narrow<T, Real, A, kColumns>(plane);
  }
  constexpr bool kSplit = in_split_order<T, Real>;
  using V = Vec<Real>;
  const SwishRate<V> rate(plane.beta);
  using Channel = NormalizeChannel<T, Real, A, numbers_of<kColumns>>;
  // order: whether the lanes are in split order, an integral constant. at: where the numbers are in the table.
  const auto element = [&](auto order, const V& value, T* y, int count, const ChannelTable& table, std::int64_t at,
                           const Channel& ch) GROUPNORM_INLINE_LAMBDA {
    normalize_one<order.value, kColumns, T, Real, A>(value, y, count, table, at, ch, rate, plane.beta);
  };
  // at: where the numbers of y are in the plane's table.
  [[maybe_unused]] const auto mend_two = [&](const Doubtful& doubtful, T* y, std::int64_t at)
                                             GROUPNORM_INLINE_LAMBDA {
    if constexpr (Channel::kGuarded) mend<T, A, kColumns>(plane.table, plane.beta, doubtful, y, at);
  };
  const std::int64_t length = plane.length, tail = length % kLanes, whole = length - tail;
  const auto x_row = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return static_cast<const T*>(plane.x) + row * plane.x_stride;
  };
  const auto y_row = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return static_cast<T*>(plane.y) + row * plane.y_stride;
  };
  // float32 and float64 have ways of their own below.
  const bool streams = kTwoVectors && is_half<T> && plane.stream && plane.x != plane.y &&
                       are_whole_lines(static_cast<const T*>(plane.y), plane.y_stride, length);
  // The last vector of a column plane is not where the numbers have been brought into order.
  constexpr std::bool_constant<kSplit> in_order{};
  constexpr std::bool_constant<kSplit && !kColumns> last_order{};
  if (whole == 0) {
    const auto count = static_cast<int>(tail);
    for (std::int64_t row = 0; row < plane.rows; ++row) {
      const std::int64_t at = kColumns ? 0 : row;
      element(last_order, load_lanes<last_order.value, Real>(x_row(row), count), y_row(row), count, plane.table, at,
              Channel(plane.table, at));
    }
    return;
  }
  if constexpr (kStreams && !is_half<T>) {
    // What is in cache because it was just read, as x in place is, is not written around it.
    const bool in_place = plane.x == plane.y;
    const bool few_shared = whole_lines<T>(plane.y, plane.y_stride) || (!kColumns && length >= kLongRow);
    if (plane.stream && !in_place && few_shared) {
      for (std::int64_t turn = 0; turn < plane.rows; ++turn) {
        // As in for_each_row_block.
        const std::int64_t row = kColumns ? turn : plane.rows - 1 - turn;
        const T* const x = x_row(row);
        const Channel of_row(plane.table, kColumns ? 0 : row);
        stream_row(y_row(row), length, [&](std::int64_t i, int count) GROUPNORM_INLINE_LAMBDA {
          const V value = load_as<Real>(x + i, count);
          if constexpr (kColumns) {
            return activate_near<T, A>(Channel(plane.table, i)(value), rate);
          } else {
            return activate_near<T, A>(of_row(value), rate);
          }
        });
      }
      finish_streams();
      return;
    }
    if constexpr (kColumns && std::is_same_v<Real, float>) {
      if (!in_place && is_one_run(plane, {plane.x_stride, plane.y_stride})) {
        WrappedNumbers<3> numbers(length);
        ChannelTable table = plane.table;
        Coefficients<float>& c = table.single;
        c.center = numbers.copy(c.center);
        c.multiplier = numbers.copy(c.multiplier);
        c.offset = numbers.copy(c.offset);
        const T* const x = x_row(0);
        stream_run(y_row(0), plane.rows, length,
                   [&](std::int64_t i, std::int64_t column, int count) GROUPNORM_INLINE_LAMBDA {
                     return activate_near<T, A>(Channel(table, column)(load_as<Real>(x + i, count)), rate);
                   });
        finish_streams();
        return;
      }
    }
  }
  if constexpr (kTwoVectors && !kColumns) {
    if (joins_rows(length, kLongestJoined, {plane.x_stride, plane.y_stride})) {
      return normalize_joined<T, Real, A>(plane);
    }
  }
  const auto copy = [](auto& numbers, ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
    Coefficients<float>& c = table.single;
    c.center = numbers.copy(c.center);
    c.multiplier = numbers.copy(c.multiplier);
    c.offset = numbers.copy(c.offset);
    table.guard = numbers.copy(table.guard);
    table.watch = numbers.copy(table.watch);
    if constexpr (Channel::kTail) table.tail = numbers.copy(table.tail);
  };
  for_each_column_range<kSplit && kColumns, kTwoVectors, 6>(
      plane.table, whole, copy,
      [&](std::int64_t begin, std::int64_t end, const ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
        const bool with_tail = tail != 0 && end == whole;
        // So many rows together, an integral constant. The last vector of a row begins as far back as it
        // must to be whole. It is read before y, which may be x, is written.
        for_each_row_block<T, kColumns>(plane, true, [&](std::int64_t first, auto count)
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
                const Channel one(table, i - begin), other(table, i - begin + kLanes);
                const auto at_once = [&](auto rows, int r) GROUPNORM_INLINE_LAMBDA {
                  Doubtful doubtful[rows];
                  const T* x_here[rows];
                  T* y_here[rows];
                  repeat<rows>([&](int k) GROUPNORM_INLINE_LAMBDA {
                    x_here[k] = x[r + k] + i;
                    y_here[k] = y[r + k] + i;
                  });
                  const unsigned again = normalize_pairs(x_here, y_here, one, other, rate, streams, doubtful);
                  if (__builtin_expect(again != 0, 0)) {
                    for (int k = 0; k < rows; ++k) {
                      if ((again >> k & 1) != 0) mend_two(doubtful[k], y[r + k] + i, i);
                    }
                  }
                };
                constexpr int kRows = smaller<int>(count, kPairsAtOnce<Real, A>);
                repeat<count / kRows>([&](int turn) GROUPNORM_INLINE_LAMBDA {
                  at_once(std::integral_constant<int, kRows>(), turn * kRows);
                });
              }
            }
            for (; i < end; i += kLanes) {
              const Channel ch(table, i - begin);
              for (int r = 0; r < count; ++r) {
                element(in_order, load_lanes<kSplit, Real>(x[r] + i, kLanes), y[r] + i, kLanes, table, i - begin,
                        ch);
              }
            }
          } else {
            const Channel ch(table, first);
            std::int64_t i = 0;
            if constexpr (kTwoVectors) {
              // Mending is outside the inner loop: a call in it would cost the loop its registers.
              const auto pairs = [&](auto at_once) GROUPNORM_INLINE_LAMBDA {
                constexpr std::int64_t kPair = 2 * kLanes, kStep = at_once * kPair;
                while (i + kStep <= whole) {
                  Doubtful doubtful[at_once];
                  unsigned again = 0;
                  for (; again == 0 && i + kStep <= whole; i += kStep) {
                    const T* x_here[at_once];
                    T* y_here[at_once];
                    repeat<at_once>([&](int k) GROUPNORM_INLINE_LAMBDA {
                      x_here[k] = x[0] + i + k * kPair;
                      y_here[k] = y[0] + i + k * kPair;
                    });
                    again = normalize_pairs(x_here, y_here, ch, ch, rate, streams, doubtful);
                  }
                  for (int k = 0; k < at_once; ++k) {
                    if ((again >> k & 1) != 0) mend_two(doubtful[k], y[0] + i - kStep + k * kPair, first);
                  }
                }
              };
              pairs(std::integral_constant<int, kPairsAtOnce<Real, A>>());
              if constexpr (kPairsAtOnce<Real, A> > 1) pairs(std::integral_constant<int, 1>());
            }
            for (; i < whole; i += kLanes) {
              element(in_order, load_lanes<kSplit, Real>(x[0] + i, kLanes), y[0] + i, kLanes, table, first, ch);
            }
          }
          if (with_tail) {
            const std::int64_t at = kColumns ? length - kLanes : first;
            const Channel ch(plane.table, at);
            for (int r = 0; r < count; ++r) {
              element(last_order, last[r], y[r] + length - kLanes, kLanes, plane.table, at, ch);
            }
          }
        });
      });
  if (streams) finish_streams();
}

template <class T, class Real, Activation A, bool kColumns>
__attribute__((noinline)) void normalize_narrow(const NormalizePlane& plane) {
  using Channel = NormalizeChannel<T, Real, A, Numbers::of_columns>;
  for_each_wide<kColumns>(plane.rows, plane.length, [&](std::int64_t first, std::int64_t rows, std::int64_t length,
                                                        const auto& numbers) GROUPNORM_INLINE_LAMBDA {
    WideNumbers wide;
    NormalizePlane part = plane;
    part.x = static_cast<const T*>(plane.x) + first * plane.x_stride;
    part.y = static_cast<T*>(plane.y) + first * plane.y_stride;
    part.rows = rows;
    part.length = part.x_stride = part.y_stride = length;
    part.table = wide.for_normalize(kColumns ? plane.table : table_from(plane.table, first), numbers,
                                    std::is_same_v<Real, double>, Channel::kGuarded, Channel::kTail);
    if constexpr (!kColumns) part.far = part.stream = false;
    normalize<T, Real, A, true>(part);
  });
}

}  // namespace
}  // namespace groupnorm
