// The numbers of some channels as a table of their own.
//
// Guarantee: internal linkage, because the kernels of every instruction set include it.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace groupnorm {
namespace {

template <class Real>
inline Coefficients<Real> coefficients_from(const Coefficients<Real>& all, std::int64_t first) {
  const auto move = [first](const Real* p) { return p == nullptr ? nullptr : p + first; };
  return {move(all.center),      move(all.center_low), move(all.multiplier),
          move(all.offset),      move(all.rstd),       move(all.grad_multiplier),
          move(all.grad_offset), move(all.grad_slope)};
}

// Channel `first` and those after it.
inline ChannelTable table_from(const ChannelTable& all, std::int64_t first) {
  const auto move = [first](const float* p) { return p == nullptr ? nullptr : p + first; };
  return {coefficients_from(all.single, first), coefficients_from(all.exact, first),
          move(all.guard), move(all.tail), move(all.watch)};
}

}  // namespace
}  // namespace groupnorm
