// Calls that have been checked before: what makes small tensors cheap.
//
// Guarantee: a call is served here only if an earlier one with the same signature (types, shapes,
// strides and dtypes of all arrays, types and values of all options) has passed every check of
// problem.py and can run without a copy, and if out, where given, is x itself or apart from every
// other array. Everything else takes the long way, where errors are worded. Call with the GIL held.
#pragma once

#include "binding.h"

namespace groupnorm {

// None where the call is not known, y, or (y, mean, rstd, sum) with return_stats or a residual.
nanobind::object forward_call(nanobind::handle x, nanobind::handle num_groups,
                              nanobind::handle weight, nanobind::handle bias, nanobind::handle eps,
                              nanobind::handle activation, nanobind::handle scale,
                              nanobind::handle shift, nanobind::handle residual,
                              nanobind::handle channel_axis, nanobind::handle out,
                              nanobind::handle return_stats);

// The same arguments, as a tuple, of a call that was checked, and how the core is to be called for it.
// memory_shape is that of a new y, and axes turn it into x's.
void learn_forward(nanobind::tuple arguments, const Problem&, Strides x, Strides residual,
                   Strides out, Strides fresh, const std::vector<npy_intp>& memory_shape,
                   const std::vector<npy_intp>& axes);

// None, or (dx, dweight, dbias, dscale, dshift).
nanobind::object backward_call(nanobind::handle dy, nanobind::handle x, nanobind::handle mean,
                               nanobind::handle rstd, nanobind::handle num_groups,
                               nanobind::handle weight, nanobind::handle bias,
                               nanobind::handle activation, nanobind::handle scale,
                               nanobind::handle shift, nanobind::handle channel_axis,
                               nanobind::handle output_mask);
void learn_backward(nanobind::tuple arguments, const Problem&, Strides dy, Strides x,
                    Strides fresh, const std::vector<npy_intp>& memory_shape,
                    const std::vector<npy_intp>& axes);

std::size_t known_calls();
void forget_calls();

}  // namespace groupnorm
