// Rows of features: sixteen samples of one position each, one in every lane, forward and backward.
//
// Guarantee: a lane's result depends on its own sample only.
#pragma once

#include "activations-inl.h"
#include "moments-inl.h"

namespace groupnorm {
namespace {

// One number of each sample, a stride apart; the lanes past the last sample are 0.
template <class T>
GROUPNORM_INLINE F64 gather(const T* first, std::int64_t stride, std::int64_t samples) {
  T lanes[kLanes] = {};
  for (std::int64_t s = 0; s < samples; ++s) lanes[s] = first[s * stride];
  return load_as<double>(lanes, kLanes);
}
template <class T>
GROUPNORM_INLINE void scatter(T* first, std::int64_t stride, std::int64_t samples, const F64& a) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    // One by one: parameters and statistics may hold any NaN, whose payload a vector's rounding could
    // carry over into the sign.
    float lanes[kLanes];
    store_as(lanes, a, kLanes);
    for (std::int64_t s = 0; s < samples; ++s) first[s * stride] = to_bfloat16(lanes[s]);
  } else {
    T lanes[kLanes];
    store_as(lanes, a, kLanes);
    for (std::int64_t s = 0; s < samples; ++s) first[s * stride] = lanes[s];
  }
}

// In double for float64; else in float, which knows swish for beta >= 0 only.
template <class T, class Step>
GROUPNORM_INLINE F64 activation_lanes(const SamplesPlane& plane, const F64& v, const Step& step) {
  if constexpr (!std::is_same_v<T, double>) {
    if (plane.beta >= 0.0) return widen(step(narrow(v), SwishRate<F32>(plane.beta)));
  }
  return step(v, SwishRate<F64>(plane.beta));
}

template <class T, Activation A>
void samples_forward(const SamplesPlane& plane) {
  count_call();
  const T* x = static_cast<const T*>(plane.x);
  T* y = static_cast<T*>(plane.result);
  F64 values[kLaneChannels];
  for (std::int64_t k = 0; k < plane.groups; ++k) {
    const std::int64_t begin = plane.group_begin[k], channels = plane.group_begin[k + 1] - begin;
    const F64 count = set1<F64>(static_cast<double>(channels));
    F64 sum = set1<F64>(0.0), rest = sum, m2 = sum;
    for (std::int64_t c = 0; c < channels; ++c) {
      values[c] = gather(x + begin + c, plane.x_stride, plane.samples);
      sum = sum + values[c];
    }
    const F64 mean = sum / count;
    for (std::int64_t c = 0; c < channels; ++c) {
      values[c] = values[c] - mean;
      rest = rest + values[c];
      m2 = fma(values[c], values[c], m2);
    }
    // What the mean's rounding left.
    const F64 low = rest / count;
    // Squares that overflow must not turn into zeros: infinity times 0 is NaN.
    const F64 exact_m2 = at_least(fnma(rest, low, m2), set1<F64>(0.0));
    const F64 variance = fma(set1<F64>(0.0), exact_m2, exact_m2 / count);
    const F64 rstd = set1<F64>(1.0) / sqrt(variance + set1<F64>(plane.eps));
    scatter(plane.mean + k, plane.groups, plane.samples, mean + low);
    scatter(plane.rstd + k, plane.groups, plane.samples, rstd);
    for (std::int64_t c = 0; c < channels; ++c) {
      const F64 v = fma((values[c] - low) * rstd, set1<F64>(plane.gain[begin + c]),
                        set1<F64>(plane.offset[begin + c]));
      const F64 result =
          A == Activation::none
              ? v
              : activation_lanes<T>(plane, v, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                  return activate<A>(u, rate);
                });
      scatter(y + begin + c, plane.result_stride, plane.samples, result);
    }
  }
}

template <class T, Activation A>
void samples_backward(const SamplesPlane& plane) {
  count_call();
  const T* x = static_cast<const T*>(plane.x);
  const T* dy = static_cast<const T*>(plane.dy);
  T* dx = static_cast<T*>(plane.result);
  F64 xhats[kLaneChannels], dvs[kLaneChannels];
  for (std::int64_t k = 0; k < plane.groups; ++k) {
    const std::int64_t begin = plane.group_begin[k], channels = plane.group_begin[k + 1] - begin;
    const F64 mean = gather(plane.mean + k, plane.groups, plane.samples);
    const F64 rstd = gather(plane.rstd + k, plane.groups, plane.samples);
    F64 p = set1<F64>(0.0), q = p;
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t at = begin + c;
      const F64 gain = set1<F64>(plane.gain[at]);
      const F64 xhat = (gather(x + at, plane.x_stride, plane.samples) - mean) * rstd;
      const F64 slope_at = fma(xhat, gain, set1<F64>(plane.offset[at]));
      F64 dv = gather(dy + at, plane.dy_stride, plane.samples);
      if constexpr (A == Activation::relu) {
        dv = through_activation<A>(dv, slope_at, SwishRate<F64>(plane.beta));
      } else if constexpr (A != Activation::none) {
        dv = dv * activation_lanes<T>(
                      plane, slope_at,
                      [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                        return through_activation<A>(set1<std::decay_t<decltype(u)>>(1), u, rate);
                      });
      }
      const F64 product = dv * xhat;
      // A lane without a sample may hold 0 times infinity.
      const int samples = static_cast<int>(plane.samples);
      plane.a[at] = reduce_add(first_lanes_if(dv, samples));
      if (plane.b != nullptr) plane.b[at] = reduce_add(first_lanes_if(product, samples));
      p = fma(gain, dv, p);
      q = fma(gain, product, q);
      xhats[c] = xhat;
      dvs[c] = dv;
    }
    if (dx == nullptr) continue;
    const F64 inverse = set1<F64>(1.0 / static_cast<double>(channels));
    p = p * inverse;
    q = q * inverse;
    for (std::int64_t c = 0; c < channels; ++c) {
      const F64 gain = set1<F64>(plane.gain[begin + c]);
      const F64 terms = fnma(xhats[c], q, fma(gain, dvs[c], set1<F64>(0.0) - p));
      scatter(dx + begin + c, plane.result_stride, plane.samples, rstd * terms);
    }
  }
}

}  // namespace
}  // namespace groupnorm
