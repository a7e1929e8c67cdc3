// What the kernels of one instruction set look like to the drivers: plain structs and one table.
//
// A plane is rows x length elements. Channels-first, a row is a channel and coefficients belong to
// rows; channels-last, a row is a position and coefficients belong to columns. No kernel knows of
// threads, and only the two for rows of features of samples and groups: the drivers cut the work into
// planes.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "groupnorm.h"

namespace groupnorm {

// Per-channel numbers, indexed from the plane's first channel. Sixteen may be read from any channel on.
template <class Real>
struct Coefficients {
  // v = (x - center) * multiplier + offset, and xhat = (x - center) * rstd. In double, center_low is
  // subtracted from x too; in float, offset and grad_offset account for it, and the driver of reduce.
  const Real *center = nullptr, *center_low = nullptr, *multiplier = nullptr, *offset = nullptr;
  // dx = dv * grad_multiplier + (grad_offset - (x - center) * grad_slope)
  const Real *rstd = nullptr, *grad_multiplier = nullptr, *grad_offset = nullptr,
             *grad_slope = nullptr;
};

// A sum below this part of its terms has lost too many bits to cancellation in float for rounding to
// a 16-bit type within 1 ulp, or for its sign (docs/numerics.md).
constexpr float kGuardFloat16 = 0x1p-9f, kGuardBFloat16 = 0x1p-10f, kGuardSign = 0x1p-20f;

// Where |v| times an activation's relative slope passes this, it magnifies the error of v too far
// (channel_table.cpp): its tail.
constexpr double kTailFloat16 = 48.0, kTailBFloat16 = 80.0;

// Numbers of such a magnitude are comfortable in float: so are their differences, and products with moderate ones.
constexpr double kComfortableLeast = 0x1p-90, kComfortableMost = 0x1p90;

struct ChannelTable {
  Coefficients<float> single;
  Coefficients<double> exact;
  // For 16-bit results, v is computed again in double where |v| < guard or signed v < tail.
  const float *guard = nullptr, *tail = nullptr;
  // The larger of the guard and the least normal number. No activation makes a magnitude larger, so |y| < watch
  // wherever |v| < guard or y is below the normal range, and one question finds both. Of relu, whose results are 0
  // half of the time, |v| is asked.
  const float* watch = nullptr;
};

// Channels [begin, end) of one group, counted from the first of a table, and what they share.
struct GroupNumbers {
  std::int64_t begin, end, number;
  double mean, mean_low, rstd, grad_offset, grad_slope;
};

// From the numbers of groups, in the order of their channels, to those of the channels. Sixteen are written at a time, and
// as many read of gains and offsets: from the last channel on there is padding.
struct NumbersPlane {
  const GroupNumbers* groups;
  std::int64_t count;
  const double *gains, *offsets;  // from the first channel on
  ChannelTable table;             // whose numbers in float or in double are written
  double* xhat_low;               // written with those in float; may be null
};

struct MomentsPlane {
  const void* x;
  const void* residual;  // may be null
  void* sum;             // of x and residual, null where residual is
  std::int64_t rows, length;
  std::int64_t x_stride, residual_stride, sum_stride;
  bool far;  // the tensors are larger than the caches; only columns take note
};

// A piece's moments, with the mean in two parts: differences of means keep their precision when the
// mean is large.
struct PieceMoments {
  double count = 0.0, mean = 0.0, mean_low = 0.0, m2 = 0.0;
};

struct NormalizePlane {
  const void* x;
  void* y;
  std::int64_t rows, length;
  std::int64_t x_stride, y_stride;
  ChannelTable table;
  double beta;
  bool far;     // as above, and only where two vectors are taken at a time
  // y is to be written around the caches where its rows are long, or whole cache lines, or, of float32, one run; of
  // 16-bit types, and in place, it is not.
  bool stream;
};

// The vectors that dv is kept in. Of rows of fewer elements it is not: several of them are one (narrow-inl.h).
constexpr std::int64_t kKeptVector = 16, kNarrow = kKeptVector;

struct ReducePlane {
  const void *dy, *x;
  std::int64_t rows, length;
  std::int64_t dy_stride, x_stride;
  ChannelTable table;
  double beta;
  double* a;  // per channel: sum of dv
  double* b;  // per channel: sum of dv * xhat; null where it is not wanted
  // Kept for apply where not null, only of smooth activations, in double for float64 and else of what is computed in
  // float: rows of whole vectors, except that float32 and float64 keep it where dx will be, and rows that are taken as
  // one run lie one after the other.
  void* dv;
  std::int64_t dv_stride;
  // As above. Rows that are asked for ahead are those of up to 128 elements, and those whose dv is kept.
  bool far;
};

struct ApplyPlane {
  const void *dy, *x;
  void* dx;
  std::int64_t rows, length;
  std::int64_t dy_stride, x_stride, dx_stride;
  ChannelTable table;
  double beta;
  bool far;     // as above
  // dx is to be written around the caches where its rows are whole cache lines; where dx is not in place also if they
  // are long (float32 and float64), or one run (float32 without relu).
  bool stream;
};

// One position per sample: samples, in the backward up to sixteen, and small groups of adjacent channels. Of float32 everything, and of the 16-bit types the backward, is computed in float where its numbers are
// comfortable; the rest in double, with the activation in float for the types narrower than float64.
constexpr std::int64_t kLaneSamples = 16, kLaneChannels = 32;  // of a block, and of a group

struct SamplesPlane {
  const void *x, *dy;  // dy is null in the forward
  void* result;        // y, or dx, which may be null
  std::int64_t x_stride, dy_stride, result_stride;  // between samples
  std::int64_t samples, channels, groups;
  std::int64_t group_size;  // 0 where they differ
  const std::int64_t* group_begin;
  const double *gain, *offset;  // per channel
  double eps, beta;
  double *mean, *rstd;  // [samples, groups], written by the forward
  double *a, *b;        // [channels], sums over the samples; b may be null
  bool adds;            // to what is in a and b
};

// The last two indices are the layout and whether the elements are computed in double. float64 is
// always computed in double; the other types are where their numbers leave float's range, and
// those kernels exist once, built for any CPU.
struct Kernels {
  const char* name;
  std::uint64_t* calls;  // kernels entered, counted by the kernels themselves
  // All rows together, channels-first.
  PieceMoments (*moments_run[kDTypes])(const MomentsPlane&);
  // Each column by itself, channels-last.
  void (*moments_columns[kDTypes])(const MomentsPlane&, double* mean, double* mean_low, double* m2);
  void (*normalize[kDTypes][kActivations][2][2])(const NormalizePlane&);
  void (*reduce[kDTypes][kActivations][2][2])(const ReducePlane&);
  void (*apply[kDTypes][kActivations][2][2])(const ApplyPlane&);
  void (*samples_forward[kDTypes][kActivations])(const SamplesPlane&);
  void (*samples_backward[kDTypes][kActivations])(const SamplesPlane&);
  // In float, dy being a kept dv in float. None for float64, whose kept dv is like any dy.
  void (*apply_kept[kDTypes][2])(const ApplyPlane&);
  // The last index is whether the numbers are those in double: all of a channel's but grad_offset and grad_slope, and
  // those two.
  void (*channel_numbers[2])(const NumbersPlane&);
  void (*gradient_numbers[2])(const NumbersPlane&);
  // b -= a * xhat_low. Then 0, or NaN where an a or a b is not finite.
  double (*put_back_xhat_low)(double* b, const double* a, const double* xhat_low, std::int64_t count);
  // Whether rows of such a length and such strides are taken as one run; dv is then kept in the same way, in the
  // order of the elements.
  bool (*joins_gradient_rows)(std::int64_t length, std::initializer_list<std::int64_t> strides);
};

const Kernels& kernels_portable();
// The portable kernels that compute narrower types in double: an object file of their own halves the time
// to compile the largest one.
const Kernels& kernels_narrow_in_double();
#ifdef GROUPNORM_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512_bf16();
#endif

// The selected table, complete. Throws std::invalid_argument where a forced one cannot run.
const Kernels& kernels();

}  // namespace groupnorm
