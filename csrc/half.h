// Scalar float16 and bfloat16: exact in, rounded once to nearest even out, NaN stays NaN.
// Internal linkage on purpose: these are compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace groupnorm {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

static inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float to_float(BFloat16 value) {
  return float_of(static_cast<std::uint32_t>(value.bits) << 16);
}

static inline BFloat16 to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  if (value != value) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

static inline float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // A float16 is an integer count of 2^-24 below 2^-14; above, only the exponent's bias differs.
  const float result = magnitude < 0x400u
                           ? static_cast<float>(magnitude) * 0x1p-24f
                           : float_of((magnitude << 13) + ((127u - 15u) << 23));
  return float_of(bits_of(result) | sign);
}

static inline Float16 to_float16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 65536 and up
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the count of 2^-24, rounded to even, in the low bits.
    result = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    // A carry out of the fraction moves to the next exponent, and past 65504 to infinity.
    result = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | result)};
}

}  // namespace groupnorm
