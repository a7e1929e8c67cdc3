// Sums of a channel that are not finite: loops over channels, written so that
// a compiler turns them into vectors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace groupnorm {

// 1 for NaN and infinities, without a branch.
inline unsigned not_finite(double value) {
  constexpr std::uint64_t exponent = std::uint64_t{0x7ff} << 52;
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & exponent) == exponent ? 1u : 0u;
}

// 0, or NaN where a number is not finite. In four lanes, because one sum would wait for its last
// addition.
inline double zero_if_finite(const double* values, std::int64_t count) {
  double lanes[4] = {};
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int lane = 0; lane < 4; ++lane) lanes[lane] += 0.0 * values[i + lane];
  }
  for (; i < count; ++i) lanes[0] += 0.0 * values[i];
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

// Whether all magnitudes are between these two, or 0 if that is allowed; no NaN is.
inline bool all_within(const double* values, std::int64_t count, double least, double most,
                       bool zero_allowed) {
  double outside[4] = {};
  const auto look_at = [&](std::int64_t i, int lane) {
    const double magnitude = std::fabs(values[i]);
    const bool inside =
        ((magnitude > least) & (magnitude < most)) | (zero_allowed & (magnitude == 0.0));
    outside[lane] += inside ? 0.0 : 1.0;
  };
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int lane = 0; lane < 4; ++lane) look_at(i + lane, lane);
  }
  for (; i < count; ++i) look_at(i, 0);
  return (outside[0] + outside[1]) + (outside[2] + outside[3]) == 0.0;
}

}  // namespace groupnorm
