// The backward of rows of features whose groups are 4, 8 or 16 channels, without an activation: a vector holds whole groups
// of one sample, and the sums of a group are added up between neighbouring lanes. Rows are read and written in their
// order. (With an activation each vector's chain of operations is so long that sixteen samples side by side are faster.)
//
// Guarantee: a group's result depends on its own elements and parameters only, and so does the arithmetic it is computed
// in. That is float where its numbers fit, else double: of a vector with a group that does not, both are done, and each lane
// takes its own.
#pragma once

#include "samples_tile-inl.h"

namespace groupnorm {
namespace {

// Channels whose numbers are at hand while all samples of a block go by.
constexpr std::int64_t kStripChannels = 512;

// The sum of each group, in all of its lanes: i with i + kSize / 2, then i + kSize / 4 and so on.
template <int kSize>
GROUPNORM_INLINE F32 group_sum(F32 a) {
  if constexpr (kSize >= 16) a = a + swap_lanes<8>(a);
  if constexpr (kSize >= 8) a = a + swap_lanes<4>(a);
  a = a + swap_lanes<2>(a);
  return a + swap_lanes<1>(a);
}
// The same for groups of any such size.
template <class V>
GROUPNORM_INLINE V group_sum(const V& a, int size) {
  typename V::element lanes[kLanes], sums[kLanes];
  to_array(a, lanes);
  for (int half = size / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane] + lanes[lane ^ half];
    std::memcpy(lanes, sums, sizeof lanes);
  }
  return from_array<V>(lanes);
}

// The lane's own of two results: what was computed in float where that fits, else what was in double.
GROUPNORM_INLINE F32 own_of(const F32& fits, const F32& single, const F64& exact) {
  return select_lt(fits, set1<F32>(0.5f), narrow(exact), single);
}
GROUPNORM_INLINE F64 own_of(const F64& fits, const F64& single, const F64& exact) {
  return select_lt(fits, set1<F64>(0.5), exact, single);
}
// The parameters of so many channels from one on, and for which vectors of them float will do: a bit for each.
struct StripParameters {
  static_assert(kStripChannels / kLanes <= 32);
  alignas(64) float gain[kStripChannels];
  std::uint32_t fit = 0;

  GROUPNORM_INLINE StripParameters(const SamplesPlane& plane, std::int64_t first, std::int64_t channels) {
    for_each_vector(channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
      const F64 gains = plain(load_as<double>(plane.gain + first + c, count));
      store(gain + c, narrow(gains));
      fit |= std::uint32_t{all_ones(kBackwardLimits.fit(gains))} << (c / kLanes);
    });
  }
};

// The gradients of a vector, in the lanes of V, which is F32 or F64.
template <class V>
struct RowGradients {
  V product, terms;  // dy * xhat, and dx over r
  V most, least;     // of dy and xhat: whether V will do is told by these

  // sum(a) has each group's sum in all of its lanes.
  template <class Sum>
  GROUPNORM_INLINE RowGradients(const V& x, const V& dy, const V& mean, const V& mean_low, const V& rstd,
                                const V& gain, int size, const Sum& sum) {
    const V one_of_all = set1<V>(static_cast<typename V::element>(1.0 / size));
    const V xhat = ((x - mean) - mean_low) * rstd;
    const V weighted = gain * dy;
    product = dy * xhat;
    V p = sum(weighted) * one_of_all, q = sum(gain * product) * one_of_all;
    // In float this is left to double, which is then asked.
    if constexpr (std::is_same_v<V, F64>) poison(p, q);
    terms = fnma(xhat, q, weighted - p);
    const V magnitude = abs(dy);
    most = fma(abs(xhat), set1<V>(kMostGradient / kMostXhat), magnitude);
    least = select_lt(set1<V>(0), magnitude, magnitude, set1<V>(1));
  }
};

// Statistics of a sample's groups, as many as a strip has.
struct RowStatistics {
  static constexpr std::int64_t kGroups = kStripChannels / 4 + kLanes;  // spread() reads sixteen
  alignas(64) float mean[kGroups] = {}, mean_low[kGroups] = {}, rstd[kGroups] = {};
  bool fit = true;

  GROUPNORM_INLINE void take(const double* exact_mean, const double* exact_rstd, std::int64_t groups) {
    fit = true;
    for_each_vector(groups, [&](std::int64_t k, int count) GROUPNORM_INLINE_LAMBDA {
      const F64 center = plain(load_as<double>(exact_mean + k, count));
      const F32 near = narrow(center), root = narrow(plain(load_as<double>(exact_rstd + k, count)));
      store(mean + k, near);
      store(mean_low + k, narrow(center - widen(near)));
      store(rstd + k, root);
      fit &= all_lt(set1<F32>(0.5f), count == kLanes ? fitting(near, root) : others_fit(fitting(near, root), count));
    });
  }

  static GROUPNORM_INLINE F32 fitting(const F32& near, const F32& root) {
    return select_lt(abs(near), set1<F32>(kComfortableMost), within(root, kComfortableLeast, kComfortableMost),
                     set1<F32>(0.0f));
  }

 private:
  static GROUPNORM_INLINE F32 others_fit(const F32& fits, int count) {
    return first_elements<false>(fits - set1<F32>(1.0f), count) + set1<F32>(1.0f);
  }
};

// The sums of a strip's channels over the samples of a block.
struct StripSums {
  alignas(64) float a[kStripChannels] = {}, b[kStripChannels] = {};
  // What was computed in double; zeros are written when there is some.
  alignas(64) double exact_a[kStripChannels], exact_b[kStripChannels];
  bool any_exact = false;

  GROUPNORM_INLINE void add(std::int64_t c, const F32& dy, const F32& product) {
    store(a + c, load(a + c) + dy);
    store(b + c, load(b + c) + product);
  }
  GROUPNORM_INLINE void add(std::int64_t c, const F64& dy, const F64& product) {
    if (!any_exact) {
      std::memset(exact_a, 0, sizeof exact_a);
      std::memset(exact_b, 0, sizeof exact_b);
      any_exact = true;
    }
    store(exact_a + c, load(exact_a + c) + dy);
    store(exact_b + c, load(exact_b + c) + product);
  }
};

// The gradients of a vector some of whose groups need double.
template <class T>
[[gnu::noinline]] void row_gradients_twice(const SamplesPlane& plane, std::int64_t n, std::int64_t channel, int count,
                                           StripSums& sums, std::int64_t at) {
  const int size = static_cast<int>(plane.group_size);
  // There is a group at least; without that GCC warns of copies of no elements.
  if (count < 4) __builtin_unreachable();
  const auto sum = [&](const auto& a) GROUPNORM_INLINE_LAMBDA { return group_sum(a, size); };
  const T* const x = static_cast<const T*>(plane.x) + n * plane.x_stride + channel;
  const T* const dy = static_cast<const T*>(plane.dy) + n * plane.dy_stride + channel;
  double means[kLanes] = {}, rstds[kLanes] = {};
  for (int lane = 0; lane < count; ++lane) {
    const std::int64_t group = n * plane.groups + (channel + lane) / size;
    means[lane] = plane.mean[group];
    rstds[lane] = plane.rstd[group];
  }
  const F64 gain = plain(load_as<double>(plane.gain + channel, count));
  const F64 mean = plain(from_array<F64>(means)), rstd = plain(from_array<F64>(rstds));
  const F32 near = narrow(mean), root = narrow(rstd);
  const F64 dy_wide = load_as<double>(dy, count);
  const RowGradients<F32> single(load_as<float>(x, count), load_as<float>(dy, count), near, narrow(mean - widen(near)),
                                 root, narrow(gain), size, sum);
  const RowGradients<F64> exact(load_as<double>(x, count), dy_wide, mean, set1<F64>(0.0), rstd, gain, size, sum);
  const F32 one = set1<F32>(1.0f), zero = set1<F32>(0.0f);
  const F32 below = select_lt(single.most, set1<F32>(kMostGradient), one, zero);
  const F32 gradients = select_lt(set1<F32>(kLeastGradient), single.least, below, zero);
  const F32 ones = sum(gradients * kBackwardLimits.fit(gain) * RowStatistics::fitting(near, root));
  const F32 fits = select_lt(set1<F32>(static_cast<float>(size) - 0.5f), ones, one, zero);
  const F64 wide_fits = widen(fits);
  const auto existing = [&](const F64& a) GROUPNORM_INLINE_LAMBDA { return first_elements<false>(a, count); };
  sums.add(at, existing(dy_wide), existing(own_of(wide_fits, widen(single.product), exact.product)));
  if (plane.result == nullptr) return;
  T* const dx = static_cast<T*>(plane.result) + n * plane.result_stride + channel;
  store_as(dx, own_of(fits, root * single.terms, rstd * exact.terms), count);
}

template <class T, int kSize>
GROUPNORM_INLINE void backward_strip(const SamplesPlane& plane, std::int64_t first, std::int64_t channels) {
  const StripParameters parameters(plane, first, channels);
  RowStatistics statistics;
  const auto sum = [](const F32& a) GROUPNORM_INLINE_LAMBDA { return group_sum<kSize>(a); };
  StripSums sums;
  const F32 most = set1<F32>(kMostGradient), least = set1<F32>(kLeastGradient);
  for (std::int64_t n = 0; n < plane.samples; ++n) {
    const std::int64_t group = n * plane.groups + first / kSize;
    statistics.take(plane.mean + group, plane.rstd + group, channels / kSize);
    const std::uint32_t fit = statistics.fit ? parameters.fit : 0;
    const T* const x = static_cast<const T*>(plane.x) + n * plane.x_stride + first;
    const T* const dy = static_cast<const T*>(plane.dy) + n * plane.dy_stride + first;
    T* const dx = plane.result == nullptr ? nullptr
                                          : static_cast<T*>(plane.result) + n * plane.result_stride + first;
    for_each_vector(channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
      const F32 rstd = spread<kSize>(statistics.rstd + c / kSize);
      const F32 gradient = load_as<float>(dy + c, count);
      const RowGradients<F32> row(load_as<float>(x + c, count), gradient, spread<kSize>(statistics.mean + c / kSize),
                                  spread<kSize>(statistics.mean_low + c / kSize), rstd, load(parameters.gain + c),
                                  kSize, sum);
      const bool fits = (fit >> (c / kLanes) & 1) != 0 && all_lt(row.most, most) && all_lt(least, row.least);
      if (__builtin_expect(!fits, 0)) {
        return row_gradients_twice<T>(plane, n, first + c, count, sums, c);
      }
      sums.add(c, gradient, row.product);
      if (dx != nullptr) store_as(dx + c, rstd * row.terms, count);
    });
  }
  const auto write = [&](const float* single, const double* exact, double* to) GROUPNORM_INLINE_LAMBDA {
    for_each_vector(channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
      F64 total = widen(load(single + c));
      if (sums.any_exact) total = total + load(exact + c);
      if (plane.adds) total = load_as<double>(to + first + c, count) + total;
      store_as(to + first + c, total, count);
    });
  };
  write(sums.a, sums.exact_a, plane.a);
  if (plane.b != nullptr) write(sums.b, sums.exact_b, plane.b);
}

// Whether groups are of a size that is taken here, and then all of it.
template <class T>
GROUPNORM_INLINE bool backward_by_rows(const SamplesPlane& plane) {
  const auto all = [&](auto size) GROUPNORM_INLINE_LAMBDA {
    for (std::int64_t first = 0; first < plane.channels; first += kStripChannels) {
      backward_strip<T, decltype(size)::value>(plane, first, smaller(kStripChannels, plane.channels - first));
    }
    return true;
  };
  switch (plane.group_size) {
    case 4: return all(std::integral_constant<int, 4>{});
    case 8: return all(std::integral_constant<int, 8>{});
    case 16: return all(std::integral_constant<int, 16>{});
    default: return false;
  }
}

}  // namespace
}  // namespace groupnorm
