#include "channel_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "finite.h"
#include "half.h"
#include "parallel.h"
#include "partition.h"
#include "table_part.h"

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
constexpr double kModerateLeast = 0x1p-45, kModerateMost = 0x1p45;
bool moderate(double value) {
  const double magnitude = std::fabs(value);
  return (magnitude > kModerateLeast) & (magnitude < kModerateMost);
}

// What is not finite gives NaN in either arithmetic, and must not change how the other groups of a sample are
// computed.
bool comfortable(double value) {
  const double magnitude = std::fabs(value);
  return value == 0.0 || !std::isfinite(value) ||
         (magnitude > kComfortableLeast && magnitude < kComfortableMost);
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
// The argument of gelu_tanh's exponential is itself a rounded polynomial: a quarter of that.
double tail_limit(DType dtype, Activation activation) {
  const double limit = dtype == DType::float16 ? kTailFloat16 : kTailBFloat16;
  return activation == Activation::gelu_tanh ? 0.25 * limit : limit;
}

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
        v = std::max(0.0, v - value / (g + 0.42 * v * (v + b)));
      }
      return v;
    }
    default: return std::numeric_limits<double>::infinity();
  }
}

template <class T>
double read_as_double(const void* data, std::int64_t index) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    return static_cast<double>(read<T>(data, index));
  } else {
    return static_cast<double>(to_float(read<T>(data, index)));
  }
}
template <class T>
void load(const void* data, std::int64_t step, std::int64_t count, double* values) {
  // Apart, so that the compiler can do several at once.
  if (step == 1) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = read_as_double<T>(data, i);
  } else {
    for (std::int64_t i = 0; i < count; ++i) values[i] = read_as_double<T>(data, i * step);
  }
}

// A kernel may read a whole vector from any channel on.
std::int64_t coefficient_length(std::int64_t channels) { return channels + kPadding; }

std::size_t coefficient_count(std::int64_t channels, bool for_gradient) {
  return static_cast<std::size_t>((for_gradient ? 7 : 4) * coefficient_length(channels));
}

// Cuts arrays of equal length off one.
template <class Real>
void carve(const Real* next, std::int64_t length, bool for_gradient, Coefficients<Real>& out) {
  const auto take = [&] { return std::exchange(next, next + length); };
  out.center = take();
  out.center_low = take();
  out.multiplier = take();
  out.offset = take();
  if (for_gradient) {
    // w r multiplies x - mean in the forward and dv in the backward.
    out.grad_multiplier = out.multiplier;
    out.rstd = take();
    out.grad_offset = take();
    out.grad_slope = take();
  }
}

// What a kernel may read past the last channel.
template <class Real>
void pad(std::initializer_list<const Real*> arrays, std::int64_t channels) {
  for (const Real* array : arrays) {
    if (array != nullptr) std::fill_n(const_cast<Real*>(array) + channels, kPadding, Real{0});
  }
}
template <class Real>
void pad(const Coefficients<Real>& numbers, std::int64_t channels) {
  pad({numbers.center, numbers.center_low, numbers.multiplier, numbers.offset, numbers.rstd, numbers.grad_offset,
       numbers.grad_slope},
      channels);
}
template <class Real>
void pad_means(const Coefficients<Real>& numbers, std::int64_t channels) {
  pad({numbers.grad_offset, numbers.grad_slope}, channels);
}

}  // namespace

double parameter_at(const Parameter& parameter, std::int64_t index) {
  switch (parameter.dtype) {
    case DType::float32: return read_as_double<float>(parameter.data, index);
    case DType::float64: return read_as_double<double>(parameter.data, index);
    case DType::float16: return read_as_double<Float16>(parameter.data, index);
    case DType::bfloat16: break;
  }
  return read_as_double<BFloat16>(parameter.data, index);
}

void load_values(const void* data, DType dtype, std::int64_t step, std::int64_t count, double* values) {
  switch (dtype) {
    case DType::float32: return load<float>(data, step, count, values);
    case DType::float64: return load<double>(data, step, count, values);
    case DType::float16: return load<Float16>(data, step, count, values);
    case DType::bfloat16: return load<BFloat16>(data, step, count, values);
  }
}

void load_statistics(const void* data, DType dtype, std::int64_t count, double* values) {
  constexpr std::int64_t kBlock = 8192;
  const std::int64_t size = element_size(dtype);
  parallel_ranges((count + kBlock - 1) / kBlock, threads_for(size * count),
                  [&](std::int64_t begin, std::int64_t end, int) {
                    const std::int64_t first = begin * kBlock, last = std::min(end * kBlock, count);
                    load_values(static_cast<const char*>(data) + size * first, dtype, 1, last - first, values + first);
                  });
}

void store_parameter(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::float32: return write(data, index, static_cast<float>(value));
    case DType::float64: return write(data, index, value);
    case DType::float16: return write(data, index, to_float16(static_cast<float>(value)));
    case DType::bfloat16: return write(data, index, to_bfloat16(static_cast<float>(value)));
  }
}

void store_values(void* data, DType dtype, std::int64_t step, std::int64_t count, const double* values) {
  if (dtype == DType::float32 && step == 1) {
    for (std::int64_t i = 0; i < count; ++i) write(data, i, static_cast<float>(values[i]));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) store_parameter(data, dtype, i * step, values[i]);
}

Affine::Affine(const Shape& shape, DType dtype, const Epilogue& epilogue)
    : padded_((shape.channels + 2 * kPadding - 1) / kPadding * kPadding),
      adaptive_(is_adaptive(epilogue)),
      samples_(adaptive_ ? shape.samples : 1),
      gain_(at(samples_ * padded_)),
      offset_(at(samples_ * padded_)),
      guard_(dtype == DType::float64 ? 0 : at(samples_ * padded_ + kPadding)),
      tail_(guard_.size()),
      watch_(guard_.size()),
      // The kernels in float know swish for beta >= 0 only.
      any_in_double_(dtype != DType::float64 && epilogue.activation == Activation::swish &&
                     epilogue.beta < 0.0),
      in_double_(dtype == DType::float64 ? 0 : at(samples_ * padded_)) {}

void Affine::fill(const Shape& shape, DType dtype, const Epilogue& epilogue) {
  const std::int64_t channels = shape.channels, all = samples_ * padded_;
  const auto fill_in = [&](const Parameter& parameter, double absent, double* values) {
    const std::int64_t given = parameter.data == nullptr ? 0 : channels;
    load_values(parameter.data, parameter.dtype, 1, given, values);
    std::fill(values + given, values + padded_, absent);
  };
  fill_in(epilogue.weight, 1.0, gain_.data());
  fill_in(epilogue.bias, 0.0, offset_.data());
  // From the last, because the first sample's place holds the parameters themselves.
  for (std::int64_t n = samples_ - 1; adaptive_ && n >= 0; --n) {
    double *gains = gain_.data() + n * padded_, *offsets = offset_.data() + n * padded_;
    for (std::int64_t c = 0; c < channels; ++c) {
      const double factor = 1.0 + parameter_or(epilogue.scale, n * channels + c, 0.0);
      gains[c] = gain_[at(c)] * factor;
      offsets[c] = offset_[at(c)] * factor + parameter_or(epilogue.shift, n * channels + c, 0.0);
    }
    std::fill(gains + channels, gains + padded_, 1.0);
    std::fill(offsets + channels, offsets + padded_, 0.0);
  }
  moderate_gains_ = all_within(gain_.data(), all, kModerateLeast, kModerateMost, false);
  const bool easy_offsets = all_within(offset_.data(), all, kComfortableLeast, kComfortableMost, true);
  if (dtype == DType::float64) return;
  if (dtype != DType::float32 || epilogue.activation == Activation::relu) {
    const double ratio = guard_ratio(dtype);
    for (std::int64_t i = 0; i < all; ++i) {
      guard_[at(i)] = static_cast<float>(ratio * std::fabs(offset_[at(i)]));
    }
    std::fill(guard_.begin() + all, guard_.end(), 0.0F);
  }
  if (dtype != DType::float32 && is_smooth(epilogue.activation)) {
    const double limit = tail_limit(dtype, epilogue.activation);
    for (std::int64_t i = 0; i < all; ++i) {
      tail_[at(i)] =
          static_cast<float>(-tail_start(epilogue.activation, epilogue.beta, limit, offset_[at(i)]));
    }
    std::fill(tail_.begin() + all, tail_.end(), 0.0F);
  }
  if (dtype != DType::float32) {
    for (std::int64_t i = 0; i < all; ++i) {
      watch_[at(i)] = std::max(guard_[at(i)], std::numeric_limits<float>::min());
    }
    std::fill(watch_.begin() + all, watch_.end(), 0.0F);
  }
  // Marks are not looked at before there is one.
  if (!any_in_double_ && easy_offsets) return;
  std::fill(in_double_.begin(), in_double_.end(), any_in_double_);
  for (std::int64_t i = 0; i < all; ++i) {
    if (!comfortable(offset_[at(i)])) in_double_[at(i)] = any_in_double_ = true;
  }
}

ChannelScratch::ChannelScratch(DType dtype, const Epilogue& epilogue, std::int64_t max_channels,
                               bool for_gradient)
    : dtype_(dtype),
      for_gradient_(for_gradient),
      // 16-bit results and relu look at single vectors again, in double.
      exact_in_float_kernels_(for_gradient ? epilogue.activation == Activation::relu
                                           : dtype != DType::float32),
      // Unwritten: it is another thread that fills them.
      exact_(coefficient_count(max_channels, for_gradient)),
      xhat_low_(static_cast<std::size_t>(for_gradient ? max_channels + kPadding : 0)),
      single_(dtype == DType::float64 ? 0 : exact_.size()),
      in_double_(static_cast<std::size_t>(max_channels)),
      groups_(static_cast<std::size_t>(max_channels)) {
  const std::int64_t length = coefficient_length(max_channels);
  if (dtype == DType::float64) std::fill(in_double_.begin(), in_double_.end(), true);
  carve(exact_.data(), length, for_gradient, table_.exact);
  if (dtype != DType::float64) carve(single_.data(), length, for_gradient, table_.single);
}

ChannelTable ChannelScratch::table_from(std::int64_t first) const {
  return first == 0 ? table_ : groupnorm::table_from(table_, first);
}

NumbersPlane ChannelScratch::numbers() {
  return {groups_.data(),
          static_cast<std::int64_t>(group_count_),
          affine_->gains() + place_,
          affine_->offsets() + place_,
          table_,
          for_gradient_ ? xhat_low_.data() : nullptr};
}

void ChannelScratch::fill_exact() {
  if (exact_filled_) return;
  kernels_.channel_numbers[1](numbers());
  if (means_filled_) kernels_.gradient_numbers[1](numbers());
  pad(table_.exact, filled_);
  exact_filled_ = true;
}

void ChannelScratch::use_double(std::int64_t begin, std::int64_t end) {
  // The marks are not looked at before there is one.
  if (!any_in_double_) std::fill(in_double_.begin(), in_double_.begin() + filled_, false);
  any_in_double_ = true;
  std::fill(in_double_.begin() + begin, in_double_.begin() + end, true);
}

void ChannelScratch::fill(const Shape& shape, const Affine& affine, std::int64_t n,
                          std::int64_t begin, std::int64_t end, const SampleStatistics& stats) {
  filled_ = end - begin;
  affine_ = &affine;
  place_ = affine.place(n, begin);
  group_count_ = 0;
  exact_filled_ = means_filled_ = false;
  const bool is_float64 = dtype_ == DType::float64;
  any_in_double_ = is_float64;
  const bool easy = !affine.any_in_double() && affine.moderate_gains();
  const auto& bounds = shape.group_begin;
  auto k = std::upper_bound(bounds.begin(), bounds.end(), begin) - bounds.begin() - 1;
  for (std::int64_t i = 0; i < filled_; ++k) {
    const auto at = static_cast<std::size_t>(k);
    // In its place at once: copied as a whole, it would wait for its parts to be stored.
    GroupNumbers& group = groups_[group_count_++];
    group.begin = i;
    group.end = std::min(bounds[at + 1] - begin, filled_);
    group.number = k;
    group.mean = stats.mean[k];
    group.mean_low = stats.mean_low == nullptr ? 0.0 : stats.mean_low[k];
    group.rstd = stats.rstd[k];
    i = group.end;
    if (is_float64) continue;
    const bool comfortable_group = comfortable(group.mean) && comfortable(group.rstd);
    if (!comfortable_group) use_double(group.begin, group.end);
    if (!comfortable_group || (easy && moderate(group.rstd))) continue;
    for (std::int64_t c = group.begin; c < group.end; ++c) {
      if ((affine.any_in_double() && affine.in_double(place_ + c)) ||
          !comfortable(affine.gain(place_ + c) * group.rstd)) {
        use_double(c, c + 1);
      }
    }
  }
  if (!is_float64) {
    kernels_.channel_numbers[0](numbers());
    pad(table_.single, filled_);
    table_.guard = affine.guard(place_);
    table_.tail = affine.tail(place_);
    table_.watch = affine.watch(place_);
  }
  if (any_in_double_ || exact_in_float_kernels_) fill_exact();
}

void ChannelScratch::fill_means(const GradientMeans* means) {
  means_filled_ = true;
  for (std::size_t i = 0; i < group_count_; ++i) {
    GroupNumbers& group = groups_[i];
    const GradientMeans& terms = means[group.number];
    group.grad_offset = -group.rstd * terms.p;
    group.grad_slope = group.rstd * group.rstd * terms.q;
    if (dtype_ == DType::float64) continue;
    if (!(comfortable(group.grad_offset) && comfortable(group.grad_slope))) {
      use_double(group.begin, group.end);
    }
  }
  if (dtype_ != DType::float64) {
    kernels_.gradient_numbers[0](numbers());
    pad_means(table_.single, filled_);
  }
  if (exact_filled_) {
    kernels_.gradient_numbers[1](numbers());
    pad_means(table_.exact, filled_);
  } else if (any_in_double_) {
    fill_exact();
  }
}

}  // namespace groupnorm
