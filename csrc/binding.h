// What the binding's files share: a checked problem, and strides as Python hands them over.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "groupnorm.h"
#include "numpy_arrays.h"

namespace groupnorm {

using Strides = std::pair<std::int64_t, std::int64_t>;  // of samples and rows, in elements

inline Input input(nanobind::handle array, const Strides& strides) {
  return {data_of(array), strides.first, strides.second};
}
inline Output output(nanobind::handle array, const Strides& strides) {
  return {data_of(array), strides.first, strides.second};
}

// A validated problem: everything about a call but the pointers.
struct Problem {
  Shape shape;
  DType dtype;
  Epilogue epilogue;

  Problem(DType dtype_, Layout layout, std::int64_t samples, std::int64_t channels,
          std::int64_t spatial, const std::vector<std::int64_t>& group_sizes,
          Activation activation, double beta, const std::vector<DType>& parameter_dtypes)
      : dtype(dtype_) {
    shape.samples = samples;
    shape.channels = channels;
    shape.spatial = spatial;
    shape.layout = layout;
    shape.group_begin.push_back(0);
    for (const std::int64_t size : group_sizes) {
      shape.group_begin.push_back(shape.group_begin.back() + size);
    }
    if (shape.group_begin.back() != channels || parameter_dtypes.size() != 4) {
      throw nanobind::value_error("group sizes must sum to the channels; four parameter dtypes");
    }
    epilogue.activation = activation;
    epilogue.beta = beta;
    epilogue.weight.dtype = parameter_dtypes[0];
    epilogue.bias.dtype = parameter_dtypes[1];
    epilogue.scale.dtype = parameter_dtypes[2];
    epilogue.shift.dtype = parameter_dtypes[3];
  }

  Epilogue with_parameters(nanobind::handle weight, nanobind::handle bias, nanobind::handle scale,
                                      nanobind::handle shift) const {
    Epilogue result = epilogue;
    result.weight.data = data_of(weight);
    result.bias.data = data_of(bias);
    result.scale.data = data_of(scale);
    result.shift.data = data_of(shift);
    return result;
  }

  std::size_t statistics() const {
    return static_cast<std::size_t>(shape.samples * shape.groups());
  }
};

}  // namespace groupnorm
