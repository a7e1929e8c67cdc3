#include "channel_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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
void carve(std::vector<Real>& storage, std::int64_t length, bool for_gradient,
           Coefficients<Real>& out, const float** guard) {
  Carver<Real> carver(storage, length, 8);
  out.center = carver.take();
  out.center_low = carver.take();
  out.multiplier = carver.take();
  out.offset = carver.take();
  if (for_gradient) {
    out.grad_multiplier = carver.take();
    out.grad_offset = carver.take();
    out.grad_slope = carver.take();
  }
  if constexpr (std::is_same_v<Real, float>) *guard = carver.take();
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

ChannelScratch::ChannelScratch(DType dtype, std::int64_t max_channels, bool for_gradient)
    : dtype_(dtype) {
  const std::int64_t length = (max_channels + kPadding - 1) / kPadding * kPadding;
  carve(exact_, length, for_gradient, table_.exact, nullptr);
  if (dtype != DType::float64) {
    carve(single_, length, for_gradient, table_.single, &table_.guard);
  }
}

void ChannelScratch::fill(const Shape& shape, const Affine& affine, std::int64_t n,
                          std::int64_t begin, std::int64_t end, const double* mean,
                          const double* rstd, const GradientMeans* means) {
  const auto& bounds = shape.group_begin;
  std::int64_t k = std::upper_bound(bounds.begin(), bounds.end(), begin) - bounds.begin() - 1;
  const bool with_single = dtype_ != DType::float64;
  const double guard = guard_ratio(dtype_);
  bool in_range = true;
  for (std::int64_t c = begin; c < end; ++c) {
    while (c >= bounds[static_cast<std::size_t>(k) + 1]) ++k;
    const std::int64_t i = c - begin;
    const double gain = affine.gain(n, c);
    const double multiplier = gain * rstd[k], offset = affine.offset(n, c);
    put(table_.exact.center, i, mean[k]);
    put(table_.exact.multiplier, i, multiplier);
    put(table_.exact.offset, i, offset);
    if (with_single) {
      const float high = static_cast<float>(mean[k]);
      put(table_.single.center, i, mean[k]);
      put(table_.single.center_low, i, mean[k] - static_cast<double>(high));
      put(table_.single.multiplier, i, multiplier);
      put(table_.single.offset, i, offset);
      put(table_.guard, i, guard * std::fabs(offset));
      in_range = in_range && comfortable(mean[k]) && comfortable(rstd[k]) &&
                 comfortable(multiplier) && comfortable(offset);
    }
    if (means == nullptr) continue;
    const double slope = rstd[k] * rstd[k] * means[k].q, grad_offset = -rstd[k] * means[k].p;
    put(table_.exact.grad_multiplier, i, multiplier);
    put(table_.exact.grad_offset, i, grad_offset);
    put(table_.exact.grad_slope, i, slope);
    if (with_single) {
      put(table_.single.grad_multiplier, i, multiplier);
      put(table_.single.grad_offset, i, grad_offset);
      put(table_.single.grad_slope, i, slope);
      in_range = in_range && comfortable(grad_offset) && comfortable(slope);
    }
  }
  in_double_ = with_single && in_range ? 0 : 1;
}

}  // namespace groupnorm
