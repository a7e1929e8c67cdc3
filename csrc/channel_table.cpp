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

std::vector<double> as_doubles(const Parameter& parameter, std::int64_t count) {
  std::vector<double> values;
  if (parameter.data == nullptr) return values;
  values.resize(static_cast<std::size_t>(count));
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
  Carver<Real> carver(storage, length, 9);
  out.center = carver.take();
  out.center_low = carver.take();
  out.multiplier = carver.take();
  out.offset = carver.take();
  if (for_gradient) {
    out.grad_multiplier = carver.take();
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
      weight_(as_doubles(epilogue.weight, shape.channels)),
      bias_(as_doubles(epilogue.bias, shape.channels)),
      scale_(epilogue.scale),
      shift_(epilogue.shift) {}

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
      in_double_(static_cast<std::size_t>(max_channels)) {
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

void ChannelScratch::fill(const Shape& shape, const Affine& affine, std::int64_t n,
                          std::int64_t begin, std::int64_t end, const SampleStatistics& stats,
                          const GradientMeans* means) {
  const auto& bounds = shape.group_begin;
  std::int64_t k = std::upper_bound(bounds.begin(), bounds.end(), begin) - bounds.begin() - 1;
  const bool is_float64 = dtype_ == DType::float64;
  const bool has_tail = !is_float64 && dtype_ != DType::float32;
  const double guard = guard_ratio(dtype_), limit = tail_limit(dtype_);
  filled_ = end - begin;
  any_in_double_ = is_float64;
  for (std::int64_t c = begin; c < end; ++c) {
    while (c >= bounds[static_cast<std::size_t>(k) + 1]) ++k;
    const std::int64_t i = c - begin;
    const double mean = stats.mean[k], rstd = stats.rstd[k];
    const double mean_low = stats.mean_low == nullptr ? 0.0 : stats.mean_low[k];
    const double multiplier = affine.gain(n, c) * rstd, offset = affine.offset(n, c);
    put(table_.exact.center, i, mean);
    put(table_.exact.center_low, i, mean_low);
    put(table_.exact.multiplier, i, multiplier);
    put(table_.exact.offset, i, offset);
    bool in_range = !is_float64;
    if (!is_float64) {
      const float high = static_cast<float>(mean);
      put(table_.single.center, i, mean);
      put(table_.single.center_low, i, (mean - static_cast<double>(high)) + mean_low);
      put(table_.single.multiplier, i, multiplier);
      put(table_.single.offset, i, offset);
      put(table_.guard, i, guard * std::fabs(offset));
      if (has_tail) put(table_.tail, i, -tail_start(activation_, beta_, limit, offset));
      in_range = comfortable(mean) && comfortable(rstd) && comfortable(multiplier) &&
                 comfortable(offset);
    }
    if (means != nullptr) {
      const double slope = rstd * rstd * means[k].q, grad_offset = -rstd * means[k].p;
      put(table_.exact.grad_multiplier, i, multiplier);
      put(table_.exact.grad_offset, i, grad_offset);
      put(table_.exact.grad_slope, i, slope);
      if (!is_float64) {
        put(table_.single.grad_multiplier, i, multiplier);
        put(table_.single.grad_offset, i, grad_offset);
        put(table_.single.grad_slope, i, slope);
        in_range = in_range && comfortable(grad_offset) && comfortable(slope);
      }
    }
    in_double_[static_cast<std::size_t>(i)] = !in_range;
    any_in_double_ = any_in_double_ || !in_range;
  }
}

}  // namespace groupnorm
