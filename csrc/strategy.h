// Which way a problem is taken: decided once here, for the drivers and for those who ask.
//
// Guarantee: the choice changes speed and no bit of y, dx or the statistics; where two ways differ in bits, a sample's
// shape and the epilogue decide, and nothing else.
#pragma once

#include <cstdint>

#include "groupnorm.h"
#include "parallel.h"
#include "partition.h"
#include "small_samples.h"

namespace groupnorm {

enum class Strategy {
  one_by_one,        // samples of a few elements, without kernels
  samples_in_lanes,  // rows of features: sixteen samples in the lanes of one call
  whole_groups,      // channels first: a thread takes groups, both halves of each while it is in cache
  whole_samples,     // channels last: a thread takes samples
  pieces,            // all threads share every half, with a barrier between
};

struct Plan {
  Strategy strategy;
  int threads;
};

// Whether a quarter of the threads' time at most is lost to waiting if each takes whole samples, these being so
// small that their pieces would cost more: pieces are combined channel by channel.
inline bool whole_samples_share(const Shape& shape, int threads) {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 18;
  const std::int64_t turns = (shape.samples + threads - 1) / threads;
  return shape.channels * shape.spatial <= kMostElements && 4 * shape.samples >= 3 * turns * threads;
}

// Tensors of x's size that the halves of a call read.
constexpr std::int64_t kForwardStreams = 1, kBackwardStreams = 2;

inline Plan plan(const Shape& shape, DType dtype, const Epilogue& epilogue, std::int64_t streams) {
  const int threads = threads_for(work(shape, dtype, epilogue.activation, streams));
  if (one_by_one(shape, epilogue)) return {Strategy::one_by_one, threads};
  const bool first = shape.layout == Layout::channels_first;
  if (!first && samples_in_lanes(shape, epilogue)) return {Strategy::samples_in_lanes, threads};
  const std::int64_t units = first ? shape.samples * shape.groups() : shape.samples;
  if (!shares_well(units, threads) && (first || !whole_samples_share(shape, threads))) {
    return {Strategy::pieces, threads};
  }
  return {first ? Strategy::whole_groups : Strategy::whole_samples, threads};
}

inline Plan forward_plan(const Shape& shape, DType dtype, const Epilogue& epilogue) {
  return plan(shape, dtype, epilogue, kForwardStreams);
}
inline Plan backward_plan(const Shape& shape, DType dtype, const Epilogue& epilogue) {
  return plan(shape, dtype, epilogue, kBackwardStreams);
}

}  // namespace groupnorm
