// Small tensors of torch straight to the core.
//
// Why: torch's dispatcher, reached from Python, costs a call as much as the work on a small tensor. Here tensors are
// read through the table of C functions that torch's class holds for exchange by DLPack, and results are made by
// torch.empty_like.
//
// Guarantees: the same bits as the operators of torch_ops.h. A call is served only for plain tensors and parameters
// on the CPU, dense, with memory of their own and under a megabyte, and while no mode of torch (dispatch, pre-dispatch
// or function), no tracer and no profiler of the calling thread is at work. For everything else, bad input included,
// the answer is None, and the caller asks the operator. Call with the GIL held.
//
// What is not asked about, because torch has no answer: callbacks on every operator of the process (an execution
// trace, a profiler of another thread), and kernels that somebody registers for ours under other keys.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

namespace groupnorm {

// What is needed of torch. types: Tensor and Parameter. watchers: (function,) or (function, argument), which returns
// something false while nobody has to be told of an operator. Empty where calls are served from now on, else why not. To be
// called after define_torch_operators.
std::string enable_torch_direct(nanobind::tuple types, nanobind::handle empty_like, nanobind::handle is_neg,
                                nanobind::tuple watchers);

// None, or y; with statistics (y, mean and rstd as bytes, which only direct_backward reads).
nanobind::object direct_forward(nanobind::handle x, nanobind::handle num_groups, nanobind::handle weight,
                                nanobind::handle bias, nanobind::handle eps, std::int64_t activation,
                                bool with_statistics);

// None, or (dx, dweight, dbias), each None where its bit of wanted is not set or its tensor was not given.
nanobind::object direct_backward(nanobind::handle dy, nanobind::handle x, nanobind::handle statistics,
                                 nanobind::handle num_groups, nanobind::handle weight, nanobind::handle bias,
                                 std::int64_t activation, std::int64_t wanted);

}  // namespace groupnorm
