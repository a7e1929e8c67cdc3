// From the numbers of groups to those of their channels, sixteen at a time: of rows of fewer than a hundred elements, loops
// over ten channels at a time took as long as a third of the elements.
//
// Guarantees: numbers are computed in double and rounded once; a NaN is the plain one, because its payload, rounded to
// bfloat16, could carry over into the sign. What is written past a group's end is written again by the next group, or is
// the padding that the arrays have after their last channel.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "channels-inl.h"
#include "kernels.h"
#include "vectors-inl.h"

namespace groupnorm {
namespace {

template <class Real>
GROUPNORM_INLINE void put(const Real* array, std::int64_t at, const F64& values) {
  const Vec<Real> nan = set1<Vec<Real>>(std::numeric_limits<Real>::quiet_NaN());
  store(const_cast<Real*>(array) + at, number_or(narrow_to(values, Real()), nan));
}

// What one Real cannot hold of a group's mean.
template <class Real>
GROUPNORM_INLINE double mean_low(const GroupNumbers& group) {
  return (group.mean - static_cast<double>(static_cast<Real>(group.mean))) + group.mean_low;
}

template <class Real>
void channel_numbers(const NumbersPlane& plane) {
  constexpr bool kSingle = std::is_same_v<Real, float>;
  const Coefficients<Real> out = coefficients<Real>(plane.table);
  for (std::int64_t k = 0; k < plane.count; ++k) {
    const GroupNumbers& group = plane.groups[k];
    // In float, what one number cannot hold of the mean goes into the offsets: it is so small beside
    // the mean's own rounding that no difference of large numbers is formed.
    const double low = kSingle ? mean_low<Real>(group) : 0.0;
    const F64 rstd = set1<F64>(group.rstd), lows = set1<F64>(low), mean = set1<F64>(group.mean);
    for (std::int64_t c = group.begin; c < group.end; c += kLanes) {
      put(out.center, c, mean);
      if constexpr (!kSingle) put(out.center_low, c, set1<F64>(group.mean_low));
      const F64 multiplier = load(plane.gains + c) * rstd;
      put(out.multiplier, c, multiplier);
      put(out.offset, c, load(plane.offsets + c) - lows * multiplier);
      if (out.rstd != nullptr) put(out.rstd, c, rstd);
      if (kSingle && plane.xhat_low != nullptr) store(plane.xhat_low + c, lows * rstd);
    }
  }
}

template <class Real>
void gradient_numbers(const NumbersPlane& plane) {
  const Coefficients<Real> out = coefficients<Real>(plane.table);
  for (std::int64_t k = 0; k < plane.count; ++k) {
    const GroupNumbers& group = plane.groups[k];
    const double low = std::is_same_v<Real, float> ? mean_low<Real>(group) : 0.0;
    const F64 offset = set1<F64>(group.grad_offset + low * group.grad_slope), slope = set1<F64>(group.grad_slope);
    for (std::int64_t c = group.begin; c < group.end; c += kLanes) {
      put(out.grad_offset, c, offset);
      put(out.grad_slope, c, slope);
    }
  }
}

// b -= a * xhat_low. Then 0, or NaN where an a or a b is not finite.
inline double put_back_xhat_low(double* b, const double* a, const double* xhat_low, std::int64_t count) {
  if (count < kLanes) {
    double broken = 0.0;
    for (std::int64_t c = 0; c < count; ++c) {
      b[c] -= a[c] * xhat_low[c];
      broken += 0.0 * a[c] + 0.0 * b[c];
    }
    return broken;
  }
  const F64 zero = set1<F64>(0.0);
  F64 broken = zero;
  const auto corrected = [&](std::int64_t c) GROUPNORM_INLINE_LAMBDA {
    const F64 a_here = load(a + c), result = load(b + c) - a_here * load(xhat_low + c);
    broken = fma(zero, a_here, fma(zero, result, broken));
    return result;
  };
  // Its first lanes may be among those of the loop, which must not have been there when they are read.
  const F64 last = corrected(count - kLanes);
  for (std::int64_t c = 0; c + kLanes < count; c += kLanes) store(b + c, corrected(c));
  store(b + count - kLanes, last);
  return reduce_add(broken);
}

}  // namespace
}  // namespace groupnorm
