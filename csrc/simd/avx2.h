// AVX2 with FMA and F16C: sixteen floats are two registers, sixteen doubles are four.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "../half.h"
#include "force_inline.h"
#include "transpose8.h"

namespace groupnorm {
namespace {

using f32r = __m256;
using f64r = __m256d;
typedef std::uint32_t u32r __attribute__((vector_size(32)));
typedef std::uint64_t u64r __attribute__((vector_size(32)));

GROUPNORM_INLINE f32r broadcast(float value) { return _mm256_set1_ps(value); }
GROUPNORM_INLINE f64r broadcast(double value) { return _mm256_set1_pd(value); }
GROUPNORM_INLINE f32r fma_register(f32r a, f32r b, f32r c) { return _mm256_fmadd_ps(a, b, c); }
GROUPNORM_INLINE f64r fma_register(f64r a, f64r b, f64r c) { return _mm256_fmadd_pd(a, b, c); }
// The second operand where one is a NaN.
GROUPNORM_INLINE f32r max_register(f32r a, f32r b) { return _mm256_max_ps(a, b); }
GROUPNORM_INLINE f32r min_register(f32r a, f32r b) { return _mm256_min_ps(a, b); }
GROUPNORM_INLINE f64r max_register(f64r a, f64r b) { return _mm256_max_pd(a, b); }
GROUPNORM_INLINE f64r min_register(f64r a, f64r b) { return _mm256_min_pd(a, b); }
GROUPNORM_INLINE f32r abs_register(f32r a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
GROUPNORM_INLINE f64r abs_register(f64r a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
// a * 2^n, a normal number like a, of an integral n that was found as biased - kIntegerBias: the low bits of biased are
// added to a's exponent.
GROUPNORM_INLINE f32r times_exp2_register(f32r a, f32r, f32r biased) {
  return (f32r)((u32r)a + ((u32r)biased << 23));
}
// As in avx512.h.
template <class R>
GROUPNORM_INLINE R held_register(R a) {
  asm("" : "+x"(a));
  return a;
}
GROUPNORM_INLINE f32r sqrt_register(f32r a) { return _mm256_sqrt_ps(a); }
GROUPNORM_INLINE f64r sqrt_register(f64r a) { return _mm256_sqrt_pd(a); }
// i with i + 2, then i + 1.
GROUPNORM_INLINE double reduce_register(f64r a) {
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

}  // namespace
}  // namespace groupnorm

#include "lanes.h"

namespace groupnorm {
namespace {

// a < b in any lane; without kVaries, all lanes of b are alike. A NaN may hide the other register's
// lane, where b does not vary.
template <bool kVaries>
GROUPNORM_INLINE __m256 either_lt(const F32& a, const F32& b) {
  if constexpr (kVaries) {
    return _mm256_or_ps(_mm256_cmp_ps(a.v[0], b.v[0], _CMP_LT_OQ),
                        _mm256_cmp_ps(a.v[1], b.v[1], _CMP_LT_OQ));
  } else {
    return _mm256_cmp_ps(_mm256_min_ps(a.v[0], a.v[1]), b.v[0], _CMP_LT_OQ);
  }
}
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const F32& a, const F32& b) {
  return _mm256_movemask_ps(either_lt<kVaries>(a, b)) != 0;
}
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const F32& a, const F32& b, const F32& c, const F32& d) {
  return _mm256_movemask_ps(_mm256_or_ps(either_lt<kVaries>(a, b), either_lt<kVaries>(c, d))) != 0;
}

// a < b in every lane.
GROUPNORM_INLINE bool all_lt(const F32& a, const F32& b) {
  const __m256 first = _mm256_cmp_ps(a.v[0], b.v[0], _CMP_LT_OQ), second = _mm256_cmp_ps(a.v[1], b.v[1], _CMP_LT_OQ);
  return _mm256_movemask_ps(_mm256_and_ps(first, second)) == 0xff;
}

// Each lane has that of the lane whose number differs in one bit.
template <int kBit>
GROUPNORM_INLINE F32 swap_lanes(const F32& a) {
  if constexpr (kBit == 8) return {a.v[1], a.v[0]};
  return each<F32>([&](int i) GROUPNORM_INLINE_LAMBDA -> __m256 {
    if constexpr (kBit == 4) return _mm256_permute2f128_ps(a.v[i], a.v[i], 0x01);
    return _mm256_shuffle_ps(a.v[i], a.v[i], kBit == 1 ? 0xb1 : 0x4e);
  });
}
// Each of the first numbers in so many lanes; sixteen may be read.
template <int kTimes>
GROUPNORM_INLINE F32 spread(const float* p) {
  constexpr int k = kTimes;
  const __m256 numbers = _mm256_loadu_ps(p);
  const __m256i first = _mm256_setr_epi32(0, 1 / k, 2 / k, 3 / k, 4 / k, 5 / k, 6 / k, 7 / k);
  const __m256i second = _mm256_setr_epi32(8 / k, 9 / k, 10 / k, 11 / k, 12 / k, 13 / k, 14 / k, 15 / k);
  return {_mm256_permutevar8x32_ps(numbers, first), _mm256_permutevar8x32_ps(numbers, second)};
}
// The number of each of a vector's groups of kSize lanes, which are groups `part` * 16 / kSize and so on, in all lanes.
template <int kSize>
GROUPNORM_INLINE F32 spread_part(const F32& numbers, int part) {
  constexpr int k = kSize, kGroups = kLanes / k;
  const __m256 eight = numbers.v[part * kGroups / 8];
  const __m256i begin = _mm256_set1_epi32(part * kGroups % 8);
  const __m256i first = _mm256_setr_epi32(0, 1 / k, 2 / k, 3 / k, 4 / k, 5 / k, 6 / k, 7 / k);
  const __m256i second = _mm256_setr_epi32(8 / k, 9 / k, 10 / k, 11 / k, 12 / k, 13 / k, 14 / k, 15 / k);
  return {_mm256_permutevar8x32_ps(eight, _mm256_add_epi32(first, begin)),
          _mm256_permutevar8x32_ps(eight, _mm256_add_epi32(second, begin))};
}
// The first of each group of kSize lanes in all of them.
template <int kSize>
GROUPNORM_INLINE F32 first_of_groups(const F32& a) {
  const auto first = [](__m256 eight) GROUPNORM_INLINE_LAMBDA {
    return _mm256_broadcastss_ps(_mm256_castps256_ps128(eight));
  };
  if constexpr (kSize == 16) {
    const __m256 all = first(a.v[0]);
    return {all, all};
  } else {
    return each<F32>([&](int i) GROUPNORM_INLINE_LAMBDA -> __m256 {
      return kSize == 8 ? first(a.v[i]) : _mm256_shuffle_ps(a.v[i], a.v[i], 0x00);
    });
  }
}

// a * b + c rounded once.
GROUPNORM_INLINE F64 fused(const F64& a, const F64& b, const F64& c) { return fma(a, b, c); }

// The lanes' sum of each of eight, in the tree of reduce_add: see avx512.h.
GROUPNORM_INLINE void reduce_add_eight(const F64* a, double* sums) {
  const auto halves = [&](int i, int j) GROUPNORM_INLINE_LAMBDA {
    const __m256d first = (a[i].v[0] + a[i].v[2]) + (a[i].v[1] + a[i].v[3]);
    const __m256d second = (a[j].v[0] + a[j].v[2]) + (a[j].v[1] + a[j].v[3]);
    return _mm256_permute2f128_pd(first, second, 0x20) + _mm256_permute2f128_pd(first, second, 0x31);
  };
  for (int i = 0; i < 8; i += 4) {
    const __m256d even = halves(i, i + 2), odd = halves(i + 1, i + 3);
    _mm256_storeu_pd(sums + i, _mm256_unpacklo_pd(even, odd) + _mm256_unpackhi_pd(even, odd));
  }
}

// Of each of sixteen, the same way, in float.
GROUPNORM_INLINE F32 reduce_add_sixteen(const F32* a) {
  const auto halves = [&](int i, int j) GROUPNORM_INLINE_LAMBDA {
    const __m256 first = a[i].v[0] + a[i].v[1], second = a[j].v[0] + a[j].v[1];
    return _mm256_permute2f128_ps(first, second, 0x20) + _mm256_permute2f128_ps(first, second, 0x31);
  };
  const auto pairs = [&](int i) GROUPNORM_INLINE_LAMBDA {
    const __m256 first = halves(i, i + 4), second = halves(i + 1, i + 5);
    return _mm256_shuffle_ps(first, second, 0x44) + _mm256_shuffle_ps(first, second, 0xee);
  };
  return each<F32>([&](int eight) GROUPNORM_INLINE_LAMBDA -> __m256 {
    const __m256 first = pairs(8 * eight), second = pairs(8 * eight + 2);
    return _mm256_shuffle_ps(first, second, 0x88) + _mm256_shuffle_ps(first, second, 0xdd);
  });
}

// The sum of each of sixteen groups of kSize lanes, in as many vectors: see avx512.h.
template <int kSize>
GROUPNORM_INLINE F32 reduce_groups(const F32* a) {
  if constexpr (kSize == 16) {
    return reduce_add_sixteen(a);
  } else {
    // Two groups, of which four lanes each are left.
    const auto halves = [&](int i) GROUPNORM_INLINE_LAMBDA -> __m256 {
      if constexpr (kSize == 4) return a[i / 2 % kSize].v[i % 2];
      const F32& groups = a[i % kSize];
      return _mm256_permute2f128_ps(groups.v[0], groups.v[1], 0x20) +
             _mm256_permute2f128_ps(groups.v[0], groups.v[1], 0x31);
    };
    const auto pairs = [&](int i) GROUPNORM_INLINE_LAMBDA {
      const __m256 first = halves(i), second = halves(i + 1);
      return _mm256_shuffle_ps(first, second, 0x44) + _mm256_shuffle_ps(first, second, 0xee);
    };
    return each<F32>([&](int eight) GROUPNORM_INLINE_LAMBDA -> __m256 {
      const __m256 first = pairs(4 * eight), second = pairs(4 * eight + 2);
      const __m256 sums = _mm256_shuffle_ps(first, second, 0x88) + _mm256_shuffle_ps(first, second, 0xdd);
      return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    });
  }
}

GROUPNORM_INLINE F64 widen(const F32& a) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.v[0])),
           _mm256_cvtps_pd(_mm256_extractf128_ps(a.v[0], 1)),
           _mm256_cvtps_pd(_mm256_castps256_ps128(a.v[1])),
           _mm256_cvtps_pd(_mm256_extractf128_ps(a.v[1], 1))};
}
GROUPNORM_INLINE F32 narrow(const F64& a) {
  return {_mm256_set_m128(_mm256_cvtpd_ps(a.v[1]), _mm256_cvtpd_ps(a.v[0])),
           _mm256_set_m128(_mm256_cvtpd_ps(a.v[3]), _mm256_cvtpd_ps(a.v[2]))};
}

GROUPNORM_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
GROUPNORM_INLINE F64 load(const double* p) {
  return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4), _mm256_loadu_pd(p + 8),
           _mm256_loadu_pd(p + 12)};
}
GROUPNORM_INLINE __m128i load_eight(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
GROUPNORM_INLINE F32 load(const Float16* p) {
  return {_mm256_cvtph_ps(load_eight(p)), _mm256_cvtph_ps(load_eight(p + 8))};
}
GROUPNORM_INLINE __m256 float_of_bfloat16(__m128i eight) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
}
GROUPNORM_INLINE F32 load(const BFloat16* p) {
  return {float_of_bfloat16(load_eight(p)), float_of_bfloat16(load_eight(p + 8))};
}

GROUPNORM_INLINE void store(float* p, const F32& a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
GROUPNORM_INLINE void store(double* p, const F64& a) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_pd(p + 4 * i, a.v[i]);
}
GROUPNORM_INLINE void store(Float16* p, const F32& a) {
  for (int i = 0; i < 2; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i),
                     _mm256_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}
// To nearest even, in the upper half of each lane. A NaN stays one unless its low sixteen bits are near
// their end; those of a bfloat16 and of the CPU's own NaN are zero.
GROUPNORM_INLINE __m256i rounded_to_bfloat16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff));
  return _mm256_add_epi32(up, odd);
}
GROUPNORM_INLINE void store(BFloat16* p, const F32& a) {
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded_to_bfloat16(a.v[0]), 16),
                                             _mm256_srli_epi32(rounded_to_bfloat16(a.v[1]), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Split order (lanes.h): a shift and a mask, where the elements' own order takes two conversions that
// cross the register, each as slow as three other instructions.
GROUPNORM_INLINE F32 load_split(const BFloat16* p) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)))};
}
GROUPNORM_INLINE void store_split(BFloat16* p, const F32& a) {
  const __m256i even = _mm256_srli_epi32(rounded_to_bfloat16(a.v[0]), 16);
  const __m256i pairs = _mm256_blend_epi16(even, rounded_to_bfloat16(a.v[1]), 0xaa);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs);
}
GROUPNORM_INLINE F32 to_split(const F32& a) {
  const auto in_order = [](__m256 quarters) GROUPNORM_INLINE_LAMBDA {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(quarters), 0xd8));
  };
  return {in_order(_mm256_shuffle_ps(a.v[0], a.v[1], 0x88)),
          in_order(_mm256_shuffle_ps(a.v[0], a.v[1], 0xdd))};
}
GROUPNORM_INLINE F32 from_split(const F32& a) {
  const __m256 low = _mm256_unpacklo_ps(a.v[0], a.v[1]), high = _mm256_unpackhi_ps(a.v[0], a.v[1]);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

}  // namespace
}  // namespace groupnorm

#include "one_by_one.h"
