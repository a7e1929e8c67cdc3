// The Python binding: a table of contents. Checks that it was handed arrays, takes their pointers,
// releases the GIL and calls the core. Every rule of shape, dtype and layout is in problem.py.
#define GROUPNORM_IMPORTS_NUMPY
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"
#include "calls.h"
#include "groupnorm.h"
#include "result_memory.h"
#include "scratch.h"
#include "strategy.h"
#include "streaming.h"
#include "torch_direct.h"
#include "torch_ops.h"

namespace nb = nanobind;
using namespace nb::literals;
using groupnorm::Activation;
using groupnorm::data_of;
using groupnorm::DType;
using groupnorm::input;
using groupnorm::Layout;
using groupnorm::output;
using groupnorm::Problem;
using groupnorm::Strides;

namespace {

bool is_double(nb::handle array) {
  return PyArray_TYPE(groupnorm::array_of(array)) == NPY_DOUBLE;
}

// Doubles into a float32 or float64 array of the same length.
void write_statistics(nb::handle array, const std::vector<double>& values) {
  if (array.is_none()) return;
  void* data = data_of(array);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (is_double(array)) {
      static_cast<double*>(data)[i] = values[i];
    } else {
      static_cast<float*>(data)[i] = static_cast<float>(values[i]);
    }
  }
}

void forward(const Problem& problem, nb::handle x, Strides x_strides, nb::handle residual,
             Strides residual_strides, nb::handle sum, Strides sum_strides, nb::handle y,
             Strides y_strides, double eps, nb::handle weight, nb::handle bias, nb::handle scale,
             nb::handle shift, nb::handle mean, nb::handle rstd) {
  const auto epilogue = problem.with_parameters(weight, bias, scale, shift);
  const auto x_in = input(x, x_strides);
  const auto residual_in = input(residual, residual_strides);
  const auto sum_out = output(sum, sum_strides), y_out = output(y, y_strides);
  std::vector<double> means(problem.statistics()), rstds(problem.statistics());
  {
    nb::gil_scoped_release unlocked;
    groupnorm::forward(problem.shape, problem.dtype, x_in, residual_in, sum_out, eps, epilogue,
                       y_out, means.data(), rstds.data());
  }
  write_statistics(mean, means);
  write_statistics(rstd, rstds);
}

// mean and m2 are float64 arrays [N, G].
void moments(const Problem& problem, nb::handle x, Strides x_strides, nb::handle mean,
             nb::handle m2) {
  const auto x_in = input(x, x_strides);
  std::vector<groupnorm::Moments> result(problem.statistics());
  {
    nb::gil_scoped_release unlocked;
    groupnorm::moments(problem.shape, problem.dtype, x_in, {}, {}, result.data());
  }
  auto* means = static_cast<double*>(data_of(mean));
  auto* m2s = static_cast<double*>(data_of(m2));
  for (std::size_t i = 0; i < result.size(); ++i) {
    means[i] = result[i].mean;
    m2s[i] = result[i].m2;
  }
}

// The forward's second half by itself; mean and rstd are float64 arrays [N, G].
void normalize(const Problem& problem, nb::handle x, Strides x_strides, nb::handle mean,
               nb::handle rstd, nb::handle weight, nb::handle bias, nb::handle scale,
               nb::handle shift, nb::handle y, Strides y_strides) {
  const auto epilogue = problem.with_parameters(weight, bias, scale, shift);
  const auto x_in = input(x, x_strides);
  const auto y_out = output(y, y_strides);
  const auto* means = static_cast<const double*>(data_of(mean));
  const auto* rstds = static_cast<const double*>(data_of(rstd));
  nb::gil_scoped_release unlocked;
  groupnorm::normalize(problem.shape, problem.dtype, x_in, means, rstds, epilogue, y_out);
}

// The strategy and the threads that a call without scale and shift would use.
std::tuple<groupnorm::Strategy, int> plan_of(const Problem& problem, bool backward) {
  const auto how = (backward ? groupnorm::backward_plan : groupnorm::forward_plan)(
      problem.shape, problem.dtype, problem.epilogue);
  return {how.strategy, how.threads};
}

// mean and rstd are float64 arrays [N, G]. What is None is not computed.
void backward(const Problem& problem, nb::handle dy, Strides dy_strides, nb::handle x,
              Strides x_strides, nb::handle mean, nb::handle rstd, nb::handle weight,
              nb::handle bias, nb::handle scale, nb::handle shift, nb::handle dx,
              Strides dx_strides, nb::handle dweight, nb::handle dbias, nb::handle dscale,
              nb::handle dshift) {
  const auto epilogue = problem.with_parameters(weight, bias, scale, shift);
  const auto dy_in = input(dy, dy_strides), x_in = input(x, x_strides);
  const auto dx_out = output(dx, dx_strides);
  const auto* means = static_cast<const double*>(data_of(mean));
  const auto* rstds = static_cast<const double*>(data_of(rstd));
  const groupnorm::ParameterGradients gradients = {data_of(dweight), data_of(dbias),
                                                   data_of(dscale), data_of(dshift)};
  nb::gil_scoped_release unlocked;
  groupnorm::all_gradients(problem.shape, problem.dtype, epilogue, dy_in, x_in, means, rstds, dx_out,
                           gradients);
}

// The backward's two halves by themselves; a and b are float64 arrays [N, C], b may be None.
void reduce(const Problem& problem, nb::handle dy, Strides dy_strides, nb::handle x,
            Strides x_strides, nb::handle mean, nb::handle rstd, nb::handle weight,
            nb::handle bias, nb::handle scale, nb::handle shift, nb::handle a, nb::handle b) {
  const auto epilogue = problem.with_parameters(weight, bias, scale, shift);
  const auto dy_in = input(dy, dy_strides), x_in = input(x, x_strides);
  const auto* means = static_cast<const double*>(data_of(mean));
  const auto* rstds = static_cast<const double*>(data_of(rstd));
  const groupnorm::Sums sums = {static_cast<double*>(data_of(a)),
                                static_cast<double*>(data_of(b))};
  nb::gil_scoped_release unlocked;
  groupnorm::reduce(problem.shape, problem.dtype, dy_in, x_in, means, rstds, epilogue, sums);
}

void apply(const Problem& problem, nb::handle dy, Strides dy_strides, nb::handle x,
           Strides x_strides, nb::handle mean, nb::handle rstd, nb::handle weight, nb::handle bias,
           nb::handle scale, nb::handle shift, nb::handle a, nb::handle b, nb::handle dx,
           Strides dx_strides) {
  const auto epilogue = problem.with_parameters(weight, bias, scale, shift);
  const auto dy_in = input(dy, dy_strides), x_in = input(x, x_strides);
  const auto dx_out = output(dx, dx_strides);
  const auto* means = static_cast<const double*>(data_of(mean));
  const auto* rstds = static_cast<const double*>(data_of(rstd));
  const groupnorm::Sums sums = {static_cast<double*>(data_of(a)),
                                static_cast<double*>(data_of(b))};
  nb::gil_scoped_release unlocked;
  groupnorm::apply(problem.shape, problem.dtype, dy_in, x_in, means, rstds, epilogue, sums,
                   dx_out);
}

// The same bytes, by as many threads as an operator of that traffic would use: the speed that every
// other number is compared with.
void copy(nb::handle destination, nb::handle source) {
  void* to = data_of(destination);
  const void* from = data_of(source);
  const auto bytes = PyArray_NBYTES(groupnorm::array_of(destination));
  if (bytes != PyArray_NBYTES(groupnorm::array_of(source))) {
    throw nb::value_error("copy takes two arrays of the same number of bytes");
  }
  nb::gil_scoped_release unlocked;
  groupnorm::copy_bytes(to, from, bytes);
}

// A read-only NumPy array over somebody's DLPack or buffer memory. NumPy cannot take bfloat16
// from DLPack: it comes back as the same bits in uint16, with true as the second value.
std::pair<nb::object, bool> adopt_array(nb::ndarray<nb::ro, nb::device::cpu> array) {
  const auto rank = array.ndim();
  std::vector<std::size_t> shape(rank);
  std::vector<std::int64_t> strides(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    shape[i] = array.shape(i);
    strides[i] = array.stride(i);
  }
  nb::dlpack::dtype dtype = array.dtype();
  if (dtype.lanes != 1 || dtype.bits < 8 || dtype.bits > 64) {
    throw nb::type_error("NumPy has no such dtype");
  }
  const bool is_bfloat16 =
      dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16;
  if (is_bfloat16) dtype = nb::dtype<std::uint16_t>();
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  const bool is_number = code == nb::dlpack::dtype_code::Int ||
                         code == nb::dlpack::dtype_code::UInt ||
                         code == nb::dlpack::dtype_code::Bool ||
                         (code == nb::dlpack::dtype_code::Float && dtype.bits >= 16);
  if (!is_number) throw nb::type_error("NumPy has no such dtype");
  const auto* keep = new nb::ndarray<nb::ro, nb::device::cpu>(array);
  const nb::capsule owner(keep, [](void* kept) noexcept {
    delete static_cast<nb::ndarray<nb::ro, nb::device::cpu>*>(kept);
  });
  const nb::ndarray<nb::numpy, nb::ro> view(array.data(), rank, shape.data(), owner,
                                            strides.data(), dtype);
  return {nb::cast(view), is_bfloat16};
}

}  // namespace

NB_MODULE(_core, m) {
  if (_import_array() < 0) throw nb::python_error();
  m.doc() = "The compiled core of groupnorm. Arguments are trusted: call it through groupnorm.";

  nb::enum_<DType>(m, "DType")
      .value("float32", DType::float32)
      .value("float64", DType::float64)
      .value("float16", DType::float16)
      .value("bfloat16", DType::bfloat16);
  nb::enum_<Activation>(m, "Activation")
      .value("none", Activation::none)
      .value("relu", Activation::relu)
      .value("swish", Activation::swish)
      .value("gelu", Activation::gelu)
      .value("gelu_tanh", Activation::gelu_tanh);
  nb::enum_<Layout>(m, "Layout")
      .value("channels_first", Layout::channels_first)
      .value("channels_last", Layout::channels_last);
  nb::enum_<groupnorm::Strategy>(m, "Strategy")
      .value("one_by_one", groupnorm::Strategy::one_by_one)
      .value("samples_in_lanes", groupnorm::Strategy::samples_in_lanes)
      .value("whole_groups", groupnorm::Strategy::whole_groups)
      .value("whole_samples", groupnorm::Strategy::whole_samples)
      .value("pieces", groupnorm::Strategy::pieces);

  nb::class_<Problem>(m, "Problem")
      .def(nb::init<DType, Layout, std::int64_t, std::int64_t, std::int64_t,
                    const std::vector<std::int64_t>&, Activation, double,
                    const std::vector<DType>&>())
      .def("forward", &forward, "x"_a, "x_strides"_a, "residual"_a.none(), "residual_strides"_a,
           "sum"_a.none(), "sum_strides"_a, "y"_a, "y_strides"_a, "eps"_a, "weight"_a.none(),
           "bias"_a.none(), "scale"_a.none(), "shift"_a.none(), "mean"_a.none(), "rstd"_a.none())
      .def("moments", &moments, "x"_a, "x_strides"_a, "mean"_a, "m2"_a)
      .def("normalize", &normalize, "x"_a, "x_strides"_a, "mean"_a, "rstd"_a, "weight"_a.none(),
           "bias"_a.none(), "scale"_a.none(), "shift"_a.none(), "y"_a, "y_strides"_a)
      .def("backward", &backward, "dy"_a, "dy_strides"_a, "x"_a, "x_strides"_a, "mean"_a, "rstd"_a,
           "weight"_a.none(), "bias"_a.none(), "scale"_a.none(), "shift"_a.none(), "dx"_a.none(),
           "dx_strides"_a, "dweight"_a.none(), "dbias"_a.none(), "dscale"_a.none(),
           "dshift"_a.none())
      .def("reduce", &reduce, "dy"_a, "dy_strides"_a, "x"_a, "x_strides"_a, "mean"_a, "rstd"_a,
           "weight"_a.none(), "bias"_a.none(), "scale"_a.none(), "shift"_a.none(), "a"_a,
           "b"_a.none())
      .def("apply", &apply, "dy"_a, "dy_strides"_a, "x"_a, "x_strides"_a, "mean"_a, "rstd"_a,
           "weight"_a.none(), "bias"_a.none(), "scale"_a.none(), "shift"_a.none(), "a"_a, "b"_a,
           "dx"_a, "dx_strides"_a)
      .def("plan", &plan_of, "backward"_a);

  // The short way: None where a call is not known, see calls.h.
  m.def("forward_call", &groupnorm::forward_call,
        "x"_a.none(), "num_groups"_a.none(), "weight"_a.none(), "bias"_a.none(), "eps"_a.none(),
        "activation"_a.none(), "scale"_a.none(), "shift"_a.none(), "residual"_a.none(),
        "channel_axis"_a.none(), "out"_a.none(), "return_stats"_a.none());
  m.def("learn_forward", &groupnorm::learn_forward);
  m.def("backward_call", &groupnorm::backward_call,
        "dy"_a.none(), "x"_a.none(), "mean"_a.none(), "rstd"_a.none(), "num_groups"_a.none(),
        "weight"_a.none(), "bias"_a.none(), "activation"_a.none(), "scale"_a.none(),
        "shift"_a.none(), "channel_axis"_a.none(), "output_mask"_a.none());
  m.def("learn_backward", &groupnorm::learn_backward);
  m.def("known_calls", &groupnorm::known_calls);
  m.def("forget_calls", &groupnorm::forget_calls);

  m.def("empty", [](const std::vector<npy_intp>& shape, nb::handle dtype) {
    return groupnorm::empty_array(shape, reinterpret_cast<PyArray_Descr*>(dtype.ptr()));
  });
  m.def("copy", &copy);
  m.def("poison_results", &groupnorm::poison_results);
  m.def("result_cache_limit", &groupnorm::result_cache_limit);
  m.def("set_result_cache_limit", &groupnorm::set_result_cache_limit);
  m.def("result_cache_held", &groupnorm::result_cache_held);
  m.def("empty_result_cache", &groupnorm::empty_result_cache);

  m.def("shared_cache_bytes", &groupnorm::shared_cache_bytes);
  m.def("stream_limit", &groupnorm::stream_limit);
  m.def("set_stream_limit", &groupnorm::set_stream_limit);
  m.def("scratch_held", &groupnorm::scratch_held);
  m.def("poison_scratch", &groupnorm::poison_scratch);

  m.def("define_torch_operators", &groupnorm::define_torch_operators);
  m.def("override_aten", &groupnorm::override_aten, "enable"_a, "asks_for_the_type"_a);
  // The short way of small tensors: None where the operator is to be asked, see torch_direct.h.
  m.def("enable_torch_direct", &groupnorm::enable_torch_direct);
  m.def("direct_forward", &groupnorm::direct_forward, "x"_a.none(), "num_groups"_a.none(), "weight"_a.none(),
        "bias"_a.none(), "eps"_a.none(), "activation"_a, "with_statistics"_a);
  m.def("direct_backward", &groupnorm::direct_backward, "dy"_a.none(), "x"_a.none(), "statistics"_a.none(),
        "num_groups"_a.none(), "weight"_a.none(), "bias"_a.none(), "activation"_a, "wanted"_a);

  m.def("adopt_array", &adopt_array);
  m.def("get_num_threads", &groupnorm::get_num_threads);
  m.def("set_num_threads", &groupnorm::set_num_threads);
  m.def("threading_runtime", &groupnorm::threading_runtime);
  m.def("isa_selected", &groupnorm::isa_selected);
  m.def(
      "isa_force",
      [](const std::optional<std::string>& name) {
        groupnorm::isa_force(name ? name->c_str() : nullptr);
      },
      "name"_a.none());
  // (name, why it cannot run or None, kernels entered so far), best first
  m.def("isa_list", [] {
    std::vector<std::tuple<std::string, nb::object, std::uint64_t>> rows;
    for (const auto& isa : groupnorm::isa_list()) {
      nb::object reason = isa.why_not == nullptr ? nb::object(nb::none()) : nb::cast(isa.why_not);
      rows.emplace_back(isa.name, reason, isa.kernel_calls);
    }
    return rows;
  });
  m.attr("compiler") = GROUPNORM_COMPILER;
  m.attr("build_type") = GROUPNORM_BUILD_TYPE;
}
