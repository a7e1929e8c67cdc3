// Rows of features: sixteen samples of one position each, one in every lane, forward and backward.
//
// Guarantee: a lane's result depends on its own sample only.
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

  // From [sample][group], samples being a stride apart. The lanes past the last sample are 0.
  GROUPNORM_INLINE void gather(const double* first, std::int64_t stride, std::int64_t samples,
                               std::int64_t groups) {
    transpose(first, stride, samples, groups, lanes[0], kLaneSamples);
    for (std::int64_t k = 0; samples < kLaneSamples && k < groups; ++k) {
      std::fill(lanes[k] + samples, lanes[k] + kLaneSamples, 0.0);
    }
  }
  GROUPNORM_INLINE void scatter(double* first, std::int64_t stride, std::int64_t samples,
                                std::int64_t groups) const {
    transpose(lanes[0], kLaneSamples, groups, samples, first, stride);
  }
};

// As many of a plane's groups as a tile holds, at least one, and their channels' parameters.
struct GroupRange {
  std::int64_t first, count;
  std::int64_t first_channel, channels;
  const std::int64_t* begin;
  alignas(64) double gain[kLaneChannels], offset[kLaneChannels];

  // step(group, first channel, end), all counted from the range's first.
  template <class Step>
  GROUPNORM_INLINE void for_each_group(const Step& step) const {
    for (std::int64_t k = 0; k < count; ++k) step(k, begin[k] - first_channel, begin[k + 1] - first_channel);
  }
};

template <class Step>
GROUPNORM_INLINE void for_each_range(const SamplesPlane& plane, const Step& step) {
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
    for (std::int64_t c = 0; c < range.channels; c += kLanes) {
      const auto count = static_cast<int>(smaller<std::int64_t>(kLanes, range.channels - c));
      const std::int64_t at = range.first_channel + c;
      store(range.gain + c, plain(load_as<double>(plane.gain + at, count)));
      store(range.offset + c, plain(load_as<double>(plane.offset + at, count)));
    }
    step(range);
  }
}

// The lanes' sum of each of so many.
GROUPNORM_INLINE void reduce_add_each(const F64* a, std::int64_t count, double* sums) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) reduce_add_eight(a + i, sums + i);
  for (; i < count; ++i) sums[i] = reduce_add(a[i]);
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

// step(0), step(1) and so on, for the channels of a group: kChannels of them, whose numbers then stay in registers,
// or if that is 0 any number.
template <int kChannels, class Step>
GROUPNORM_INLINE void for_each_channel(std::int64_t channels, const Step& step) {
  if constexpr (kChannels > 0) {
    repeat<kChannels>(step);
  } else {
    for (std::int64_t c = 0; c < channels; ++c) step(c);
  }
}
// Channels in as many registers as AVX-512 has to spare; others have not, and take any number the same way.
constexpr int kUsualGroup = F64::kRegisters <= 2 ? 8 : 0;

// y takes the place of x.
template <Activation A, int kChannels, class E, class Lane>
GROUPNORM_INLINE void normalize_group(E (*lanes)[kLaneSamples], std::int64_t channels, const double* gain,
                                      const double* offset, double eps, const Lane& activation, double* mean_lanes,
                                      double* rstd_lanes) {
  F64 values[kChannels > 0 ? kChannels : kLaneChannels];
  const F64 inverse = set1<F64>(1.0 / static_cast<double>(kChannels > 0 ? kChannels : channels));
  F64 sum = set1<F64>(0.0), rest = sum, m2 = sum;
  for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
    values[c] = load_as<double>(lanes[c], kLanes);
    sum = sum + values[c];
  });
  const F64 mean = sum * inverse;
  for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
    values[c] = values[c] - mean;
    rest = rest + values[c];
    m2 = fma(values[c], values[c], m2);
  });
  // What the mean's rounding left.
  const F64 low = rest * inverse;
  // Squares that overflow must not turn into zeros: infinity times 0 is NaN.
  const F64 exact_m2 = at_least(fnma(rest, low, m2), set1<F64>(0.0));
  const F64 variance = fma(set1<F64>(0.0), exact_m2, exact_m2 * inverse);
  const F64 rstd = set1<F64>(1.0) / sqrt(variance + set1<F64>(eps));
  store(mean_lanes, mean + low);
  store(rstd_lanes, rstd);
  for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
    const F64 v = fma((values[c] - low) * rstd, set1<F64>(gain[c]), set1<F64>(offset[c]));
    const F64 result = A == Activation::none
                           ? v
                           : activation(v, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                               return activate<A>(u, rate);
                             });
    store_as(lanes[c], result, kLanes);
  });
}

template <class T, Activation A>
void samples_forward(const SamplesPlane& plane) {
  count_call();
  TileOf<T> tile;
  GroupsTile means, rstds;
  const LaneActivation<T> activation(plane.beta);
  for_each_range(plane, [&](const GroupRange& range) GROUPNORM_INLINE_LAMBDA {
    load_tile(tile, static_cast<const T*>(plane.x) + range.first_channel, plane.x_stride, plane.samples,
              range.channels, plane.channels - range.first_channel);
    range.for_each_group([&](std::int64_t k, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
      const auto with = [&](auto usual) GROUPNORM_INLINE_LAMBDA {
        normalize_group<A, decltype(usual)::value>(tile.lanes + begin, end - begin, range.gain + begin,
                                                   range.offset + begin, plane.eps, activation, means.lanes[k],
                                                   rstds.lanes[k]);
      };
      if (kUsualGroup > 0 && end - begin == kUsualGroup) {
        with(std::integral_constant<int, kUsualGroup>{});
      } else {
        with(std::integral_constant<int, 0>{});
      }
    });
    means.scatter(plane.mean + range.first, plane.groups, plane.samples, range.count);
    rstds.scatter(plane.rstd + range.first, plane.groups, plane.samples, range.count);
    store_tile(tile, static_cast<T*>(plane.result) + range.first_channel, plane.result_stride, plane.samples,
               range.channels);
  });
}

template <class T, Activation A>
void samples_backward(const SamplesPlane& plane) {
  count_call();
  TileOf<T> x, dy;
  GroupsTile means, rstds;
  F64 xhats[kLaneChannels], dvs[kLaneChannels], products[kLaneChannels], ps[kLaneChannels], qs[kLaneChannels];
  const LaneActivation<T> activation(plane.beta);
  const int samples = static_cast<int>(plane.samples);
  for_each_range(plane, [&](const GroupRange& range) GROUPNORM_INLINE_LAMBDA {
    // First, so that what is stored number by number has settled when it is read as vectors.
    means.gather(plane.mean + range.first, plane.groups, plane.samples, range.count);
    rstds.gather(plane.rstd + range.first, plane.groups, plane.samples, range.count);
    const std::int64_t readable = plane.channels - range.first_channel;
    load_tile(x, static_cast<const T*>(plane.x) + range.first_channel, plane.x_stride, plane.samples,
              range.channels, readable);
    load_tile(dy, static_cast<const T*>(plane.dy) + range.first_channel, plane.dy_stride, plane.samples,
              range.channels, readable);
    range.for_each_group([&](std::int64_t k, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
      const F64 mean = means[k], rstd = rstds[k];
      F64 p = set1<F64>(0.0), q = p;
      for (std::int64_t c = begin; c < end; ++c) {
        const F64 gain = set1<F64>(range.gain[c]);
        const F64 xhat = (load_as<double>(x.lanes[c], kLanes) - mean) * rstd;
        const F64 slope_at = fma(xhat, gain, set1<F64>(range.offset[c]));
        F64 dv = load_as<double>(dy.lanes[c], kLanes);
        if constexpr (A == Activation::relu) {
          dv = through_activation<A>(dv, slope_at, SwishRate<F64>(plane.beta));
        } else if constexpr (A != Activation::none) {
          dv = dv * activation(slope_at, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                   return through_activation<A>(set1<std::decay_t<decltype(u)>>(1), u, rate);
                 });
        }
        const F64 product = dv * xhat;
        p = fma(gain, dv, p);
        q = fma(gain, product, q);
        xhats[c] = xhat;
        // A lane without a sample may hold 0 times infinity.
        dvs[c] = samples == kLanes ? dv : first_elements<false>(dv, samples);
        products[c] = samples == kLanes ? product : first_elements<false>(product, samples);
      }
      const F64 inverse = set1<F64>(1.0 / static_cast<double>(end - begin));
      ps[k] = p * inverse;
      qs[k] = q * inverse;
    });
    reduce_add_each(dvs, range.channels, plane.a + range.first_channel);
    if (plane.b != nullptr) reduce_add_each(products, range.channels, plane.b + range.first_channel);
    if (plane.result == nullptr) return;
    range.for_each_group([&](std::int64_t k, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
      const F64 rstd = rstds[k], minus_p = set1<F64>(0.0) - ps[k], q = qs[k];
      for (std::int64_t c = begin; c < end; ++c) {
        const F64 terms = fnma(xhats[c], q, fma(set1<F64>(range.gain[c]), dvs[c], minus_p));
        // dx takes the place of dy in the tile.
        store_as(dy.lanes[c], rstd * terms, kLanes);
      }
    });
    store_tile(dy, static_cast<T*>(plane.result) + range.first_channel, plane.result_stride, plane.samples,
               range.channels);
  });
}

}  // namespace
}  // namespace groupnorm
