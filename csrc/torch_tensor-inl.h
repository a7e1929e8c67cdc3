// Tensors of torch through its C interface: owned handles, the values of its stack, new tensors. Nothing here
// knows of group norm.
//
// Guarantees: what a kernel was handed is released whatever is thrown; a tensor that cannot be walked in
// a layout is never read in it. Everything has internal linkage: torch_ops.cpp includes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "groupnorm.h"
#include "partition.h"
#include "result_memory.h"
#include "torch_abi.h"
#include "torch_layout.h"

namespace groupnorm {
namespace {

constexpr std::int32_t kCpu = 0, kNoIndex = -1, kStrided = 0;

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
    std::swap(type_, other.type_);
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
    // What looks like an address may be an offset into memory that was given back: storage().resize_(0).
    std::int64_t bytes = 0;
    check(torch_abi().get_storage_size(handle_, &bytes));
    if (bytes == 0 && elements() != 0) {
      throw std::runtime_error("The tensor has a non-zero number of elements, but its data is not allocated");
    }
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
    if (type_ < 0) check(torch_abi().get_dtype(handle_, &type_));
    return type_;
  }

 private:
  TorchTensor* handle_ = nullptr;
  // Asked for once.
  mutable std::int32_t type_ = -1;
  mutable std::int64_t dim_ = -1;
  mutable std::int64_t *sizes_ = nullptr, *strides_ = nullptr;
};

std::int32_t type_of(DType dtype) { return torch_abi().types[static_cast<int>(dtype)]; }

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
    const List list(*next_++);
    std::vector<std::int64_t> result(list.size());
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = list[i];
    return result;
  }
  // The first ones of a list that should have so many, and how many it has.
  std::size_t integers(std::int64_t* values, std::size_t count) {
    const List list(*next_++);
    const std::size_t size = list.size();
    for (std::size_t i = 0; i < std::min(size, count); ++i) values[i] = list[i];
    return size;
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

  // An owned list of integers.
  class List {
   public:
    explicit List(StableValue value) : list_(pointer<TorchList>(value), torch_abi().delete_list) {}
    std::size_t size() const {
      std::size_t result = 0;
      check(torch_abi().list_size(list_.get(), &result));
      return result;
    }
    std::int64_t operator[](std::size_t i) const {
      StableValue item = 0;
      check(torch_abi().list_item(list_.get(), i, &item));
      return static_cast<std::int64_t>(item);
    }

   private:
    std::unique_ptr<TorchList, TorchAbi::Status (*)(TorchList*)> list_;
  };

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

// A number of groups, or the sizes of several.
struct Groups {
  const std::int64_t* values;
  std::size_t count;

  Groups(const std::vector<std::int64_t>& list) : values(list.data()), count(list.size()) {}
  Groups(const std::int64_t& number) : values(&number), count(1) {}
};

Tensor empty(const std::int64_t* sizes, std::int64_t dim, const std::int64_t* strides,
             DType dtype) {
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
          block, dim, sizes, strides, 0, type_of(dtype), kCpu, kNoIndex, &result, kStrided,
          nullptr, 0, [](void* data, void*) { release_result(data); }, nullptr);
      if (status == 0) return Tensor(result);
      release_result(block);
    }
  }
  check(torch.empty_strided(dim, sizes, strides, type_of(dtype), kCpu, kNoIndex, &result));
  return Tensor(result);
}
Tensor empty_dense(const std::int64_t* sizes, std::int64_t dim, bool channels_last, DType dtype) {
  Buffer<std::int64_t, 8> strides(static_cast<std::size_t>(dim));
  std::int64_t step = 1;
  const auto take = [&](std::int64_t axis) {
    strides[static_cast<std::size_t>(axis)] = step;
    step *= std::max<std::int64_t>(1, sizes[axis]);
  };
  if (channels_last) take(1);
  for (std::int64_t axis = dim - 1; axis >= (channels_last ? 2 : 0); --axis) take(axis);
  if (channels_last) take(0);
  return empty(sizes, dim, strides.data(), dtype);
}
Tensor empty_like(const Tensor& like, bool channels_last, DType dtype) {
  return empty_dense(like.sizes(), like.dim(), channels_last, dtype);
}
Tensor empty_vector(std::int64_t length, DType dtype) {
  const std::int64_t stride = 1;
  return empty(&length, 1, &stride, dtype);
}
Tensor empty_matrix(std::int64_t rows, std::int64_t columns, DType dtype) {
  const std::int64_t sizes[] = {rows, columns}, strides[] = {std::max<std::int64_t>(1, columns), 1};
  return empty(sizes, 2, strides, dtype);
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

}  // namespace
}  // namespace groupnorm
