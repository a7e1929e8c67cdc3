// Sixteen lanes of float or double, whatever the width of a register.
//
// Guarantee: every operation means the same for each lane on every instruction set, and sums over
// lanes are taken in one fixed tree, so that instruction sets with a fused multiply-add agree to
// the bit. An instruction-set header defines the registers (f32r, f64r), their conversions, fma,
// loads and stores; what GCC and Clang spell with operators on vector types is written here, once.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace groupnorm {
namespace {

constexpr int kLanes = 16;

// Split order: the elements of even place in the first eight lanes, those of odd place in the others.
// Sixteen bfloat16 come into it and out of it without crossing a register. It is for sums and for what is
// done to each element alike; what differs between elements has to be brought into it.
constexpr int split_element(int lane) { return 2 * lane - (lane < kLanes / 2 ? 0 : kLanes - 1); }

template <class Register, class Element, int kCount = kLanes>
struct Lanes {
  using element = Element;
  static constexpr int kRegisters =
      static_cast<int>(kCount * sizeof(Element) / sizeof(Register));
  using Sequence = std::make_integer_sequence<int, kRegisters>;
  Register v[kRegisters];

  Lanes() = default;
  template <class... Registers,
            class = std::enable_if_t<sizeof...(Registers) == static_cast<std::size_t>(kRegisters)>,
            class = std::enable_if_t<(std::is_convertible_v<Registers, Register> && ...)>>
  GROUPNORM_INLINE Lanes(Registers... registers) : v{registers...} {}
  // Register by register: GCC copies an array member as bytes, through memory.
  GROUPNORM_INLINE Lanes(const Lanes& other) : Lanes(other, Sequence{}) {}
  GROUPNORM_INLINE Lanes& operator=(const Lanes& other) {
    assign(other, Sequence{});
    return *this;
  }

 private:
  template <int... I>
  GROUPNORM_INLINE Lanes(const Lanes& other, std::integer_sequence<int, I...>)
      : v{other.v[I]...} {}
  template <int... I>
  GROUPNORM_INLINE void assign(const Lanes& other, std::integer_sequence<int, I...>) {
    ((v[I] = other.v[I]), ...);
  }
};

template <int kCount>
using Floats = Lanes<f32r, float, kCount>;
using F32 = Floats<kLanes>;
template <int kCount>
using Doubles = Lanes<f64r, double, kCount>;
using F64 = Doubles<kLanes>;

// Thirty-two lanes. Two vectors of bfloat16 at a time have an order of their own, which each instruction
// set chooses; add_split_two brings their sum into split order.
template <class V>
struct Two {
  V first, second;
};

template <class R>
struct LanesOf;
template <>
struct LanesOf<float> {
  using type = F32;
};
template <>
struct LanesOf<double> {
  using type = F64;
};
template <class R>
using Vec = typename LanesOf<R>::type;

// The same function on each register; unrolled by the compiler's front end, so nothing is left to
// an optimiser's opinion of small loops.
template <class V, class F, int... I>
GROUPNORM_INLINE V each(F&& f, std::integer_sequence<int, I...>) {
  return V(f(I)...);
}
template <class V, class F>
GROUPNORM_INLINE V each(F&& f) {
  return each<V>(f, std::make_integer_sequence<int, V::kRegisters>{});
}

// f(0), f(1) and so on, the same way.
template <class F, int... I>
GROUPNORM_INLINE void repeat(F&& f, std::integer_sequence<int, I...>) {
  (f(I), ...);
}
template <int kTimes, class F>
GROUPNORM_INLINE void repeat(F&& f) {
  repeat(f, std::make_integer_sequence<int, kTimes>{});
}

template <class V>
GROUPNORM_INLINE V set1(typename V::element value) {
  return each<V>([&](int) GROUPNORM_INLINE_LAMBDA { return broadcast(value); });
}
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> operator+(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return a.v[i] + b.v[i]; });
}
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> operator-(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return a.v[i] - b.v[i]; });
}
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> operator*(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return a.v[i] * b.v[i]; });
}
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> operator/(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return a.v[i] / b.v[i]; });
}
// a * b + c
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> fma(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b, const Lanes<R, E, N>& c) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return fma_register(a.v[i], b.v[i], c.v[i]); });
}
// a * b - c
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> fms(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b, const Lanes<R, E, N>& c) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return fma_register(a.v[i], b.v[i], -c.v[i]); });
}
// c - a * b
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> fnma(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b, const Lanes<R, E, N>& c) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return fma_register(-a.v[i], b.v[i], c.v[i]); });
}
// a < b ? yes : no, lane by lane; a NaN takes no.
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> select_lt(const Lanes<R, E, N>& a, const Lanes<R, E, N>& b, const Lanes<R, E, N>& yes,
                             const Lanes<R, E, N>& no) {
  return each<Lanes<R, E, N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> R { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
// a, or b where a is NaN.
template <class V>
GROUPNORM_INLINE V number_or(const V& a, const V& b) {
  return each<V>([&](int i) GROUPNORM_INLINE_LAMBDA { return a.v[i] == a.v[i] ? a.v[i] : b.v[i]; });
}
// A NaN in a stays a NaN.
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> at_least(const Lanes<R, E, N>& a, const Lanes<R, E, N>& least) {
  return each<Lanes<R, E, N>>(
      [&](int i) GROUPNORM_INLINE_LAMBDA -> R { return max_register(least.v[i], a.v[i]); });
}
template <class R, class E, int N>
GROUPNORM_INLINE Lanes<R, E, N> at_most(const Lanes<R, E, N>& a, const Lanes<R, E, N>& most) {
  return each<Lanes<R, E, N>>(
      [&](int i) GROUPNORM_INLINE_LAMBDA -> R { return min_register(most.v[i], a.v[i]); });
}
template <class V>
GROUPNORM_INLINE V abs(const V& a) {
  return each<V>([&](int i) GROUPNORM_INLINE_LAMBDA { return abs_register(a.v[i]); });
}
template <class V>
GROUPNORM_INLINE V sqrt(const V& a) {
  return each<V>([&](int i) GROUPNORM_INLINE_LAMBDA { return sqrt_register(a.v[i]); });
}
// Lane i is lane places[i] of a, for as many places as it has lanes.
template <class R, class Place>
GROUPNORM_INLINE R permute_register(const R& a, const Place* places) {
  decltype(a == a) index;
  static_assert(sizeof(index[0]) == sizeof(Place));
  std::memcpy(&index, places, sizeof index);
#ifdef __clang__
  R result;
  for (std::size_t i = 0; i < sizeof(R) / sizeof(Place); ++i) result[i] = a[index[i]];
  return result;
#else
  return __builtin_shuffle(a, index);
#endif
}
// a, once it was loaded not to be loaded again.
template <class V>
GROUPNORM_INLINE V held(const V& a) {
  return each<V>([&](int i) GROUPNORM_INLINE_LAMBDA { return held_register(a.v[i]); });
}
// 2^n for integral n whose result is a normal number: the sum's low bits are the biased exponent,
// and the shift moves them into place.
template <int N>
GROUPNORM_INLINE Floats<N> exp2_integer(const Floats<N>& n) {
  return each<Floats<N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> f32r {
    return (f32r)((u32r)(n.v[i] + broadcast(0x1.8p23f + 127.0f)) << 23);
  });
}
GROUPNORM_INLINE F64 exp2_integer(const F64& n) {
  return each<F64>([&](int i) GROUPNORM_INLINE_LAMBDA -> f64r {
    return (f64r)((u64r)(n.v[i] + broadcast(0x1.8p52 + 1023.0)) << 52);
  });
}
// Added to a number well inside the fraction's range, it leaves no room for less than an integer, which is then in the
// low bits.
constexpr float kIntegerBias = 0x1.8p23f;
// The float without its lower sixteen bits: eight bits of precision.
GROUPNORM_INLINE F32 upper_half(const F32& a) {
  return each<F32>([&](int i) GROUPNORM_INLINE_LAMBDA -> f32r {
    return (f32r)(((u32r)a.v[i] >> 16) << 16);
  });
}
// The nearest integer, for values well inside the fraction's range.
template <int N>
GROUPNORM_INLINE Floats<N> nearest_integer(const Floats<N>& a) {
  const Floats<N> bias = set1<Floats<N>>(kIntegerBias);
  return (a + bias) - bias;
}
GROUPNORM_INLINE F64 nearest_integer(const F64& a) {
  const F64 magic = set1<F64>(0x1.8p52);
  return (a + magic) - magic;
}

template <class V>
GROUPNORM_INLINE void to_array(const V& a, typename V::element* lanes) {
  std::memcpy(lanes, a.v, sizeof a.v);
}
template <class V>
GROUPNORM_INLINE V from_array(const typename V::element* lanes) {
  V a;
  std::memcpy(a.v, lanes, sizeof a.v);
  return a;
}

GROUPNORM_INLINE double first_lane(const F64& a) {
  double lane;
  std::memcpy(&lane, &a.v[0], sizeof lane);
  return lane;
}

// The lanes' sum: i with i + 8, then i + 4, i + 2, i + 1; whole registers first.
GROUPNORM_INLINE double reduce_add(const F64& a) {
  F64 sums = a;
  for (int half = F64::kRegisters / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums.v[i] = sums.v[i] + sums.v[i + half];
  }
  return reduce_register(sums.v[0]);
}

}  // namespace
}  // namespace groupnorm
