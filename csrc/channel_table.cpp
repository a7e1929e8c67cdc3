#include "channel_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "half.h"

namespace groupnorm {
namespace {

constexpr std::int64_t kPadding = 16;

template <class T>
T read(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const T*>(data) + index, sizeof value);
  return value;
}
template <class T>
void write(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<T*>(data) + index, &value, sizeof value);
}

// Products and differences of such numbers stay finite and normal in float. What is not finite gives
// NaN in either arithmetic, and must not change how the other groups of a sample are computed.
bool comfortable(double value) {
  const double magnitude = std::fabs(value);
  return value == 0.0 || !std::isfinite(value) || (magnitude > 0x1p-90 && magnitude < 0x1p90);
}

double guard_ratio(DType dtype) {
  switch (dtype) {
    case DType::float16: return static_cast<double>(kGuardFloat16);
    case DType::bfloat16: return static_cast<double>(kGuardBFloat16);
    default: return static_cast<double>(kGuardSign);
  }
}

// A relative error of y is one of v times |v| g(v), where g is about 1 in the tail of silu, |beta| in
// that of swish, |v| in that of gelu and 1.6 + 0.21 v^2 in that of gelu_tanh. v's own error is about
// u (|v| + |offset|). Where g (|v| + |offset|) passes this limit, v is computed in double, which keeps
// 16-bit results equal to float64 rounded once.
double tail_limit(DType dtype) { return dtype == DType::float16 ? 48.0 : 96.0; }

// The least |v| in the tail, for an offset.
double tail_start(Activation activation, double beta, double limit, double offset) {
  const double b = std::fabs(offset);
  switch (activation) {
    case Activation::swish: return std::max(0.0, limit / std::max(1.0, std::fabs(beta)) - b);
    case Activation::gelu: return 0.5 * (std::sqrt(b * b + 4.0 * limit) - b);
    case Activation::gelu_tanh: {
      // Newton from above: the function is convex.
      double v = std::cbrt(limit / 0.21);
      for (int i = 0; i < 6; ++i) {
        const double g = 1.6 + 0.21 * v * v, value = g * (v + b) - limit;
        v -= value / (g + 0.42 * v * (v + b));
      }
      return std::max(0.0, v);
    }
    default: return std::numeric_limits<double>::infinity();
  }
}

std::vector<double> as_doubles(const Parameter& parameter, std::int64_t count, double absent) {
  std::vector<double> values(static_cast<std::size_t>(count), absent);
  if (parameter.data == nullptr) return values;
  for (std::int64_t i = 0; i < count; ++i) {
    values[static_cast<std::size_t>(i)] = parameter_at(parameter, i);
  }
  return values;
}

// Cuts arrays of equal length off one allocation.
template <class Real>
class Carver {
 public:
  Carver(std::vector<Real>& storage, std::int64_t length, int arrays)
      : next_((storage.resize(static_cast<std::size_t>(length) * static_cast<std::size_t>(arrays)),
               storage.data())),
        length_(length) {}
  Real* take() {
    Real* taken = next_;
    next_ += length_;
    return taken;
  }

 private:
  Real* next_;
  std::int64_t length_;
};

template <class Real>
Carver<Real> carve(std::vector<Real>& storage, std::int64_t length, bool for_gradient,
                   Coefficients<Real>& out) {
  Carver<Real> carver(storage, length, 8);
  out.center = carver.take();
  out.center_low = carver.take();
  out.multiplier = carver.take();
  out.offset = carver.take();
  if (for_gradient) {
    // w r multiplies x - mean in the forward and dv in the backward.
    out.grad_multiplier = out.multiplier;
    out.grad_offset = carver.take();
    out.grad_slope = carver.take();
  }
  return carver;
}

template <class Real>
Coefficients<Real> advanced(const Coefficients<Real>& from, std::int64_t by) {
  const auto move = [by](const Real* p) { return p == nullptr ? nullptr : p + by; };
  return {move(from.center),          move(from.center_low),  move(from.multiplier),
          move(from.offset),          move(from.grad_multiplier), move(from.grad_offset),
          move(from.grad_slope)};
}

template <class Real>
void put(const Real* array, std::int64_t at, double value) {
  const_cast<Real*>(array)[at] = static_cast<Real>(value);
}
template <class Real>
void put_all(const Real* array, std::int64_t begin, std::int64_t end, double value) {
  std::fill(const_cast<Real*>(array) + begin, const_cast<Real*>(array) + end,
            static_cast<Real>(value));
}

}  // namespace

double parameter_at(const Parameter& parameter, std::int64_t index) {
  switch (parameter.dtype) {
    case DType::float32: return static_cast<double>(read<float>(parameter.data, index));
    case DType::float64: return read<double>(parameter.data, index);
    case DType::float16: return static_cast<double>(to_float(read<Float16>(parameter.data, index)));
    case DType::bfloat16: break;
  }
  return static_cast<double>(to_float(read<BFloat16>(parameter.data, index)));
}

void store_parameter(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::float32: return write(data, index, static_cast<float>(value));
    case DType::float64: return write(data, index, value);
    case DType::float16: return write(data, index, to_float16(static_cast<float>(value)));
    case DType::bfloat16: return write(data, index, to_bfloat16(static_cast<float>(value)));
  }
}

Affine::Affine(const Shape& shape, const Epilogue& epilogue)
    : channels_(shape.channels),
      weight_(as_doubles(epilogue.weight, shape.channels, 1.0)),
      bias_(as_doubles(epilogue.bias, shape.channels, 0.0)),
      scale_(epilogue.scale),
      shift_(epilogue.shift),
      adaptive_(scale_.data != nullptr || shift_.data != nullptr) {}

double Affine::one_plus_scale(std::int64_t n, std::int64_t c) const {
  return scale_.data == nullptr ? 1.0 : 1.0 + parameter_at(scale_, n * channels_ + c);
}

double Affine::shift(std::int64_t n, std::int64_t c) const {
  return shift_.data == nullptr ? 0.0 : parameter_at(shift_, n * channels_ + c);
}

ChannelScratch::ChannelScratch(DType dtype, const Epilogue& epilogue, std::int64_t max_channels,
                               bool for_gradient)
    : dtype_(dtype),
      activation_(epilogue.activation),
      beta_(epilogue.beta),
      gain_(static_cast<std::size_t>(max_channels)),
      in_double_(static_cast<std::size_t>(max_channels), 1),
      offset_in_double_(static_cast<std::size_t>(max_channels)) {
  const std::int64_t length = (max_channels + kPadding - 1) / kPadding * kPadding;
  carve(exact_, length, for_gradient, table_.exact);
  if (dtype != DType::float64) {
    auto carver = carve(single_, length, for_gradient, table_.single);
    table_.guard = carver.take();
    table_.tail = carver.take();
  }
}

ChannelTable ChannelScratch::table_from(std::int64_t first) const {
  if (first == 0) return table_;
  return {advanced(table_.single, first), advanced(table_.exact, first), table_.guard + first,
          table_.tail + first};
}

void ChannelScratch::fill_parameters(const Affine& affine, std::int64_t n, std::int64_t begin,
                                     std::int64_t end) {
  begin_ = begin;
  filled_ = end - begin;
  any_offset_in_double_ = false;
  const bool has_tail = dtype_ == DType::float16 || dtype_ == DType::bfloat16;
  const double guard = guard_ratio(dtype_), limit = tail_limit(dtype_);
  for (std::int64_t i = 0; i < filled_; ++i) {
    const double offset = affine.offset(n, begin + i);
    gain_[static_cast<std::size_t>(i)] = affine.gain(n, begin + i);
    put(table_.exact.offset, i, offset);
    if (dtype_ == DType::float64) continue;
    put(table_.single.offset, i, offset);
    put(table_.guard, i, guard * std::fabs(offset));
    if (has_tail) put(table_.tail, i, -tail_start(activation_, beta_, limit, offset));
    const bool in_double = !comfortable(offset);
    offset_in_double_[static_cast<std::size_t>(i)] = in_double;
    any_offset_in_double_ = any_offset_in_double_ || in_double;
  }
}

void ChannelScratch::fill(const Shape& shape, const Affine& affine, std::int64_t n,
                          std::int64_t begin, std::int64_t end, const SampleStatistics& stats,
                          const GradientMeans* means) {
  if (affine.adaptive() || begin != begin_ || end - begin != filled_) {
    fill_parameters(affine, n, begin, end);
  }
  const auto& bounds = shape.group_begin;
  auto k = static_cast<std::size_t>(std::upper_bound(bounds.begin(), bounds.end(), begin) -
                                    bounds.begin() - 1);
  const bool is_float64 = dtype_ == DType::float64;
  any_in_double_ = is_float64 || any_offset_in_double_;
  for (std::int64_t i = 0; i < filled_; ++k) {
    const std::int64_t last = std::min(bounds[k + 1] - begin, filled_);
    const double mean = stats.mean[k], rstd = stats.rstd[k];
    const double mean_low = stats.mean_low == nullptr ? 0.0 : stats.mean_low[k];
    const double slope = means == nullptr ? 0.0 : rstd * rstd * means[k].q;
    const double grad_offset = means == nullptr ? 0.0 : -rstd * means[k].p;
    const auto fill_group = [&](const auto& out, double low) {
      put_all(out.center, i, last, mean);
      put_all(out.center_low, i, last, low);
      for (std::int64_t c = i; c < last; ++c) {
        put(out.multiplier, c, gain_[static_cast<std::size_t>(c)] * rstd);
      }
      if (means == nullptr) return;
      put_all(out.grad_offset, i, last, grad_offset);
      put_all(out.grad_slope, i, last, slope);
    };
    fill_group(table_.exact, mean_low);
    if (!is_float64) {
      fill_group(table_.single, (mean - static_cast<double>(static_cast<float>(mean))) + mean_low);
      const bool group_in_double = !(comfortable(mean) && comfortable(rstd) &&
                                     comfortable(grad_offset) && comfortable(slope));
      for (std::int64_t c = i; c < last; ++c) {
        const auto at = static_cast<std::size_t>(c);
        const bool in_double =
            group_in_double || offset_in_double_[at] != 0 || !comfortable(table_.exact.multiplier[c]);
        in_double_[at] = in_double;
        any_in_double_ = any_in_double_ || in_double;
      }
    }
    i = last;
  }
}

}  // namespace groupnorm
