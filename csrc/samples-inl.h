// Rows of features, forward and backward: sixteen samples of one position each, one in every lane, but for what
// rows_forward-inl.h and rows_backward-inl.h take.
//
// Guarantee: a lane's result depends on its own sample only, and so does the arithmetic it is computed in. That is
// float where its numbers fit, else double: for a group with a lane that does not, both are done, and each lane takes
// its own.
#pragma once

#include "group_lanes-inl.h"
#include "rows_backward-inl.h"
#include "rows_forward-inl.h"
#include "samples_tile-inl.h"

namespace groupnorm {
namespace {

// y takes the place of x.
template <Activation A, int kChannels, class V, class E, class Lane>
GROUPNORM_INLINE V normalize_group(E (*lanes)[kLaneSamples], std::int64_t channels, const GroupRange& range,
                                   std::int64_t first, double eps, const Lane& activation, double* mean_lanes,
                                   double* rstd_lanes, bool in_any_case) {
  NormalizedGroup<A, kChannels, V> group;
  const V fits = group.measure(lanes, channels, eps);
  if constexpr (in_single<V>) {
    if (!in_any_case && __builtin_expect(!all_ones(fits), 0)) return fits;
  }
  store(mean_lanes, group.mean);
  store(rstd_lanes, group.rstd);
  group.write(lanes, channels, range.gains<V>() + first, range.offsets<V>() + first, activation);
  return fits;
}

// The same in both arithmetics, for a group of which some lanes need the wider one.
template <Activation A, class Lane>
[[gnu::noinline]] void normalize_group_twice(float (*lanes)[kLaneSamples], std::int64_t channels,
                                             const GroupRange& range, std::int64_t first, double eps,
                                             const Lane& activation, double* mean_lanes, double* rstd_lanes) {
  SamplesTile<float> wide;
  alignas(64) double wide_mean[kLanes], wide_rstd[kLanes];
  std::memcpy(wide.lanes[0], lanes[0], static_cast<std::size_t>(channels) * sizeof lanes[0]);
  normalize_group<A, 0, F64>(wide.lanes, channels, range, first, eps, activation, wide_mean, wide_rstd, true);
  float fits[kLanes];
  to_array(normalize_group<A, 0, F32>(lanes, channels, range, first, eps, activation, mean_lanes, rstd_lanes, true),
           fits);
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    if (fits[lane] == 1.0f) continue;
    mean_lanes[lane] = wide_mean[lane];
    rstd_lanes[lane] = wide_rstd[lane];
    for (std::int64_t c = 0; c < channels; ++c) lanes[c][lane] = wide.lanes[c][lane];
  }
}

// Up to sixteen samples.
template <class T, Activation A>
GROUPNORM_INLINE void forward_in_lanes(const SamplesPlane& plane, const LaneActivation<T>& activation, bool in_float) {
  TileOf<T> tile;
  GroupsTile means, rstds;
  for_each_range(plane, kForwardLimits, [&](const GroupRange& range) GROUPNORM_INLINE_LAMBDA {
    load_tile(tile, static_cast<const T*>(plane.x) + range.first_channel, plane.x_stride, plane.samples,
              range.channels, plane.channels - range.first_channel);
    range.for_each_group([&](std::int64_t k, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
      const std::int64_t channels = end - begin;
      const auto in = [&](auto vector) GROUPNORM_INLINE_LAMBDA {
        using V = decltype(vector);
        bool done = false;
        with_channels(channels, [&](auto usual) GROUPNORM_INLINE_LAMBDA {
          const V fits = normalize_group<A, decltype(usual)::value, V>(
              tile.lanes + begin, channels, range, begin, plane.eps, activation, means.lanes[k], rstds.lanes[k], false);
          if constexpr (in_single<V>) done = all_ones(fits);
        });
        return done;
      };
      if constexpr (std::is_same_v<T, float>) {
        if (in_float && range.fits(begin, end)) {
          if (in(F32())) return;
          return normalize_group_twice<A>(tile.lanes + begin, channels, range, begin, plane.eps, activation,
                                          means.lanes[k], rstds.lanes[k]);
        }
      }
      in(F64());
    });
    means.scatter(plane.mean + range.first, plane.groups, plane.samples, range.count);
    rstds.scatter(plane.rstd + range.first, plane.groups, plane.samples, range.count);
    store_tile(tile, static_cast<T*>(plane.result) + range.first_channel, plane.result_stride, plane.samples,
               range.channels);
  });
}

template <class T, Activation A>
void samples_forward(const SamplesPlane& plane) {
  count_call();
  const LaneActivation<T> activation(plane.beta);
  // A sum of squares does not bear a negative eps, nor its root one beyond the range. The 16-bit types are computed in
  // double: where gain and offset cancel, float would not do.
  const bool eps_fits = plane.eps >= 0.0 && plane.eps < kComfortableMost;
  const bool in_float = std::is_same_v<T, float> && activation.in_float() && eps_fits;
  if constexpr (std::is_same_v<T, float>) {
    if (in_float && forward_by_rows<A>(plane, activation)) return;
  }
  SamplesPlane block = plane;
  for (std::int64_t n = 0; n < plane.samples; n += kLaneSamples) {
    block.x = static_cast<const T*>(plane.x) + n * plane.x_stride;
    block.result = static_cast<T*>(plane.result) + n * plane.result_stride;
    block.mean = plane.mean + n * plane.groups;
    block.rstd = plane.rstd + n * plane.groups;
    block.samples = smaller(kLaneSamples, plane.samples - n);
    forward_in_lanes<T, A>(block, activation, in_float);
  }
}

// dv, dv * xhat and dx of the channels of one group.
template <Activation A, int kChannels, class V>
struct GroupGradients {
  static constexpr int kMost = kChannels > 0 ? kChannels : static_cast<int>(kLaneChannels);
  V xhats[kMost], dvs[kMost];
  V rstd, p, q;

  // Writes dv and dv * xhat; 1 in the lanes for which V will do, as double does for all.
  template <class E, class Real, class Lane>
  GROUPNORM_INLINE V reduce(const E (*x)[kLaneSamples], const E (*dy)[kLaneSamples], std::int64_t channels,
                            int samples, const Real* gain, const Real* offset, const F64& exact_mean,
                            const F64& exact_rstd, const Lane& activation, V* all_dvs, V* products) {
    const V mean = narrow_to(exact_mean, Real());
    V mean_low = set1<V>(0);
    if constexpr (in_single<V>) mean_low = narrow(exact_mean - widen(mean));
    rstd = narrow_to(exact_rstd, Real());
    ChannelSum<V> sum_p, sum_q, xhat_magnitudes;
    V least_dv = set1<V>(1);
    for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
      const V weight = set1<V>(gain[c]);
      V away = load_as<Real>(x[c], kLanes) - mean;
      if constexpr (in_single<V>) away = away - mean_low;
      const V xhat = away * rstd;
      V dv = load_as<Real>(dy[c], kLanes);
      if constexpr (A != Activation::none) {
        const V v = fma(xhat, weight, set1<V>(offset[c]));
        dv = dv * activation(v, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
               return through_activation<A>(set1<std::decay_t<decltype(u)>>(1), u, rate);
             });
      }
      const V product = dv * xhat;
      sum_p.add_product(c, weight, dv);
      sum_q.add_product(c, weight, product);
      if constexpr (in_single<V>) {
        const V zero = set1<V>(0), magnitude = abs(dv);
        least_dv = at_most(least_dv, select_lt(zero, magnitude, magnitude, set1<V>(1)));
        xhat_magnitudes.add(c, abs(xhat));
      }
      xhats[c] = xhat;
      dvs[c] = dv;
      // A lane without a sample may hold 0 times infinity.
      all_dvs[c] = samples == kLanes ? dv : first_elements<false>(dv, samples);
      products[c] = samples == kLanes ? product : first_elements<false>(product, samples);
    });
    const V one_of_all = set1<V>(static_cast<Real>(1.0 / static_cast<double>(channels)));
    p = sum_p.total() * one_of_all;
    q = sum_q.total() * one_of_all;
    if constexpr (in_single<V>) {
      const V one = set1<V>(1), zero = set1<V>(0), most = set1<V>(kComfortableMost);
      const V terms = abs(p) + abs(q) * (one + xhat_magnitudes.total());
      const V sums = select_lt(terms, most, one, zero);
      const V gradients = select_lt(set1<V>(kLeastGradient), least_dv, sums, zero);
      return within(rstd, kComfortableLeast, kComfortableMost) * select_lt(abs(mean), most, gradients, zero);
    } else {
      poison(p, q);
      return set1<V>(1);
    }
  }

  template <class E, class Real>
  GROUPNORM_INLINE void apply(E (*dx)[kLaneSamples], std::int64_t channels, const Real* gain) const {
    const V minus_p = set1<V>(0) - p;
    for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
      store_as(dx[c], rstd * fnma(xhats[c], q, fma(set1<V>(gain[c]), dvs[c], minus_p)), kLanes);
    });
  }
};

// What the groups of a tile are computed from, and where their sums over the samples go: [channel].
template <class T>
struct GradientTile {
  TileOf<T> x, dy;  // dx takes the place of dy
  GroupsTile means, rstds;
  F32 dvs[kLaneChannels], products[kLaneChannels];
  F64 exact_dvs[kLaneChannels], exact_products[kLaneChannels];
  alignas(64) double a[kLaneChannels], b[kLaneChannels];

  // Sums are taken of sixteen channels at once, of which not all need exist.
  GROUPNORM_INLINE GradientTile() {
    for (std::int64_t c = 0; c < kLaneChannels; ++c) dvs[c] = products[c] = set1<F32>(0.0f);
  }
};

template <class V, class T>
GROUPNORM_INLINE V* dvs_of(GradientTile<T>& tile) {
  if constexpr (in_single<V>) return tile.dvs;
  else return tile.exact_dvs;
}
template <class V, class T>
GROUPNORM_INLINE V* products_of(GradientTile<T>& tile) {
  if constexpr (in_single<V>) return tile.products;
  else return tile.exact_products;
}

// Group k, channels [begin, end), in V: 1 in the lanes for which that will do.
template <Activation A, int kChannels, class V, class T, class E, class Lane>
GROUPNORM_INLINE V gradients_of_group(GradientTile<T>& tile, const GroupRange& range, std::int64_t k,
                                      std::int64_t begin, std::int64_t end, int samples, const Lane& activation,
                                      E (*dx)[kLaneSamples], bool in_any_case) {
  GroupGradients<A, kChannels, V> group;
  const V fits = group.reduce(tile.x.lanes + begin, tile.dy.lanes + begin, end - begin, samples,
                              range.gains<V>() + begin, range.offsets<V>() + begin, tile.means[k], tile.rstds[k],
                              activation, dvs_of<V>(tile) + begin, products_of<V>(tile) + begin);
  if constexpr (in_single<V>) {
    if (!in_any_case && __builtin_expect(!all_ones(fits), 0)) return fits;
  }
  if (dx != nullptr) group.apply(dx, end - begin, range.gains<V>() + begin);
  return fits;
}

// The same in both arithmetics; the sums of each lane's own are left where those of double would be.
template <Activation A, class T, class Lane>
[[gnu::noinline]] void gradients_of_group_twice(GradientTile<T>& tile, const GroupRange& range, std::int64_t k,
                                                std::int64_t begin, std::int64_t end, int samples,
                                                const Lane& activation, bool wants_dx) {
  TileOf<T> single, wide;
  alignas(64) float fits[kLanes];
  to_array(gradients_of_group<A, 0, F32>(tile, range, k, begin, end, samples, activation,
                                         wants_dx ? single.lanes : nullptr, true),
           fits);
  gradients_of_group<A, 0, F64>(tile, range, k, begin, end, samples, activation, wants_dx ? wide.lanes : nullptr,
                                true);
  const F64 fits_wide = widen(load(fits)), half = set1<F64>(0.5);
  for (std::int64_t c = begin; c < end; ++c) {
    const auto own = [&](F64& exact, const F32& rounded) GROUPNORM_INLINE_LAMBDA {
      exact = select_lt(fits_wide, half, exact, widen(rounded));
    };
    own(tile.exact_dvs[c], tile.dvs[c]);
    own(tile.exact_products[c], tile.products[c]);
    if (!wants_dx) continue;
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      tile.dy.lanes[c][lane] = (fits[lane] == 1.0f ? single : wide).lanes[c - begin][lane];
    }
  }
}

// Sums over the lanes of channels [begin, end), in double.
GROUPNORM_INLINE void reduce_add_each(const F64* a, std::int64_t begin, std::int64_t end, double* sums) {
  std::int64_t i = begin;
  for (; i + 8 <= end; i += 8) reduce_add_eight(a + i, sums + i);
  for (; i < end; ++i) sums[i] = reduce_add(a[i]);
}
// Of all of so many channels in float; of sixteen in double where one is not finite.
GROUPNORM_INLINE void reduce_add_each(const F32* a, std::int64_t channels, double* sums) {
  const F32 largest = set1<F32>(std::numeric_limits<float>::max()), one = set1<F32>(1.0f), zero = set1<F32>(0.0f);
  for (std::int64_t i = 0; i < channels; i += kLanes) {
    const F32 sixteen = reduce_add_sixteen(a + i);
    store(sums + i, widen(sixteen));
    if (__builtin_expect(all_ones(select_lt(abs(sixteen), largest, one, zero)), 1)) continue;
    for (std::int64_t c = i; c < smaller(i + kLanes, channels); ++c) sums[c] = reduce_add(widen(a[c]));
  }
}

template <class T, Activation A>
void samples_backward(const SamplesPlane& plane) {
  count_call();
  const LaneActivation<T> activation(plane.beta);
  const int samples = static_cast<int>(plane.samples);
  // Of relu it is the sign of v that counts, which float may get wrong.
  constexpr bool kInFloat = !std::is_same_v<T, double> && A != Activation::relu;
  const bool in_float = kInFloat && activation.in_float();
  if constexpr (kInFloat && A == Activation::none) {
    if (backward_by_rows<T>(plane)) return;
  }
  GradientTile<T> tile;
  for_each_range(plane, kBackwardLimits, [&](const GroupRange& range) GROUPNORM_INLINE_LAMBDA {
    // First, so that what is stored number by number has settled when it is read as vectors.
    tile.means.gather(plane.mean + range.first, plane.groups, plane.samples, range.count, 0.0);
    tile.rstds.gather(plane.rstd + range.first, plane.groups, plane.samples, range.count, 1.0);
    const std::int64_t readable = plane.channels - range.first_channel;
    load_tile(tile.x, static_cast<const T*>(plane.x) + range.first_channel, plane.x_stride, plane.samples,
              range.channels, readable);
    load_tile(tile.dy, static_cast<const T*>(plane.dy) + range.first_channel, plane.dy_stride, plane.samples,
              range.channels, readable);
    // Which groups have been computed in double, or in both.
    bool wide[kLaneChannels], any_wide = false;
    const bool wants_dx = plane.result != nullptr;
    range.for_each_group([&](std::int64_t k, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
      auto* const dx = wants_dx ? tile.dy.lanes + begin : nullptr;
      wide[k] = true;
      if constexpr (kInFloat) {
        if (in_float && range.fits(begin, end)) {
          with_channels(end - begin, [&](auto usual) GROUPNORM_INLINE_LAMBDA {
            wide[k] = !all_ones(gradients_of_group<A, decltype(usual)::value, F32>(tile, range, k, begin, end, samples,
                                                                                  activation, dx, false));
          });
          if (__builtin_expect(wide[k], 0)) {
            gradients_of_group_twice<A>(tile, range, k, begin, end, samples, activation, wants_dx);
            any_wide = true;
          }
          return;
        }
      }
      any_wide = true;
      gradients_of_group<A, 0, F64>(tile, range, k, begin, end, samples, activation, dx, true);
    });
    const auto sum_over_samples = [&](const F32* single, const F64* exact, double* sums, double* to)
                                      GROUPNORM_INLINE_LAMBDA {
      if (kInFloat && in_float) reduce_add_each(single, range.channels, sums);
      if (any_wide) {
        range.for_each_group([&](std::int64_t k, std::int64_t begin, std::int64_t end) GROUPNORM_INLINE_LAMBDA {
          if (wide[k]) reduce_add_each(exact, begin, end, sums);
        });
      }
      for_each_vector(range.channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
        double* const place = to + range.first_channel + c;
        const F64 total = load(sums + c);
        store_as(place, plane.adds ? load_as<double>(place, count) + total : total, count);
      });
    };
    sum_over_samples(tile.dvs, tile.exact_dvs, tile.a, plane.a);
    if (plane.b != nullptr) sum_over_samples(tile.products, tile.exact_products, tile.b, plane.b);
    if (!wants_dx) return;
    store_tile(tile.dy, static_cast<T*>(plane.result) + range.first_channel, plane.result_stride, plane.samples,
               range.channels);
  });
}

}  // namespace
}  // namespace groupnorm
