// The backward's first half: sums of dv and dv * xhat for each channel, and dv itself where the second half can use it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gradients-inl.h"
#include "narrow-inl.h"

namespace groupnorm {
namespace {

// Sums of dv and of dv * xhat: Real for a few terms, double in between.
template <class Real>
struct GradientSums {
  using V = Vec<Real>;
  V a = set1<V>(0), b = a;

  GROUPNORM_INLINE void add(const V& dv, const V& xhat) {
    const V here = held(dv);
    a = a + here;
    b = fma(here, xhat, b);
  }
};

// What of a plane is wanted: both sums, those of dv alone (without an activation they need no x), or both
// and dv itself in plane.dv, for an apply that then needs neither dy nor the activation.
enum class Reduction { sums, sums_of_dy, sums_and_dv };

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
              repeat<at_once>([&](int k) GROUPNORM_INLINE_LAMBDA {
                places[k] = further(row, i + k * kPair);
                // Long rows without a dv to be written came no sooner.
                if constexpr (kWhat == Reduction::sums_and_dv) {
                  if (!plane.far) return;
                  ask_ahead<2>(places[k].dy);
                  ask_ahead<2>(places[k].x);
                }
              });
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
  const auto add_rows = [&](auto far) GROUPNORM_INLINE_LAMBDA {
    for (std::int64_t r = 0; r < plane.rows; ++r) {
      const Dy* const dy = all_dy + r * plane.dy_stride;
      const T* const x = all_x + r * plane.x_stride;
      const F32 mean = set1<F32>(center[r]), root = set1<F32>(rstd[r]);
      Two<GradientSums<float>> two;
      for (std::int64_t i = 0; i < pairs; i += kPair) {
        if constexpr (decltype(far)::value) {
          ask_ahead<2>(dy + i);
          ask_ahead<2>(x + i);
        }
        const Two<F32> dv = dy_two(dy + i), value = load_two<kSplit, float>(x + i);
        two.first.add(dv.first, (value.first - mean) * root);
        two.second.add(dv.second, (value.second - mean) * root);
      }
      if constexpr (decltype(far)::value) {
        ask_ahead<1>(dy + last);
        ask_ahead<1>(x + last);
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
  };
  if (plane.far) add_rows(std::true_type());
  else add_rows(std::false_type());
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
      if (plane.far) {
        ask_ahead<2>(dy + i);
        ask_ahead<2>(x + i);
      }
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
      keep(Across(row, next, {element.first, end}), Across(row, next, {element.second, end}));
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
void reduce_narrow(const ReducePlane& plane);

template <class T, class Real, Activation A, bool kColumns>
void reduce(const ReducePlane& plane) {
  count_call();
  if (is_narrow<kColumns>(plane.rows, plane.length, {plane.dy_stride, plane.x_stride})) {
    return reduce_narrow<T, Real, A, kColumns>(plane);
  }
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
          kept.far = false;
          return reduce_brief_rows<T, float>(kept);
        }
      }
      return reduce_plane<T, Real, A, kColumns, Reduction::sums_and_dv>(plane);
    }
  }
  reduce_plane<T, Real, A, kColumns, Reduction::sums>(plane);
}

// Sums of the columns of wide rows, and of those the channels' sums, in double.
template <class T, class Real, Activation A, bool kColumns>
__attribute__((noinline)) void reduce_narrow(const ReducePlane& plane) {
  using GradientOf = Gradient<Real, A, Numbers::of_columns, false>;
  // Sixteen may be read from any column on.
  double a[kMostWide + kLanes], b[kMostWide + kLanes];
  for_each_wide<kColumns>(plane.rows, plane.length, [&](std::int64_t first, std::int64_t rows, std::int64_t length,
                                                        const auto& numbers) GROUPNORM_INLINE_LAMBDA {
    WideNumbers wide;
    ReducePlane part = plane;
    part.dy = static_cast<const T*>(plane.dy) + first * plane.dy_stride;
    part.x = static_cast<const T*>(plane.x) + first * plane.x_stride;
    part.rows = rows;
    part.length = part.dy_stride = part.x_stride = length;
    part.table = wide.for_reduce(kColumns ? plane.table : table_from(plane.table, first), numbers,
                                 std::is_same_v<Real, double>, GradientOf::kGuarded);
    part.a = a;
    part.b = plane.b == nullptr ? nullptr : b;
    if constexpr (!kColumns) part.far = false;
    reduce<T, Real, A, true>(part);
    const auto add_up = [&](const double* columns, double* sums) GROUPNORM_INLINE_LAMBDA {
      if constexpr (kColumns) {
        // Of the plane's first rows, or what is left of it after them.
        if (first == 0) std::memset(sums, 0, static_cast<std::size_t>(numbers.channels) * sizeof *sums);
        for (std::int64_t i = 0; i < numbers.times; ++i) {
          for (std::int64_t c = 0; c < numbers.channels; ++c) sums[c] += columns[i * numbers.channels + c];
        }
      } else {
        const std::int64_t channels = numbers.channels, positions = numbers.positions;
        const F64 of_channel = set1<F64>(static_cast<double>(positions)), zero = set1<F64>(0.0);
        const auto terms = [&](std::int64_t c) GROUPNORM_INLINE_LAMBDA {
          return select_lt(element_index<false, F64>(), of_channel, load(columns + c * positions), zero);
        };
        std::int64_t c = 0;
        for (; c + 8 <= channels; c += 8) {
          F64 eight[8];
          repeat<8>([&](int i) GROUPNORM_INLINE_LAMBDA { eight[i] = terms(c + i); });
          reduce_add_eight(eight, sums + first + c);
        }
        for (; c < channels; ++c) sums[first + c] = reduce_add(terms(c));
      }
    };
    add_up(a, plane.a);
    if (plane.b != nullptr) add_up(b, plane.b);
  });
}

}  // namespace
}  // namespace groupnorm
