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

  double weight(std::int64_t c) const { return weight_.empty() ? 1.0 : weight_[at(c)]; }
  double bias(std::int64_t c) const { return bias_.empty() ? 0.0 : bias_[at(c)]; }
  double one_plus_scale(std::int64_t n, std::int64_t c) const;
  double shift(std::int64_t n, std::int64_t c) const;
  // weight * (1 + scale)
  double gain(std::int64_t n, std::int64_t c) const { return weight(c) * one_plus_scale(n, c); }
  // bias * (1 + scale) + shift
  double offset(std::int64_t n, std::int64_t c) const {
    return bias(c) * one_plus_scale(n, c) + shift(n, c);
  }

 private:
  static std::size_t at(std::int64_t c) { return static_cast<std::size_t>(c); }

  std::int64_t channels_;
  std::vector<double> weight_, bias_;
  Parameter scale_, shift_;
};

// The mean terms of dx for one (n, k): P and Q of SPEC.md.
struct GradientMeans {
  double p = 0.0, q = 0.0;
};

// Scratch for a run of channels; each thread has one and fills it again and again.
class ChannelScratch {
 public:
  ChannelScratch(DType dtype, std::int64_t max_channels, bool for_gradient);
  // The table points into the vectors: a move keeps them in place, a copy would not.
  ChannelScratch(ChannelScratch&&) = default;
  ChannelScratch& operator=(ChannelScratch&&) = default;

  // Channels [begin, end) of sample n; mean and rstd (and means) are indexed by group.
  void fill(const Shape&, const Affine&, std::int64_t n, std::int64_t begin, std::int64_t end,
            const double* mean, const double* rstd, const GradientMeans* means = nullptr);

  // Pointers to what fill wrote.
  const ChannelTable& table() const { return table_; }
  // Which of a kernel's two versions serves these channels: 0 in float, 1 in double.
  int in_double() const { return in_double_; }

 private:
  DType dtype_;
  std::vector<double> exact_;
  std::vector<float> single_;
  ChannelTable table_;
  int in_double_ = 0;
};

double parameter_at(const Parameter&, std::int64_t index);
void store_parameter(void* data, DType, std::int64_t index, double value);

}  // namespace groupnorm
