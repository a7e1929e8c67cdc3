// From statistics and parameters to the per-channel numbers that the kernels read.
//
// Guarantees: computed in double and rounded once; where a number would leave the comfortable range
// of float, the channels are marked to be computed in double, so that data of 1e30 or gradients of
// 1e-35 give right answers.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "groupnorm.h"
#include "kernels.h"

namespace groupnorm {

// The epilogue's parameters, once per call: v = gain * xhat + offset for each (n, c), and what the
// kernels need to know of them.
class Affine {
 public:
  // Memory, unwritten.
  Affine(const Shape&, DType, const Epilogue&);
  void fill(const Shape&, DType, const Epilogue&);

  // Whether scale and shift make samples differ.
  static bool is_adaptive(const Epilogue& epilogue) {
    return epilogue.scale.data != nullptr || epilogue.shift.data != nullptr;
  }
  // The place of (n, c) in the arrays below: scale and shift make them differ between samples.
  std::int64_t place(std::int64_t n, std::int64_t c) const { return (adaptive_ ? n * padded_ : 0) + c; }
  // weight * (1 + scale), and bias * (1 + scale) + shift
  const double* gains() const { return gain_.data(); }
  const double* offsets() const { return offset_.data(); }
  double gain(std::int64_t place) const { return gain_[at(place)]; }
  double offset(std::int64_t place) const { return offset_[at(place)]; }
  // See ChannelTable; for the types narrower than float64. Sixteen may be read from any channel on.
  const float* guard(std::int64_t place) const { return guard_.data() + place; }
  const float* tail(std::int64_t place) const { return tail_.data() + place; }
  const float* watch(std::int64_t place) const { return watch_.data() + place; }
  // Whether an offset or the activation asks for double, which is to be asked of one place only where it holds for
  // any; and whether every gain is far from the ends of float's range.
  bool in_double(std::int64_t place) const { return in_double_[at(place)] != 0; }
  bool any_in_double() const { return any_in_double_; }
  bool moderate_gains() const { return moderate_gains_; }

 private:
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  static constexpr std::size_t kInPlace = 128;

  std::int64_t padded_;  // what one sample takes
  bool adaptive_;        // samples differ; else there is one for all
  std::int64_t samples_;
  Buffer<double, kInPlace> gain_, offset_;
  Buffer<float, kInPlace> guard_, tail_, watch_;
  bool any_in_double_, moderate_gains_ = true;
  Buffer<unsigned char, kInPlace> in_double_;
};

// The parameters for each thread, in memory that it alone writes and reads: between cores, lines that one has
// written and another reads cost more than the numbers in them. Where samples differ, or channels are so many that
// copies would take more memory than time, there is one for all.
class Affines {
 public:
  Affines(const Shape& shape, DType dtype, const Epilogue& epilogue, int threads)
      : shape_(shape),
        dtype_(dtype),
        epilogue_(epilogue),
        copies_(is_shared(shape, epilogue) ? 1 : static_cast<std::size_t>(threads), shape, dtype, epilogue) {
    if (copies_.size() == 1) of(0);
  }

  // To be called by that thread.
  const Affine& of(int thread) const {
    Copy& copy = copies_[copies_.size() == 1 ? 0 : static_cast<std::size_t>(thread)];
    if (copy.filled) return copy.affine;
    copy.affine.fill(shape_, dtype_, epilogue_);
    copy.filled = true;
    return copy.affine;
  }

 private:
  // A copy takes up to 29 bytes a channel.
  static bool is_shared(const Shape& shape, const Epilogue& epilogue) {
    constexpr std::int64_t kMostChannelsCopied = 8192;
    return Affine::is_adaptive(epilogue) || shape.channels > kMostChannelsCopied;
  }

  struct Copy {
    Affine affine;
    bool filled = false;
    Copy(const Shape& shape, DType dtype, const Epilogue& epilogue) : affine(shape, dtype, epilogue) {}
  };
  const Shape& shape_;
  DType dtype_;
  const Epilogue& epilogue_;
  mutable PerThread<Copy> copies_;
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
  // Channels [begin, end) of sample n.
  void fill(const Shape&, const Affine&, std::int64_t n, std::int64_t begin, std::int64_t end,
            const SampleStatistics&);
  // The mean terms of the same channels, indexed by group.
  void fill_means(const GradientMeans*);

  // body(first, count, table, in_double) over runs of channels that share an arithmetic: what one kernel
  // call can serve. in_double is the index of a kernel's two versions: 0 in float, 1 in double. It
  // belongs to a channel, so that it depends neither on how the channels were cut nor on the others.
  template <class Body>
  void for_each_run(Body&& body) const {
    std::int64_t first = 0;
    while (first < filled_) {
      std::int64_t end = filled_;
      bool in_double = false;
      if (any_in_double_) {
        in_double = in_double_[static_cast<std::size_t>(first)] != 0;
        end = first + 1;
        while (end < filled_ && (in_double_[static_cast<std::size_t>(end)] != 0) == in_double) ++end;
      }
      body(first, end - first, table_from(first), static_cast<int>(in_double));
      first = end;
    }
  }

  // Whether all filled channels share one arithmetic, in float.
  bool one_run() const { return !any_in_double_; }
  // The same in either, and that of one channel. float64 knows no other than double.
  bool one_arithmetic() const { return one_run() || dtype_ == DType::float64; }
  bool in_double(std::int64_t channel) const { return in_double_[static_cast<std::size_t>(channel)] != 0; }
  // The table of one channel and those after it.
  ChannelTable table_from(std::int64_t first) const;
  // The part of xhat that kernels in float leave out of their sums, for each filled channel.
  const double* xhat_low() const { return xhat_low_.data(); }
  // Numbers in double for all filled channels, where a kernel in float turns out not to do.
  void fill_exact();

 private:
  // The kernels' plane for all filled groups: from groups' numbers to those of their channels.
  NumbersPlane numbers();
  void use_double(std::int64_t begin, std::int64_t end);

  // In place there is room for the coefficients of 57 channels at least.
  static constexpr std::size_t kInPlace = 64;

  const Kernels& kernels_ = kernels();
  DType dtype_;
  bool for_gradient_, exact_in_float_kernels_;
  Buffer<double, 8 * kInPlace> exact_;
  Buffer<double, kInPlace + 16> xhat_low_;
  Buffer<float, 8 * kInPlace> single_;
  Buffer<unsigned char, kInPlace> in_double_;
  Buffer<GroupNumbers, kInPlace / 4> groups_;
  std::size_t group_count_ = 0;
  ChannelTable table_;
  std::int64_t filled_ = 0;
  const Affine* affine_ = nullptr;
  std::int64_t place_ = 0;  // of the first filled channel
  bool any_in_double_ = false, exact_filled_ = false, means_filled_ = false;
};

double parameter_at(const Parameter&, std::int64_t index);
// What an absent one stands for: a weight is then 1, the others are 0.
inline double parameter_or(const Parameter& parameter, std::int64_t index, double absent) {
  return parameter.data == nullptr ? absent : parameter_at(parameter, index);
}
void store_parameter(void* data, DType, std::int64_t index, double value);
// So many numbers of a type, each so many elements after the last.
void load_values(const void* data, DType, std::int64_t step, std::int64_t count, double* values);
// Adjacent ones, by as many threads as that is worth: rows of features have as many statistics as groups.
void load_statistics(const void* data, DType, std::int64_t count, double* values);
void store_values(void* data, DType, std::int64_t step, std::int64_t count, const double* values);

}  // namespace groupnorm
