// The forward of rows of features of float32 whose groups are 4, 8 or 16 channels: vectors hold whole groups of one sample,
// and the sums of sixteen groups are added up together. Rows are read and written in their order.
//
// Guarantee: a group's result depends on its own elements and parameters only, and so does the arithmetic it is computed
// in. That is float where its numbers fit; a group that does not is computed again in double.
#pragma once

#include "group_lanes-inl.h"
#include "samples_tile-inl.h"

namespace groupnorm {
namespace {

// 1 / sqrt(a) in double, of what has such a root in float too: that one, right to 2^-22, and a step that leaves 2^-52. The
// CPU's own root and quotient of doubles take several times as long.
GROUPNORM_INLINE F64 inverse_root(const F64& a) {
  const F64 near = widen(set1<F32>(1.0f) / sqrt(narrow(a)));
  const F64 error = fnma(a * near, near, set1<F64>(1.0));
  return fma(near * error, fma(error, set1<F64>(0.375), set1<F64>(0.5)), near);
}

// The parameters of a strip's channels, and of which groups float will do for them.
struct RowParameters {
  static constexpr std::int64_t kChannels = 512;
  alignas(64) float gain[kChannels], offset[kChannels];
  alignas(64) float fit[kChannels];  // of each group, 1 or 0, and 1 where there is none

  GROUPNORM_INLINE RowParameters(const SamplesPlane& plane, std::int64_t first, std::int64_t channels) {
    for_each_vector(channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
      const F64 gains = plain(load_as<double>(plane.gain + first + c, count));
      const F64 offsets = plain(load_as<double>(plane.offset + first + c, count));
      store(gain + c, narrow(gains));
      store(offset + c, narrow(offsets));
      store(fit + c, kForwardLimits.fit(gains, offsets));
    });
    const std::int64_t size = plane.group_size, groups = channels / size;
    for (std::int64_t k = 0; k < groups; ++k) {
      float all = 1.0f;
      for (std::int64_t c = k * size; c < (k + 1) * size; ++c) all *= fit[c];
      fit[k] = all;
    }
    for (std::int64_t k = groups; k < kChannels; ++k) fit[k] = 1.0f;
  }
};

// What sixteen groups of a sample lie in, or are written to.
struct RowOfGroups {
  const float* x;
  float* y;
  const double *gain, *offset;
  double *mean, *rstd;
};

// One of them, in double, from its elements.
template <Activation A, class Lane>
[[gnu::noinline]] void normalize_row_group(const float* x, std::int64_t size, std::int64_t k, const RowOfGroups& row,
                                           double eps, const Lane& activation) {
  double gain[kLaneChannels], offset[kLaneChannels];
  SamplesTile<float> tile;
  for_each_vector(size, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
    store(gain + c, plain(load_as<double>(row.gain + k * size + c, count)));
    store(offset + c, plain(load_as<double>(row.offset + k * size + c, count)));
  });
  for (std::int64_t c = 0; c < size; ++c) store(tile.lanes[c], set1<F32>(x[c]));
  NormalizedGroup<A, 0, F64> group;
  group.measure(tile.lanes, size, eps);
  group.write(tile.lanes, size, gain, offset, activation);
  for (std::int64_t c = 0; c < size; ++c) row.y[k * size + c] = tile.lanes[c][0];
  row.mean[k] = first_lane(group.mean);
  row.rstd[k] = first_lane(group.rstd);
}

// Sixteen groups in as many vectors as a group has lanes. channel: where the parameters of the first are.
template <Activation A, int kSize, class Lane>
GROUPNORM_INLINE void normalize_sixteen_groups(const RowOfGroups& row, const RowParameters& parameters,
                                               std::int64_t channel, double eps, const Lane& activation) {
  const F32 one_of_all = set1<F32>(1.0f / kSize), zero = set1<F32>(0.0f), one = set1<F32>(1.0f);
  F32 values[kSize], others[kSize];
  alignas(64) float shifts[kLanes];
  for (int k = 0; k < kLanes; ++k) shifts[k] = row.x[k * kSize];
  // Differences from a group's first element: they are exact where the mean is large, and 0 where all are alike.
  repeat<kSize>([&](int i) GROUPNORM_INLINE_LAMBDA {
    const F32 own = load(row.x + i * kLanes);
    values[i] = own - first_of_groups<kSize>(own);
  });
  const F32 near = reduce_groups<kSize>(values) * one_of_all;
  repeat<kSize>([&](int i) GROUPNORM_INLINE_LAMBDA {
    values[i] = values[i] - spread_part<kSize>(near, i);
    others[i] = values[i] * values[i];
  });
  const F32 rest = reduce_groups<kSize>(values), low = rest * one_of_all;
  const F32 m2 = at_least(fnma(rest, low, reduce_groups<kSize>(others)), zero);
  const F64 rstd = inverse_root(fma(widen(m2), set1<F64>(1.0 / kSize), set1<F64>(eps)));
  F32 fits = within(m2, kComfortableLeast, kComfortableMost);
  if (__builtin_expect(!all_ones(fits), 0) && eps > kComfortableLeast) {
    // A group whose elements are all alike has nothing that could be lost.
    repeat<kSize>([&](int i) GROUPNORM_INLINE_LAMBDA { others[i] = abs(values[i]); });
    const F32 least = set1<F32>(std::numeric_limits<float>::denorm_min());
    fits = select_lt(reduce_groups<kSize>(others), least, one, fits);
  }
  fits = fits * load(parameters.fit + channel / kSize);
  const bool in_float = all_ones(fits);
  float kept[kLanes * kSize];  // y may be x
  if (__builtin_expect(!in_float, 0)) std::memcpy(kept, row.x, sizeof kept);
  store(row.mean, widen(load(shifts)) + (widen(near) + widen(low)));
  store(row.rstd, rstd);
  const F32 factor = narrow(rstd);
  const auto v_of = [&](int i) GROUPNORM_INLINE_LAMBDA {
    const F32 xhat = (values[i] - spread_part<kSize>(low, i)) * spread_part<kSize>(factor, i);
    const std::int64_t at = channel + i * kLanes;
    return fma(xhat, load(parameters.gain + at), load(parameters.offset + at));
  };
  if constexpr (A == Activation::none) {
    repeat<kSize>([&](int i) GROUPNORM_INLINE_LAMBDA { store(row.y + i * kLanes, v_of(i)); });
  } else {
    repeat<kSize>([&](int i) GROUPNORM_INLINE_LAMBDA { values[i] = v_of(i); });
    for (int i = 0; i < kSize; ++i) {
      store(row.y + i * kLanes, activation(values[i], [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
              return activate<A>(u, rate);
            }));
    }
  }
  if (__builtin_expect(in_float, 1)) return;
  float own[kLanes];
  to_array(fits, own);
  for (int k = 0; k < kLanes; ++k) {
    if (own[k] != 1.0f) normalize_row_group<A>(kept + k * kSize, kSize, k, row, eps, activation);
  }
}

// The last groups of a sample: the others are zeros, and nobody sees what becomes of them.
template <Activation A, int kSize, class Lane>
[[gnu::noinline]] void normalize_last_groups(const RowOfGroups& row, std::int64_t groups,
                                             const RowParameters& parameters, std::int64_t channel, double eps,
                                             const Lane& activation) {
  constexpr std::int64_t kChunk = kLanes * kSize;
  alignas(64) float elements[kChunk] = {};
  alignas(64) double gain[kChunk] = {}, offset[kChunk] = {}, mean[kLanes], rstd[kLanes];
  const auto channels = static_cast<std::size_t>(groups * kSize), count = static_cast<std::size_t>(groups);
  std::memcpy(elements, row.x, channels * sizeof(float));
  std::memcpy(gain, row.gain, channels * sizeof(double));
  std::memcpy(offset, row.offset, channels * sizeof(double));
  normalize_sixteen_groups<A, kSize>({elements, elements, gain, offset, mean, rstd}, parameters, channel, eps,
                                     activation);
  std::memcpy(row.y, elements, channels * sizeof(float));
  std::memcpy(row.mean, mean, count * sizeof(double));
  std::memcpy(row.rstd, rstd, count * sizeof(double));
}

template <Activation A, int kSize, class Lane>
GROUPNORM_INLINE void forward_by_rows_of(const SamplesPlane& plane, const Lane& activation) {
  constexpr std::int64_t kChunk = kLanes * kSize;
  static_assert(RowParameters::kChannels % kChunk == 0);
  for (std::int64_t first = 0; first < plane.channels; first += RowParameters::kChannels) {
    const std::int64_t channels = smaller(RowParameters::kChannels, plane.channels - first);
    const RowParameters parameters(plane, first, channels);
    for (std::int64_t n = 0; n < plane.samples; ++n) {
      for (std::int64_t c = 0; c < channels; c += kChunk) {
        const std::int64_t channel = first + c, group = n * plane.groups + channel / kSize;
        const RowOfGroups row = {static_cast<const float*>(plane.x) + n * plane.x_stride + channel,
                                 static_cast<float*>(plane.result) + n * plane.result_stride + channel,
                                 plane.gain + channel, plane.offset + channel, plane.mean + group, plane.rstd + group};
        if (c + kChunk <= channels) {
          normalize_sixteen_groups<A, kSize>(row, parameters, c, plane.eps, activation);
        } else {
          normalize_last_groups<A, kSize>(row, (channels - c) / kSize, parameters, c, plane.eps, activation);
        }
      }
    }
  }
}

// Whether groups are of a size that is taken here, and then all of it.
template <Activation A, class Lane>
GROUPNORM_INLINE bool forward_by_rows(const SamplesPlane& plane, const Lane& activation) {
  switch (plane.group_size) {
    case 4: forward_by_rows_of<A, 4>(plane, activation); return true;
    case 8: forward_by_rows_of<A, 8>(plane, activation); return true;
    case 16: forward_by_rows_of<A, 16>(plane, activation); return true;
    default: return false;
  }
}

}  // namespace
}  // namespace groupnorm
