// Rows of features, turned around: sixteen samples of one position each, one in every lane.
//
// Guarantee: nothing outside the plane is read or written; lanes past the last sample hold numbers that harm nobody.
#pragma once

#include <algorithm>
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

// Rows of doubles into columns.
GROUPNORM_INLINE void transpose(const double* from, std::int64_t from_stride, std::int64_t rows,
                                std::int64_t columns, double* to, std::int64_t to_stride) {
  constexpr std::int64_t kStep = 4;
  for (std::int64_t row = 0; row < rows; row += kStep) {
    for (std::int64_t column = 0; column < columns; column += kStep) {
      const double* const first = from + row * from_stride + column;
      double* const result = to + column * to_stride + row;
      if (row + kStep <= rows && column + kStep <= columns) {
        transpose_four_doubles(first, from_stride, result, to_stride);
        continue;
      }
      for (std::int64_t r = 0; r < smaller(kStep, rows - row); ++r) {
        for (std::int64_t c = 0; c < smaller(kStep, columns - column); ++c) {
          result[c * to_stride + r] = first[r * from_stride + c];
        }
      }
    }
  }
}
GROUPNORM_INLINE void transpose(const double* from, std::int64_t from_stride, double* to,
                                std::int64_t to_stride) {
  transpose(from, from_stride, kLanes, kLanes, to, to_stride);
}

// The rows are too far apart for the hardware to see a tile coming.
template <class T>
GROUPNORM_INLINE void prefetch_tile(const T* first, std::int64_t stride, std::int64_t samples) {
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t s = 0; s < samples; ++s) {
    for (std::int64_t c = 0; c < kLaneChannels; c += kLine) __builtin_prefetch(first + s * stride + c);
  }
}

// The samples' elements from first on, a stride apart, of which `readable` may be read. The lanes past
// the last sample are 0.
template <class T, class E>
GROUPNORM_INLINE void load_tile(SamplesTile<E>& tile, const T* first, std::int64_t stride,
                                std::int64_t samples, std::int64_t channels, std::int64_t readable) {
  prefetch_tile(first + kLaneChannels, stride, samples);
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

// A NaN loses its payload, which rounding to bfloat16 could carry over into the sign: parameters and
// statistics may hold any.
GROUPNORM_INLINE F64 plain(const F64& a) {
  return each<F64>([&](int i) GROUPNORM_INLINE_LAMBDA -> f64r {
    return a.v[i] == a.v[i] ? a.v[i] : broadcast(std::numeric_limits<double>::quiet_NaN());
  });
}

// One number of each of a tile's groups and samples: [group][sample].
struct GroupsTile {
  alignas(64) double lanes[kLaneChannels][kLaneSamples];

  GROUPNORM_INLINE F64 operator[](std::int64_t group) const { return plain(load(lanes[group])); }

  // From [sample][group], samples being a stride apart. The lanes past the last sample have the number that is given.
  GROUPNORM_INLINE void gather(const double* first, std::int64_t stride, std::int64_t samples,
                               std::int64_t groups, double past_last) {
    transpose(first, stride, samples, groups, lanes[0], kLaneSamples);
    for (std::int64_t k = 0; samples < kLaneSamples && k < groups; ++k) {
      std::fill(lanes[k] + samples, lanes[k] + kLaneSamples, past_last);
    }
  }
  GROUPNORM_INLINE void scatter(double* first, std::int64_t stride, std::int64_t samples,
                                std::int64_t groups) const {
    transpose(lanes[0], kLaneSamples, groups, samples, first, stride);
  }
};

// 1 where a magnitude is between these two, 0 where not.
template <class V>
GROUPNORM_INLINE V within(const V& a, double least, double most) {
  const auto c = [](double value) GROUPNORM_INLINE_LAMBDA { return set1<V>(static_cast<typename V::element>(value)); };
  const V magnitude = abs(a), below = select_lt(magnitude, c(most), c(1.0), c(0.0));
  return select_lt(c(least), magnitude, below, c(0.0));
}
// Whether all are 1, of ones and zeros.
GROUPNORM_INLINE bool all_ones(const F32& a) { return all_lt(set1<F32>(0.5f), a); }

// Magnitudes of dv, or 0, of gains and of xhat for which products of all three and another xhat, and sums of those over a
// group or a block of samples, are finite in float, and those of a dv and a gain normal.
constexpr double kLeastGradient = 0x1p-75, kMostGradient = 0x1p50;
constexpr double kMostXhat = 0x1p20;

// Magnitudes of parameters for which float will do. A gain may be 0, and an offset as small as can be.
struct ParameterLimits {
  double least_gain, most;

  GROUPNORM_INLINE F32 fit(const F64& gain) const {
    return narrow(select_lt(set1<F64>(0.0), abs(gain), within(gain, least_gain, most), set1<F64>(1.0)));
  }
  GROUPNORM_INLINE F32 fit(const F64& gain, const F64& offset) const {
    return narrow(select_lt(abs(offset), set1<F64>(most), widen(fit(gain)), set1<F64>(0.0)));
  }
};
constexpr ParameterLimits kForwardLimits = {kComfortableLeast, kComfortableMost};
constexpr ParameterLimits kBackwardLimits = {0x1p-35, 0x1p30};

// As many of a plane's groups as a tile holds, at least one, and their channels' parameters.
struct GroupRange {
  std::int64_t first, count;
  std::int64_t first_channel, channels;
  const std::int64_t* begin;
  alignas(64) double gain[kLaneChannels], offset[kLaneChannels];
  alignas(64) float gain_single[kLaneChannels], offset_single[kLaneChannels];
  alignas(64) float fit[kLaneChannels];  // 1 where the parameters do not need double
  bool all_fit;

  // The parameters in the arithmetic of V.
  template <class V>
  GROUPNORM_INLINE const typename V::element* gains() const {
    if constexpr (std::is_same_v<V, F64>) return gain;
    else return gain_single;
  }
  template <class V>
  GROUPNORM_INLINE const typename V::element* offsets() const {
    if constexpr (std::is_same_v<V, F64>) return offset;
    else return offset_single;
  }

  // Whether float will do for the parameters of these channels, counted from the range's first.
  GROUPNORM_INLINE bool fits(std::int64_t from, std::int64_t to) const {
    if (__builtin_expect(all_fit, 1)) return true;
    for (std::int64_t c = from; c < to; ++c) {
      if (fit[c] != 1.0f) return false;
    }
    return true;
  }

  // step(group, first channel, end), all counted from the range's first.
  template <class Step>
  GROUPNORM_INLINE void for_each_group(const Step& step) const {
    for (std::int64_t k = 0; k < count; ++k) step(k, begin[k] - first_channel, begin[k + 1] - first_channel);
  }
};

template <class Step>
GROUPNORM_INLINE void for_each_range(const SamplesPlane& plane, const ParameterLimits& limits, const Step& step) {
  GroupRange range;
  for (range.first = 0; range.first < plane.groups; range.first += range.count) {
    range.begin = plane.group_begin + range.first;
    range.first_channel = range.begin[0];
    const std::int64_t most = plane.groups - range.first;
    range.count = 1;
    while (range.count < most && range.begin[range.count + 1] - range.first_channel <= kLaneChannels) {
      ++range.count;
    }
    range.channels = range.begin[range.count] - range.first_channel;
    range.all_fit = true;
    for (std::int64_t c = 0; c < range.channels; c += kLanes) {
      const auto count = static_cast<int>(smaller<std::int64_t>(kLanes, range.channels - c));
      const std::int64_t at = range.first_channel + c;
      const F64 gain = plain(load_as<double>(plane.gain + at, count));
      const F64 offset = plain(load_as<double>(plane.offset + at, count));
      const F32 fit = limits.fit(gain, offset);
      store(range.gain + c, gain);
      store(range.offset + c, offset);
      store(range.gain_single + c, narrow(gain));
      store(range.offset_single + c, narrow(offset));
      store(range.fit + c, fit);
      range.all_fit &= all_ones(fit);
    }
    step(range);
  }
}

// What is not finite makes all of its group NaN.
GROUPNORM_INLINE void poison(F64& p, F64& q) {
  const F64 nothing = (p + q) * set1<F64>(0.0);
  p = p + nothing;
  q = q + nothing;
}

// In double for float64; else in float, which knows swish for beta >= 0 only. Made once for a call: what swish
// needs of its beta takes divisions.
template <class T>
class LaneActivation {
 public:
  GROUPNORM_INLINE explicit LaneActivation(double beta)
      : in_float_(!std::is_same_v<T, double> && beta >= 0.0), single_(beta), exact_(beta) {}

  GROUPNORM_INLINE bool in_float() const { return in_float_; }

  template <class Step>
  GROUPNORM_INLINE F64 operator()(const F64& v, const Step& step) const {
    return in_float_ ? widen(step(narrow(v), single_)) : step(v, exact_);
  }
  // Only if it is in float.
  template <class Step>
  GROUPNORM_INLINE F32 operator()(const F32& v, const Step& step) const {
    return step(v, single_);
  }

 private:
  bool in_float_;
  SwishRate<F32> single_;
  SwishRate<F64> exact_;
};

}  // namespace
}  // namespace groupnorm
