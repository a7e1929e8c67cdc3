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

// The product of two such numbers is comfortable.
bool moderate(double value) {
  const double magnitude = std::fabs(value);
  return magnitude > 0x1p-45 && magnitude < 0x1p45;
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
double tail_limit(DType dtype) { return dtype == DType::float16 ? 48.0 : 80.0; }

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
void carve(std::vector<Real>& storage, std::int64_t length, bool for_gradient,
                   Coefficients<Real>& out) {
  Carver<Real> carver(storage, length, for_gradient ? 7 : 4);
  out.center = carver.take();
  out.center_low = carver.take();
  out.multiplier = carver.take();
  out.offset = carver.take();
  if (for_gradient) {
    // w r multiplies x - mean in the forward and dv in the backward.
    out.grad_multiplier = out.multiplier;
    out.rstd = carver.take();
    out.grad_offset = carver.take();
    out.grad_slope = carver.take();
  }
}

template <class Real>
Coefficients<Real> advanced(const Coefficients<Real>& from, std::int64_t by) {
  const auto move = [by](const Real* p) { return p == nullptr ? nullptr : p + by; };
  return {move(from.center),     move(from.center_low),      move(from.multiplier),
          move(from.offset),     move(from.rstd),            move(from.grad_multiplier),
          move(from.grad_offset), move(from.grad_slope)};
}

// A NaN loses its payload, which rounding to bfloat16 could carry over into the sign.
template <class Real>
Real plain(double value) {
  return value == value ? static_cast<Real>(value) : std::numeric_limits<Real>::quiet_NaN();
}
template <class Real>
void put(const Real* array, std::int64_t at, double value) {
  const_cast<Real*>(array)[at] = plain<Real>(value);
}
template <class Real>
void put_all(const Real* array, std::int64_t begin, std::int64_t end, double value) {
  std::fill(const_cast<Real*>(array) + begin, const_cast<Real*>(array) + end, plain<Real>(value));
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

Affine::Affine(const Shape& shape, DType dtype, const Epilogue& epilogue)
    : channels_(shape.channels),
      weight_(as_doubles(epilogue.weight, shape.channels, 1.0)),
      bias_(as_doubles(epilogue.bias, shape.channels, 0.0)),
      scale_(epilogue.scale) {
  const std::int64_t padded = (channels_ / kPadding + 1) * kPadding;
  const bool adaptive = epilogue.scale.data != nullptr || epilogue.shift.data != nullptr;
  const std::int64_t samples = adaptive ? shape.samples : 1;
  sample_stride_ = adaptive ? padded : 0;
  const std::size_t count = at(samples * padded);
  gain_.resize(count, 1.0);
  offset_.resize(count);
  for (std::int64_t n = 0; n < samples; ++n) {
    for (std::int64_t c = 0; c < channels_; ++c) {
      const std::size_t i = at(n * padded + c);
      const double factor = one_plus_scale(n, c);
      const double shift = epilogue.shift.data == nullptr
                               ? 0.0
                               : parameter_at(epilogue.shift, n * channels_ + c);
      gain_[i] = weight_[at(c)] * factor;
      offset_[i] = bias_[at(c)] * factor + shift;
      moderate_gains_ = moderate_gains_ && moderate(gain_[i]);
    }
  }
  if (dtype == DType::float64) return;
  const bool has_tail = dtype != DType::float32 && is_smooth(epilogue.activation);
  // The kernels in float know swish for beta >= 0 only.
  const bool negative_beta = epilogue.activation == Activation::swish && epilogue.beta < 0.0;
  const double ratio = guard_ratio(dtype), limit = tail_limit(dtype);
  guard_.resize(count);
  tail_.resize(count);
  in_double_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (static_cast<std::int64_t>(i) % padded >= channels_) continue;
    guard_[i] = static_cast<float>(ratio * std::fabs(offset_[i]));
    if (has_tail) {
      tail_[i] = static_cast<float>(
          -tail_start(epilogue.activation, epilogue.beta, limit, offset_[i]));
    }
    in_double_[i] = negative_beta || !comfortable(offset_[i]);
    any_in_double_ = any_in_double_ || in_double_[i] != 0;
  }
}

double Affine::one_plus_scale(std::int64_t n, std::int64_t c) const {
  return scale_.data == nullptr ? 1.0 : 1.0 + parameter_at(scale_, n * channels_ + c);
}

ChannelScratch::ChannelScratch(DType dtype, const Epilogue& epilogue, std::int64_t max_channels,
                               bool for_gradient)
    : dtype_(dtype),
      for_gradient_(for_gradient),
      // 16-bit results and relu look at single vectors again, in double.
      exact_in_float_kernels_(for_gradient ? epilogue.activation == Activation::relu
                                           : dtype != DType::float32),
      xhat_low_(static_cast<std::size_t>(for_gradient ? max_channels : 0)),
      in_double_(static_cast<std::size_t>(max_channels), dtype == DType::float64) {
  const std::int64_t length = (max_channels + kPadding - 1) / kPadding * kPadding;
  carve(exact_, length, for_gradient, table_.exact);
  if (dtype != DType::float64) carve(single_, length, for_gradient, table_.single);
}

ChannelTable ChannelScratch::table_from(std::int64_t first) const {
  if (first == 0) return table_;
  return {advanced(table_.single, first), advanced(table_.exact, first), table_.guard + first,
          table_.tail + first};
}

template <class Real>
void ChannelScratch::fill_group(const Coefficients<Real>& out, const Group& group) const {
  constexpr bool kSingle = std::is_same_v<Real, float>;
  const double center = static_cast<double>(static_cast<Real>(group.mean));
  // In float, what one number cannot hold of the mean goes into the offsets: it is so small beside
  // the mean's own rounding that no difference of large numbers is formed.
  const double low = kSingle ? (group.mean - center) + group.mean_low : 0.0;
  put_all(out.center, group.begin, group.end, center);
  if (!kSingle) put_all(out.center_low, group.begin, group.end, group.mean_low);
  for (std::int64_t c = group.begin; c < group.end; ++c) {
    const double multiplier = affine_->gain(place_ + c) * group.rstd;
    put(out.multiplier, c, multiplier);
    put(out.offset, c, affine_->offset(place_ + c) - low * multiplier);
  }
  if (!for_gradient_) return;
  put_all(out.rstd, group.begin, group.end, group.rstd);
  if (!group.with_means) return;
  put_all(out.grad_offset, group.begin, group.end, group.grad_offset + low * group.grad_slope);
  put_all(out.grad_slope, group.begin, group.end, group.grad_slope);
}

void ChannelScratch::fill_exact() {
  if (exact_filled_) return;
  for (const Group& group : groups_) fill_group(table_.exact, group);
  exact_filled_ = true;
}

void ChannelScratch::fill(const Shape& shape, const Affine& affine, std::int64_t n,
                          std::int64_t begin, std::int64_t end, const SampleStatistics& stats,
                          const GradientMeans* means) {
  filled_ = end - begin;
  affine_ = &affine;
  place_ = affine.place(n, begin);
  groups_.clear();
  exact_filled_ = false;
  const bool is_float64 = dtype_ == DType::float64;
  any_in_double_ = is_float64;
  const auto& bounds = shape.group_begin;
  auto k = static_cast<std::size_t>(std::upper_bound(bounds.begin(), bounds.end(), begin) -
                                    bounds.begin() - 1);
  for (std::int64_t i = 0; i < filled_; ++k) {
    const std::int64_t last = std::min(bounds[k + 1] - begin, filled_);
    const double rstd = stats.rstd[k];
    Group group = {i, last, stats.mean[k], stats.mean_low == nullptr ? 0.0 : stats.mean_low[k],
                   rstd, means != nullptr, 0.0, 0.0};
    if (means != nullptr) {
      group.grad_offset = -rstd * means[k].p;
      group.grad_slope = rstd * rstd * means[k].q;
    }
    groups_.push_back(group);
    if (!is_float64) {
      fill_group(table_.single, group);
      const bool comfortable_group = comfortable(group.mean) && comfortable(rstd) &&
                                     comfortable(group.grad_offset) &&
                                     comfortable(group.grad_slope);
      if (comfortable_group && !affine.any_in_double() && affine.moderate_gains() &&
          moderate(rstd)) {
        std::fill(in_double_.begin() + i, in_double_.begin() + last, 0);
      } else {
        for (std::int64_t c = i; c < last; ++c) {
          const bool in_double = !comfortable_group || affine.in_double(place_ + c) ||
                                 !comfortable(affine.gain(place_ + c) * rstd);
          in_double_[static_cast<std::size_t>(c)] = in_double;
          any_in_double_ = any_in_double_ || in_double;
        }
      }
      if (for_gradient_) {
        const double low = (group.mean - static_cast<double>(static_cast<float>(group.mean))) +
                           group.mean_low;
        std::fill(xhat_low_.begin() + i, xhat_low_.begin() + last, low * rstd);
      }
    }
    i = last;
  }
  if (!is_float64) {
    table_.guard = affine.guard(place_);
    table_.tail = affine.tail(place_);
  }
  if (any_in_double_ || exact_in_float_kernels_) fill_exact();
}

}  // namespace groupnorm
