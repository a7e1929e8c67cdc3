// How a tensor of torch lies in memory, from its sizes and strides: whatever has dim(), sizes() and strides().
//
// Guarantee: a tensor that cannot be walked in a layout is said to be so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "groupnorm.h"

namespace groupnorm {

// Torch's rule: whether the strides order the axes as channels_last or channels_last_3d does.
template <class Tensor>
bool is_channels_last(const Tensor& x) {
  const std::int64_t dim = x.dim();
  if (dim != 4 && dim != 5) return false;
  const std::int64_t *sizes = x.sizes(), *strides = x.strides();
  if (strides[1] == 0) return false;
  std::int64_t least = 0;
  for (std::int64_t i = 0; i < dim; ++i) {
    // Channels, then the positions from the last, then samples.
    const std::int64_t axis = i == 0 ? 1 : i == dim - 1 ? 0 : dim - i;
    if (sizes[axis] == 0 || strides[axis] < least) return false;
    // One channel or one position: memory that is both is channels-first.
    if (axis == 0 && least == strides[1]) return false;
    least = sizes[axis] > 1 ? strides[axis] * sizes[axis] : strides[axis];
  }
  return true;
}

// What the core is told of a tensor of two dimensions or more. Rows of features are in both layouts; the core knows
// them as channels last.
template <class Tensor>
void set_sizes(const Tensor& x, bool channels_last, Shape& shape) {
  shape.samples = x.sizes()[0];
  shape.channels = x.sizes()[1];
  shape.spatial = 1;
  for (std::int64_t i = 2; i < x.dim(); ++i) shape.spatial *= x.sizes()[i];
  shape.layout = channels_last || shape.spatial == 1 ? Layout::channels_last : Layout::channels_first;
}
// So many groups, which divide the channels.
inline void set_equal_groups(std::int64_t count, Shape& shape) {
  shape.group_begin.resize(static_cast<std::size_t>(count) + 1);
  for (std::size_t k = 0; k < shape.group_begin.size(); ++k) {
    shape.group_begin[k] = shape.channels / count * static_cast<std::int64_t>(k);
  }
}
inline std::size_t statistics_of(const Shape& shape) {
  return static_cast<std::size_t>(shape.samples * shape.groups());
}
inline DType statistics_type(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

// Strides of samples and rows of [N, C, ...] in a layout; false where it cannot be walked so.
template <class Tensor>
bool walk(const Tensor& tensor, Layout layout, std::int64_t& sample, std::int64_t& row) {
  const std::int64_t *sizes = tensor.sizes(), *strides = tensor.strides();
  const std::int64_t dim = tensor.dim(), channels = sizes[1];
  const bool first = layout == Layout::channels_first;
  std::int64_t positions = 1, step = 1;
  // Channels-last, the innermost axis says how far apart rows are.
  bool step_is_known = first;
  for (std::int64_t i = dim - 1; i >= 2; --i) {
    if (sizes[i] == 1) continue;
    if (!step_is_known) step = row = strides[i];
    step_is_known = true;
    if (strides[i] != step) return false;
    step *= sizes[i];
    positions *= sizes[i];
  }
  if (first) {
    row = channels > 1 ? strides[1] : positions;
  } else {
    if (channels > 1 && strides[1] != 1) return false;
    if (positions == 1) row = channels;
  }
  sample = sizes[0] > 1 ? strides[0] : channels * positions;
  return true;
}

}  // namespace groupnorm
