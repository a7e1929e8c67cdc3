// What both halves of the backward have in common: dv and x - mean of vectors, and where a dv is kept between them.
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
  using OfRow = Gradient<Real, A, Numbers::of_row, kSplit>;
  // It looks at single vectors again, whose numbers are those of one row, or of columns.
  static_assert(!kGuarded || kNumbers != Numbers::across_rows);

  const ChannelTable* table;
  std::int64_t at;
  Centering<kNumbers, Real> center;
  Scaling<kNumbers, Real> scale;
  V guard{};

  GROUPNORM_INLINE Gradient(const ChannelTable& table_, std::int64_t at_)
      : table(&table_),
        at(at_),
        center(coefficients<Real>(table_), at_),
        scale(coefficients<Real>(table_), at_) {
    if constexpr (kGuarded) guard = channel<kNumbers>(table->guard, at);
  }
  GROUPNORM_INLINE Gradient(const OfRow& row, const OfRow& next, const AcrossRows<V>& across)
      : table(row.table),
        at(row.at),
        center(row.center, next.center, across),
        scale(row.scale, next.scale, across) {}

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

static_assert(kKeptVector == kLanes);

// Where the dv of a vector that begins at element i is kept. In split order a vector has a place of its
// own, the last of a row too, whose elements overlap with those before.
template <bool kSplit>
GROUPNORM_INLINE std::int64_t kept_at(std::int64_t i) {
  return kSplit ? (i + kLanes - 1) / kLanes * kLanes : i;
}

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

}  // namespace
}  // namespace groupnorm
