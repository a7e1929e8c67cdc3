// Rows of features: sixteen samples of one position each, one in every lane, forward and backward.
//
// Guarantee: a lane's result depends on its own sample only.
#pragma once

#include <limits>

#include "activations-inl.h"
#include "moments-inl.h"

namespace groupnorm {
namespace {

// Some channels of sixteen samples: [channel][sample]. Elements are turned around tile by tile, since
// picking a channel's sixteen one by one would make each vector wait for as many narrow stores.
template <class E>
struct SamplesTile {
  alignas(64) E lanes[kLaneChannels][kLaneSamples];
};
template <class T>
using TileOf = SamplesTile<std::conditional_t<std::is_same_v<T, double>, double, float>>;

GROUPNORM_INLINE void transpose(const double* from, std::int64_t from_stride, double* to,
                                std::int64_t to_stride) {
  for (int row = 0; row < kLanes; ++row) {
    for (int column = 0; column < kLanes; ++column) {
      to[column * to_stride + row] = from[row * from_stride + column];
    }
  }
}

// The samples' elements from first on, a stride apart, of which `readable` may be read. The lanes past
// the last sample are 0.
template <class T, class E>
GROUPNORM_INLINE void load_tile(SamplesTile<E>& tile, const T* first, std::int64_t stride,
                                std::int64_t samples, std::int64_t channels, std::int64_t readable) {
  // The rows are too far apart for the hardware to see the next tile coming.
  for (std::int64_t s = 0; s < samples; ++s) {
    const T* const next = first + s * stride + kLaneChannels;
    __builtin_prefetch(next);
    __builtin_prefetch(next + kLaneChannels / 2);
  }
  for (std::int64_t c = 0; c < channels; c += kLanes) {
    const auto count = static_cast<int>(smaller<std::int64_t>(kLanes, readable - c));
    if constexpr (std::is_same_v<T, float>) {
      if (samples == kLaneSamples && count == kLanes) {
        transpose(first + c, stride, tile.lanes[c], kLaneSamples);
        continue;
      }
    }
    alignas(64) E rows[kLaneSamples][kLanes];
    for (std::int64_t s = 0; s < kLaneSamples; ++s) {
      store(rows[s], s < samples ? load_as<E>(first + s * stride + c, count) : set1<Vec<E>>(0));
    }
    transpose(rows[0], kLanes, tile.lanes[c], kLaneSamples);
  }
}
template <class T, class E>
GROUPNORM_INLINE void store_tile(const SamplesTile<E>& tile, T* first, std::int64_t stride,
                                 std::int64_t samples, std::int64_t channels) {
  for (std::int64_t c = 0; c < channels; c += kLanes) {
    const auto count = static_cast<int>(smaller<std::int64_t>(kLanes, channels - c));
    if constexpr (std::is_same_v<T, float>) {
      if (samples == kLaneSamples && count == kLanes) {
        transpose(tile.lanes[c], kLaneSamples, first + c, stride);
        continue;
      }
    }
    alignas(64) E rows[kLaneSamples][kLanes];
    transpose(tile.lanes[c], kLaneSamples, rows[0], kLanes);
    for (std::int64_t s = 0; s < samples; ++s) store_as(first + s * stride + c, load(rows[s]), count);
  }
}

// step(first group, end group, first channel, channels): as many groups as a tile holds, at least one.
template <class Step>
GROUPNORM_INLINE void for_each_tile(const SamplesPlane& plane, const Step& step) {
  for (std::int64_t first = 0; first < plane.groups;) {
    const std::int64_t begin = plane.group_begin[first];
    std::int64_t end = first + 1;
    while (end < plane.groups && plane.group_begin[end + 1] - begin <= kLaneChannels) ++end;
    step(first, end, begin, plane.group_begin[end] - begin);
    first = end;
  }
}

// A NaN without its payload, which rounding to bfloat16 could carry over into the sign: parameters and
// statistics may hold any.
GROUPNORM_INLINE double plain(double value) {
  return value == value ? value : std::numeric_limits<double>::quiet_NaN();
}

// One number of each sample, a stride apart; the lanes past the last sample are 0.
GROUPNORM_INLINE F64 gather(const double* first, std::int64_t stride, std::int64_t samples) {
  double lanes[kLanes] = {};
  for (std::int64_t s = 0; s < samples; ++s) lanes[s] = first[s * stride];
  const F64 numbers = load(lanes);
  const double sum = reduce_add(numbers);
  if (__builtin_expect(sum == sum, 1)) return numbers;
  for (double& lane : lanes) lane = plain(lane);
  return load(lanes);
}
GROUPNORM_INLINE void scatter(double* first, std::int64_t stride, std::int64_t samples, const F64& a) {
  double lanes[kLanes];
  store(lanes, a);
  for (std::int64_t s = 0; s < samples; ++s) first[s * stride] = lanes[s];
}

// In double for float64; else in float, which knows swish for beta >= 0 only. Made once for a call: what swish
// needs of its beta takes divisions.
template <class T>
class LaneActivation {
 public:
  GROUPNORM_INLINE explicit LaneActivation(double beta)
      : in_float_(!std::is_same_v<T, double> && beta >= 0.0), single_(beta), exact_(beta) {}

  template <class Step>
  GROUPNORM_INLINE F64 operator()(const F64& v, const Step& step) const {
    return in_float_ ? widen(step(narrow(v), single_)) : step(v, exact_);
  }

 private:
  bool in_float_;
  SwishRate<F32> single_;
  SwishRate<F64> exact_;
};

template <class T, Activation A>
void samples_forward(const SamplesPlane& plane) {
  count_call();
  TileOf<T> tile;
  F64 values[kLaneChannels];
  const LaneActivation<T> activation(plane.beta);
  const auto group = [&](std::int64_t k, std::int64_t first_channel) GROUPNORM_INLINE_LAMBDA {
    const std::int64_t begin = plane.group_begin[k], channels = plane.group_begin[k + 1] - begin;
    auto* const lanes = tile.lanes + (begin - first_channel);
    const F64 inverse = set1<F64>(1.0 / static_cast<double>(channels));
    F64 sum = set1<F64>(0.0), rest = sum, m2 = sum;
    for (std::int64_t c = 0; c < channels; ++c) {
      values[c] = load_as<double>(lanes[c], kLanes);
      sum = sum + values[c];
    }
    const F64 mean = sum * inverse;
    for (std::int64_t c = 0; c < channels; ++c) {
      values[c] = values[c] - mean;
      rest = rest + values[c];
      m2 = fma(values[c], values[c], m2);
    }
    // What the mean's rounding left.
    const F64 low = rest * inverse;
    // Squares that overflow must not turn into zeros: infinity times 0 is NaN.
    const F64 exact_m2 = at_least(fnma(rest, low, m2), set1<F64>(0.0));
    const F64 variance = fma(set1<F64>(0.0), exact_m2, exact_m2 * inverse);
    const F64 rstd = set1<F64>(1.0) / sqrt(variance + set1<F64>(plane.eps));
    scatter(plane.mean + k, plane.groups, plane.samples, mean + low);
    scatter(plane.rstd + k, plane.groups, plane.samples, rstd);
    for (std::int64_t c = 0; c < channels; ++c) {
      const F64 v = fma((values[c] - low) * rstd, set1<F64>(plain(plane.gain[begin + c])),
                        set1<F64>(plain(plane.offset[begin + c])));
      const F64 result =
          A == Activation::none
              ? v
              : activation(v, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                  return activate<A>(u, rate);
                });
      store_as(lanes[c], result, kLanes);
    }
  };
  for_each_tile(plane, [&](std::int64_t first, std::int64_t end, std::int64_t begin,
                           std::int64_t channels) GROUPNORM_INLINE_LAMBDA {
    load_tile(tile, static_cast<const T*>(plane.x) + begin, plane.x_stride, plane.samples, channels,
              plane.channels - begin);
    for (std::int64_t k = first; k < end; ++k) group(k, begin);
    store_tile(tile, static_cast<T*>(plane.result) + begin, plane.result_stride, plane.samples,
               channels);
  });
}

template <class T, Activation A>
void samples_backward(const SamplesPlane& plane) {
  count_call();
  TileOf<T> x, dy;
  F64 xhats[kLaneChannels], dvs[kLaneChannels];
  const LaneActivation<T> activation(plane.beta);
  const auto group = [&](std::int64_t k, std::int64_t first_channel) GROUPNORM_INLINE_LAMBDA {
    const std::int64_t begin = plane.group_begin[k], channels = plane.group_begin[k + 1] - begin;
    const auto* const x_lanes = x.lanes + (begin - first_channel);
    auto* const dy_lanes = dy.lanes + (begin - first_channel);
    const F64 mean = gather(plane.mean + k, plane.groups, plane.samples);
    const F64 rstd = gather(plane.rstd + k, plane.groups, plane.samples);
    F64 p = set1<F64>(0.0), q = p;
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t at = begin + c;
      const F64 gain = set1<F64>(plain(plane.gain[at]));
      const F64 xhat = (load_as<double>(x_lanes[c], kLanes) - mean) * rstd;
      const F64 slope_at = fma(xhat, gain, set1<F64>(plain(plane.offset[at])));
      F64 dv = load_as<double>(dy_lanes[c], kLanes);
      if constexpr (A == Activation::relu) {
        dv = through_activation<A>(dv, slope_at, SwishRate<F64>(plane.beta));
      } else if constexpr (A != Activation::none) {
        dv = dv * activation(slope_at, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                 return through_activation<A>(set1<std::decay_t<decltype(u)>>(1), u, rate);
               });
      }
      const F64 product = dv * xhat;
      // A lane without a sample may hold 0 times infinity.
      const auto counted = [&](const F64& lanes) GROUPNORM_INLINE_LAMBDA {
        const int samples = static_cast<int>(plane.samples);
        return samples == kLanes ? lanes : first_elements<false>(lanes, samples);
      };
      plane.a[at] = reduce_add(counted(dv));
      if (plane.b != nullptr) plane.b[at] = reduce_add(counted(product));
      p = fma(gain, dv, p);
      q = fma(gain, product, q);
      xhats[c] = xhat;
      dvs[c] = dv;
    }
    if (plane.result == nullptr) return;
    const F64 inverse = set1<F64>(1.0 / static_cast<double>(channels));
    p = p * inverse;
    q = q * inverse;
    for (std::int64_t c = 0; c < channels; ++c) {
      const F64 gain = set1<F64>(plain(plane.gain[begin + c]));
      const F64 terms = fnma(xhats[c], q, fma(gain, dvs[c], set1<F64>(0.0) - p));
      store_as(dy_lanes[c], rstd * terms, kLanes);
    }
  };
  for_each_tile(plane, [&](std::int64_t first, std::int64_t end, std::int64_t begin,
                           std::int64_t channels) GROUPNORM_INLINE_LAMBDA {
    const std::int64_t readable = plane.channels - begin;
    load_tile(x, static_cast<const T*>(plane.x) + begin, plane.x_stride, plane.samples, channels,
              readable);
    load_tile(dy, static_cast<const T*>(plane.dy) + begin, plane.dy_stride, plane.samples, channels,
              readable);
    for (std::int64_t k = first; k < end; ++k) group(k, begin);
    if (plane.result == nullptr) return;
    // dx takes the place of dy in the tile.
    store_tile(dy, static_cast<T*>(plane.result) + begin, plane.result_stride, plane.samples,
               channels);
  });
}

}  // namespace
}  // namespace groupnorm
