// From statistics and parameters to the per-channel numbers that the kernels read.
//
// Guarantees: computed in double and rounded once; where a number would leave the comfortable range
// of float, the channels are marked to be computed in double, so that data of 1e30 or gradients of
// 1e-35 give right answers.
#pragma once

#include <cstdint>
#include <vector>

#include "groupnorm.h"
#include "kernels.h"

namespace groupnorm {

// The epilogue's parameters as doubles: v = gain * xhat + offset for each (n, c).
class Affine {
 public:
  Affine(const Shape&, const Epilogue&);

  double weight(std::int64_t c) const { return weight_[at(c)]; }
  double bias(std::int64_t c) const { return bias_[at(c)]; }
  // Whether scale or shift make gain and offset differ from sample to sample.
  bool adaptive() const { return adaptive_; }
  double one_plus_scale(std::int64_t n, std::int64_t c) const;
  double shift(std::int64_t n, std::int64_t c) const;
  // weight * (1 + scale)
  double gain(std::int64_t n, std::int64_t c) const {
    return adaptive_ ? weight(c) * one_plus_scale(n, c) : weight(c);
  }
  // bias * (1 + scale) + shift
  double offset(std::int64_t n, std::int64_t c) const {
    return adaptive_ ? bias(c) * one_plus_scale(n, c) + shift(n, c) : bias(c);
  }

 private:
  static std::size_t at(std::int64_t c) { return static_cast<std::size_t>(c); }

  std::int64_t channels_;
  std::vector<double> weight_, bias_;  // 1 and 0 where absent
  Parameter scale_, shift_;
  bool adaptive_;
};

// The mean terms of dx for one (n, k): P and Q of SPEC.md.
struct GradientMeans {
  double p = 0.0, q = 0.0;
};

// The statistics of one sample, indexed by group. mean_low, the part of the mean that one double
// cannot hold, may be null.
struct SampleStatistics {
  const double *mean, *mean_low, *rstd;
};

// Scratch for a run of channels; each thread has one and fills it again and again.
class ChannelScratch {
 public:
  ChannelScratch(DType, const Epilogue&, std::int64_t max_channels, bool for_gradient);
  // The table points into the vectors: a move keeps them in place, a copy would not.
  ChannelScratch(ChannelScratch&&) = default;
  ChannelScratch& operator=(ChannelScratch&&) = default;

  // Channels [begin, end) of sample n; means are indexed by group.
  void fill(const Shape&, const Affine&, std::int64_t n, std::int64_t begin, std::int64_t end,
            const SampleStatistics&, const GradientMeans* means = nullptr);

  // body(first, count, table, in_double) over what one kernel call can serve: all the filled channels
  // where columns are channels, else runs of channels that share an arithmetic. in_double is the
  // index of a kernel's two versions: 0 in float, 1 in double. It belongs to a channel (columns: to
  // a sample), so that it does not depend on how the channels were cut.
  template <class Body>
  void for_each_run(Layout layout, Body&& body) const {
    std::int64_t first = 0;
    while (first < filled_) {
      std::int64_t end = filled_;
      bool in_double = any_in_double_;
      if (in_double && layout == Layout::channels_first) {
        in_double = in_double_[static_cast<std::size_t>(first)] != 0;
        end = first + 1;
        while (end < filled_ && (in_double_[static_cast<std::size_t>(end)] != 0) == in_double) ++end;
      }
      body(first, end - first, table_from(first), static_cast<int>(in_double));
      first = end;
    }
  }

 private:
  ChannelTable table_from(std::int64_t first) const;
  void fill_parameters(const Affine&, std::int64_t n, std::int64_t begin, std::int64_t end);

  DType dtype_;
  Activation activation_;
  double beta_;
  std::vector<double> exact_, gain_;
  std::vector<float> single_;
  std::vector<unsigned char> in_double_, offset_in_double_;
  ChannelTable table_;
  // What the parameters were filled for last; they stay where they do not differ between samples.
  std::int64_t begin_ = 0, filled_ = 0;
  bool any_in_double_ = false, any_offset_in_double_ = false;
};

double parameter_at(const Parameter&, std::int64_t index);
void store_parameter(void* data, DType, std::int64_t index, double value);

}  // namespace groupnorm
