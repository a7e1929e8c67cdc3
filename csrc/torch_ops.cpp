#include "torch_ops.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>
#include <vector>

#include "buffer.h"
#include "channel_table.h"
#include "groupnorm.h"
#include "parallel.h"
#include "partition.h"
#include "torch_abi.h"
#include "torch_errors.h"
#include "torch_tensor-inl.h"
#include "torch_threads.h"

namespace groupnorm {
namespace {

// The version of torch whose conventions these kernels follow.
constexpr std::uint64_t kConventions = (std::uint64_t{2} << 56) | (std::uint64_t{10} << 48);

// What forward and backward share: the shape as the core wants it, and parameters it can read.
struct Call {
  Shape shape;
  DType dtype;
  Epilogue epilogue;
  bool channels_last;
  bool bias_is_implied = false;  // there is one, but nobody says what it holds
  Tensor weight, bias, scale, shift;

  Call(const Tensor& x, const Groups& groups, Tensor weight_, Tensor bias_,
       Tensor scale_, Tensor shift_)
      : weight(std::move(weight_)),
        bias(std::move(bias_)),
        scale(std::move(scale_)),
        shift(std::move(shift_)) {
    const std::int64_t dim = x.dim();
    if (dim < 2) {
      throw std::runtime_error("Expected at least 2 dimensions for input tensor but received " +
                               std::to_string(dim));
    }
    dtype = dtype_of(x, "x");
    channels_last = is_channels_last(x);
    set_sizes(x, channels_last, shape);
    set_groups(x, groups);
    set_vector(weight, epilogue.weight, "weight", x);
    set_vector(bias, epilogue.bias, "bias", x);
    set_matrix(scale, epilogue.scale, "scale", x);
    set_matrix(shift, epilogue.shift, "shift", x);
  }

  DType statistics_type() const { return groupnorm::statistics_type(dtype); }
  std::size_t statistics() const { return statistics_of(shape); }

  // The array as the core can walk it, copied where it cannot.
  template <class Array>
  Array view(Tensor& tensor) const {
    Array result;
    if (!walk(tensor, shape.layout, result.sample_stride, result.row_stride)) {
      Tensor copied = empty_like(tensor, channels_last, dtype);
      check(torch_abi().copy(copied.get(), tensor.get(), 0));
      tensor = std::move(copied);
      walk(tensor, shape.layout, result.sample_stride, result.row_stride);
    }
    result.data = tensor.data();
    return result;
  }

 private:
  void set_groups(const Tensor& x, const Groups& groups) {
    if (groups.count == 1) {
      const std::int64_t count = groups.values[0];
      if (count <= 0) {
        throw std::runtime_error("Expected num groups to be greater than 0, got " +
                                 std::to_string(count));
      }
      if (shape.channels % count != 0) {
        throw std::runtime_error(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            "shape " +
            shape_text(x) + " and num_groups=" + std::to_string(count));
      }
      set_equal_groups(count, shape);
      return;
    }
    shape.group_begin.push_back(0);
    for (std::size_t i = 0; i < groups.count; ++i) {
      const std::int64_t size = groups.values[i];
      if (size <= 0) throw std::runtime_error("group sizes must be positive");
      shape.group_begin.push_back(shape.group_begin.back() + size);
    }
    if (shape.group_begin.back() != shape.channels) {
      throw std::runtime_error("group sizes must sum to the channels of x, which has shape " +
                               shape_text(x) + ", but sum to " +
                               std::to_string(shape.group_begin.back()));
    }
  }

  void set_vector(Tensor& tensor, Parameter& parameter, const char* name, const Tensor& x) {
    if (!tensor) return;
    if (tensor.dim() != 1 || tensor.sizes()[0] != shape.channels) {
      throw std::runtime_error("Expected " + std::string(name) +
                               " to be a vector of size equal to the number of channels in input, "
                               "but got " +
                               name + " of shape " + shape_text(tensor) + " and input of shape " +
                               shape_text(x));
    }
    set_parameter(tensor, parameter, name);
  }
  void set_matrix(Tensor& tensor, Parameter& parameter, const char* name, const Tensor& x) {
    if (!tensor) return;
    if (tensor.dim() != 2 || tensor.sizes()[0] != shape.samples ||
        tensor.sizes()[1] != shape.channels) {
      throw std::runtime_error(std::string(name) + " must have shape [N, C] = [" +
                               std::to_string(shape.samples) + ", " +
                               std::to_string(shape.channels) + "] for x of shape " +
                               shape_text(x) + ", but got " + shape_text(tensor));
    }
    set_parameter(tensor, parameter, name);
  }
  void set_parameter(Tensor& tensor, Parameter& parameter, const char* name) {
    parameter.dtype = dtype_of(tensor, name);
    make_contiguous(tensor, parameter.dtype);
    parameter.data = tensor.data();
  }
};

void check_like(const Tensor& tensor, const Tensor& x, DType dtype, const char* name) {
  require_cpu(tensor, name);
  if (tensor.dim() != x.dim() || !std::equal(x.sizes(), x.sizes() + x.dim(), tensor.sizes()) ||
      tensor.type() != type_of(dtype)) {
    throw std::runtime_error(std::string(name) + " must have the shape and the dtype of x, " +
                             shape_text(x) + ", but has shape " + shape_text(tensor) +
                             (tensor.type() == type_of(dtype) ? "" : " and another dtype"));
  }
}

// The statistics of a call, [N, G] each.
struct Statistics {
  Values mean, rstd;

  explicit Statistics(const Call& call) : mean(call.statistics()), rstd(call.statistics()) {}
};

Tensor statistics_tensor(const Call& call, const Values& values, DType dtype) {
  Tensor result = empty_matrix(call.shape.samples, call.shape.groups(), dtype);
  store_values(result.data(), dtype, 1, static_cast<std::int64_t>(values.size()), values.data());
  return result;
}

// Both in one tensor, [2, N, G].
Tensor statistics_tensor(const Call& call, const Statistics& statistics) {
  const std::int64_t sizes[] = {2, call.shape.samples, call.shape.groups()};
  const DType dtype = call.statistics_type();
  const auto count = static_cast<std::int64_t>(call.statistics());
  Tensor result = empty_dense(sizes, 3, false, dtype);
  auto* const data = static_cast<char*>(result.data());
  store_values(data, dtype, 1, count, statistics.mean.data());
  store_values(data + count * element_size(dtype), dtype, 1, count, statistics.rstd.data());
  return result;
}

// A contiguous tensor of so many [N, G] in a row.
Parameter statistics_parameter(const Call& call, Tensor& tensor, std::size_t several,
                               const char* name) {
  const DType dtype = dtype_of(tensor, name);
  // Torch's own operators take [N, G] in any shape.
  const bool fits = several == 1 || (tensor.dim() == 3 && tensor.sizes()[0] == 2 &&
                                     tensor.sizes()[1] == call.shape.samples);
  if (!fits || static_cast<std::size_t>(tensor.elements()) != several * call.statistics()) {
    throw std::runtime_error(std::string(name) + " must have shape " +
                             (several == 1 ? "[N, G] = [" : "[2, N, G] = [2, ") +
                             std::to_string(call.shape.samples) + ", " +
                             std::to_string(call.shape.groups()) + "], but got " +
                             shape_text(tensor));
  }
  make_contiguous(tensor, dtype);
  return {tensor.data(), dtype};
}

void read_values(const Parameter& from, std::size_t first, Values& result) {
  const auto* const data =
      static_cast<const char*>(from.data) + element_size(from.dtype) * static_cast<std::int64_t>(first);
  load_statistics(data, from.dtype, static_cast<std::int64_t>(result.size()), result.data());
}

void read_statistics(const Call& call, Tensor& mean, Tensor& rstd, Statistics& result) {
  read_values(statistics_parameter(call, mean, 1, "mean"), 0, result.mean);
  read_values(statistics_parameter(call, rstd, 1, "rstd"), 0, result.rstd);
}

void read_statistics(const Call& call, Tensor& both, Statistics& result) {
  const Parameter values = statistics_parameter(call, both, 2, "statistics");
  read_values(values, 0, result.mean);
  read_values(values, call.statistics(), result.rstd);
}

struct Normalized {
  Tensor y, sum;
};

Normalized normalize_tensor(Call& call, Tensor x, Tensor residual, double eps,
                            Statistics& statistics) {
  Normalized result;
  result.y = empty_like(x, call.channels_last, call.dtype);
  Output sum;
  Input added;
  if (residual) {
    check_like(residual, x, call.dtype, "residual");
    added = call.view<Input>(residual);
    result.sum = empty_like(x, call.channels_last, call.dtype);
    sum = call.view<Output>(result.sum);
  }
  const Input in = call.view<Input>(x);
  const Output y = call.view<Output>(result.y);
  const TorchThreads threads(call.shape, call.dtype, call.epilogue);
  forward(call.shape, call.dtype, in, added, sum, eps, call.epilogue, y, statistics.mean.data(),
          statistics.rstd.data());
  return result;
}

enum Wanted { kX, kWeight, kBias, kScale, kShift, kGradients };

// What is not wanted, or the gradient of what was not given, stays none.
std::array<Tensor, kGradients> gradients(Call& call, Tensor dy, Tensor x,
                                         const Statistics& statistics,
                                         const std::array<bool, kGradients>& wanted) {
  check_like(dy, x, call.dtype, "dy");
  std::array<Tensor, kGradients> result;
  ParameterGradients out;
  const auto parameter = [&](Wanted which, bool given, const Parameter& like) -> void* {
    if (!wanted[which] || !given) return nullptr;
    const std::int64_t channels = call.shape.channels;
    result[which] = which == kScale || which == kShift
                        ? empty_matrix(call.shape.samples, channels, like.dtype)
                        : empty_vector(channels, like.dtype);
    return result[which].data();
  };
  out.weight = parameter(kWeight, bool(call.weight), call.epilogue.weight);
  out.bias = parameter(kBias, call.bias || call.bias_is_implied, call.epilogue.bias);
  out.scale = parameter(kScale, bool(call.scale), call.epilogue.scale);
  out.shift = parameter(kShift, bool(call.shift), call.epilogue.shift);
  Output dx;
  if (wanted[kX]) {
    result[kX] = empty_like(x, call.channels_last, call.dtype);
    dx = call.view<Output>(result[kX]);
  }
  const Input in = call.view<Input>(x), dy_in = call.view<Input>(dy);
  const TorchThreads threads(call.shape, call.dtype, call.epilogue);
  all_gradients(call.shape, call.dtype, call.epilogue, dy_in, in, statistics.mean.data(),
                statistics.rstd.data(), dx, out);
  return result;
}

// With a residual the sum is the second of four results, else there are three.
template <bool kResidual>
void forward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor x = in.tensor(), residual = kResidual ? in.tensor() : Tensor();
  const std::vector<std::int64_t> groups = in.integers();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  Tensor scale = in.optional_tensor(), shift = in.optional_tensor();
  const double eps = in.real();
  const std::string activation = in.text();
  const double beta = in.real();
  Call call(x, groups, std::move(weight), std::move(bias), std::move(scale), std::move(shift));
  call.epilogue.activation = activation_of(activation);
  call.epilogue.beta = beta;
  Statistics statistics(call);
  Normalized out = normalize_tensor(call, std::move(x), std::move(residual), eps, statistics);
  Tensor mean = statistics_tensor(call, statistics.mean, call.statistics_type());
  Tensor rstd = statistics_tensor(call, statistics.rstd, call.statistics_type());
  *stack++ = out.y.release();
  if (kResidual) *stack++ = out.sum.release();
  *stack++ = mean.release();
  *stack++ = rstd.release();
}

void backward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor dy = in.tensor(), x = in.tensor(), mean = in.tensor(), rstd = in.tensor();
  const std::vector<std::int64_t> groups = in.integers();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  Tensor scale = in.optional_tensor(), shift = in.optional_tensor();
  const std::string activation = in.text();
  const double beta = in.real();
  std::array<std::int64_t, kGradients> mask;
  const std::size_t entries = in.integers(mask.data(), mask.size());
  if (entries != mask.size()) {
    throw std::runtime_error("output_mask must have five entries, but got " + std::to_string(entries));
  }
  Call call(x, groups, std::move(weight), std::move(bias), std::move(scale), std::move(shift));
  call.epilogue.activation = activation_of(activation);
  call.epilogue.beta = beta;
  std::array<bool, kGradients> wanted;
  for (std::size_t i = 0; i < kGradients; ++i) wanted[i] = (mask[i] & 1) != 0;
  Statistics statistics(call);
  read_statistics(call, mean, rstd, statistics);
  auto out = gradients(call, std::move(dy), std::move(x), statistics, wanted);
  for (std::size_t i = 0; i < kGradients; ++i) {
    stack[i] = (out[i] ? std::move(out[i]) : empty_vector(0, call.dtype)).release();
  }
}

// The common case in eager mode, with as few and as plain arguments as possible: each costs as much as
// the work on a small tensor.
Call plain_call(const Tensor& x, std::int64_t groups, Tensor weight, Tensor bias,
                std::int64_t activation) {
  if (activation < 0 || activation >= kActivations) {
    throw std::runtime_error("activation must be from 0 to 4, but got " +
                             std::to_string(activation));
  }
  Call call(x, groups, std::move(weight), std::move(bias), {}, {});
  call.epilogue.activation = static_cast<Activation>(activation);
  return call;
}

// Without statistics for a backward y is the only result, else there are two.
template <bool kStatistics>
void plain_forward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor x = in.tensor();
  const std::int64_t groups = in.integer();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const double eps = in.real();
  Call call = plain_call(x, groups, std::move(weight), std::move(bias), in.integer());
  Statistics statistics(call);
  Normalized out = normalize_tensor(call, std::move(x), {}, eps, statistics);
  Tensor both = kStatistics ? statistics_tensor(call, statistics) : Tensor();
  stack[0] = out.y.release();
  if (kStatistics) stack[1] = both.release();
}

// What is not wanted comes back undefined, which Python sees as None.
StableValue released_or_undefined(Tensor& tensor) {
  if (tensor) return tensor.release();
  TorchTensor* undefined = nullptr;
  check(torch_abi().undefined_tensor(&undefined));
  return Tensor(undefined).release();
}

void plain_backward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor dy = in.tensor(), x = in.tensor(), both = in.tensor();
  const std::int64_t groups = in.integer();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const std::int64_t activation = in.integer(), wanted = in.integer();
  Call call = plain_call(x, groups, std::move(weight), std::move(bias), activation);
  Statistics statistics(call);
  read_statistics(call, both, statistics);
  auto out = gradients(call, std::move(dy), std::move(x), statistics,
                       {(wanted & 1) != 0, (wanted & 2) != 0, (wanted & 4) != 0, false, false});
  for (std::size_t i = 0; i < 3; ++i) stack[i] = released_or_undefined(out[i]);
}

// Torch's own operators name N, C and the positions beside a tensor that may have any shape with so
// many elements.
class Samples {
 public:
  Samples(const Tensor& x, std::int64_t samples, std::int64_t channels, std::int64_t positions,
          DType dtype)
      : dtype_(dtype), shape_{samples, channels, positions} {
    if (std::min({samples, channels, positions}) < 0 ||
        x.elements() != samples * channels * positions) {
      throw std::runtime_error("Expected an input of N * C * HxW = " + std::to_string(samples) +
                               " * " + std::to_string(channels) + " * " +
                               std::to_string(positions) + " elements, but got shape " +
                               shape_text(x));
    }
    as_it_is_ = x.dim() >= 2 && x.sizes()[0] == samples && x.sizes()[1] == channels;
    if (!as_it_is_) sizes_.assign(x.sizes(), x.sizes() + x.dim());
  }

  Tensor in(Tensor x) const {
    if (as_it_is_) return x;
    make_contiguous(x, dtype_);
    return copied(x, shape_.data(), 3);
  }
  // A result in the shape of the input.
  Tensor out(Tensor y) const {
    if (as_it_is_ || !y) return y;
    return copied(y, sizes_.data(), static_cast<std::int64_t>(sizes_.size()));
  }

 private:
  Tensor copied(const Tensor& from, const std::int64_t* sizes, std::int64_t dim) const {
    Tensor to = empty_dense(sizes, dim, false, dtype_);
    const std::int64_t bytes = from.elements() * element_size(dtype_);
    if (bytes > 0) std::memcpy(to.data(), from.data(), static_cast<std::size_t>(bytes));
    return to;
  }

  DType dtype_;
  std::array<std::int64_t, 3> shape_;
  std::vector<std::int64_t> sizes_;  // of what is not as it is
  bool as_it_is_;
};

std::atomic<bool> torch_asks_for_the_type{false};  // see torch_errors.h

// In torch's words for what it refuses.
DType aten_dtype_of(const Tensor& input) {
  // By torch's numbers. Ours have no name here, nor have those that are quantized, which do not get here.
  constexpr const char* names[] = {
      "Byte", "Char", "Short", "Int", "Long", nullptr, nullptr, nullptr, "ComplexHalf", "ComplexFloat", "ComplexDouble",
      "Bool", nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, "Bits1x8", "Bits2x4", "Bits4x2", "Bits8", "Bits16",
      "Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz", "UInt16", "UInt32", "UInt64", "UInt1",
      "UInt2", "UInt3", "UInt4", "UInt5", "UInt6", "UInt7", "Int1", "Int2", "Int3", "Int4", "Int5", "Int6", "Int7",
      "Float8_e8m0fnu", "Float4_e2m1fn_x2"};
  const auto type = static_cast<std::size_t>(input.type());
  if (type < std::size(names) && names[type] != nullptr) {
    throw_not_implemented(std::string("\"GroupNormKernelImpl\" not implemented for '") + names[type] + "'",
                          torch_asks_for_the_type.load());
  }
  return dtype_of(input, "input");
}

void aten_forward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor x = in.tensor();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const std::int64_t samples = in.integer(), channels = in.integer(), positions = in.integer();
  const std::int64_t groups = in.integer();
  const double eps = in.real();
  const DType dtype = aten_dtype_of(x);
  // Torch keeps statistics in x's type, unless a parameter has another.
  const bool mixed = (weight && weight.type() != x.type()) || (bias && bias.type() != x.type());
  const Samples shapes(x, samples, channels, positions, dtype);
  x = shapes.in(std::move(x));
  Call call(x, groups, std::move(weight), std::move(bias), {}, {});
  Statistics statistics(call);
  Normalized out = normalize_tensor(call, std::move(x), {}, eps, statistics);
  const DType kept = mixed ? call.statistics_type() : dtype;
  Tensor mean = statistics_tensor(call, statistics.mean, kept);
  Tensor rstd = statistics_tensor(call, statistics.rstd, kept);
  stack[0] = shapes.out(std::move(out.y)).release();
  stack[1] = mean.release();
  stack[2] = rstd.release();
}

// Statistics that were kept in 16 bits are too coarse for gradients (torch's own are off by a percent):
// they are taken from x again. rstd needs an eps that is not among the arguments: the usual ones are
// tried, and where none gives what was kept, that is used, coarse as it is.
void refine_statistics(const Call& call, Tensor& x, DType kept, Statistics& statistics) {
  std::vector<Moments> again(call.statistics());
  {
    const TorchThreads threads(call.shape, call.dtype, call.epilogue);
    moments(call.shape, call.dtype, call.view<Input>(x), {}, {}, again.data());
  }
  for (std::size_t i = 0; i < again.size(); ++i) {
    statistics.mean[i] = again[i].mean;
    const double variance = again[i].count > 0.0 ? again[i].m2 / again[i].count : 0.0;
    for (const double eps : {1e-5, 1e-6, 1e-3, 1e-4, 1e-12, 0.0}) {
      const double exact = 1.0 / std::sqrt(variance + eps);
      double rounded[1];
      store_parameter(rounded, kept, 0, exact);
      if (parameter_at({rounded, kept}, 0) == statistics.rstd[i]) {
        statistics.rstd[i] = exact;
        break;
      }
    }
  }
}

void aten_backward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor dy = in.tensor(), x = in.tensor(), mean = in.tensor(), rstd = in.tensor();
  Tensor weight = in.optional_tensor();
  const std::int64_t samples = in.integer(), channels = in.integer(), positions = in.integer();
  const std::int64_t groups = in.integer();
  std::array<std::int64_t, 3> mask;
  const std::size_t entries = in.integers(mask.data(), mask.size());
  const DType dtype = aten_dtype_of(x);
  const Samples shapes(x, samples, channels, positions, dtype);
  if (dy.elements() != x.elements() || entries != mask.size()) {
    throw std::runtime_error("Expected grad_out of shape " + shape_text(x) +
                             " and three entries of output_mask, but got shape " + shape_text(dy));
  }
  x = shapes.in(std::move(x));
  dy = shapes.in(std::move(dy));
  const DType kept = dtype_of(rstd, "rstd");
  Call call(x, groups, std::move(weight), {}, {}, {});
  Statistics statistics(call);
  read_statistics(call, mean, rstd, statistics);
  if (kept == DType::float16 || kept == DType::bfloat16) {
    refine_statistics(call, x, kept, statistics);
  }
  // The bias is not an argument; its gradient has the weight's type, or x's.
  call.epilogue.bias.dtype = call.weight ? call.epilogue.weight.dtype : dtype;
  call.bias_is_implied = true;
  auto out = gradients(call, std::move(dy), std::move(x), statistics,
                       {mask[0] != 0, mask[1] != 0, mask[2] != 0, false, false});
  out[kX] = shapes.out(std::move(out[kX]));
  for (std::size_t i = 0; i < 3; ++i) stack[i] = released_or_undefined(out[i]);
}

}  // namespace

std::string define_torch_operators(
    const std::vector<std::pair<std::string, std::string>>& schemas) {
  static const std::string why_not = [&] {
    const std::string missing = TorchAbi::load();
    if (!missing.empty()) return missing;
    const TorchAbi& torch = torch_abi();
    // Both live as long as the process.
    TorchLibrary *definitions = nullptr, *implementations = nullptr;
    check(torch.library_define("groupnorm", __FILE__, __LINE__, &definitions));
    check(torch.library_implement("groupnorm", "CPU", __FILE__, __LINE__, &implementations));
    constexpr std::pair<const char*, Kernel> kernels[] = {
        {"forward", forward_kernel<false>},
        {"forward_residual", forward_kernel<true>},
        {"backward", backward_kernel},
        {"plain_infer", plain_forward_kernel<false>},
        {"plain_forward", plain_forward_kernel<true>},
        {"plain_backward", plain_backward_kernel}};
    for (const auto& [name, schema] : schemas) {
      for (const auto& [known, kernel] : kernels) {
        if (name != known) continue;
        check(torch.define(definitions, (name + schema).c_str()));
        check(torch.implement(implementations, known, kernel, kConventions));
      }
    }
    return std::string();
  }();
  return why_not;
}

void override_aten(bool enable, bool asks_for_the_type) {
  torch_asks_for_the_type.store(asks_for_the_type);
  static TorchLibrary* library = nullptr;
  const TorchAbi& torch = torch_abi();
  if (enable == (library != nullptr)) return;
  if (!enable) {
    check(torch.delete_library(std::exchange(library, nullptr)));
    return;
  }
  check(torch.library_implement("aten", "CPU", __FILE__, __LINE__, &library));
  check(torch.implement(library, "native_group_norm", aten_forward_kernel, kConventions));
  check(torch.implement(library, "native_group_norm_backward", aten_backward_kernel, kConventions));
}

}  // namespace groupnorm
