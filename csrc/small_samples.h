// Samples of a few elements, taken one number after the other in double: tables of coefficients and calls of kernels
// would cost them more than the work. The same code on every instruction set.
//
// Guarantee: what is small depends on a sample's shape only, and the moments of a small sample are taken this way
// whatever follows them.
#pragma once

#include <cstdint>

#include "channel_table.h"
#include "groupnorm.h"
#include "partition.h"

namespace groupnorm {

constexpr std::int64_t kSmallSample = 32;  // elements

// One position is better off with its samples in lanes. A small sample is never cut into pieces: where there are so
// many that a second thread is worth it, they share evenly.
inline bool is_small_sample(const Shape& shape) {
  return shape.spatial > 1 && shape.channels * shape.spatial <= kSmallSample;
}
// An instruction set that was asked for and is not there is refused, whether a kernel is called or not.
inline void refuse_unknown_isa() { kernels(); }

// Whether all of a call is done so: activations are computed by the kernels.
inline bool one_by_one(const Shape& shape, const Epilogue& epilogue) {
  return is_small_sample(shape) && epilogue.activation == Activation::none && !Affine::is_adaptive(epilogue);
}

// Channel c of sample n, all its positions.
template <class View>
void load_channel(const View& array, const Shape& shape, DType dtype, std::int64_t n, std::int64_t c, double* values) {
  const bool first = shape.layout == Layout::channels_first;
  load_values(address(array, dtype, n, first ? c : 0, first ? 0 : c), dtype, first ? 1 : array.row_stride,
              shape.spatial, values);
}
inline void store_channel(const Output& array, const Shape& shape, DType dtype, std::int64_t n, std::int64_t c,
                          const double* values) {
  const bool first = shape.layout == Layout::channels_first;
  store_values(address(array, dtype, n, first ? c : 0, first ? 0 : c), dtype, first ? 1 : array.row_stride,
               shape.spatial, values);
}

}  // namespace groupnorm
