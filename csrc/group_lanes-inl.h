// A group of rows of features of which each lane has one sample: loops over its channels, sums, and its forward.
#pragma once

#include "samples_tile-inl.h"

namespace groupnorm {
namespace {

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
// step(its channels as a constant, or 0 if they are not the usual number).
template <class Step>
GROUPNORM_INLINE void with_channels(std::int64_t channels, const Step& step) {
  if (kUsualGroup > 0 && channels == kUsualGroup) {
    step(std::integral_constant<int, kUsualGroup>{});
  } else {
    step(std::integral_constant<int, 0>{});
  }
}

// A sum over the channels of a group: every other one in a sum of its own, so that neither has more than kFloatTerms
// and an addition need not wait for the one before.
template <class V>
struct ChannelSum {
  static_assert(kLaneChannels <= 2 * kFloatTerms);
  V parts[2] = {set1<V>(0), set1<V>(0)};

  GROUPNORM_INLINE void add(std::int64_t c, const V& a) { parts[c % 2] = parts[c % 2] + a; }
  GROUPNORM_INLINE void add_product(std::int64_t c, const V& a, const V& b) { parts[c % 2] = fma(a, b, parts[c % 2]); }
  GROUPNORM_INLINE V total() const { return parts[0] + parts[1]; }
};

// A group's numbers in the lanes of V, which is F32 or F64.
template <class V>
constexpr bool in_single = std::is_same_v<V, F32>;

template <Activation A, int kChannels, class V>
struct NormalizedGroup {
  V values[kChannels > 0 ? kChannels : kLaneChannels];  // differences from a mean
  V low;                                                // what that mean's rounding left
  F64 mean, rstd;

  // 1 in the lanes for which V will do, as double does for all.
  template <class E>
  GROUPNORM_INLINE V measure(const E (*lanes)[kLaneSamples], std::int64_t channels, double eps) {
    using Real = typename V::element;
    const double inverse = 1.0 / static_cast<double>(kChannels > 0 ? kChannels : channels);
    const V one_of_all = set1<V>(static_cast<Real>(inverse));
    // In float, differences from the first channel: they are exact where the mean is large, and 0 where all are alike.
    const V shift = in_single<V> ? load_as<Real>(lanes[0], kLanes) : set1<V>(0);
    ChannelSum<V> sum, rest, squares;
    for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
      values[c] = load_as<Real>(lanes[c], kLanes);
      if constexpr (in_single<V>) values[c] = values[c] - shift;
      sum.add(c, values[c]);
    });
    const V near = sum.total() * one_of_all;
    for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
      values[c] = values[c] - near;
      rest.add(c, values[c]);
      squares.add_product(c, values[c], values[c]);
    });
    low = rest.total() * one_of_all;
    const V m2 = at_least(fnma(rest.total(), low, squares.total()), set1<V>(0));
    mean = widen(near) + widen(low);
    if constexpr (in_single<V>) mean = widen(shift) + mean;
    // Squares that overflow must not turn into zeros: infinity times 0 is NaN.
    const F64 exact_m2 = widen(m2);
    const F64 variance = fma(set1<F64>(0.0), exact_m2, exact_m2 * set1<F64>(inverse));
    rstd = set1<F64>(1.0) / sqrt(variance + set1<F64>(eps));
    if constexpr (in_single<V>) {
      V fits = within(m2, kComfortableLeast, kComfortableMost);
      if (__builtin_expect(!all_ones(fits), 0) && eps > kComfortableLeast) {
        // A group whose elements are all alike has nothing that could be lost.
        ChannelSum<V> magnitudes;
        for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA { magnitudes.add(c, abs(values[c])); });
        const V least = set1<V>(std::numeric_limits<float>::denorm_min());
        fits = select_lt(magnitudes.total(), least, set1<V>(1), fits);
      }
      return fits;
    } else {
      return set1<V>(1);
    }
  }

  template <class E, class Real, class Lane>
  GROUPNORM_INLINE void write(E (*y)[kLaneSamples], std::int64_t channels, const Real* gain, const Real* offset,
                              const Lane& activation) const {
    const V factor = narrow_to(rstd, Real());
    for_each_channel<kChannels>(channels, [&](auto c) GROUPNORM_INLINE_LAMBDA {
      const V v = fma((values[c] - low) * factor, set1<V>(gain[c]), set1<V>(offset[c]));
      const V result = A == Activation::none
                           ? v
                           : activation(v, [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
                               return activate<A>(u, rate);
                             });
      store_as(y[c], result, kLanes);
    });
  }
};

}  // namespace
}  // namespace groupnorm
