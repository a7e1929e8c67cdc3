// AVX-512 (F, BW, DQ, VL): sixteen floats are one register, sixteen doubles are two. With
// AVX512_BF16 the rounding to bfloat16 is one instruction, except for results below the normal
// range, which that instruction would flush to zero.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../half.h"
#include "force_inline.h"
#include "transpose8.h"

namespace groupnorm {
namespace {

using f32r = __m512;
using f64r = __m512d;
typedef std::uint32_t u32r __attribute__((vector_size(64)));
typedef std::uint64_t u64r __attribute__((vector_size(64)));

GROUPNORM_INLINE f32r broadcast(float value) { return _mm512_set1_ps(value); }
GROUPNORM_INLINE f64r broadcast(double value) { return _mm512_set1_pd(value); }
GROUPNORM_INLINE f32r fma_register(f32r a, f32r b, f32r c) { return _mm512_fmadd_ps(a, b, c); }
GROUPNORM_INLINE f64r fma_register(f64r a, f64r b, f64r c) { return _mm512_fmadd_pd(a, b, c); }
// The second operand where one is a NaN.
GROUPNORM_INLINE f32r max_register(f32r a, f32r b) { return _mm512_max_ps(a, b); }
GROUPNORM_INLINE f32r min_register(f32r a, f32r b) { return _mm512_min_ps(a, b); }
GROUPNORM_INLINE f64r max_register(f64r a, f64r b) { return _mm512_max_pd(a, b); }
GROUPNORM_INLINE f64r min_register(f64r a, f64r b) { return _mm512_min_pd(a, b); }
GROUPNORM_INLINE f32r abs_register(f32r a) { return _mm512_abs_ps(a); }
GROUPNORM_INLINE f64r abs_register(f64r a) { return _mm512_abs_pd(a); }
// a * 2^n, a normal number like a, of an integral n that was found as biased - kIntegerBias.
GROUPNORM_INLINE f32r times_exp2_register(f32r a, f32r n, f32r) { return _mm512_scalef_ps(a, n); }
// What was loaded, held in a register: the compiler would rather load it again for each use, which has to share two loads
// a cycle with all others. Emulated (tests/emulation), there is no such register.
template <class R>
GROUPNORM_INLINE R held_register(R a) {
#ifdef __AVX512F__
  asm("" : "+v"(a));
#endif
  return a;
}
GROUPNORM_INLINE f32r sqrt_register(f32r a) { return _mm512_sqrt_ps(a); }
GROUPNORM_INLINE f64r sqrt_register(f64r a) { return _mm512_sqrt_pd(a); }
// i with i + 4, then i + 2, i + 1.
GROUPNORM_INLINE double reduce_register(f64r a) {
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(a), _mm512_extractf64x4_pd(a, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

}  // namespace
}  // namespace groupnorm

#include "lanes.h"

namespace groupnorm {
namespace {

// a < b in any lane; without kVaries, all lanes of b are alike, which is of no use here.
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const F32& a, const F32& b) {
  return _mm512_cmp_ps_mask(a.v[0], b.v[0], _CMP_LT_OQ) != 0;
}
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const F32& a, const F32& b, const F32& c, const F32& d) {
  return (_mm512_cmp_ps_mask(a.v[0], b.v[0], _CMP_LT_OQ) |
          _mm512_cmp_ps_mask(c.v[0], d.v[0], _CMP_LT_OQ)) != 0;
}

// a < b in every lane.
GROUPNORM_INLINE bool all_lt(const F32& a, const F32& b) {
  return _mm512_cmp_ps_mask(a.v[0], b.v[0], _CMP_LT_OQ) == 0xffff;
}

// Each lane has that of the lane whose number differs in one bit.
template <int kBit>
GROUPNORM_INLINE F32 swap_lanes(const F32& a) {
  const __m512 r = a.v[0];
  if constexpr (kBit == 1) return {_mm512_shuffle_ps(r, r, 0xb1)};
  if constexpr (kBit == 2) return {_mm512_shuffle_ps(r, r, 0x4e)};
  if constexpr (kBit == 4) return {_mm512_shuffle_f32x4(r, r, 0xb1)};
  if constexpr (kBit == 8) return {_mm512_shuffle_f32x4(r, r, 0x4e)};
}
// Each of the first numbers in so many lanes; sixteen may be read.
template <int kTimes>
GROUPNORM_INLINE F32 spread(const float* p) {
  if constexpr (kTimes == 16) return {_mm512_set1_ps(*p)};
  constexpr int k = kTimes;
  const __m512i from = _mm512_set_epi32(15 / k, 14 / k, 13 / k, 12 / k, 11 / k, 10 / k, 9 / k, 8 / k, 7 / k, 6 / k,
                                        5 / k, 4 / k, 3 / k, 2 / k, 1 / k, 0);
  return {_mm512_permutexvar_ps(from, _mm512_loadu_ps(p))};
}
// The number of each of a vector's groups of kSize lanes, which are groups `part` * 16 / kSize and so on, in all lanes.
template <int kSize>
GROUPNORM_INLINE F32 spread_part(const F32& numbers, int part) {
  constexpr int k = kSize;
  const __m512i from = _mm512_set_epi32(15 / k, 14 / k, 13 / k, 12 / k, 11 / k, 10 / k, 9 / k, 8 / k, 7 / k, 6 / k,
                                        5 / k, 4 / k, 3 / k, 2 / k, 1 / k, 0);
  return {_mm512_permutexvar_ps(_mm512_add_epi32(from, _mm512_set1_epi32(part * (kLanes / k))), numbers.v[0])};
}
// The first of each group of kSize lanes in all of them.
template <int kSize>
GROUPNORM_INLINE F32 first_of_groups(const F32& a) {
  constexpr int k = ~(kSize - 1);
  const __m512i from = _mm512_set_epi32(15 & k, 14 & k, 13 & k, 12 & k, 11 & k, 10 & k, 9 & k, 8 & k, 7 & k, 6 & k,
                                        5 & k, 4 & k, 3 & k, 2 & k, 1 & k, 0);
  return {_mm512_permutexvar_ps(from, a.v[0])};
}

// a * b + c rounded once.
GROUPNORM_INLINE F64 fused(const F64& a, const F64& b, const F64& c) { return fma(a, b, c); }

// The smaller of two magnitudes.
GROUPNORM_INLINE __m512 smaller_magnitude(__m512 a, __m512 b) {
  constexpr int kSmallerMagnitude = 0x0a;
  return _mm512_range_ps(a, b, kSmallerMagnitude);
}

// |a| below its limit in any lane; without kVaries, all limits are alike.
template <bool kVaries>
GROUPNORM_INLINE bool any_magnitude_lt(const Two<F32>& a, const Two<F32>& limit) {
  if constexpr (kVaries) {
    return any_lt<true>(abs(a.first), limit.first, abs(a.second), limit.second);
  } else {
    const __m512 least = smaller_magnitude(a.first.v[0], a.second.v[0]);
    return _mm512_cmp_ps_mask(least, limit.first.v[0], _CMP_LT_OQ) != 0;
  }
}

// a below its limit, the same.
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const Two<F32>& a, const Two<F32>& limit) {
  if constexpr (kVaries) {
    return any_lt<true>(a.first, limit.first, a.second, limit.second);
  } else {
    return any_lt<false>(at_most(a.first, a.second), limit.first);
  }
}

// Whether neither of these two holds: one question after the other narrows a mask, which is tested once.
template <bool kVaries>
GROUPNORM_INLINE bool none_below(const Two<F32>& a, const Two<F32>& magnitude, const Two<F32>& b,
                                 const Two<F32>& limit) {
  if constexpr (kVaries) {
    return !any_magnitude_lt<true>(a, magnitude) && !any_lt<true>(b, limit);
  } else {
    const __m512 smallest = smaller_magnitude(a.first.v[0], a.second.v[0]);
    const __m512 least = at_most(b.first, b.second).v[0];
    const __mmask16 clear = _mm512_cmp_ps_mask(smallest, magnitude.first.v[0], _CMP_NLT_UQ);
    return _mm512_mask_cmp_ps_mask(clear, least, limit.first.v[0], _CMP_NLT_UQ) == 0xffff;
  }
}

// The lanes' sum of each of eight, in the tree of reduce_add: a half of one and the same half of another share a
// register, and then quarters, and single lanes, so that additions are not done to lanes that nobody needs.
GROUPNORM_INLINE void reduce_add_eight(const F64* a, double* sums) {
  const auto halves = [&](int i, int j) GROUPNORM_INLINE_LAMBDA {
    const __m512d first = a[i].v[0] + a[i].v[1], second = a[j].v[0] + a[j].v[1];
    return _mm512_shuffle_f64x2(first, second, 0x44) + _mm512_shuffle_f64x2(first, second, 0xee);
  };
  const auto quarters = [&](int i) GROUPNORM_INLINE_LAMBDA {
    const __m512d first = halves(i, i + 2), second = halves(i + 4, i + 6);
    return _mm512_shuffle_f64x2(first, second, 0x88) + _mm512_shuffle_f64x2(first, second, 0xdd);
  };
  const __m512d even = quarters(0), odd = quarters(1);
  _mm512_storeu_pd(sums, _mm512_unpacklo_pd(even, odd) + _mm512_unpackhi_pd(even, odd));
}

// Of each of sixteen, the same way, in float.
GROUPNORM_INLINE F32 reduce_add_sixteen(const F32* a) {
  const auto halves = [&](int i, int j) GROUPNORM_INLINE_LAMBDA {
    const __m512 first = a[i].v[0], second = a[j].v[0];
    return _mm512_shuffle_f32x4(first, second, 0x44) + _mm512_shuffle_f32x4(first, second, 0xee);
  };
  const auto quarters = [&](int i) GROUPNORM_INLINE_LAMBDA {
    const __m512 first = halves(i, i + 4), second = halves(i + 8, i + 12);
    return _mm512_shuffle_f32x4(first, second, 0x88) + _mm512_shuffle_f32x4(first, second, 0xdd);
  };
  const auto pairs = [&](int i) GROUPNORM_INLINE_LAMBDA {
    const __m512 first = quarters(i), second = quarters(i + 1);
    return _mm512_shuffle_ps(first, second, 0x44) + _mm512_shuffle_ps(first, second, 0xee);
  };
  const __m512 first = pairs(0), second = pairs(2);
  return {_mm512_shuffle_ps(first, second, 0x88) + _mm512_shuffle_ps(first, second, 0xdd)};
}

// The sum of each of sixteen groups of kSize lanes, in as many vectors: i with i + kSize / 2, then i + kSize / 4 and so on.
template <int kSize>
GROUPNORM_INLINE F32 reduce_groups(const F32* a) {
  if constexpr (kSize == 16) {
    return reduce_add_sixteen(a);
  } else {
    // Four groups, of which four lanes each are left.
    const auto quarters = [&](int i) GROUPNORM_INLINE_LAMBDA -> __m512 {
      if constexpr (kSize == 4) return a[i].v[0];
      const __m512 first = a[(2 * i) % kSize].v[0], second = a[(2 * i + 1) % kSize].v[0];
      return _mm512_shuffle_f32x4(first, second, 0x88) + _mm512_shuffle_f32x4(first, second, 0xdd);
    };
    const auto pairs = [&](int i) GROUPNORM_INLINE_LAMBDA {
      const __m512 first = quarters(i), second = quarters(i + 1);
      return _mm512_shuffle_ps(first, second, 0x44) + _mm512_shuffle_ps(first, second, 0xee);
    };
    const __m512 first = pairs(0), second = pairs(2);
    const __m512 sums = _mm512_shuffle_ps(first, second, 0x88) + _mm512_shuffle_ps(first, second, 0xdd);
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return {_mm512_permutexvar_ps(in_order, sums)};
  }
}

GROUPNORM_INLINE F64 widen(const F32& a) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(a.v[0])),
           _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v[0], 1))};
}
GROUPNORM_INLINE F32 narrow(const F64& a) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a.v[0])),
                              _mm512_cvtpd_ps(a.v[1]), 1)};
}

GROUPNORM_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
GROUPNORM_INLINE F64 load(const double* p) { return {_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)}; }
GROUPNORM_INLINE __m256i load_sixteen(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
GROUPNORM_INLINE F32 load(const Float16* p) { return {_mm512_cvtph_ps(load_sixteen(p))}; }
// Without a detour over sixteen floats in one register, which would have to be cut in two.
GROUPNORM_INLINE F64 load_wide(const Float16* p) {
  const auto eight = [](const Float16* q) GROUPNORM_INLINE_LAMBDA {
    return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))));
  };
  return {eight(p), eight(p + 8)};
}
GROUPNORM_INLINE F32 load(const BFloat16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_sixteen(p)), 16))};
}

GROUPNORM_INLINE void store(float* p, const F32& a) { _mm512_storeu_ps(p, a.v[0]); }
GROUPNORM_INLINE void store(double* p, const F64& a) {
  _mm512_storeu_pd(p, a.v[0]);
  _mm512_storeu_pd(p + 8, a.v[1]);
}
GROUPNORM_INLINE void store_sixteen(void* p, __m256i a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a);
}
GROUPNORM_INLINE void store(Float16* p, const F32& a) {
  store_sixteen(p, _mm512_cvtps_ph(a.v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// To nearest even, in the upper half of each lane. A NaN stays one unless its low sixteen bits are near
// their end; those of a bfloat16 and of the CPU's own NaN are zero.
GROUPNORM_INLINE __m512i rounded_to_bfloat16(__m512 a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}
#ifdef __AVX512BF16__
GROUPNORM_INLINE __mmask16 subnormal(__m512 a) { return _mm512_fpclass_ps_mask(a, 0x20); }
#endif
GROUPNORM_INLINE __m256i bfloat16_of_float(__m512 a) {
#ifdef __AVX512BF16__
  if (__builtin_expect(subnormal(a) == 0, 1)) {
    const __m256bh rounded = _mm512_cvtneps_pbh(a);
    __m256i bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
  }
#endif
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bfloat16(a), 16));
}
GROUPNORM_INLINE void store(BFloat16* p, const F32& a) {
  store_sixteen(p, bfloat16_of_float(a.v[0]));
}

// Split order (lanes.h). Sixteen numbers, twice in the register, are moved within its quarters into the
// upper halves of their lanes.
GROUPNORM_INLINE F32 load_split(const BFloat16* p) {
  constexpr int kZeros = 0x8080;
  const auto upper = [](int element) { return kZeros | (2 * element) << 16 | (2 * element + 1) << 24; };
  const __m512i from = _mm512_set_epi32(
      upper(7), upper(5), upper(3), upper(1), upper(7), upper(5), upper(3), upper(1),
      upper(6), upper(4), upper(2), upper(0), upper(6), upper(4), upper(2), upper(0));
  return {_mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_broadcast_i64x4(load_sixteen(p)), from))};
}
// As load_wide.
GROUPNORM_INLINE F64 load_split_wide(const BFloat16* p) {
  const __m256i pairs = load_sixteen(p);
  const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000));
  return {_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))),
          _mm512_cvtps_pd(_mm256_castsi256_ps(odd))};
}
GROUPNORM_INLINE void store_split(BFloat16* p, const F32& a) {
  const __m256i from = _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
  store_sixteen(p, _mm256_permutexvar_epi16(from, bfloat16_of_float(a.v[0])));
}
GROUPNORM_INLINE F32 to_split(const F32& a) {
  const __m512i from = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
  return {_mm512_permutexvar_ps(from, a.v[0])};
}
GROUPNORM_INLINE F32 from_split(const F32& a) {
  const __m512i from = _mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
  return {_mm512_permutexvar_ps(from, a.v[0])};
}

// One register a vector leaves registers for two vectors, and sums that do not wait for each other. Of
// thirty-two bfloat16, those of even place are the first vector and those of odd place the second.
constexpr bool kTwoVectors = true;

GROUPNORM_INLINE Two<F32> load_split_two(const BFloat16* p) {
  const __m512i pairs = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))}};
}
// Two vectors as thirty-two bfloat16: of any numbers by integers, of numbers of which none is below the normal
// range, but perhaps 0, by the CPU's own rounding if it has one, and of any the faster way that is right.
GROUPNORM_INLINE __m512i rounded_split_two(const Two<F32>& a) {
  const __m512i low = _mm512_srli_epi32(rounded_to_bfloat16(a.first.v[0]), 16);
  const __m512i high = _mm512_and_si512(rounded_to_bfloat16(a.second.v[0]), _mm512_set1_epi32(-0x10000));
  return _mm512_or_si512(low, high);
}
#ifdef __AVX512BF16__
GROUPNORM_INLINE __m512i normal_split_two(const Two<F32>& a) {
  const __m512i from = _mm512_set_epi32(
      0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a, 0x190009, 0x180008,
      0x170007, 0x160006, 0x150005, 0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
  const __m512bh rounded = _mm512_cvtne2ps_pbh(a.second.v[0], a.first.v[0]);
  __m512i bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return _mm512_permutexvar_epi16(from, bits);
}
GROUPNORM_INLINE __m512i any_split_two(const Two<F32>& a) {
  const bool normal = (subnormal(a.first.v[0]) | subnormal(a.second.v[0])) == 0;
  return __builtin_expect(normal, 1) ? normal_split_two(a) : rounded_split_two(a);
}
#else
GROUPNORM_INLINE __m512i normal_split_two(const Two<F32>& a) { return rounded_split_two(a); }
GROUPNORM_INLINE __m512i any_split_two(const Two<F32>& a) { return rounded_split_two(a); }
#endif
GROUPNORM_INLINE void store_split_two(BFloat16* p, const Two<F32>& a) {
  _mm512_storeu_si512(p, any_split_two(a));
}
GROUPNORM_INLINE void store_normal_split_two(BFloat16* p, const Two<F32>& a) {
  _mm512_storeu_si512(p, normal_split_two(a));
}

constexpr bool kStreams = true;
// Around the caches, to addresses that are whole lines or halves of them; another thread sees it after
// finish_streams.
GROUPNORM_INLINE void stream(float* p, const F32& a) { _mm512_stream_ps(p, a.v[0]); }
GROUPNORM_INLINE void stream(double* p, const F64& a) {
  _mm512_stream_pd(p, a.v[0]);
  _mm512_stream_pd(p + 8, a.v[1]);
}
GROUPNORM_INLINE void stream_sixteen(void* p, __m256i a) {
  _mm256_stream_si256(static_cast<__m256i*>(p), a);
}
GROUPNORM_INLINE void stream(Float16* p, const F32& a) {
  stream_sixteen(p, _mm512_cvtps_ph(a.v[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
GROUPNORM_INLINE void stream_split_two(BFloat16* p, const Two<F32>& a) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), any_split_two(a));
}
GROUPNORM_INLINE void stream_normal_split_two(BFloat16* p, const Two<F32>& a) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), normal_split_two(a));
}
GROUPNORM_INLINE void finish_streams() { _mm_sfence(); }

GROUPNORM_INLINE Two<F32> to_split_two(const Two<F32>& a) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return {{_mm512_permutex2var_ps(a.first.v[0], even, a.second.v[0])},
          {_mm512_permutex2var_ps(a.first.v[0], odd, a.second.v[0])}};
}
GROUPNORM_INLINE Two<F32> from_split_two(const Two<F32>& a) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  return {{_mm512_permutex2var_ps(a.first.v[0], low, a.second.v[0])},
          {_mm512_permutex2var_ps(a.first.v[0], high, a.second.v[0])}};
}
// The sum of the vectors, in split order.
GROUPNORM_INLINE F32 add_split_two(const Two<F32>& a) {
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 19, 18, 17, 16, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i high = _mm512_set_epi32(31, 30, 29, 28, 27, 26, 25, 24, 15, 14, 13, 12, 11, 10, 9, 8);
  return {_mm512_add_ps(_mm512_permutex2var_ps(a.first.v[0], low, a.second.v[0]),
                        _mm512_permutex2var_ps(a.first.v[0], high, a.second.v[0]))};
}

}  // namespace
}  // namespace groupnorm
