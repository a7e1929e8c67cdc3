#include "torch_direct.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "buffer.h"
#include "channel_table.h"
#include "groupnorm.h"
#include "partition.h"
#include "result_memory.h"
#include "torch_abi.h"
#include "torch_layout.h"
#include "torch_threads.h"

namespace nb = nanobind;

namespace groupnorm {
namespace {

using DlTensor = nb::dlpack::dltensor;

// The table behind __dlpack_c_exchange_api__, version 1 of DLPack.
struct ExchangeTable {
  std::uint32_t major, minor;
  void* previous;
  void *allocate, *export_owned, *import_owned;
  int (*read)(void* python_object, DlTensor* out);  // 0, or -1 and a Python error
  void* current_stream;
};
constexpr std::uint32_t kDlpackMajor = 1;
constexpr char kCapsule[] = "dlpack_exchange_api";

// Held for ever: torch is not unloaded.
struct Torch {
  const ExchangeTable* table;
  PyTypeObject *tensor, *parameter;
  PyObject *empty_like, *is_neg;
  std::vector<std::pair<PyObject*, PyObject*>> watchers;  // a function and its argument, or null
};
std::optional<Torch> torch;

// Null where the call raised; what it raised is for the operator to say.
nb::object call_python(PyObject* function, PyObject* argument) {
  PyObject* arguments[] = {nullptr, argument};
  const std::size_t count = argument == nullptr ? 0 : 1;
  PyObject* result =
      PyObject_Vectorcall(function, arguments + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (result == nullptr) PyErr_Clear();
  return nb::steal(result);
}
// What raised counts as true: the answer is then left to the operator.
bool is_true(const nb::object& answer) {
  if (!answer.is_valid()) return true;
  if (answer.ptr() == Py_None || answer.ptr() == Py_False) return false;
  const int truth = PyObject_IsTrue(answer.ptr());
  if (truth < 0) PyErr_Clear();
  return truth != 0;
}

bool nobody_watches() {
  return std::none_of(torch->watchers.begin(), torch->watchers.end(),
                      [](const auto& watcher) { return is_true(call_python(watcher.first, watcher.second)); });
}

// A tensor's memory, as long as the tensor lives and nobody changes it.
class Memory {
 public:
  // Whether it is one that can be read here.
  bool read(nb::handle object) { return look_at(object) && is_as_stored(object); }
  // Its numbers may be those of its memory with the other sign.
  static bool is_as_stored(nb::handle object) { return !is_true(call_python(torch->is_neg, object.ptr())); }
  // All but that; nothing of Python is called.
  bool look_at(nb::handle object) {
    if (Py_TYPE(object.ptr()) != torch->tensor && Py_TYPE(object.ptr()) != torch->parameter) return false;
    if (torch->table->read(object.ptr(), &dl_) != 0) {
      // One without memory, or of a type that DLPack does not know.
      PyErr_Clear();
      return false;
    }
    constexpr std::int32_t kDlCpu = 1;
    // No memory is so low: it is an offset into a storage that was given back.
    constexpr std::uintptr_t kLowest = std::uintptr_t{1} << 32;
    return dl_.device.device_type == kDlCpu && dl_.dtype.lanes == 1 &&
           reinterpret_cast<std::uintptr_t>(dl_.data) >= kLowest && dl_.strides != nullptr && set_dtype();
  }

  std::int64_t dim() const { return dl_.ndim; }
  const std::int64_t* sizes() const { return dl_.shape; }
  const std::int64_t* strides() const { return dl_.strides; }
  std::int64_t elements() const {
    std::int64_t result = 1;
    for (std::int64_t i = 0; i < dim(); ++i) result *= sizes()[i];
    return result;
  }
  void* data() const { return static_cast<char*>(dl_.data) + dl_.byte_offset; }
  DType dtype() const { return dtype_; }

  // Of one dtype and one shape.
  bool is_like(const Memory& other) const {
    return dtype() == other.dtype() && dim() == other.dim() &&
           std::equal(sizes(), sizes() + dim(), other.sizes());
  }
  bool is_vector(std::int64_t length) const {
    return dim() == 1 && sizes()[0] == length && strides()[0] == 1;
  }
  // Without gaps, the axes in the order of the memory format, even those of size 1: a new tensor like it has the
  // same strides.
  bool is_dense(bool channels_last) const {
    std::int64_t step = 1;
    const auto fits = [&](std::int64_t axis) {
      const bool here = strides()[axis] == step;
      step *= sizes()[axis];
      return here;
    };
    if (channels_last && !fits(1)) return false;
    for (std::int64_t axis = dim() - 1; axis >= (channels_last ? 2 : 0); --axis) {
      if (!fits(axis)) return false;
    }
    return !channels_last || fits(0);
  }

 private:
  bool set_dtype() {
    constexpr std::uint8_t kFloat = 2, kBFloat = 4;
    if (dl_.dtype.code == kBFloat && dl_.dtype.bits == 16) {
      dtype_ = DType::bfloat16;
      return true;
    }
    if (dl_.dtype.code != kFloat) return false;
    switch (dl_.dtype.bits) {
      case 16: dtype_ = DType::float16; return true;
      case 32: dtype_ = DType::float32; return true;
      case 64: dtype_ = DType::float64; return true;
      default: return false;
    }
  }

  DlTensor dl_;
  DType dtype_ = DType::float32;
};

// What forward and backward share. False from a function: the operator is to be asked.
struct Call {
  Memory x, weight, bias;
  Shape shape;
  Epilogue epilogue;

  bool read(nb::handle x_object, nb::handle groups, nb::handle weight_object, nb::handle bias_object,
            std::int64_t activation) {
    if (!torch || !PyLong_CheckExact(groups.ptr()) || !x.look_at(x_object)) return false;
    int overflow = 0;
    const std::int64_t num_groups = PyLong_AsLongLongAndOverflow(groups.ptr(), &overflow);
    if (overflow != 0) return false;
    const std::int64_t dim = x.dim(), elements = x.elements();
    if (dim < 2 || elements == 0 ||
        static_cast<std::size_t>(elements * element_size(x.dtype())) >= kLargeResult) {
      return false;
    }
    const std::int64_t channels = x.sizes()[1];
    if (num_groups <= 0 || channels % num_groups != 0 || activation < 0 || activation >= kActivations) return false;
    const bool channels_last = is_channels_last(x);
    if (!x.is_dense(channels_last)) return false;
    set_sizes(x, channels_last, shape);
    set_equal_groups(num_groups, shape);
    epilogue.activation = static_cast<Activation>(activation);
    return nobody_watches() && Memory::is_as_stored(x_object) && set(epilogue.weight, weight_object, weight) &&
           set(epilogue.bias, bias_object, bias);
  }

  std::size_t statistics() const { return statistics_of(shape); }
  DType statistics_type() const { return groupnorm::statistics_type(x.dtype()); }

  // The array in x's layout.
  template <class Array>
  bool view(const Memory& memory, Array& result) const {
    result.data = memory.data();
    return walk(memory, shape.layout, result.sample_stride, result.row_stride);
  }

  // A new tensor like one that was given. Null where there is none to be had.
  nb::object like(nb::handle object, const Memory& given, Memory& memory) const {
    nb::object made = call_python(torch->empty_like, object.ptr());
    if (!made.is_valid() || !memory.look_at(made) || !memory.is_like(given)) return {};
    return made;
  }

 private:
  bool set(Parameter& parameter, nb::handle object, Memory& memory) const {
    if (object.is_none()) return true;
    if (!memory.read(object) || !memory.is_vector(shape.channels)) return false;
    parameter = {memory.data(), memory.dtype()};
    return true;
  }
};

// Gives up the GIL for work that is worth it, in as many threads as torch has.
class Unlocked {
 public:
  explicit Unlocked(const Call& call) : threads_(call.shape, call.x.dtype(), call.epilogue) {
    constexpr std::int64_t kBriefElements = 16384;
    if (total_elements(call.shape) > kBriefElements) released_.emplace();
  }

 private:
  TorchThreads threads_;
  std::optional<nb::gil_scoped_release> released_;
};

}  // namespace

std::string enable_torch_direct(nb::tuple types, nb::handle empty_like, nb::handle is_neg,
                                nb::tuple watchers) {
  const nb::handle tensor = types[0];
  const nb::object capsule =
      nb::steal(PyObject_GetAttrString(tensor.ptr(), "__dlpack_c_exchange_api__"));
  const auto* const table = !capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), kCapsule)
                                ? nullptr
                                : static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  PyErr_Clear();
  if (table == nullptr) return "torch has no __dlpack_c_exchange_api__";
  if (table->major != kDlpackMajor || table->read == nullptr) return "torch exchanges tensors by another DLPack";
  if (torch_abi().num_threads == nullptr) return "torch's C interface is not in use";
  Torch found{table,
              reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr()),
              reinterpret_cast<PyTypeObject*>(nb::handle(types[1]).inc_ref().ptr()),
              empty_like.inc_ref().ptr(),
              is_neg.inc_ref().ptr(),
              {}};
  for (const nb::handle watcher : watchers) {
    const auto pair = nb::cast<nb::tuple>(watcher);
    const auto held = [&](std::size_t i) {
      return i < pair.size() ? nb::handle(pair[i]).inc_ref().ptr() : nullptr;
    };
    found.watchers.emplace_back(held(0), held(1));
  }
  torch = std::move(found);
  return "";
}

nb::object direct_forward(nb::handle x, nb::handle num_groups, nb::handle weight, nb::handle bias,
                          nb::handle eps, std::int64_t activation, bool with_statistics) {
  Call call;
  if (!PyFloat_CheckExact(eps.ptr()) || !call.read(x, num_groups, weight, bias, activation)) return nb::none();
  Memory y_memory;
  nb::object y = call.like(x, call.x, y_memory);
  Input in;
  Output out;
  if (!y.is_valid() || !call.view(call.x, in) || !call.view(y_memory, out)) return nb::none();
  Values mean(call.statistics()), rstd(call.statistics());
  {
    const Unlocked unlocked(call);
    forward(call.shape, call.x.dtype(), in, {}, {}, PyFloat_AS_DOUBLE(eps.ptr()), call.epilogue, out, mean.data(),
            rstd.data());
  }
  if (!with_statistics) return y;
  const auto count = static_cast<std::int64_t>(call.statistics());
  const std::int64_t each = count * element_size(call.statistics_type());
  nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(2 * each)));
  if (!bytes.is_valid()) throw nb::python_error();
  char* const data = PyBytes_AS_STRING(bytes.ptr());
  store_values(data, call.statistics_type(), 1, count, mean.data());
  store_values(data + each, call.statistics_type(), 1, count, rstd.data());
  return nb::make_tuple(y, bytes);
}

nb::object direct_backward(nb::handle dy, nb::handle x, nb::handle statistics, nb::handle num_groups,
                           nb::handle weight, nb::handle bias, std::int64_t activation, std::int64_t wanted) {
  Call call;
  Memory dy_memory;
  Input dy_in, x_in;
  if (!PyBytes_CheckExact(statistics.ptr()) || !call.read(x, num_groups, weight, bias, activation) ||
      !dy_memory.read(dy) || !dy_memory.is_like(call.x) ||
      !call.view(call.x, x_in) || !call.view(dy_memory, dy_in)) {
    return nb::none();
  }
  const auto count = static_cast<std::int64_t>(call.statistics());
  const DType kept = call.statistics_type();
  if (PyBytes_GET_SIZE(statistics.ptr()) != 2 * count * element_size(kept)) return nb::none();
  const char* const numbers = PyBytes_AS_STRING(statistics.ptr());
  Values mean(call.statistics()), rstd(call.statistics());
  load_statistics(numbers, kept, count, mean.data());
  load_statistics(numbers + count * element_size(kept), kept, count, rstd.data());
  nb::object results[3] = {nb::none(), nb::none(), nb::none()};
  Memory memory[3];
  const nb::handle given[3] = {x, weight, bias};
  const Memory* const given_memory[3] = {&call.x, &call.weight, &call.bias};
  for (std::size_t i = 0; i < 3; ++i) {
    if ((wanted >> i & 1) == 0 || given[i].is_none()) continue;
    results[i] = call.like(given[i], *given_memory[i], memory[i]);
    if (!results[i].is_valid()) return nb::none();
  }
  const auto data_of = [&](std::size_t i) { return results[i].is_none() ? nullptr : memory[i].data(); };
  Output dx;
  if (data_of(0) != nullptr && !call.view(memory[0], dx)) return nb::none();
  ParameterGradients out;
  out.weight = data_of(1);
  out.bias = data_of(2);
  {
    const Unlocked unlocked(call);
    all_gradients(call.shape, call.x.dtype(), call.epilogue, dy_in, x_in, mean.data(), rstd.data(), dx, out);
  }
  return nb::make_tuple(results[0], results[1], results[2]);
}

}  // namespace groupnorm
