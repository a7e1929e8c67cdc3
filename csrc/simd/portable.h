// Any CPU, through the vector types of GCC and Clang: SSE2 on x86-64, NEON on aarch64.
// No machine header. Without a fused multiply-add in the baseline, fma rounds twice.
#pragma once

#include <cstdint>

#include "../half.h"
#include "force_inline.h"

namespace groupnorm {
namespace {

typedef float f32r __attribute__((vector_size(16)));
typedef double f64r __attribute__((vector_size(16)));
typedef std::uint32_t u32r __attribute__((vector_size(16)));
typedef std::uint64_t u64r __attribute__((vector_size(16)));

GROUPNORM_INLINE f32r broadcast(float value) { return f32r{value, value, value, value}; }
GROUPNORM_INLINE f64r broadcast(double value) { return f64r{value, value}; }

#ifdef __FP_FAST_FMAF
GROUPNORM_INLINE f32r fma_register(f32r a, f32r b, f32r c) {
  for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
GROUPNORM_INLINE f64r fma_register(f64r a, f64r b, f64r c) {
  for (int i = 0; i < 2; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
}
#else
GROUPNORM_INLINE f32r fma_register(f32r a, f32r b, f32r c) { return a * b + c; }
GROUPNORM_INLINE f64r fma_register(f64r a, f64r b, f64r c) { return a * b + c; }
#endif

// The second operand where one is a NaN.
template <class R>
GROUPNORM_INLINE R max_register(R a, R b) { return a > b ? a : b; }
template <class R>
GROUPNORM_INLINE R min_register(R a, R b) { return a < b ? a : b; }
GROUPNORM_INLINE f32r abs_register(f32r a) {
  const u32r magnitude = {0x7fffffffu, 0x7fffffffu, 0x7fffffffu, 0x7fffffffu};
  return (f32r)((u32r)a & magnitude);
}
GROUPNORM_INLINE f64r abs_register(f64r a) {
  const u64r magnitude = {~0ull >> 1, ~0ull >> 1};
  return (f64r)((u64r)a & magnitude);
}
// a * 2^n, a normal number like a, of an integral n that was found as biased - kIntegerBias: the low bits of biased are
// added to a's exponent.
GROUPNORM_INLINE f32r times_exp2_register(f32r a, f32r, f32r biased) {
  return (f32r)((u32r)a + ((u32r)biased << 23));
}
template <class R>
GROUPNORM_INLINE R held_register(R a) {
  return a;
}
GROUPNORM_INLINE f32r sqrt_register(f32r a) {
  return f32r{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])};
}
GROUPNORM_INLINE f64r sqrt_register(f64r a) {
  return f64r{__builtin_sqrt(a[0]), __builtin_sqrt(a[1])};
}
GROUPNORM_INLINE double reduce_register(f64r a) { return a[0] + a[1]; }

}  // namespace
}  // namespace groupnorm

#include "lanes.h"

namespace groupnorm {
namespace {

// a < b in any lane; without kVaries, all lanes of b are alike, which is of no use here.
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const F32& a, const F32& b) {
  u32r any = {};
  for (int i = 0; i < F32::kRegisters; ++i) any |= (u32r)(a.v[i] < b.v[i]);
  return (any[0] | any[1] | any[2] | any[3]) != 0;
}
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const F32& a, const F32& b, const F32& c, const F32& d) {
  return any_lt<kVaries>(a, b) | any_lt<kVaries>(c, d);
}

// a < b in every lane.
GROUPNORM_INLINE bool all_lt(const F32& a, const F32& b) {
  u32r all = (u32r)(a.v[0] < b.v[0]);
  for (int i = 1; i < F32::kRegisters; ++i) all &= (u32r)(a.v[i] < b.v[i]);
  return (all[0] & all[1] & all[2] & all[3]) != 0;
}

// Each lane has that of the lane whose number differs in one bit.
template <int kBit>
GROUPNORM_INLINE F32 swap_lanes(const F32& a) {
  float lanes[kLanes], swapped[kLanes];
  to_array(a, lanes);
  for (int i = 0; i < kLanes; ++i) swapped[i] = lanes[i ^ kBit];
  return from_array<F32>(swapped);
}
// Each of the first numbers in so many lanes; sixteen may be read.
template <int kTimes>
GROUPNORM_INLINE F32 spread(const float* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = p[i / kTimes];
  return from_array<F32>(lanes);
}
// The number of each of a vector's groups of kSize lanes, which are groups `part` * 16 / kSize and so on, in all lanes.
template <int kSize>
GROUPNORM_INLINE F32 spread_part(const F32& numbers, int part) {
  float lanes[kLanes], parts[kLanes];
  to_array(numbers, lanes);
  for (int i = 0; i < kLanes; ++i) parts[i] = lanes[part * (kLanes / kSize) + i / kSize];
  return from_array<F32>(parts);
}
// The first of each group of kSize lanes in all of them.
template <int kSize>
GROUPNORM_INLINE F32 first_of_groups(const F32& a) {
  float lanes[kLanes], firsts[kLanes];
  to_array(a, lanes);
  for (int i = 0; i < kLanes; ++i) firsts[i] = lanes[i / kSize * kSize];
  return from_array<F32>(firsts);
}

// a * b + c rounded once, whatever it costs.
GROUPNORM_INLINE F64 fused(const F64& a, const F64& b, const F64& c) {
  return each<F64>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const f64r x = a.v[i], y = b.v[i], z = c.v[i];
    return f64r{__builtin_fma(x[0], y[0], z[0]), __builtin_fma(x[1], y[1], z[1])};
  });
}

// The lanes' sum of each of eight.
GROUPNORM_INLINE void reduce_add_eight(const F64* a, double* sums) {
  for (int i = 0; i < 8; ++i) sums[i] = reduce_add(a[i]);
}

// Of each of sixteen, in float.
GROUPNORM_INLINE F32 reduce_add_sixteen(const F32* a) {
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    float lanes[kLanes];
    to_array(a[i], lanes);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    sums[i] = lanes[0];
  }
  return from_array<F32>(sums);
}

// The sum of each of sixteen groups of kSize lanes, in as many vectors: see avx512.h.
template <int kSize>
GROUPNORM_INLINE F32 reduce_groups(const F32* a) {
  float sums[kLanes];
  for (int i = 0; i < kSize; ++i) {
    float lanes[kLanes];
    to_array(a[i], lanes);
    for (int group = 0; group < kLanes / kSize; ++group) {
      float* const first = lanes + group * kSize;
      for (int half = kSize / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) first[lane] += first[lane + half];
      }
      sums[i * (kLanes / kSize) + group] = first[0];
    }
  }
  return from_array<F32>(sums);
}

GROUPNORM_INLINE F64 widen(const F32& a) {
  return each<F64>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const f32r half = a.v[i / 2];
    const int at = 2 * (i % 2);
    return f64r{half[at], half[at + 1]};
  });
}
GROUPNORM_INLINE F32 narrow(const F64& a) {
  return each<F32>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const f64r low = a.v[2 * i], high = a.v[2 * i + 1];
    return f32r{static_cast<float>(low[0]), static_cast<float>(low[1]),
                static_cast<float>(high[0]), static_cast<float>(high[1])};
  });
}

GROUPNORM_INLINE F32 load(const float* p) { return from_array<F32>(p); }
GROUPNORM_INLINE F64 load(const double* p) { return from_array<F64>(p); }
template <class Half>
GROUPNORM_INLINE F32 load_half(const Half* p) {
  Half halves[kLanes];
  float lanes[kLanes];
  std::memcpy(halves, p, sizeof halves);
  for (int i = 0; i < kLanes; ++i) lanes[i] = to_float(halves[i]);
  return from_array<F32>(lanes);
}
GROUPNORM_INLINE F32 load(const Float16* p) { return load_half(p); }
GROUPNORM_INLINE F32 load(const BFloat16* p) { return load_half(p); }

GROUPNORM_INLINE void store(float* p, const F32& a) { to_array(a, p); }
GROUPNORM_INLINE void store(double* p, const F64& a) { to_array(a, p); }
GROUPNORM_INLINE void store(Float16* p, const F32& a) {
  float lanes[kLanes];
  Float16 halves[kLanes];
  to_array(a, lanes);
  for (int i = 0; i < kLanes; ++i) halves[i] = to_float16(lanes[i]);
  std::memcpy(p, halves, sizeof halves);
}
GROUPNORM_INLINE void store(BFloat16* p, const F32& a) {
  float lanes[kLanes];
  BFloat16 halves[kLanes];
  to_array(a, lanes);
  for (int i = 0; i < kLanes; ++i) halves[i] = to_bfloat16(lanes[i]);
  std::memcpy(p, halves, sizeof halves);
}

// Split order (lanes.h).
GROUPNORM_INLINE F32 to_split(const F32& a) {
  float lanes[kLanes], split[kLanes];
  to_array(a, lanes);
  for (int i = 0; i < kLanes; ++i) split[i] = lanes[split_element(i)];
  return from_array<F32>(split);
}
GROUPNORM_INLINE F32 from_split(const F32& a) {
  float lanes[kLanes], split[kLanes];
  to_array(a, split);
  for (int i = 0; i < kLanes; ++i) lanes[split_element(i)] = split[i];
  return from_array<F32>(lanes);
}
GROUPNORM_INLINE F32 load_split(const BFloat16* p) { return to_split(load(p)); }
GROUPNORM_INLINE void store_split(BFloat16* p, const F32& a) { store(p, from_split(a)); }

// Sixteen rows of sixteen floats into columns.
GROUPNORM_INLINE void transpose(const float* from, std::int64_t from_stride, float* to,
                                std::int64_t to_stride) {
  for (int row = 0; row < kLanes; ++row) {
    for (int column = 0; column < kLanes; ++column) {
      to[column * to_stride + row] = from[row * from_stride + column];
    }
  }
}
// Four rows of four.
GROUPNORM_INLINE void transpose_four_doubles(const double* from, std::int64_t from_stride, double* to,
                                             std::int64_t to_stride) {
  for (int row = 0; row < 4; ++row) {
    for (int column = 0; column < 4; ++column) to[column * to_stride + row] = from[row * from_stride + column];
  }
}

}  // namespace
}  // namespace groupnorm

#include "one_by_one.h"
