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
#include "table_part.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

// How a kernel finds the numbers of its lanes: those of one channel are for all lanes (rows), those of
// sixteen channels (columns) are in the order of the lanes, or have to be brought into split order.
enum class Numbers { of_row, of_columns, of_columns_to_split };

template <bool kColumns>
constexpr Numbers numbers_of = kColumns ? Numbers::of_columns : Numbers::of_row;

template <Numbers kNumbers, class Real>
GROUPNORM_INLINE Vec<Real> channel(const Real* array, std::int64_t at) {
  if constexpr (kNumbers == Numbers::of_row) {
    return set1<Vec<Real>>(array[at]);
  } else {
    return to_lanes<kNumbers == Numbers::of_columns_to_split>(load(array + at));
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
template <Numbers kNumbers, class Real>
struct Centering {
  Vec<Real> center;
  std::conditional_t<std::is_same_v<Real, double>, F64, char> low;

  GROUPNORM_INLINE Centering(const Coefficients<Real>& c, std::int64_t at)
      : center(channel<kNumbers>(c.center, at)) {
    if constexpr (std::is_same_v<Real, double>) low = channel<kNumbers>(c.center_low, at);
  }
  GROUPNORM_INLINE Vec<Real> operator()(const Vec<Real>& x) const {
    if constexpr (std::is_same_v<Real, double>) return (x - center) - low;
    else return x - center;
  }
};

template <Numbers kNumbers, class Real>
struct Scaling {
  Vec<Real> multiplier, offset;

  GROUPNORM_INLINE Scaling(const Coefficients<Real>& c, std::int64_t at)
      : multiplier(channel<kNumbers>(c.multiplier, at)), offset(channel<kNumbers>(c.offset, at)) {}
  GROUPNORM_INLINE Vec<Real> operator()(const Vec<Real>& centred) const {
    return fma(centred, multiplier, offset);
  }
};

// v by way of double, for the few vectors where float has cancelled too far. The table's numbers in
// double are in the order of the channels, whatever that of the lanes.
template <bool kColumns, bool kSplit>
GROUPNORM_INLINE F32 exact_v(const ChannelTable& table, std::int64_t at, const F32& x) {
  constexpr bool kReorder = kColumns && kSplit;
  const Centering<numbers_of<kColumns>, double> center(table.exact, at);
  const Scaling<numbers_of<kColumns>, double> scale(table.exact, at);
  return to_lanes<kReorder>(narrow(scale(center(widen(from_lanes<kReorder>(x))))));
}

template <class T, class Real>
constexpr bool in_split_order = is_split<T> && std::is_same_v<Real, float>;

// A copy of column numbers in split order, of as many channels as the first cache can well hold.
constexpr std::int64_t kSplitColumns = 1024;
template <int kArrays>
class SplitNumbers {
 public:
  GROUPNORM_INLINE explicit SplitNumbers(std::int64_t columns) : columns_(columns) {}
  GROUPNORM_INLINE const float* copy(const float* numbers) {
    float* const to = storage_[used_++];
    for (std::int64_t i = 0; i < columns_; i += kLanes) store(to + i, to_split(load(numbers + i)));
    return to;
  }

 private:
  alignas(64) float storage_[kArrays][kSplitColumns];
  std::int64_t columns_;
  int used_ = 0;
};

// body(begin, end, table) over column ranges of whole vectors, each with its numbers in the order of the
// lanes; the table belongs to channel begin. copy(numbers, table) brings what the kernel reads into order.
template <bool kSplit, int kArrays, class Copy, class Body>
GROUPNORM_INLINE void for_each_column_range(const ChannelTable& table, std::int64_t whole,
                                            const Copy& copy, const Body& body) {
  if constexpr (kSplit) {
    for (std::int64_t begin = 0; begin < whole; begin += kSplitColumns) {
      const std::int64_t end = smaller(begin + kSplitColumns, whole);
      SplitNumbers<kArrays> numbers(end - begin);
      ChannelTable part = table_from(table, begin);
      copy(numbers, part);
      body(begin, end, part);
    }
  } else {
    body(0, whole, table);
  }
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

// dv and x - mean of one vector.
template <class Real, Activation A, Numbers kNumbers, bool kSplit>
struct Gradient {
  using V = Vec<Real>;
  // relu's derivative jumps at 0: near it, the sign of v is settled in double.
  static constexpr bool kGuarded = A == Activation::relu && std::is_same_v<Real, float>;
  static constexpr bool kColumns = kNumbers != Numbers::of_row;

  const ChannelTable& table;
  std::int64_t at;
  Centering<kNumbers, Real> center;
  Scaling<kNumbers, Real> scale;
  V guard;

  GROUPNORM_INLINE Gradient(const ChannelTable& table_, std::int64_t at_)
      : table(table_),
        at(at_),
        center(coefficients<Real>(table_), at_),
        scale(coefficients<Real>(table_), at_) {
    if constexpr (kGuarded) guard = channel<kNumbers>(table.guard, at);
  }

  struct Pair {
    V centred, dv;
  };
  GROUPNORM_INLINE Pair operator()(const V& dy, const V& value, const SwishRate<V>& rate) const {
    const V centred = center(value);
    V v = scale(centred);
    if constexpr (kGuarded) {
      if (__builtin_expect(any_lt<kColumns>(abs(v), guard), 0)) {
        v = exact_v<kColumns, kSplit>(table, at, value);
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

  GROUPNORM_INLINE void add(const V& dv, const V& xhat) {
    a = a + dv;
    b = fma(dv, xhat, b);
  }
};

static_assert(kKeptVector == kLanes);

// Where the dv of a vector that begins at element i is kept. In split order a vector has a place of its
// own, the last of a row too, whose elements overlap with those before.
template <bool kSplit>
GROUPNORM_INLINE std::int64_t kept_at(std::int64_t i) {
  return kSplit ? (i + kLanes - 1) / kLanes * kLanes : i;
}

// What of a plane is wanted: both sums, those of dv alone (without an activation they need no x), or both
// and dv itself in plane.dv, for an apply that then needs neither dy nor the activation.
enum class Reduction { sums, sums_of_dy, sums_and_dv };

template <class T, class Real, Activation A, bool kColumns, Reduction kWhat>
GROUPNORM_INLINE void reduce_plane(const ReducePlane& plane) {
  using V = Vec<Real>;
  const Coefficients<Real>& c = coefficients<Real>(plane.table);
  const SwishRate<V> rate(plane.beta);
  constexpr bool kSplit = in_split_order<T, Real>;
  constexpr Numbers kNumbers =
      kColumns && kSplit ? Numbers::of_columns_to_split : numbers_of<kColumns>;
  using GradientOf = Gradient<Real, A, kNumbers, kSplit>;
  struct Row {
    const T *dy, *x;
    float* dv;
  };
  const auto row_at = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return Row{static_cast<const T*>(plane.dy) + row * plane.dy_stride,
               static_cast<const T*>(plane.x) + row * plane.x_stride,
               plane.dv == nullptr ? nullptr : plane.dv + row * plane.dv_stride};
  };
  // Only the last `fresh` lanes count; those past a row's end hold dy = 0.
  const auto element = [&](GradientSums<Real>& sums, const Row& row, std::int64_t i, int count,
                           int fresh, const GradientOf& gradient, const V& rstd)
                           GROUPNORM_INLINE_LAMBDA {
    const auto counted = [&](const V& lanes) GROUPNORM_INLINE_LAMBDA {
      return fresh == kLanes ? lanes : last_elements<kSplit>(lanes, fresh);
    };
    const V dy = load_lanes<kSplit, Real>(row.dy + i, count);
    if constexpr (kWhat == Reduction::sums_of_dy) {
      sums.a = sums.a + counted(dy);
    } else {
      const auto pair = gradient(dy, load_lanes<kSplit, Real>(row.x + i, count), rate);
      if constexpr (kWhat == Reduction::sums_and_dv) {
        store_as(row.dv + kept_at<kSplit>(i), pair.dv, kSplit ? kLanes : count);
      }
      sums.add(counted(pair.dv), pair.centred * rstd);
    }
  };
  const bool with_b = plane.b != nullptr;
  if constexpr (kColumns) {
    for_each_column_block(
        plane.rows, plane.length,
        [&](std::int64_t row, std::int64_t end, std::int64_t column, int count, int fresh)
            GROUPNORM_INLINE_LAMBDA {
              const GradientOf gradient(plane.table, column);
              const V rstd = channel<kNumbers>(c.rstd, column);
              F64 a = set1<F64>(0.0), b = a;
              if (row != 0) {
                a = load_as<double>(plane.a + column, count);
                if (with_b) b = load_as<double>(plane.b + column, count);
              }
              GradientSums<Real> sums;
              for (; row < end; ++row) {
                element(sums, row_at(row), column, count, kLanes, gradient, rstd);
              }
              store_sums(plane.a + column, a + widen(from_lanes<kSplit>(sums.a)), count, fresh);
              if (with_b) {
                store_sums(plane.b + column, b + widen(from_lanes<kSplit>(sums.b)), count, fresh);
              }
            });
  } else {
    const std::int64_t tail = plane.length % kLanes, whole = plane.length - tail;
    constexpr std::int64_t span = kFloatTerms * kLanes;
    for (std::int64_t r = 0; r < plane.rows; ++r) {
      const Row row = row_at(r);
      const GradientOf gradient(plane.table, r);
      const V rstd = channel<kNumbers>(c.rstd, r);
      F64 a = set1<F64>(0.0), b = a;
      const auto fold = [&](const GradientSums<Real>& sums) GROUPNORM_INLINE_LAMBDA {
        a = a + widen(sums.a);
        b = b + widen(sums.b);
      };
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
      plane.a[r] = reduce_add(a);
      if (with_b) plane.b[r] = reduce_add(b);
    }
  }
}

template <class T, class Real, Activation A, bool kColumns>
void reduce(const ReducePlane& plane) {
  count_call();
  if constexpr (A == Activation::none) {
    if (plane.b == nullptr) return reduce_plane<T, Real, A, kColumns, Reduction::sums_of_dy>(plane);
  }
  if constexpr (is_smooth(A) && std::is_same_v<Real, float>) {
    if (plane.dv != nullptr) {
      return reduce_plane<T, Real, A, kColumns, Reduction::sums_and_dv>(plane);
    }
  }
  reduce_plane<T, Real, A, kColumns, Reduction::sums>(plane);
}

template <class Real, Activation A, Numbers kNumbers, bool kSplit>
struct ApplyChannel {
  Gradient<Real, A, kNumbers, kSplit> gradient;
  Vec<Real> multiplier, offset, slope;

  GROUPNORM_INLINE ApplyChannel(const ChannelTable& table, std::int64_t at)
      : gradient(table, at),
        multiplier(channel<kNumbers>(coefficients<Real>(table).grad_multiplier, at)),
        offset(channel<kNumbers>(coefficients<Real>(table).grad_offset, at)),
        slope(channel<kNumbers>(coefficients<Real>(table).grad_slope, at)) {}
};

// kKept: dy is dv in float as reduce has kept it, perhaps in dx.
template <class T, class Real, Activation A, bool kColumns, bool kKept>
void apply(const ApplyPlane& plane) {
  count_call();
  using V = Vec<Real>;
  using Dy = std::conditional_t<kKept, float, T>;
  // As in normalize.
  constexpr bool kSplit = in_split_order<T, Real>, kLastSplit = kSplit && !kColumns;
  constexpr std::bool_constant<kSplit> in_order{};
  constexpr std::bool_constant<kLastSplit> last_order{};
  constexpr Numbers kNumbers = numbers_of<kColumns>;
  using Channel = ApplyChannel<Real, A, kNumbers, kSplit>;
  using LastChannel = ApplyChannel<Real, A, kNumbers, kLastSplit>;
  const SwishRate<V> rate(plane.beta);
  const auto dy_at = [&](auto order, std::int64_t row, std::int64_t i, int count)
                         GROUPNORM_INLINE_LAMBDA {
    const Dy* const dy = static_cast<const Dy*>(plane.dy) + row * plane.dy_stride;
    if constexpr (kKept && kSplit) {
      return from_lanes<!order.value>(load(dy + kept_at<kSplit>(i)));
    } else {
      return load_lanes<order.value, Real>(dy + i, count);
    }
  };
  const auto element = [&](auto order, const V& dy, std::int64_t row, std::int64_t i, int count,
                           const auto& ch) GROUPNORM_INLINE_LAMBDA {
    const T* const x = static_cast<const T*>(plane.x) + row * plane.x_stride + i;
    T* const dx = static_cast<T*>(plane.dx) + row * plane.dx_stride + i;
    const auto pair = ch.gradient(dy, load_lanes<order.value, Real>(x, count), rate);
    store_lanes<order.value>(dx, fma(pair.dv, ch.multiplier, fnma(pair.centred, ch.slope, ch.offset)),
                             count);
  };
  const std::int64_t length = plane.length, whole = length - length % kLanes;
  if (whole == 0) {
    const auto count = static_cast<int>(length);
    for (std::int64_t row = 0; row < plane.rows; ++row) {
      element(last_order, dy_at(last_order, row, 0, count), row, 0, count,
              LastChannel(plane.table, kColumns ? 0 : row));
    }
    return;
  }
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
  for_each_column_range<kSplit && kColumns, 6>(
      plane.table, whole, copy,
      [&](std::int64_t begin, std::int64_t end, const ChannelTable& table) GROUPNORM_INLINE_LAMBDA {
        const bool with_tail = whole != length && end == whole;
        // As in normalize: the last dy is read before dx, which may be dy, is written.
        for_each_row_block<kColumns>(plane, [&](std::int64_t first, auto rows)
                                                GROUPNORM_INLINE_LAMBDA {
          V last[rows];
          for (int r = 0; r < rows; ++r) last[r] = dy_at(last_order, first + r, length - kLanes, kLanes);
          if constexpr (kColumns) {
            for (std::int64_t i = begin; i < end; i += kLanes) {
              const Channel ch(table, i - begin);
              for (int r = 0; r < rows; ++r) {
                element(in_order, dy_at(in_order, first + r, i, kLanes), first + r, i, kLanes, ch);
              }
            }
          } else {
            const Channel ch(table, first);
            for (std::int64_t i = 0; i < whole; i += kLanes) {
              element(in_order, dy_at(in_order, first, i, kLanes), first, i, kLanes, ch);
            }
          }
          if (with_tail) {
            const LastChannel ch(plane.table, kColumns ? length - kLanes : first);
            for (int r = 0; r < rows; ++r) {
              element(last_order, last[r], first + r, length - kLanes, kLanes, ch);
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
