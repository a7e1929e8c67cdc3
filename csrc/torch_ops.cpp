#include "torch_ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "channel_table.h"
#include "groupnorm.h"
#include "parallel.h"
#include "partition.h"
#include "result_memory.h"
#include "torch_abi.h"

namespace groupnorm {
namespace {

constexpr std::int32_t kCpu = 0, kNoIndex = -1, kStrided = 0;
// The version of torch whose conventions these kernels follow.
constexpr std::uint64_t kConventions = (std::uint64_t{2} << 56) | (std::uint64_t{10} << 48);

void check(TorchAbi::Status status) {
  if (status != 0) throw std::runtime_error("groupnorm: a call to torch's C interface failed");
}

// An owned tensor, perhaps none.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(TorchTensor* handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(dim_, other.dim_);
    std::swap(sizes_, other.sizes_);
    std::swap(strides_, other.strides_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) torch_abi().delete_tensor(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  TorchTensor* get() const { return handle_; }
  StableValue release() {
    return static_cast<StableValue>(
        reinterpret_cast<std::uintptr_t>(std::exchange(handle_, nullptr)));
  }

  void* data() const {
    if (handle_ == nullptr) return nullptr;
    void* result = nullptr;
    check(torch_abi().get_data_ptr(handle_, &result));
    return result;
  }
  std::int64_t dim() const {
    if (dim_ < 0) check(torch_abi().get_dim(handle_, &dim_));
    return dim_;
  }
  const std::int64_t* sizes() const {
    if (sizes_ == nullptr) check(torch_abi().get_sizes(handle_, &sizes_));
    return sizes_;
  }
  const std::int64_t* strides() const {
    if (strides_ == nullptr) check(torch_abi().get_strides(handle_, &strides_));
    return strides_;
  }
  std::int64_t elements() const {
    std::int64_t result = 1;
    for (std::int64_t i = 0; i < dim(); ++i) result *= sizes()[i];
    return result;
  }
  std::int32_t type() const {
    std::int32_t result = 0;
    check(torch_abi().get_dtype(handle_, &result));
    return result;
  }

 private:
  TorchTensor* handle_ = nullptr;
  // Asked for once.
  mutable std::int64_t dim_ = -1;
  mutable std::int64_t *sizes_ = nullptr, *strides_ = nullptr;
};

std::int32_t type_of(DType dtype) {
  const TorchAbi& torch = torch_abi();
  switch (dtype) {
    case DType::float32: return torch.float32();
    case DType::float64: return torch.float64();
    case DType::float16: return torch.float16();
    case DType::bfloat16: return torch.bfloat16();
  }
  throw std::logic_error("no such dtype");
}

void require_cpu(const Tensor& tensor, const char* name) {
  std::int32_t device = kCpu;
  check(torch_abi().get_device_type(tensor.get(), &device));
  if (device != kCpu) {
    throw std::runtime_error(std::string(name) + " must be on the device of x, the CPU; move it there");
  }
}

DType dtype_of(const Tensor& tensor, const char* name) {
  require_cpu(tensor, name);
  const std::int32_t type = tensor.type();
  for (const DType dtype :
       {DType::float32, DType::bfloat16, DType::float16, DType::float64}) {
    if (type == type_of(dtype)) return dtype;
  }
  throw std::runtime_error(std::string(name) +
                           " must have dtype float32, float64, float16 or bfloat16; convert it "
                           "first");
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.sizes()[i]);
  }
  return text + "]";
}

// Values of torch's stack, one after the other, each owned from then on.
class Arguments {
 public:
  explicit Arguments(const StableValue* stack) : next_(stack) {}

  Tensor tensor() { return Tensor(pointer<TorchTensor>(*next_++)); }
  Tensor optional_tensor() {
    auto* cell = pointer<StableValue>(*next_++);
    if (cell == nullptr) return {};
    Tensor result(pointer<TorchTensor>(*cell));
    if (torch_abi().delete_value != nullptr) {
      torch_abi().delete_value(cell);
    } else {
      delete cell;
    }
    // Torch's own operators hand an absent tensor over as one that is not defined.
    bool defined = false;
    check(torch_abi().is_defined(result.get(), &defined));
    return defined ? std::move(result) : Tensor();
  }
  std::int64_t integer() { return static_cast<std::int64_t>(*next_++); }
  double real() {
    double result;
    std::memcpy(&result, next_++, sizeof result);
    return result;
  }
  std::vector<std::int64_t> integers() {
    const std::unique_ptr<TorchList, TorchAbi::Status (*)(TorchList*)> list(
        pointer<TorchList>(*next_++), torch_abi().delete_list);
    std::size_t size = 0;
    check(torch_abi().list_size(list.get(), &size));
    std::vector<std::int64_t> result(size);
    for (std::size_t i = 0; i < size; ++i) {
      StableValue item = 0;
      check(torch_abi().list_item(list.get(), i, &item));
      result[i] = static_cast<std::int64_t>(item);
    }
    return result;
  }
  std::string text() {
    const std::unique_ptr<TorchString, TorchAbi::Status (*)(TorchString*)> string(
        pointer<TorchString>(*next_++), torch_abi().delete_string);
    const char* characters = nullptr;
    check(torch_abi().string_characters(string.get(), &characters));
    return characters;
  }

 private:
  template <class T>
  static T* pointer(StableValue value) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(value));
  }

  const StableValue* next_;
};

Activation activation_of(const std::string& name) {
  constexpr std::pair<const char*, Activation> names[] = {
      {"none", Activation::none},   {"silu", Activation::swish},
      {"relu", Activation::relu},   {"gelu", Activation::gelu},
      {"swish", Activation::swish}, {"gelu_tanh", Activation::gelu_tanh}};
  for (const auto& [known, activation] : names) {
    if (name == known) return activation;
  }
  throw std::runtime_error(
      "activation must be none, silu, relu, gelu, gelu_tanh or swish, but got " + name);
}

// Torch's rule: whether the strides order the axes as channels_last or channels_last_3d does.
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

using Shape64 = std::vector<std::int64_t>;

// A number of groups, or the sizes of several.
struct Groups {
  const std::int64_t* values;
  std::size_t count;

  Groups(const std::vector<std::int64_t>& list) : values(list.data()), count(list.size()) {}
  Groups(const std::int64_t& number) : values(&number), count(1) {}
};

Shape64 dense_strides(const std::int64_t* sizes, std::int64_t dim, bool channels_last) {
  Shape64 strides(static_cast<std::size_t>(dim));
  std::int64_t step = 1;
  const auto take = [&](std::int64_t axis) {
    strides[static_cast<std::size_t>(axis)] = step;
    step *= std::max<std::int64_t>(1, sizes[axis]);
  };
  if (channels_last) take(1);
  for (std::int64_t axis = dim - 1; axis >= (channels_last ? 2 : 0); --axis) take(axis);
  if (channels_last) take(0);
  return strides;
}

Tensor empty(const std::int64_t* sizes, std::int64_t dim, const Shape64& strides, DType dtype) {
  const TorchAbi& torch = torch_abi();
  std::int64_t bytes = element_size(dtype);
  for (std::int64_t i = 0; i < dim; ++i) bytes *= sizes[i];
  TorchTensor* result = nullptr;
  // As NumPy's large results do, and for the same reason.
  if (static_cast<std::size_t>(bytes) >= kLargeResult && torch.from_blob != nullptr &&
      result_cache_limit() > 0) {
    void* const block = acquire_result(static_cast<std::size_t>(bytes));
    if (block != nullptr) {
      const TorchAbi::Status status = torch.from_blob(
          block, dim, sizes, strides.data(), 0, type_of(dtype), kCpu, kNoIndex, &result, kStrided,
          nullptr, 0, [](void* data, void*) { release_result(data); }, nullptr);
      if (status == 0) return Tensor(result);
      release_result(block);
    }
  }
  check(torch.empty_strided(dim, sizes, strides.data(), type_of(dtype), kCpu, kNoIndex, &result));
  return Tensor(result);
}
Tensor empty_like(const Tensor& like, bool channels_last, DType dtype) {
  const std::int64_t dim = like.dim();
  return empty(like.sizes(), dim, dense_strides(like.sizes(), dim, channels_last), dtype);
}
Tensor empty_matrix(std::int64_t rows, std::int64_t columns, DType dtype) {
  const std::int64_t sizes[] = {rows, columns};
  return empty(sizes, 2, {std::max<std::int64_t>(1, columns), 1}, dtype);
}
Tensor nothing(DType dtype) {
  const std::int64_t sizes[] = {0};
  return empty(sizes, 1, {1}, dtype);
}

bool is_contiguous(const Tensor& tensor) {
  std::int64_t expected = 1;
  for (std::int64_t i = tensor.dim() - 1; i >= 0; --i) {
    if (tensor.sizes()[i] == 0) return true;
    if (tensor.sizes()[i] != 1 && tensor.strides()[i] != expected) return false;
    expected *= tensor.sizes()[i];
  }
  return true;
}
void make_contiguous(Tensor& tensor, DType dtype) {
  if (is_contiguous(tensor)) return;
  Tensor copied = empty_like(tensor, false, dtype);
  check(torch_abi().copy(copied.get(), tensor.get(), 0));
  tensor = std::move(copied);
}

// Strides of samples and rows of [N, C, ...] in a layout; false where it cannot be walked so.
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
    const std::int64_t* sizes = x.sizes();
    shape.samples = sizes[0];
    shape.channels = sizes[1];
    shape.spatial = 1;
    for (std::int64_t i = 2; i < dim; ++i) shape.spatial *= sizes[i];
    set_groups(x, groups);
    channels_last = is_channels_last(x);
    // Rows of features are both; the core knows them as the latter.
    shape.layout =
        channels_last || shape.spatial == 1 ? Layout::channels_last : Layout::channels_first;
    set_vector(weight, epilogue.weight, "weight", x);
    set_vector(bias, epilogue.bias, "bias", x);
    set_matrix(scale, epilogue.scale, "scale", x);
    set_matrix(shift, epilogue.shift, "shift", x);
  }

  DType statistics_type() const {
    return dtype == DType::float64 ? DType::float64 : DType::float32;
  }
  std::size_t statistics() const {
    return static_cast<std::size_t>(shape.samples * shape.groups());
  }

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
      shape.group_begin.resize(static_cast<std::size_t>(count) + 1);
      for (std::size_t k = 0; k < shape.group_begin.size(); ++k) {
        shape.group_begin[k] = shape.channels / count * static_cast<std::int64_t>(k);
      }
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

// As many threads as torch would use, for the time of a call.
class TorchThreads {
 public:
  TorchThreads() {
    std::uint32_t count = 1;
    check(torch_abi().num_threads(&count));
    previous_ = use_threads(static_cast<int>(count));
  }
  ~TorchThreads() { use_threads(previous_); }
  TorchThreads(const TorchThreads&) = delete;
  TorchThreads& operator=(const TorchThreads&) = delete;

 private:
  int previous_;
};

Tensor statistics_tensor(const Call& call, const std::vector<double>& values, DType dtype) {
  Tensor result = empty_matrix(call.shape.samples, call.shape.groups(), dtype);
  void* const data = result.data();
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_parameter(data, dtype, static_cast<std::int64_t>(i), values[i]);
  }
  return result;
}

std::vector<double> statistics_values(const Call& call, Tensor& tensor, const char* name) {
  const DType dtype = dtype_of(tensor, name);
  if (static_cast<std::size_t>(tensor.elements()) != call.statistics()) {
    throw std::runtime_error(std::string(name) + " must have shape [N, G] = [" +
                             std::to_string(call.shape.samples) + ", " +
                             std::to_string(call.shape.groups()) + "], but got " +
                             shape_text(tensor));
  }
  make_contiguous(tensor, dtype);
  const Parameter values = {tensor.data(), dtype};
  std::vector<double> result(call.statistics());
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = parameter_at(values, static_cast<std::int64_t>(i));
  }
  return result;
}

struct Normalized {
  Tensor y, sum, mean, rstd;
};

Normalized normalize_tensor(Call& call, Tensor x, Tensor residual, double eps,
                            DType statistics_type, bool with_statistics = true) {
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
  std::vector<double> mean(call.statistics()), rstd(call.statistics());
  {
    const TorchThreads threads;
    forward(call.shape, call.dtype, in, added, sum, eps, call.epilogue, y, mean.data(),
            rstd.data());
  }
  if (!with_statistics) return result;
  result.mean = statistics_tensor(call, mean, statistics_type);
  result.rstd = statistics_tensor(call, rstd, statistics_type);
  return result;
}

enum Wanted { kX, kWeight, kBias, kScale, kShift, kGradients };

// What is not wanted, or the gradient of what was not given, stays none.
std::array<Tensor, kGradients> gradients(Call& call, Tensor dy, Tensor x,
                                         const std::vector<double>& mean,
                                         const std::vector<double>& rstd,
                                         const std::array<bool, kGradients>& wanted) {
  check_like(dy, x, call.dtype, "dy");
  std::array<Tensor, kGradients> result;
  ParameterGradients out;
  const auto parameter = [&](Wanted which, bool given, const Parameter& like) -> void* {
    if (!wanted[which] || !given) return nullptr;
    const std::int64_t channels = call.shape.channels;
    result[which] = which == kScale || which == kShift
                        ? empty_matrix(call.shape.samples, channels, like.dtype)
                        : empty(&channels, 1, {1}, like.dtype);
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
  const TorchThreads threads;
  all_gradients(call.shape, call.dtype, call.epilogue, dy_in, in, mean.data(), rstd.data(), dx, out);
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
  Normalized out = normalize_tensor(call, std::move(x), std::move(residual), eps,
                                    call.statistics_type());
  *stack++ = out.y.release();
  if (kResidual) *stack++ = out.sum.release();
  *stack++ = out.mean.release();
  *stack++ = out.rstd.release();
}

void backward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor dy = in.tensor(), x = in.tensor(), mean = in.tensor(), rstd = in.tensor();
  const std::vector<std::int64_t> groups = in.integers();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  Tensor scale = in.optional_tensor(), shift = in.optional_tensor();
  const std::string activation = in.text();
  const double beta = in.real();
  const std::vector<std::int64_t> mask = in.integers();
  if (mask.size() != kGradients) {
    throw std::runtime_error("output_mask must have five entries, but got " +
                             std::to_string(mask.size()));
  }
  Call call(x, groups, std::move(weight), std::move(bias), std::move(scale), std::move(shift));
  call.epilogue.activation = activation_of(activation);
  call.epilogue.beta = beta;
  std::array<bool, kGradients> wanted;
  for (std::size_t i = 0; i < kGradients; ++i) wanted[i] = (mask[i] & 1) != 0;
  const std::vector<double> means = statistics_values(call, mean, "mean");
  const std::vector<double> rstds = statistics_values(call, rstd, "rstd");
  auto out = gradients(call, std::move(dy), std::move(x), means, rstds, wanted);
  for (std::size_t i = 0; i < kGradients; ++i) {
    stack[i] = (out[i] ? std::move(out[i]) : nothing(call.dtype)).release();
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

// Without statistics for a backward y is the only result, else there are three.
template <bool kStatistics>
void plain_forward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor x = in.tensor();
  const std::int64_t groups = in.integer();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const double eps = in.real();
  Call call = plain_call(x, groups, std::move(weight), std::move(bias), in.integer());
  Normalized out =
      normalize_tensor(call, std::move(x), {}, eps, call.statistics_type(), kStatistics);
  stack[0] = out.y.release();
  if (!kStatistics) return;
  stack[1] = out.mean.release();
  stack[2] = out.rstd.release();
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
  Tensor dy = in.tensor(), x = in.tensor(), mean = in.tensor(), rstd = in.tensor();
  const std::int64_t groups = in.integer();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const std::int64_t activation = in.integer(), wanted = in.integer();
  Call call = plain_call(x, groups, std::move(weight), std::move(bias), activation);
  const std::vector<double> means = statistics_values(call, mean, "mean");
  const std::vector<double> rstds = statistics_values(call, rstd, "rstd");
  auto out = gradients(call, std::move(dy), std::move(x), means, rstds,
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
    sizes_.assign(x.sizes(), x.sizes() + x.dim());
  }

  Tensor in(Tensor x) const {
    if (as_it_is_) return x;
    make_contiguous(x, dtype_);
    return copied(x, shape_);
  }
  // A result in the shape of the input.
  Tensor out(Tensor y) const { return as_it_is_ || !y ? std::move(y) : copied(y, sizes_); }

 private:
  Tensor copied(const Tensor& from, const Shape64& sizes) const {
    const auto dim = static_cast<std::int64_t>(sizes.size());
    Tensor to = empty(sizes.data(), dim, dense_strides(sizes.data(), dim, false), dtype_);
    const std::int64_t bytes = from.elements() * element_size(dtype_);
    if (bytes > 0) std::memcpy(to.data(), from.data(), static_cast<std::size_t>(bytes));
    return to;
  }

  DType dtype_;
  Shape64 shape_, sizes_;
  bool as_it_is_;
};

void aten_forward_kernel(StableValue* stack, std::uint64_t, std::uint64_t) {
  Arguments in(stack);
  Tensor x = in.tensor();
  Tensor weight = in.optional_tensor(), bias = in.optional_tensor();
  const std::int64_t samples = in.integer(), channels = in.integer(), positions = in.integer();
  const std::int64_t groups = in.integer();
  const double eps = in.real();
  const DType dtype = dtype_of(x, "input");
  // Torch keeps statistics in x's type, unless a parameter has another.
  const bool mixed = (weight && weight.type() != x.type()) || (bias && bias.type() != x.type());
  const Samples shapes(x, samples, channels, positions, dtype);
  x = shapes.in(std::move(x));
  Call call(x, groups, std::move(weight), std::move(bias), {}, {});
  Normalized out =
      normalize_tensor(call, std::move(x), {}, eps, mixed ? call.statistics_type() : dtype);
  stack[0] = shapes.out(std::move(out.y)).release();
  stack[1] = out.mean.release();
  stack[2] = out.rstd.release();
}

// Statistics that were kept in 16 bits are too coarse for gradients (torch's own are off by a percent):
// they are taken from x again. rstd needs an eps that is not among the arguments: the usual ones are
// tried, and where none gives what was kept, that is used, coarse as it is.
void refine_statistics(const Call& call, Tensor& x, DType kept, std::vector<double>& mean,
                       std::vector<double>& rstd) {
  std::vector<Moments> again(call.statistics());
  {
    const TorchThreads threads;
    moments(call.shape, call.dtype, call.view<Input>(x), {}, {}, again.data());
  }
  for (std::size_t i = 0; i < again.size(); ++i) {
    mean[i] = again[i].mean;
    const double variance = again[i].count > 0.0 ? again[i].m2 / again[i].count : 0.0;
    for (const double eps : {1e-5, 1e-6, 1e-3, 1e-4, 1e-12, 0.0}) {
      const double exact = 1.0 / std::sqrt(variance + eps);
      double rounded[1];
      store_parameter(rounded, kept, 0, exact);
      if (parameter_at({rounded, kept}, 0) == rstd[i]) {
        rstd[i] = exact;
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
  const std::vector<std::int64_t> mask = in.integers();
  const DType dtype = dtype_of(x, "input");
  const Samples shapes(x, samples, channels, positions, dtype);
  if (dy.elements() != x.elements() || mask.size() != 3) {
    throw std::runtime_error("Expected grad_out of shape " + shape_text(x) +
                             " and three entries of output_mask, but got shape " + shape_text(dy));
  }
  x = shapes.in(std::move(x));
  dy = shapes.in(std::move(dy));
  const DType kept = dtype_of(rstd, "rstd");
  Call call(x, groups, std::move(weight), {}, {}, {});
  std::vector<double> means = statistics_values(call, mean, "mean");
  std::vector<double> rstds = statistics_values(call, rstd, "rstd");
  if (kept == DType::float16 || kept == DType::bfloat16) {
    refine_statistics(call, x, kept, means, rstds);
  }
  // The bias is not an argument; its gradient has the weight's type, or x's.
  call.epilogue.bias.dtype = call.weight ? call.epilogue.weight.dtype : dtype;
  call.bias_is_implied = true;
  auto out = gradients(call, std::move(dy), std::move(x), means, rstds,
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

void override_aten(bool enable) {
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
