// AVX-512 without the hardware: the intrinsics that csrc/simd/avx512.h uses, lane by lane, from
// their published semantics. Shadows <immintrin.h> in the emulated build (`make test-emulated`),
// so that the AVX-512 objects can be compared with the reference on any x86-64 machine with AVX2.
#pragma once

#include_next <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class To, class From>
inline To cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Element, int kCount>
struct Lanes {
  Element lane[kCount];
};
using Floats = Lanes<float, 16>;
using Doubles = Lanes<double, 8>;
using Ints = Lanes<std::uint32_t, 16>;
using Shorts = Lanes<std::uint16_t, 16>;

template <class Register, class Array, class F>
inline Register make(F f) {
  Array result{};
  int i = 0;
  for (auto& lane : result.lane) lane = f(i++);
  return cast<Register>(result);
}

inline __m512 set1(float a) { return make<__m512, Floats>([=](int) { return a; }); }
inline __m512d set1(double a) { return make<__m512d, Doubles>([=](int) { return a; }); }
inline __m512i set1_epi32(int a) {
  return make<__m512i, Ints>([=](int) { return static_cast<std::uint32_t>(a); });
}
inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
  const auto x = cast<Floats>(a), y = cast<Floats>(b), z = cast<Floats>(c);
  return make<__m512, Floats>([&](int i) { return std::fma(x.lane[i], y.lane[i], z.lane[i]); });
}
inline __m512d fmadd(__m512d a, __m512d b, __m512d c) {
  const auto x = cast<Doubles>(a), y = cast<Doubles>(b), z = cast<Doubles>(c);
  return make<__m512d, Doubles>([&](int i) { return std::fma(x.lane[i], y.lane[i], z.lane[i]); });
}
inline __m512 abs(__m512 a) {
  const auto x = cast<Floats>(a);
  return make<__m512, Floats>([&](int i) { return std::fabs(x.lane[i]); });
}
inline __m512d abs(__m512d a) {
  const auto x = cast<Doubles>(a);
  return make<__m512d, Doubles>([&](int i) { return std::fabs(x.lane[i]); });
}
inline __m512 sqrt(__m512 a) {
  const auto x = cast<Floats>(a);
  return make<__m512, Floats>([&](int i) { return std::sqrt(x.lane[i]); });
}
// Of integral exponents.
inline __m512 scale_by_exponent(__m512 a, __m512 exponent) {
  const auto x = cast<Floats>(a), n = cast<Floats>(exponent);
  return make<__m512, Floats>([&](int i) {
    const float held = std::fmax(-1000.0f, std::fmin(n.lane[i], 1000.0f));
    return std::isnan(n.lane[i]) ? n.lane[i] : std::ldexp(x.lane[i], static_cast<int>(held));
  });
}
inline __m512d sqrt(__m512d a) {
  const auto x = cast<Doubles>(a);
  return make<__m512d, Doubles>([&](int i) { return std::sqrt(x.lane[i]); });
}
inline __m256d half_of(__m512d a, int which) {
  const auto x = cast<Doubles>(a);
  __m256d half;
  std::memcpy(&half, x.lane + 4 * which, sizeof half);
  return half;
}
// The second operand where they are equal or one is a NaN.
template <class Register, class Array>
inline Register larger(Register a, Register b) {
  const auto x = cast<Array>(a), y = cast<Array>(b);
  return make<Register, Array>([&](int i) { return x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]; });
}
template <class Register, class Array>
inline Register smaller(Register a, Register b) {
  const auto x = cast<Array>(a), y = cast<Array>(b);
  return make<Register, Array>([&](int i) { return x.lane[i] < y.lane[i] ? x.lane[i] : y.lane[i]; });
}
inline __mmask16 compare(__m512 a, __m512 b, int kind) {
  const auto x = cast<Floats>(a), y = cast<Floats>(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool unordered = std::isnan(x.lane[i]) || std::isnan(y.lane[i]);
    const bool less = x.lane[i] < y.lane[i];
    const bool yes = kind == _CMP_UNORD_Q ? unordered : kind == _CMP_NLT_UQ ? !less : less;
    mask |= static_cast<unsigned>(yes) << i;
  }
  return static_cast<__mmask16>(mask);
}
// Of the classes of vfpclassps only the subnormal one is used.
inline __mmask16 subnormal(__m512 a, int) {
  const auto x = cast<Floats>(a);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    mask |= static_cast<unsigned>(std::fpclassify(x.lane[i]) == FP_SUBNORMAL) << i;
  }
  return static_cast<__mmask16>(mask);
}
inline __m512d widen(__m256 a) {
  const auto x = cast<Lanes<float, 8>>(a);
  return make<__m512d, Doubles>([&](int i) { return static_cast<double>(x.lane[i]); });
}
inline __m256 narrow(__m512d a) {
  const auto x = cast<Doubles>(a);
  return make<__m256, Lanes<float, 8>>([&](int i) { return static_cast<float>(x.lane[i]); });
}
inline __m256 half_of(__m512 a, int which) {
  return cast<Lanes<__m256, 2>>(a).lane[which];
}
inline __m512 with_half(__m512 a, __m256 b, int which) {
  auto halves = cast<Lanes<__m256, 2>>(a);
  halves.lane[which] = b;
  return cast<__m512>(halves);
}
template <class Register, class Element>
inline Register load(const Element* p) {
  Register a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
template <class Register>
inline void store(void* p, const Register& a) {
  std::memcpy(p, &a, sizeof a);
}
inline __m512 from_half(__m256i a) {
  const auto x = cast<Lanes<__m128i, 2>>(a);
  return with_half(with_half(set1(0.0f), _mm256_cvtph_ps(x.lane[0]), 0),
                   _mm256_cvtph_ps(x.lane[1]), 1);
}
inline __m256i to_half(__m512 a) {
  Lanes<__m128i, 2> result;
  for (int i = 0; i < 2; ++i) {
    result.lane[i] = _mm256_cvtps_ph(half_of(a, i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  return cast<__m256i>(result);
}
template <class F>
inline __m512i ints(__m512i a, __m512i b, F f) {
  const auto x = cast<Ints>(a), y = cast<Ints>(b);
  return make<__m512i, Ints>([&](int i) { return f(x.lane[i], y.lane[i]); });
}
// From the last lane to the first.
template <class... Values>
inline __m512i set_epi32(Values... values) {
  const std::uint32_t lanes[] = {static_cast<std::uint32_t>(values)...};
  static_assert(sizeof...(values) == 16);
  return make<__m512i, Ints>([&](int i) { return lanes[15 - i]; });
}
inline __m512i twice(__m256i a) { return cast<__m512i>(Lanes<__m256i, 2>{{a, a}}); }
inline __m512 permute(__m512i from, __m512 a) {
  const auto x = cast<Floats>(a);
  const auto at = cast<Ints>(from);
  return make<__m512, Floats>([&](int i) { return x.lane[at.lane[i] & 15u]; });
}
inline __m512i from_shorts(__m256i a) {
  const auto x = cast<Shorts>(a);
  return make<__m512i, Ints>([&](int i) { return std::uint32_t{x.lane[i]}; });
}
inline __m256i to_shorts(__m512i a) {
  const auto x = cast<Ints>(a);
  return make<__m256i, Shorts>([&](int i) { return static_cast<std::uint16_t>(x.lane[i]); });
}
inline __m512i select(__m512i a, __mmask16 mask, __m512i b) {
  const auto x = cast<Ints>(a), y = cast<Ints>(b);
  return make<__m512i, Ints>([&](int i) { return (mask >> i & 1) ? y.lane[i] : x.lane[i]; });
}
// As vcvtneps2bf16 rounds: to nearest even, subnormal inputs count as zero.
inline std::uint16_t bfloat16_bits(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  if (magnitude < 0x00800000u) return static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline __m256bh to_bfloat16(__m512 a) {
  const auto x = cast<Ints>(a);
  return make<__m256bh, Shorts>([&](int i) { return bfloat16_bits(x.lane[i]); });
}
// The second operand comes first.
inline __m512bh to_bfloat16(__m512 high, __m512 low) {
  const auto x = cast<Ints>(high), y = cast<Ints>(low);
  return make<__m512bh, Lanes<std::uint16_t, 32>>(
      [&](int i) { return bfloat16_bits(i < 16 ? y.lane[i] : x.lane[i - 16]); });
}
template <int kCount, class Register>
inline Register permute_shorts(Register from, Register a) {
  const auto x = cast<Lanes<std::uint16_t, kCount>>(a), at = cast<Lanes<std::uint16_t, kCount>>(from);
  return make<Register, Lanes<std::uint16_t, kCount>>(
      [&](int i) { return x.lane[at.lane[i] & (kCount - 1)]; });
}
// Within each quarter; zero where the index is negative.
inline __m512i shuffle_bytes(__m512i a, __m512i from) {
  using Bytes = Lanes<std::uint8_t, 64>;
  const auto x = cast<Bytes>(a), at = cast<Bytes>(from);
  return make<__m512i, Bytes>([&](int i) {
    const unsigned index = at.lane[i];
    return index & 0x80u ? std::uint8_t{0} : x.lane[(i & ~15) | static_cast<int>(index & 15u)];
  });
}
inline __m512 permute_two(__m512 a, __m512i from, __m512 b) {
  const auto x = cast<Floats>(a), y = cast<Floats>(b);
  const auto at = cast<Ints>(from);
  return make<__m512, Floats>([&](int i) {
    const unsigned index = at.lane[i];
    return (index & 16u ? y : x).lane[index & 15u];
  });
}
// Of the choices of vrangeps only the smaller magnitude without a sign is used; a NaN yields.
inline __m512 smaller_magnitude(__m512 a, __m512 b, int) {
  const auto x = cast<Floats>(a), y = cast<Floats>(b);
  return make<__m512, Floats>([&](int i) { return std::fmin(std::fabs(x.lane[i]), std::fabs(y.lane[i])); });
}

// Quarters of a and then of b, by two bits each.
inline __m512d shuffle_quarters(__m512d a, __m512d b, int from) {
  const Doubles first = cast<Doubles>(a), second = cast<Doubles>(b);
  return make<__m512d, Doubles>([&](int i) {
    const int quarter = from >> (i / 2 * 2) & 3;
    return (i < 4 ? first : second).lane[2 * quarter + i % 2];
  });
}
inline __m512 shuffle_quarters(__m512 a, __m512 b, int from) {
  const Floats first = cast<Floats>(a), second = cast<Floats>(b);
  return make<__m512, Floats>([&](int i) {
    const int quarter = from >> (i / 4 * 2) & 3;
    return (i < 8 ? first : second).lane[4 * quarter + i % 4];
  });
}
// Within each quarter two of a and then two of b, by two bits each.
inline __m512 shuffle_within_quarters(__m512 a, __m512 b, int from) {
  const Floats first = cast<Floats>(a), second = cast<Floats>(b);
  return make<__m512, Floats>([&](int i) {
    const int lane = from >> (i % 4 * 2) & 3;
    return (i % 4 < 2 ? first : second).lane[i / 4 * 4 + lane];
  });
}
// The lower or the upper of each pair of a, and beside it that of b.
inline __m512d unpack(__m512d a, __m512d b, int upper) {
  const Doubles first = cast<Doubles>(a), second = cast<Doubles>(b);
  return make<__m512d, Doubles>([&](int i) { return (i % 2 == 0 ? first : second).lane[i / 2 * 2 + upper]; });
}

}  // namespace emulated

#define _mm512_set1_ps(a) emulated::set1(static_cast<float>(a))
#define _mm512_set1_pd(a) emulated::set1(static_cast<double>(a))
#define _mm512_set1_epi32(a) emulated::set1_epi32(a)
#define _mm512_fmadd_ps(a, b, c) emulated::fmadd(a, b, c)
#define _mm512_fmadd_pd(a, b, c) emulated::fmadd(a, b, c)
#define _mm512_abs_ps(a) emulated::abs(a)
#define _mm512_abs_pd(a) emulated::abs(a)
#define _mm512_sqrt_ps(a) emulated::sqrt(a)
#define _mm512_sqrt_pd(a) emulated::sqrt(a)
#undef _mm512_scalef_ps
#define _mm512_scalef_ps(a, n) emulated::scale_by_exponent(a, n)
#undef _mm512_castpd512_pd256
#define _mm512_castpd512_pd256(a) emulated::half_of(a, 0)
#undef _mm512_shuffle_f64x2
#define _mm512_shuffle_f64x2(a, b, from) emulated::shuffle_quarters(a, b, from)
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, from) emulated::shuffle_quarters(a, b, from)
#undef _mm512_shuffle_ps
#define _mm512_shuffle_ps(a, b, from) emulated::shuffle_within_quarters(a, b, from)
#define _mm512_unpacklo_pd(a, b) emulated::unpack(a, b, 0)
#define _mm512_unpackhi_pd(a, b) emulated::unpack(a, b, 1)
#undef _mm512_extractf64x4_pd
#define _mm512_extractf64x4_pd(a, i) emulated::half_of(a, i)
#define _mm512_max_ps(a, b) emulated::larger<__m512, emulated::Floats>(a, b)
#define _mm512_min_ps(a, b) emulated::smaller<__m512, emulated::Floats>(a, b)
#define _mm512_max_pd(a, b) emulated::larger<__m512d, emulated::Doubles>(a, b)
#define _mm512_min_pd(a, b) emulated::smaller<__m512d, emulated::Doubles>(a, b)
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, kind) emulated::compare(a, b, kind)
#undef _mm512_mask_cmp_ps_mask
#define _mm512_mask_cmp_ps_mask(mask, a, b, kind) \
  static_cast<__mmask16>((mask) & emulated::compare(a, b, kind))
#undef _mm512_fpclass_ps_mask
#define _mm512_fpclass_ps_mask(a, kind) emulated::subnormal(a, kind)
#define _mm512_cvtps_pd(a) emulated::widen(a)
#define _mm512_cvtpd_ps(a) emulated::narrow(a)
#define _mm512_castps512_ps256(a) emulated::half_of(a, 0)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(a, i) emulated::half_of(a, i)
#define _mm512_castps256_ps512(a) emulated::with_half(emulated::set1(0.0f), a, 0)
#undef _mm512_insertf32x8
#define _mm512_insertf32x8(a, b, i) emulated::with_half(a, b, i)
#define _mm512_loadu_ps(p) emulated::load<__m512>(p)
#define _mm512_loadu_pd(p) emulated::load<__m512d>(p)
#define _mm512_storeu_ps(p, a) emulated::store(p, a)
#define _mm512_storeu_pd(p, a) emulated::store(p, a)
#define _mm512_stream_ps(p, a) emulated::store(p, a)
#define _mm512_stream_pd(p, a) emulated::store(p, a)
#define _mm512_stream_si512(p, a) emulated::store(p, a)
#define _mm512_loadu_si512(p) emulated::load<__m512i>(p)
#define _mm512_storeu_si512(p, a) emulated::store(p, a)
#define _mm512_add_ps(a, b) ((a) + (b))
#undef _mm512_range_ps
#define _mm512_range_ps(a, b, kind) emulated::smaller_magnitude(a, b, kind)
#define _mm512_cvtph_ps(a) emulated::from_half(a)
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, rounding) emulated::to_half(a)
#define _mm512_cvtepu16_epi32(a) emulated::from_shorts(a)
#define _mm512_cvtepi32_epi16(a) emulated::to_shorts(a)
#undef _mm512_slli_epi32
#define _mm512_set_epi32(...) emulated::set_epi32(__VA_ARGS__)
#define _mm512_broadcast_i64x4(a) emulated::twice(a)
#define _mm512_permutexvar_ps(from, a) emulated::permute(from, a)
#define _mm512_permutex2var_ps(a, from, b) emulated::permute_two(a, from, b)
#define _mm512_permutexvar_epi16(from, a) emulated::permute_shorts<32>(from, a)
#define _mm256_permutexvar_epi16(from, a) emulated::permute_shorts<16>(from, a)
#define _mm512_shuffle_epi8(a, from) emulated::shuffle_bytes(a, from)
#define _mm512_slli_epi32(a, n) emulated::ints(a, a, [](unsigned x, unsigned) { return x << n; })
#undef _mm512_srli_epi32
#define _mm512_srli_epi32(a, n) emulated::ints(a, a, [](unsigned x, unsigned) { return x >> n; })
#define _mm512_and_si512(a, b) \
  emulated::ints(a, b, [](unsigned x, unsigned y) { return x & y; })
#define _mm512_or_si512(a, b) emulated::ints(a, b, [](unsigned x, unsigned y) { return x | y; })
#define _mm512_add_epi32(a, b) emulated::ints(a, b, [](unsigned x, unsigned y) { return x + y; })
#define _mm512_castps_si512(a) emulated::cast<__m512i>(a)
#define _mm512_castsi512_ps(a) emulated::cast<__m512>(a)
#define _mm512_mask_mov_epi32(a, mask, b) emulated::select(a, mask, b)
#define _mm512_cvtneps_pbh(a) emulated::to_bfloat16(a)
#define _mm512_cvtne2ps_pbh(high, low) emulated::to_bfloat16(high, low)
