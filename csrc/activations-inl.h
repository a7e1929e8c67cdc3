// Activations and their derivatives on sixteen lanes.
//
// Guarantees, for finite v and beta: no result overflows on the way, a NaN stays a NaN, results below
// the normal range are right, and the same lane gives the same bits on every instruction set with a
// fused multiply-add, because no hardware estimate is used. Relative errors in float
// (tests/test_activations.py): silu 5e-7, gelu 5e-6, gelu_tanh and swish 2e-5, reached only in the far
// tail, where the argument of the exponential is large and carries its rounding; for |v| <= 4 they are
// 4e-7, 6e-7, 2e-6 and 6e-7. Results below 1e-36 have that error relative to 1e-36.
#pragma once

#include <cmath>

#include "groupnorm.h"
#include "kernels.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

template <class Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  // e^-104 is below half the least subnormal.
  static constexpr float lowest = -104.0f;
  static constexpr float log2e = 1.44269504f;
  // ln 2 in two parts; the first has 10 bits, so its product with an exponent is exact.
  static constexpr float ln2_high = 0.693359375f;
  static constexpr float ln2_low = -2.12194440e-4f;
  // Exponents are raised by this so that the power of two is normal; the result is lowered again.
  static constexpr float lift = 24.0f;
  static constexpr float lower = 0x1p-24f;
  // e^f = 1 + f + f^2 P(f) on |f| <= ln(2)/2; relative error 3.3e-9.
  static constexpr float poly[] = {0.499999930504912682f, 0.166665147891210339f,
                                   0.0416684568332775110f, 0.00836941904325886500f,
                                   0.00138131423570322280f};
};

template <>
struct ExpConstants<double> {
  static constexpr double lowest = -745.2;
  static constexpr double log2e = 1.4426950408889634;
  static constexpr double ln2_high = 6.93147180369123816490e-01;
  static constexpr double ln2_low = 1.90821492927058770002e-10;
  static constexpr double lift = 53.0;
  static constexpr double lower = 0x1p-53;
  // Relative error under the rounding of the evaluation.
  static constexpr double poly[] = {
      0.4999999999999998,      0.1666666666666681,      0.04166666666667277,
      0.008333333333232933,    0.0013888888897235045,   0.00019841269984653838,
      2.4801554096243936e-05,  2.75572946377432e-06,    2.7596616052276565e-07,
      2.5042695589886844e-08,  6.110622095719912e-10};
};

// e^x for x <= 0, gradual underflow included.
template <class V>
GROUPNORM_INLINE V exp_nonpositive(V x) {
  using K = ExpConstants<typename V::element>;
  const auto c = [](typename V::element value) GROUPNORM_INLINE_LAMBDA { return set1<V>(value); };
  x = at_least(x, c(K::lowest));
  const V n = nearest_integer(x * c(K::log2e));
  V f = fnma(n, c(K::ln2_high), x);
  f = fnma(n, c(K::ln2_low), f);
  constexpr int terms = sizeof(K::poly) / sizeof(K::poly[0]);
  V p = c(K::poly[terms - 1]);
  for (int i = terms - 2; i >= 0; --i) p = fma(p, f, c(K::poly[i]));
  const V e = fma(p, f * f, f) + c(1);
  return e * exp2_integer(n + c(K::lift)) * c(K::lower);
}

template <class V>
struct Sigmoid {
  V argument;           // z, held to where the sigmoid changes
  V value, complement;  // s(z) and 1 - s(z), neither by cancellation
};

// t and 1 + t, lowered by a power of two, with t = 2^e and e = v rate. Lowered by 24, t cannot overflow before
// the sigmoid 1 / (1 + t) has left the range of float. v is held so that e is in [-101, 127 + kLowered].
template <int N>
struct Logistic {
  Floats<N> t, one_plus_t;
};
constexpr int kLogisticLowered = 24;
constexpr float kLogisticScale = 1.0f / (1 << kLogisticLowered);

template <int kLowered = kLogisticLowered, int N>
GROUPNORM_INLINE Logistic<N> logistic(const Floats<N>& v, const Floats<N>& rate) {
  const auto c = [](float value) GROUPNORM_INLINE_LAMBDA { return set1<Floats<N>>(value); };
  constexpr float kScale = 1.0f / (1 << kLowered);
  const Floats<N> biased = fma(v, rate, c(kIntegerBias));
  const Floats<N> n = biased - c(kIntegerBias);
  const Floats<N> f = fms(v, rate, n);
  // 2^f on |f| <= 1/2, lowered, relative error 1.1e-7.
  Floats<N> p = fma(f, c(0x1.5bb994p-10f * kScale), c(0x1.3cea84p-7f * kScale));
  p = fma(f, p, c(0x1.c6b754p-5f * kScale));
  p = fma(f, p, c(0x1.ebf9bcp-3f * kScale));
  p = fma(f, p, c(0x1.62e42ap-1f * kScale));
  p = fma(f, p, c(kScale));
  const Floats<N> t = each<Floats<N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> f32r {
    return times_exp2_register(p.v[i], n.v[i], biased.v[i]);
  });
  return {t, t + c(kScale)};
}

// A long chain of operations is done to all registers side by side where there are registers enough (AVX-512), so that
// none waits for its own last operation; else to one after the other, because side by side they would take more than
// there are. step(begin, V()) does it for as many registers as V has, from that one on.
using OneRegister = Floats<static_cast<int>(sizeof(f32r) / sizeof(float))>;
using OneDoubleRegister = Doubles<static_cast<int>(sizeof(f64r) / sizeof(double))>;
template <int N, class Step>
GROUPNORM_INLINE Floats<N> side_by_side(const Step& step) {
  if constexpr (kTwoVectors) {
    return step(0, Floats<N>());
  } else {
    return each<Floats<N>>([&](int i) GROUPNORM_INLINE_LAMBDA -> f32r { return step(i, OneRegister()).v[0]; });
  }
}
// As many registers of a as V has, from one of them on.
template <class V, class R, class E, int N>
GROUPNORM_INLINE V registers_of(const Lanes<R, E, N>& a, int begin) {
  return each<V>([&](int i) GROUPNORM_INLINE_LAMBDA { return a.v[begin + i]; });
}
// A number that all lanes have, in as many of them.
template <class V, class R, class E>
GROUPNORM_INLINE V in_all(const Lanes<R, E, kLanes>& number) {
  return each<V>([&](int) GROUPNORM_INLINE_LAMBDA { return number.v[0]; });
}

// What swish needs of its beta >= 0. v is held to where the sigmoid changes: [lowest, highest].
template <class V>
struct SwishRate {
  V beta;

  GROUPNORM_INLINE explicit SwishRate(double value) : beta(set1<V>(value)) {}
};
template <>
struct SwishRate<F32> {
  F32 rate, lowest, highest, scaled_beta;

  // The limits are those of the rate that float can hold, which a large beta's is not.
  GROUPNORM_INLINE explicit SwishRate(double beta)
      : rate(set1<F32>(within_float(beta * -kLog2E))),
        lowest(set1<F32>(within_float(-104.0 * kLog2E / rate_within_float(beta)))),
        highest(set1<F32>(within_float(70.0 * kLog2E / rate_within_float(beta)))),
        scaled_beta(set1<F32>(within_float(beta) * kLogisticScale)) {}

 private:
  static constexpr double kLog2E = 1.4426950408889634;
  static GROUPNORM_INLINE double rate_within_float(double beta) {
    return static_cast<double>(within_float(beta * kLog2E));
  }
  // Finite, and of the double's sign: 1 / 0 is the largest float.
  static GROUPNORM_INLINE float within_float(double value) {
    constexpr double most = 0x1.fffffep127;
    return static_cast<float>(value < -most ? -most : value > most ? most : value);
  }
};

template <int N>
GROUPNORM_INLINE Floats<N> swish(const Floats<N>& v, const SwishRate<F32>& swish) {
  return side_by_side<N>([&](int begin, auto kind) GROUPNORM_INLINE_LAMBDA {
    using V = decltype(kind);
    const V numerator = at_least(registers_of<V>(v, begin), in_all<V>(swish.lowest));
    const V held = at_most(numerator, in_all<V>(swish.highest));
    return numerator * set1<V>(kLogisticScale) / logistic(held, in_all<V>(swish.rate)).one_plus_t;
  });
}
// The same for v outside the tail (kernels.h), where t cannot overflow.
static_assert(kTailFloat16 < 88.0 && kTailBFloat16 < 88.0);
template <int N>
GROUPNORM_INLINE Floats<N> swish_near(const Floats<N>& v, const SwishRate<F32>& swish) {
  return side_by_side<N>([&](int begin, auto kind) GROUPNORM_INLINE_LAMBDA {
    using V = decltype(kind);
    const V numerator = registers_of<V>(v, begin);
    const V held = at_most(numerator, in_all<V>(swish.highest));
    return numerator / logistic<0>(held, in_all<V>(swish.rate)).one_plus_t;
  });
}
// s (1 + z (1 - s)) with z = beta v and s its sigmoid.
template <int N>
GROUPNORM_INLINE Floats<N> swish_slope(const Floats<N>& v, const SwishRate<F32>& swish) {
  return side_by_side<N>([&](int begin, auto kind) GROUPNORM_INLINE_LAMBDA {
    using V = decltype(kind);
    const V held = at_most(at_least(registers_of<V>(v, begin), in_all<V>(swish.lowest)), in_all<V>(swish.highest));
    const auto l = logistic(held, in_all<V>(swish.rate));
    const V q = set1<V>(1.0f) / l.one_plus_t;
    return q * fma(held * in_all<V>(swish.scaled_beta), l.t * q, set1<V>(kLogisticScale));
  });
}

template <int N>
GROUPNORM_INLINE Sigmoid<Floats<N>> sigmoid(const Floats<N>& z) {
  using V = Floats<N>;
  Sigmoid<V> s;
  if constexpr (kTwoVectors || V::kRegisters == 1) {
    s.argument = at_least(at_most(z, set1<V>(70.0f)), set1<V>(-104.0f));
    const auto l = logistic(s.argument, set1<V>(-ExpConstants<float>::log2e));
    const V q = set1<V>(1.0f) / l.one_plus_t;
    s.value = q * set1<V>(kLogisticScale);
    s.complement = l.t * q;
  } else {
    for (int i = 0; i < V::kRegisters; ++i) {
      const auto one = sigmoid(registers_of<OneRegister>(z, i));
      s.argument.v[i] = one.argument.v[0];
      s.value.v[i] = one.value.v[0];
      s.complement.v[i] = one.complement.v[0];
    }
  }
  return s;
}

// As logistic, lowered by the digits of a double: t cannot overflow before the sigmoid has left the range of double,
// subnormal numbers included. z is held so that e = -z log2(e) is in [-953, 1077].
template <int N>
GROUPNORM_INLINE Sigmoid<Doubles<N>> sigmoid(const Doubles<N>& z) {
  using V = Doubles<N>;
  Sigmoid<V> s;
  if constexpr (kTwoVectors || V::kRegisters == 1) {
    constexpr int kLowered = 53;
    const auto c = [](double value) GROUPNORM_INLINE_LAMBDA { return set1<V>(value); };
    const V scale = c(0x1p-53), rate = c(-ExpConstants<double>::log2e), magic = c(0x1.8p52 - kLowered);
    s.argument = at_least(at_most(z, c(660.0)), c(-746.0));
    const V biased = fma(s.argument, rate, magic);
    const V f = fms(s.argument, rate, biased - magic);
    // 2^f on |f| <= 1/2, relative error 2e-17.
    constexpr double poly[] = {1.0,
                               0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a0c2p-5,
                               0x1.3b2ab6fba1ddap-7,  0x1.5d87fe78a5276p-10, 0x1.430913096fd9fp-13,
                               0x1.ffcbfc670dcd4p-17, 0x1.62bfd47773353p-20, 0x1.b524fae627834p-24,
                               0x1.e6063f7217bc6p-28, 0x1.e9d3fe3952179p-32};
    V p = c(poly[11]);
    for (int k = 10; k >= 0; --k) p = fma(p, f, c(poly[k]));
    const V t = each<V>([&](int i) GROUPNORM_INLINE_LAMBDA -> f64r {
      return (f64r)((u64r)p.v[i] + ((u64r)biased.v[i] << 52));
    });
    const V q = c(1.0) / (t + scale);
    s.value = q * scale;
    s.complement = t * q;
  } else {
    for (int i = 0; i < V::kRegisters; ++i) {
      const auto one = sigmoid(registers_of<OneDoubleRegister>(z, i));
      s.argument.v[i] = one.argument.v[0];
      s.value.v[i] = one.value.v[0];
      s.complement.v[i] = one.complement.v[0];
    }
  }
  return s;
}

template <int N>
GROUPNORM_INLINE Doubles<N> swish(const Doubles<N>& v, const SwishRate<F64>& swish) {
  return v * sigmoid(in_all<Doubles<N>>(swish.beta) * v).value;
}
template <int N>
GROUPNORM_INLINE Doubles<N> swish_slope(const Doubles<N>& v, const SwishRate<F64>& swish) {
  const auto s = sigmoid(in_all<Doubles<N>>(swish.beta) * v);
  return s.value * fma(s.argument, s.complement, set1<Doubles<N>>(1));
}

// The normal distribution: P(Z < v) and the density at v.
template <class V>
struct Normal {
  V cdf, density;
};

template <int N>
GROUPNORM_INLINE Normal<Floats<N>> normal(const Floats<N>& v) {
  using V = Floats<N>;
  const auto c = [](float value) GROUPNORM_INLINE_LAMBDA { return set1<V>(value); };
  const V t = at_most(abs(v), c(14.5f));
  // e^(-t^2/2) with the square's rounding error put back.
  const V square = t * t;
  const V rest = fma(t, t, c(0.0f) - square);
  V e = exp_nonpositive(square * c(-0.5f));
  e = fnma(e * c(0.5f), rest, e);
  // The upper tail is e^(-t^2/2) s P(s) with s = 1 / (1 + 0.3 t); relative error 3.5e-9.
  const V s = c(1.0f) / fma(c(0.3f), t, c(1.0f));
  constexpr float poly[] = {0.119686690f,   0.119571802f,  0.110235526f,  0.0783891657f,
                            0.0961582601f,  -0.0794261902f, 0.191787815f, -0.228216078f,
                            0.112436672f,   -0.0206236646f};
  V p = c(poly[9]);
  for (int i = 8; i >= 0; --i) p = fma(p, s, c(poly[i]));
  const V tail = p * s * e;
  return {select_lt(v, c(0.0f), tail, c(1.0f) - tail), e * c(0.398942280f)};
}

GROUPNORM_INLINE Normal<F64> normal(const F64& v) {
  double lanes[kLanes];
  to_array(v, lanes);
  for (double& lane : lanes) lane = 0.5 * std::erfc(lane * -0.70710678118654752440);
  const F64 square = v * v;
  return {from_array<F64>(lanes),
          exp_nonpositive(square * set1<F64>(-0.5)) * set1<F64>(0.39894228040143267794)};
}

// 2 sqrt(2/pi) (v + 0.044715 v^3), the sigmoid's argument in the tanh form of gelu, and its slope.
// v is held to +-64, where the sigmoid has long become 0 or 1, so that the cube cannot overflow.
template <class V>
struct GeluArgument {
  V held, value, slope;
};
template <class V>
GROUPNORM_INLINE GeluArgument<V> gelu_argument(const V& v) {
  const auto c = [](double value) GROUPNORM_INLINE_LAMBDA { return set1<V>(static_cast<typename V::element>(value)); };
  const V t = at_least(at_most(v, c(64)), c(-64));
  constexpr double linear = 1.59576912160573071176, cubic = linear * 0.044715;
  const V square = t * t;
  return {t, t * fma(c(cubic), square, c(linear)), fma(c(3 * cubic), square, c(linear))};
}

// Rate is a SwishRate of double or of F32, for any number of lanes.
template <Activation A, class V, class Rate>
GROUPNORM_INLINE V activate(const V& v, [[maybe_unused]] const Rate& rate) {
  if constexpr (A == Activation::relu) {
    const V zero = set1<V>(0);
    return select_lt(v, zero, zero, v);
  } else if constexpr (A == Activation::swish) {
    return swish(v, rate);
  } else if constexpr (A == Activation::gelu) {
    return v * normal(v).cdf;
  } else if constexpr (A == Activation::gelu_tanh) {
    return v * sigmoid(gelu_argument(v).value).value;
  } else {
    return v;
  }
}

// For results of type T. Those of 16 bits must be of a v outside the activation's tail (kernels.h).
template <class T, Activation A, class V, class Rate>
GROUPNORM_INLINE V activate_near(const V& v, const Rate& rate) {
  if constexpr (is_half<T> && A == Activation::swish && std::is_same_v<Rate, SwishRate<F32>>) {
    return swish_near(v, rate);
  } else {
    return activate<A>(v, rate);
  }
}

// dy times the derivative at v.
template <Activation A, class V, class Rate>
GROUPNORM_INLINE V through_activation(const V& dy, [[maybe_unused]] const V& v,
                            [[maybe_unused]] const Rate& rate) {
  [[maybe_unused]] const V zero = set1<V>(0), one = set1<V>(1);
  if constexpr (A == Activation::relu) {
    return select_lt(zero, v, dy, zero);
  } else if constexpr (A == Activation::swish) {
    return dy * swish_slope(v, rate);
  } else if constexpr (A == Activation::gelu) {
    const Normal<V> n = normal(v);
    return dy * fma(v, n.density, n.cdf);
  } else if constexpr (A == Activation::gelu_tanh) {
    const GeluArgument<V> z = gelu_argument(v);
    const Sigmoid<V> s = sigmoid(z.value);
    return dy * (s.value * fma(z.held * s.complement, z.slope, one));
  } else {
    return dy;
  }
}

// Whether the vectors of a pair are activated as one: where the chain of an activation is long, as long as there are
// registers. gelu in double is no such chain.
template <class Real, Activation A>
constexpr bool joins_pairs =
    kTwoVectors && is_smooth(A) && (std::is_same_v<Real, float> || A != Activation::gelu);
// Whether several pairs are at once: vectors of float are one register each.
template <class Real, Activation A>
constexpr bool takes_pairs = kTwoVectors && std::is_same_v<Real, float> && is_smooth(A);

// Pairs of vectors as one vector, and back.
template <class R, class E, std::size_t kPairs>
GROUPNORM_INLINE auto as_one(const Two<Lanes<R, E, kLanes>> (&pairs)[kPairs]) {
  constexpr int kEach = Lanes<R, E, kLanes>::kRegisters;
  return each<Lanes<R, E, static_cast<int>(2 * kPairs) * kLanes>>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const Two<Lanes<R, E, kLanes>>& pair = pairs[i / (2 * kEach)];
    return i / kEach % 2 == 0 ? pair.first.v[i % kEach] : pair.second.v[i % kEach];
  });
}
template <class V, class Vector, std::size_t kPairs>
GROUPNORM_INLINE void as_pairs(const V& one, Two<Vector> (&pairs)[kPairs]) {
  constexpr int kEach = Vector::kRegisters;
  repeat<static_cast<int>(kPairs) * kEach>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const int pair = i / kEach, part = i % kEach;
    pairs[pair].first.v[part] = one.v[2 * kEach * pair + part];
    pairs[pair].second.v[part] = one.v[2 * kEach * pair + kEach + part];
  });
}

// activate_near and through_activation of pairs of vectors; v becomes the results, and dy becomes dv.
template <class T, Activation A, class V, std::size_t kPairs>
GROUPNORM_INLINE void activate_pairs(Two<V> (&v)[kPairs], const SwishRate<V>& rate) {
  if constexpr (joins_pairs<typename V::element, A>) {
    as_pairs(activate_near<T, A>(as_one(v), rate), v);
  } else {
    for (Two<V>& pair : v) {
      pair = {activate_near<T, A>(pair.first, rate), activate_near<T, A>(pair.second, rate)};
    }
  }
}
template <Activation A, class V, std::size_t kPairs>
GROUPNORM_INLINE void through_pairs(const Two<V> (&v)[kPairs], Two<V> (&dy)[kPairs], const SwishRate<V>& rate) {
  if constexpr (joins_pairs<typename V::element, A>) {
    as_pairs(through_activation<A>(as_one(dy), as_one(v), rate), dy);
  } else {
    repeat<static_cast<int>(kPairs)>([&](int i) GROUPNORM_INLINE_LAMBDA {
      dy[i] = {through_activation<A>(dy[i].first, v[i].first, rate),
              through_activation<A>(dy[i].second, v[i].second, rate)};
    });
  }
}

}  // namespace
}  // namespace groupnorm
