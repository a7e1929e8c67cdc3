// The backward of rows of features whose groups are 4, 8 or 16 channels: a vector holds whole groups of one sample, and
// the sums of a group are added up between neighbouring lanes. Rows are read and written in their order.
//
// Guarantee: a group's result depends on its own elements and parameters only, and so does the arithmetic it is computed
// in. That is float where its numbers are comfortable, else double: of a vector with such a group both are done, and each
// lane takes its own.
#pragma once

#include "samples_tile-inl.h"

namespace groupnorm {
namespace {

// Channels whose numbers are at hand while all samples of a block go by.
constexpr std::int64_t kStripChannels = 512;

// Magnitudes of parameters and gradients below which sums of products of two of them, over a group or a block, are finite.
constexpr double kMostOfRows = 0x1p60;

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

// The lane's own of two results: the first where it fits, which is 1, else the second, rounded.
GROUPNORM_INLINE F32 own_of(const F32& fits, const F32& single, const F64& exact) {
  return select_lt(fits, set1<F32>(0.5f), narrow(exact), single);
}
GROUPNORM_INLINE F64 own_of(const F64& fits, const F64& single, const F64& exact) {
  return select_lt(fits, set1<F64>(0.5), exact, single);
}
// The parameters of so many channels from one on, and whether float will do for all of them.
struct StripParameters {
  alignas(64) float gain[kStripChannels], offset[kStripChannels];
  bool fit = true;

  GROUPNORM_INLINE StripParameters(const SamplesPlane& plane, std::int64_t first, std::int64_t channels) {
    for_each_vector(channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
      const F64 gains = plain(load_as<double>(plane.gain + first + c, count));
      const F64 offsets = plain(load_as<double>(plane.offset + first + c, count));
      store(gain + c, narrow(gains));
      store(offset + c, narrow(offsets));
      fit &= all_ones(fitting(gains) * fitting(offsets));
    });
  }

  static GROUPNORM_INLINE F32 fitting(const F64& a) {
    const F64 zero = set1<F64>(0.0), one = set1<F64>(1.0), magnitude = abs(a);
    const F64 below = select_lt(magnitude, set1<F64>(kMostOfRows), one, zero);
    const F64 within = select_lt(set1<F64>(kComfortableLeast), magnitude, below, zero);
    return narrow(select_lt(zero, magnitude, within, one));
  }
};

// The gradients of a vector, in the lanes of V, which is F32 or F64.
template <Activation A, class V>
struct RowGradients {
  V dv, product, terms;  // dx is r times the terms
  V magnitude;           // of dv and of its product

  // sum(a) has each group's sum in all of its lanes.
  template <class Lane, class Sum>
  GROUPNORM_INLINE RowGradients(const V& x, const V& dy, const V& mean, const V& mean_low, const V& rstd,
                                const V& gain, const V& offset, const Lane& activation, int size, const Sum& sum) {
    const V one_of_all = set1<V>(static_cast<typename V::element>(1.0 / size));
    const V xhat = ((x - mean) - mean_low) * rstd;
    dv = dy;
    if constexpr (A != Activation::none) {
      dv = dv * activation(fma(xhat, gain, offset), [](const auto& u, const auto& rate) GROUPNORM_INLINE_LAMBDA {
             return through_activation<A>(set1<std::decay_t<decltype(u)>>(1), u, rate);
           });
    }
    product = dv * xhat;
    const V weighted = gain * dv;
    V p = sum(weighted) * one_of_all, q = sum(gain * product) * one_of_all;
    // In float this is left to double, which is then asked.
    if constexpr (std::is_same_v<V, F64>) poison(p, q);
    terms = fnma(xhat, q, weighted - p);
    magnitude = abs(dv) + abs(product);
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
    return select_lt(abs(near), set1<F32>(kComfortableMost), comfortable(root), set1<F32>(0.0f));
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

  GROUPNORM_INLINE void add(std::int64_t c, const F32& dv, const F32& product) {
    store(a + c, load(a + c) + dv);
    store(b + c, load(b + c) + product);
  }
  GROUPNORM_INLINE void add(std::int64_t c, const F64& dv, const F64& product) {
    if (!any_exact) {
      std::memset(exact_a, 0, sizeof exact_a);
      std::memset(exact_b, 0, sizeof exact_b);
      any_exact = true;
    }
    store(exact_a + c, load(exact_a + c) + dv);
    store(exact_b + c, load(exact_b + c) + product);
  }
};

// As gradients in float; of a vector some of whose groups need double.
template <class T, Activation A, class Lane>
[[gnu::noinline]] void row_gradients_twice(const SamplesPlane& plane, std::int64_t n, std::int64_t channel, int count,
                                           const Lane& activation, StripSums& sums, std::int64_t at) {
  const int size = static_cast<int>(plane.group_size);
  // That of the least group: GCC would warn of what happens to none.
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
  const F64 offset = plain(load_as<double>(plane.offset + channel, count));
  const F64 mean = plain(from_array<F64>(means)), rstd = plain(from_array<F64>(rstds));
  const F32 near = narrow(mean), root = narrow(rstd);
  const RowGradients<A, F32> single(load_as<float>(x, count), load_as<float>(dy, count), near,
                                    narrow(mean - widen(near)), root, narrow(gain), narrow(offset), activation, size,
                                    sum);
  const RowGradients<A, F64> exact(load_as<double>(x, count), load_as<double>(dy, count), mean, set1<F64>(0.0), rstd,
                                   gain, offset, activation, size, sum);
  const F32 small = select_lt(single.magnitude, set1<F32>(kMostOfRows), set1<F32>(1.0f), set1<F32>(0.0f));
  const F32 parameters = StripParameters::fitting(gain) * StripParameters::fitting(offset);
  const F32 ones = sum(small * parameters * RowStatistics::fitting(near, root));
  const F32 fits = select_lt(set1<F32>(static_cast<float>(size) - 0.5f), ones, set1<F32>(1.0f), set1<F32>(0.0f));
  const F64 wide_fits = widen(fits);
  const auto existing = [&](const F64& a) GROUPNORM_INLINE_LAMBDA { return first_elements<false>(a, count); };
  sums.add(at, existing(own_of(wide_fits, widen(single.dv), exact.dv)),
           existing(own_of(wide_fits, widen(single.product), exact.product)));
  if (plane.result == nullptr) return;
  T* const dx = static_cast<T*>(plane.result) + n * plane.result_stride + channel;
  store_as(dx, own_of(fits, root * single.terms, rstd * exact.terms), count);
}

template <class T, Activation A, int kSize, class Lane>
GROUPNORM_INLINE void backward_strip(const SamplesPlane& plane, std::int64_t first, std::int64_t channels,
                                     const Lane& activation) {
  const StripParameters parameters(plane, first, channels);
  RowStatistics statistics;
  const auto sum = [](const F32& a) GROUPNORM_INLINE_LAMBDA { return group_sum<kSize>(a); };
  StripSums sums;
  const F32 most = set1<F32>(kMostOfRows);
  for (std::int64_t n = 0; n < plane.samples; ++n) {
    const std::int64_t group = n * plane.groups + first / kSize;
    statistics.take(plane.mean + group, plane.rstd + group, channels / kSize);
    const bool fit = parameters.fit && statistics.fit;
    const T* const x = static_cast<const T*>(plane.x) + n * plane.x_stride + first;
    const T* const dy = static_cast<const T*>(plane.dy) + n * plane.dy_stride + first;
    T* const dx = plane.result == nullptr ? nullptr
                                          : static_cast<T*>(plane.result) + n * plane.result_stride + first;
    for_each_vector(channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
      const F32 rstd = spread<kSize>(statistics.rstd + c / kSize);
      const RowGradients<A, F32> row(load_as<float>(x + c, count), load_as<float>(dy + c, count),
                                     spread<kSize>(statistics.mean + c / kSize),
                                     spread<kSize>(statistics.mean_low + c / kSize), rstd, load(parameters.gain + c),
                                     load(parameters.offset + c), activation, kSize, sum);
      if (__builtin_expect(!fit || !all_lt(row.magnitude, most), 0)) {
        return row_gradients_twice<T, A>(plane, n, first + c, count, activation, sums, c);
      }
      sums.add(c, row.dv, row.product);
      if (dx != nullptr) store_as(dx + c, rstd * row.terms, count);
    });
  }
  const auto write = [&](const float* single, const double* exact, double* to) GROUPNORM_INLINE_LAMBDA {
    for_each_vector(channels, [&](std::int64_t c, int count) GROUPNORM_INLINE_LAMBDA {
      const F64 total = widen(load(single + c));
      store_as(to + first + c, sums.any_exact ? total + load(exact + c) : total, count);
    });
  };
  write(sums.a, sums.exact_a, plane.a);
  if (plane.b != nullptr) write(sums.b, sums.exact_b, plane.b);
}

// strip(first channel, channels, size of a group as a constant), if groups are of a size that is taken here.
template <class Strip>
GROUPNORM_INLINE bool taken_as_rows(const SamplesPlane& plane, const Strip& strip) {
  const auto all = [&](auto size) GROUPNORM_INLINE_LAMBDA {
    for (std::int64_t first = 0; first < plane.channels; first += kStripChannels) {
      strip(first, smaller(kStripChannels, plane.channels - first), size);
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
