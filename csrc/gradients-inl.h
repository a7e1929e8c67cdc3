// The backward's two halves: sums of dv and dv * xhat for each channel, and dx from their means.
#pragma once

#include <cstdint>
#include <type_traits>

#include "activations-inl.h"
#include "channels-inl.h"
#include "kernels.h"
#include "moments-inl.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

// dv and x - mean of one vector.
template <class Real, Activation A, Numbers kNumbers, bool kSplit>
struct Gradient {
  using V = Vec<Real>;
  // relu's derivative jumps at 0: near it, the sign of v is settled in double.
  static constexpr bool kGuarded = A == Activation::relu && std::is_same_v<Real, float>;
  static constexpr bool kColumns = kNumbers != Numbers::of_row;
  using At = PlaceOf<kNumbers, V>;
  // It looks at single vectors again, whose numbers are those of one row, or of columns.
  static_assert(!kGuarded || kNumbers != Numbers::across_rows);

  const ChannelTable* table;
  At at;
  Centering<kNumbers, Real> center;
  Scaling<kNumbers, Real> scale;
  V guard{};

  GROUPNORM_INLINE Gradient(const ChannelTable& table_, const At& at_)
      : table(&table_),
        at(at_),
        center(coefficients<Real>(table_), at_),
        scale(coefficients<Real>(table_), at_) {
    if constexpr (kGuarded) guard = channel<kNumbers>(table->guard, at);
  }

  struct Pair {
    V centred, dv;
  };
  // What v is of a value whose distance from the mean is known.
  GROUPNORM_INLINE V v_of(const V& centred, [[maybe_unused]] const V& value) const {
    if constexpr (kGuarded) {
      const V v = scale(centred);
      if (__builtin_expect(any_lt<kColumns>(abs(v), guard), 0)) return exact_v<kColumns, kSplit>(*table, at, value);
      return v;
    } else {
      return scale(centred);
    }
  }
  GROUPNORM_INLINE Pair operator()(const V& dy, const V& value, const SwishRate<V>& rate) const {
    const V centred = center(value);
    return {centred, through_activation<A>(dy, v_of(centred, value), rate)};
  }
};

// The same of two vectors at each of several places, in place: x becomes x - mean, and dy becomes dv.
template <Activation A, class V, std::size_t kPairs, class First, class Second>
GROUPNORM_INLINE void differentiate_pairs(const First& first, const Second& second, Two<V> (&dy)[kPairs],
                                          Two<V> (&x)[kPairs], const SwishRate<V>& rate) {
  Two<V> v[kPairs];
  repeat<static_cast<int>(kPairs)>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const Two<V> centred = {first.center(x[i].first), second.center(x[i].second)};
    v[i] = {first.v_of(centred.first, x[i].first), second.v_of(centred.second, x[i].second)};
    x[i] = centred;
  });
  through_pairs<A>(v, dy, rate);
}

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

// relu looks at single vectors again, whose numbers it has in split order only.
template <Activation A, bool kSplit>
constexpr bool takes_two_columns = kTwoVectors && !(kSplit && A == Activation::relu);

// Two vectors of dv that was kept in the order of the elements.
template <bool kSplit>
GROUPNORM_INLINE Two<F32> load_kept_two(const float* p) {
  const Two<F32> in_order = load_two<false, float>(p);
  if constexpr (kSplit) return to_split_two(in_order);
  else return in_order;
}

// Rows so short that two lanes of their sums are added up in float.
constexpr std::int64_t kBrief = kFloatTerms * kLanes / 2;
inline bool has_brief_rows(const ReducePlane& plane) {
  return kTwoVectors && plane.b != nullptr && plane.length >= kLanes && plane.length <= kBrief;
}

// Dy: the type of dy, float where it is a dv that was kept in the order of the elements.
template <class T, class Real, Activation A, bool kColumns, Reduction kWhat, class Dy = T>
GROUPNORM_INLINE void reduce_plane(const ReducePlane& plane) {
  using V = Vec<Real>;
  const Coefficients<Real>& c = coefficients<Real>(plane.table);
  const SwishRate<V> rate(plane.beta);
  constexpr bool kSplit = in_split_order<T, Real>;
  constexpr Numbers kNumbers =
      kColumns && kSplit ? Numbers::of_columns_to_split : numbers_of<kColumns>;
  using GradientOf = Gradient<Real, A, kNumbers, kSplit>;
  struct Row {
    const Dy* dy;
    const T* x;
    Real* dv;
  };
  const auto row_at = [&](std::int64_t row) GROUPNORM_INLINE_LAMBDA {
    return Row{static_cast<const Dy*>(plane.dy) + row * plane.dy_stride,
               static_cast<const T*>(plane.x) + row * plane.x_stride,
               plane.dv == nullptr ? nullptr : static_cast<Real*>(plane.dv) + row * plane.dv_stride};
  };
  // Only the last `fresh` lanes count; those past a row's end hold dy = 0.
  const auto element = [&](GradientSums<Real>& sums, const Row& row, std::int64_t i, int count,
                           int fresh, const GradientOf& gradient, const V& rstd)
                           GROUPNORM_INLINE_LAMBDA {
    const auto counted = [&](const V& lanes) GROUPNORM_INLINE_LAMBDA {
      return fresh == kLanes ? lanes : last_elements<kSplit>(lanes, fresh);
    };
    const V dy = [&]() GROUPNORM_INLINE_LAMBDA {
      if constexpr (std::is_same_v<Dy, T>) return load_lanes<kSplit, Real>(row.dy + i, count);
      else return to_lanes<kSplit>(load_as<Real>(row.dy + i, count));
    }();
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
  // Two whole vectors at each of several places, with the numbers of both.
  [[maybe_unused]] const auto element_pairs = [&](Two<GradientSums<Real>>& sums, const auto& places, const auto& first,
                                                  const auto& second, const Two<V>& rstd) GROUPNORM_INLINE_LAMBDA {
    constexpr int kPlaces = static_cast<int>(std::extent_v<std::remove_reference_t<decltype(places)>>);
    Two<V> dv[kPlaces], x[kPlaces];
    repeat<kPlaces>([&](int k) GROUPNORM_INLINE_LAMBDA {
      if constexpr (std::is_same_v<Dy, T>) dv[k] = load_two<kSplit, Real>(places[k].dy);
      else dv[k] = load_kept_two<kSplit>(places[k].dy);
      if constexpr (kWhat != Reduction::sums_of_dy) x[k] = load_two<kSplit, Real>(places[k].x);
    });
    if constexpr (kWhat != Reduction::sums_of_dy) differentiate_pairs<A>(first, second, dv, x, rate);
    repeat<kPlaces>([&](int k) GROUPNORM_INLINE_LAMBDA {
      if constexpr (kWhat == Reduction::sums_of_dy) {
        sums.first.a = sums.first.a + dv[k].first;
        sums.second.a = sums.second.a + dv[k].second;
      } else {
        if constexpr (kWhat == Reduction::sums_and_dv) store_two<false>(places[k].dv, dv[k]);
        sums.first.add(dv[k].first, x[k].first * rstd.first);
        sums.second.add(dv[k].second, x[k].second * rstd.second);
      }
    });
  };
  constexpr int kPlacesAtOnce = takes_pairs<Real, A> ? 2 : 1;
  // The same row from an element on.
  [[maybe_unused]] const auto further = [](const Row& row, std::int64_t i) GROUPNORM_INLINE_LAMBDA {
    return Row{row.dy + i, row.x + i, kWhat == Reduction::sums_and_dv ? row.dv + i : nullptr};
  };
  const bool with_b = plane.b != nullptr;
  if constexpr (kColumns) {
    for_each_column_block<takes_two_columns<A, kSplit>>(
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
              const NextRows<T> next_dy(plane.dy, plane.dy_stride, row, column);
              const NextRows<T> next_x(plane.x, plane.x_stride, row, column);
              const NextRows<Real> next_dv(plane.dv, plane.dv_stride, row, column);
              for (std::int64_t first = row; row < end; ++row) {
                if (plane.far) {
                  next_dy.ask(row - first);
                  if constexpr (kWhat != Reduction::sums_of_dy) next_x.ask(row - first);
                  if constexpr (kWhat == Reduction::sums_and_dv) next_dv.ask(row - first);
                }
                element(sums, row_at(row), column, count, kLanes, gradient, rstd);
              }
              store_sums(plane.a + column, a + widen(from_lanes<kSplit>(sums.a)), count, fresh);
              if (with_b) {
                store_sums(plane.b + column, b + widen(from_lanes<kSplit>(sums.b)), count, fresh);
              }
            },
        [&](std::int64_t row, std::int64_t end, std::int64_t column) GROUPNORM_INLINE_LAMBDA {
          constexpr Numbers kFirst = kSplit ? Numbers::of_columns_to_first : Numbers::of_columns;
          constexpr Numbers kSecond = kSplit ? Numbers::of_columns_to_second : Numbers::of_columns;
          const std::int64_t next = kSplit ? column : column + kLanes;
          const Gradient<Real, A, kFirst, kSplit> first(plane.table, column);
          const Gradient<Real, A, kSecond, kSplit> second(plane.table, next);
          const Two<V> rstd = {channel<kFirst>(c.rstd, column), channel<kSecond>(c.rstd, next)};
          const bool fresh_sums = row == 0;
          Two<GradientSums<Real>> sums;
          const NextRows<T> next_dy(plane.dy, plane.dy_stride, row, column);
          const NextRows<T> next_x(plane.x, plane.x_stride, row, column);
          const NextRows<Real> next_dv(plane.dv, plane.dv_stride, row, column);
          const std::int64_t begin = row;
          const auto add_rows = [&](auto at_once) GROUPNORM_INLINE_LAMBDA {
            for (; row + at_once <= end; row += at_once) {
              Row places[at_once];
              repeat<at_once>([&](int k) GROUPNORM_INLINE_LAMBDA {
                places[k] = further(row_at(row + k), column);
                if (!plane.far) return;
                const std::int64_t part = row + k - begin;
                next_dy.template ask<2>(part);
                if constexpr (kWhat != Reduction::sums_of_dy) next_x.template ask<2>(part);
                if constexpr (kWhat == Reduction::sums_and_dv) next_dv.template ask<2>(part);
              });
              element_pairs(sums, places, first, second, rstd);
            }
          };
          add_rows(std::integral_constant<int, kPlacesAtOnce>());
          if constexpr (kPlacesAtOnce > 1) add_rows(std::integral_constant<int, 1>());
          const auto add_to = [&](double* totals, const V& one, const V& other)
                                  GROUPNORM_INLINE_LAMBDA {
            const Two<V> in_columns = from_two<kSplit>(Two<V>{one, other});
            const auto add = [&](double* p, const V& lanes) GROUPNORM_INLINE_LAMBDA {
              store(p, (fresh_sums ? set1<F64>(0.0) : load(p)) + widen(lanes));
            };
            add(totals + column, in_columns.first);
            add(totals + column + kLanes, in_columns.second);
          };
          add_to(plane.a, sums.first.a, sums.second.a);
          if (with_b) add_to(plane.b, sums.first.b, sums.second.b);
        });
  } else {
    const std::int64_t tail = plane.length % kLanes, whole = plane.length - tail;
    constexpr std::int64_t span = kFloatTerms * kLanes;
    // Two lanes of such a row have no more terms than one sum in float may have.
    const bool brief = std::is_same_v<Real, float> && plane.length <= kBrief;
    for (std::int64_t r = 0; r < plane.rows; ++r) {
      const Row row = row_at(r);
      const GradientOf gradient(plane.table, r);
      const V rstd = channel<kNumbers>(c.rstd, r);
      F64 a = set1<F64>(0.0), b = a;
      const auto fold = [&](const GradientSums<Real>& sums) GROUPNORM_INLINE_LAMBDA {
        a = a + widen(sums.a);
        b = b + widen(sums.b);
      };
      // Vectors of even and of odd place have sums of their own, which do not wait for each other; one that
      // is left over comes last.
      const auto add_span = [&](std::int64_t begin) GROUPNORM_INLINE_LAMBDA {
        const std::int64_t end = smaller(begin + span, whole);
        Two<GradientSums<Real>> two;
        std::int64_t i = begin;
        if constexpr (kTwoVectors) {
          const auto add_places = [&](auto at_once) GROUPNORM_INLINE_LAMBDA {
            constexpr std::int64_t kPair = 2 * kLanes;
            for (; i + at_once * kPair <= end; i += at_once * kPair) {
              Row places[at_once];
              repeat<at_once>([&](int k) GROUPNORM_INLINE_LAMBDA { places[k] = further(row, i + k * kPair); });
              element_pairs(two, places, gradient, gradient, Two<V>{rstd, rstd});
            }
          };
          add_places(std::integral_constant<int, kPlacesAtOnce>());
          if constexpr (kPlacesAtOnce > 1) add_places(std::integral_constant<int, 1>());
        } else {
          for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
            element(two.first, row, i, kLanes, kLanes, gradient, rstd);
            element(two.second, row, i + kLanes, kLanes, kLanes, gradient, rstd);
          }
        }
        GradientSums<Real> sums;
        sums.a = add_two<kSplit>(Two<V>{two.first.a, two.second.a});
        sums.b = add_two<kSplit>(Two<V>{two.first.b, two.second.b});
        if (i < end) element(sums, row, i, kLanes, kLanes, gradient, rstd);
        return sums;
      };
      const auto add_tail = [&](GradientSums<Real>& sums) GROUPNORM_INLINE_LAMBDA {
        const auto rest = static_cast<int>(tail);
        if (whole != 0) {
          element(sums, row, plane.length - kLanes, kLanes, rest, gradient, rstd);
        } else {
          element(sums, row, 0, rest, kLanes, gradient, rstd);
        }
      };
      const std::int64_t last = whole == 0 ? 0 : (whole - 1) / span * span;
      for (std::int64_t begin = 0; begin < last; begin += span) fold(add_span(begin));
      GradientSums<Real> sums = add_span(last);
      if (tail != 0) {
        // It joins the last span where that has room, which saves short rows a conversion.
        if (whole == last + span) {
          fold(sums);
          sums = GradientSums<Real>();
        }
        add_tail(sums);
      }
      if constexpr (std::is_same_v<Real, float>) {
        if (brief) {
          plane.a[r] = reduce_add_halves(sums.a);
          if (with_b) plane.b[r] = reduce_add_halves(sums.b);
          continue;
        }
      }
      fold(sums);
      plane.a[r] = reduce_add(a);
      if (with_b) plane.b[r] = reduce_add(b);
    }
  }
}

// Both of their sums, term by term in the order of reduce_plane. A loop with so little to remember that all of it stays
// in registers: a row has no more than a few vectors, and most of its time was spent between them.
template <class T, class Dy>
__attribute__((noinline)) void reduce_brief_rows(const ReducePlane& plane) {
  constexpr bool kSplit = in_split_order<T, float>;
  constexpr std::int64_t kPair = 2 * kLanes;
  const std::int64_t length = plane.length, tail = length % kLanes;
  const std::int64_t pairs = length / kPair * kPair, last = length - kLanes;
  const bool with_single = (length / kLanes) % 2 != 0;
  const float *const center = plane.table.single.center, *const rstd = plane.table.single.rstd;
  const auto* const all_dy = static_cast<const Dy*>(plane.dy);
  const auto* const all_x = static_cast<const T*>(plane.x);
  double *const a = plane.a, *const b = plane.b;
  const auto dy_two = [](const Dy* p) GROUPNORM_INLINE_LAMBDA {
    if constexpr (std::is_same_v<Dy, T>) return load_two<kSplit, float>(p);
    else return load_kept_two<kSplit>(p);
  };
  const auto dy_one = [](const Dy* p) GROUPNORM_INLINE_LAMBDA {
    if constexpr (std::is_same_v<Dy, T>) return load_lanes<kSplit, float>(p, kLanes);
    else return to_lanes<kSplit>(load_as<float>(p, kLanes));
  };
  const F32 element = element_index<kSplit, F32>(), known = set1<F32>(static_cast<float>(kLanes - tail));
  const F32 zero = set1<F32>(0.0f);
  for (std::int64_t r = 0; r < plane.rows; ++r) {
    const Dy* const dy = all_dy + r * plane.dy_stride;
    const T* const x = all_x + r * plane.x_stride;
    const F32 mean = set1<F32>(center[r]), root = set1<F32>(rstd[r]);
    Two<GradientSums<float>> two;
    for (std::int64_t i = 0; i < pairs; i += kPair) {
      const Two<F32> dv = dy_two(dy + i), value = load_two<kSplit, float>(x + i);
      two.first.add(dv.first, (value.first - mean) * root);
      two.second.add(dv.second, (value.second - mean) * root);
    }
    GradientSums<float> sums;
    sums.a = add_two<kSplit>(Two<F32>{two.first.a, two.second.a});
    sums.b = add_two<kSplit>(Two<F32>{two.first.b, two.second.b});
    const auto xhat = [&](std::int64_t i) GROUPNORM_INLINE_LAMBDA {
      return (load_lanes<kSplit, float>(x + i, kLanes) - mean) * root;
    };
    if (with_single) sums.add(dy_one(dy + pairs), xhat(pairs));
    if (tail != 0) sums.add(select_lt(element, known, zero, dy_one(dy + last)), xhat(last));
    a[r] = reduce_add_halves(sums.a);
    b[r] = reduce_add_halves(sums.b);
  }
}

// dv of short rows that lie one after the other, as one run.
template <class T, Activation A>
GROUPNORM_INLINE void keep_joined(const ReducePlane& plane) {
  constexpr bool kSplit = in_split_order<T, float>;
  using Row = Gradient<float, A, Numbers::of_row, kSplit>;
  using Across = Gradient<float, A, Numbers::across_rows, kSplit>;
  const SwishRate<F32> rate(plane.beta);
  const Two<F32> element = elements_of_two<kSplit, F32>();
  const auto *const dy = static_cast<const T*>(plane.dy), *const x = static_cast<const T*>(plane.x);
  auto* const dv = static_cast<float*>(plane.dv);
  Row row(plane.table, 0);
  JoinedRows at(plane.rows, plane.length, 0);
  for (; at.more(); at.advance()) {
    const std::int64_t i = at.place();
    const auto keep = [&](const auto& first, const auto& second) GROUPNORM_INLINE_LAMBDA {
      Two<F32> dv_here[] = {load_two<kSplit, float>(dy + i)}, x_here[] = {load_two<kSplit, float>(x + i)};
      differentiate_pairs<A>(first, second, dv_here, x_here, rate);
      store_two<false>(dv + i, from_two<kSplit>(dv_here[0]));
    };
    if (at.within_row()) {
      keep(row, row);
    } else {
      // Before a store, which might have changed the table for all that the compiler knows.
      const Row next(plane.table, at.row() + 1);
      const F32 end = set1<F32>(static_cast<float>(at.row_left()));
      keep(Across(plane.table, {at.row(), element.first, end}), Across(plane.table, {at.row(), element.second, end}));
      row = next;
    }
  }
  for_each_vector(at.row_left(), [&](std::int64_t j, int count) GROUPNORM_INLINE_LAMBDA {
    const std::int64_t i = at.place() + j;
    const auto pair = row(load_lanes<kSplit, float>(dy + i, count), load_lanes<kSplit, float>(x + i, count), rate);
    store_as(dv + i, from_lanes<kSplit>(pair.dv), count);
  });
}

template <class T, class Real, Activation A, bool kColumns>
void reduce(const ReducePlane& plane) {
  count_call();
  if constexpr (A == Activation::none) {
    if (plane.b == nullptr) return reduce_plane<T, Real, A, kColumns, Reduction::sums_of_dy>(plane);
    if constexpr (!kColumns && std::is_same_v<Real, float>) {
      if (has_brief_rows(plane)) return reduce_brief_rows<T, T>(plane);
    }
  }
  if constexpr (is_smooth(A) && (std::is_same_v<Real, float> || std::is_same_v<T, double>)) {
    if (plane.dv != nullptr) {
      if constexpr (kTwoVectors && !kColumns && std::is_same_v<Real, float>) {
        if (joins_gradient_rows(plane.length, {plane.dy_stride, plane.x_stride, plane.dv_stride})) {
          keep_joined<T, A>(plane);
          // For dx, which needs both sums.
          ReducePlane kept = plane;
          kept.dy = plane.dv;
          return reduce_brief_rows<T, float>(kept);
        }
      }
      return reduce_plane<T, Real, A, kColumns, Reduction::sums_and_dv>(plane);
    }
  }
  reduce_plane<T, Real, A, kColumns, Reduction::sums>(plane);
}

template <class Real, Activation A, Numbers kNumbers, bool kSplit>
struct ApplyChannel {
  using V = Vec<Real>;
  Gradient<Real, A, kNumbers, kSplit> gradient;
  V multiplier, offset, slope;

  GROUPNORM_INLINE ApplyChannel(const ChannelTable& table, const PlaceOf<kNumbers, V>& at)
      : gradient(table, at),
        multiplier(channel<kNumbers>(coefficients<Real>(table).grad_multiplier, at)),
        offset(channel<kNumbers>(coefficients<Real>(table).grad_offset, at)),
        slope(channel<kNumbers>(coefficients<Real>(table).grad_slope, at)) {}

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
      put(Across(plane.table, {at.row(), element.first, end}), Across(plane.table, {at.row(), element.second, end}));
      row = next;
    }
  }
  for_each_vector(at.row_left(), [&](std::int64_t j, int count) GROUPNORM_INLINE_LAMBDA {
    put_one(at.place() + j, count, row);
  });
  if (streams) finish_streams();
}

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
  [[maybe_unused]] const bool streams = kTwo && plane.stream && whole_lines<T>(plane.dx, plane.dx_stride);
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

}  // namespace
}  // namespace groupnorm
