#include "calls.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <unordered_map>

#include "buffer.h"
#include "channel_table.h"

namespace nb = nanobind;

namespace groupnorm {
namespace {

// Networks have a few hundred distinct layers.
constexpr std::size_t kMostCalls = 1024;
// Below this, giving up the GIL and taking it back costs more than others gain by it.
constexpr std::int64_t kBriefElements = 16384;

bool is_plain_array(nb::handle object) { return Py_TYPE(object.ptr()) == &PyArray_Type; }

// What a call depends on, as words. Only plain types are known: True == 1 == 1.0 would be alike, and
// a subclass of ndarray may mean something else.
class Signature {
 public:
  bool known() const { return known_; }
  const std::vector<std::int64_t>& words() const { return words_; }

  Signature& array(nb::handle object) {
    if (object.is_none()) return word(-1);
    if (!is_plain_array(object)) return unknown();
    PyArrayObject* array = array_of(object);
    const int dims = PyArray_NDIM(array);
    word(dims).word(PyArray_TYPE(array)).word(PyArray_ISNOTSWAPPED(array) ? 1 : 0);
    word(PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE);
    for (int i = 0; i < dims; ++i) word(PyArray_DIM(array, i)).word(PyArray_STRIDE(array, i));
    return *this;
  }
  Signature& integer(nb::handle object) {
    if (!PyLong_CheckExact(object.ptr())) return unknown();
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    return overflow != 0 ? unknown() : word(value);
  }
  Signature& number(nb::handle object) {
    if (!PyFloat_CheckExact(object.ptr())) return unknown();
    const double value = PyFloat_AS_DOUBLE(object.ptr());
    std::int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return word(bits);
  }
  Signature& boolean(nb::handle object) {
    if (!PyBool_Check(object.ptr())) return unknown();
    return word(object.ptr() == Py_True);
  }
  Signature& text(nb::handle object) {
    Py_ssize_t length = 0;
    if (!PyUnicode_CheckExact(object.ptr())) return unknown();
    const char* characters = PyUnicode_AsUTF8AndSize(object.ptr(), &length);
    if (characters == nullptr) {
      PyErr_Clear();
      return unknown();
    }
    // Names of activations; a longer text is not one.
    if (length > 16) return unknown();
    std::int64_t packed[2] = {};
    std::memcpy(packed, characters, static_cast<std::size_t>(length));
    return word(length).word(packed[0]).word(packed[1]);
  }
  // A number of groups, or a tuple of their sizes.
  Signature& groups(nb::handle object) {
    if (!PyTuple_CheckExact(object.ptr())) return word(-1).integer(object);
    const Py_ssize_t size = PyTuple_GET_SIZE(object.ptr());
    word(size);
    for (Py_ssize_t i = 0; i < size; ++i) integer(PyTuple_GET_ITEM(object.ptr(), i));
    return *this;
  }
  // None, a name, or ("swish", beta).
  Signature& activation(nb::handle object) {
    if (object.is_none()) return word(-1);
    if (!PyTuple_CheckExact(object.ptr())) return text(object);
    if (PyTuple_GET_SIZE(object.ptr()) != 2) return unknown();
    return word(-2).text(PyTuple_GET_ITEM(object.ptr(), 0)).number(PyTuple_GET_ITEM(object.ptr(), 1));
  }
  Signature& booleans(nb::handle object) {
    if (!PyTuple_CheckExact(object.ptr())) return unknown();
    const Py_ssize_t size = PyTuple_GET_SIZE(object.ptr());
    word(size);
    for (Py_ssize_t i = 0; i < size; ++i) boolean(PyTuple_GET_ITEM(object.ptr(), i));
    return *this;
  }

 private:
  Signature& word(std::int64_t value) {
    words_.push_back(value);
    return *this;
  }
  Signature& unknown() {
    known_ = false;
    return *this;
  }

  std::vector<std::int64_t> words_;
  bool known_ = true;
};

struct WordsHash {
  std::size_t operator()(const std::vector<std::int64_t>& words) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15u;
    for (const std::int64_t word : words) {
      hash = (hash ^ static_cast<std::uint64_t>(word)) * 0xff51afd7ed558ccdu;
      hash ^= hash >> 32;
    }
    return static_cast<std::size_t>(hash);
  }
};

// The words of one kind of call, and what was learned of it. The least lately learned half is
// forgotten when there are too many.
template <class Plan>
class KnownCalls {
 public:
  // Shared, because another thread may forget it while the call runs without the GIL.
  std::shared_ptr<const Plan> find(const Signature& signature) const {
    if (!signature.known()) return nullptr;
    const auto found = plans_.find(signature.words());
    return found == plans_.end() ? nullptr : found->second;
  }
  void learn(const Signature& signature, Plan plan) {
    if (!signature.known()) return;
    if (plans_.size() >= kMostCalls) {
      std::vector<std::size_t> ages;
      for (const auto& [words, known] : plans_) ages.push_back(known->age);
      std::nth_element(ages.begin(), ages.begin() + kMostCalls / 2, ages.end());
      const std::size_t keep = ages[kMostCalls / 2];
      for (auto it = plans_.begin(); it != plans_.end();) {
        it = it->second->age < keep ? plans_.erase(it) : std::next(it);
      }
    }
    plan.age = ++learned_;
    plans_.insert_or_assign(signature.words(), std::make_shared<const Plan>(std::move(plan)));
  }
  std::size_t size() const { return plans_.size(); }
  void clear() { plans_.clear(); }

 private:
  std::unordered_map<std::vector<std::int64_t>, std::shared_ptr<const Plan>, WordsHash> plans_;
  std::size_t learned_ = 0;
};

// How a result of x's shape is made.
struct NewResult {
  Strides strides;
  std::vector<npy_intp> memory_shape, axes;  // no axes: memory is in the order of the shape

  nb::object make(nb::handle x) const {
    nb::object array = empty_array(memory_shape, PyArray_DESCR(array_of(x)));
    if (axes.empty()) return array;
    PyArray_Dims order = {const_cast<npy_intp*>(axes.data()), static_cast<int>(axes.size())};
    PyObject* turned = PyArray_Transpose(array_of(array), &order);
    if (turned == nullptr) throw nb::python_error();
    return nb::steal(turned);
  }
};

struct ForwardPlan {
  Problem problem;
  double eps;
  Strides x, residual, out;
  NewResult fresh;
  std::size_t age = 0;
};

struct BackwardPlan {
  Problem problem;
  Strides dy, x;
  NewResult fresh;
  std::size_t age = 0;
};

KnownCalls<ForwardPlan>& forwards() {
  static auto* calls = new KnownCalls<ForwardPlan>;
  return *calls;
}
KnownCalls<BackwardPlan>& backwards() {
  static auto* calls = new KnownCalls<BackwardPlan>;
  return *calls;
}

struct Extent {
  const char *begin, *end;

  explicit Extent(nb::handle object) {
    PyArrayObject* array = array_of(object);
    begin = end = PyArray_BYTES(array);
    for (int i = 0; i < PyArray_NDIM(array); ++i) {
      const npy_intp reach = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
      (reach < 0 ? begin : end) += reach;
    }
    end += PyArray_ITEMSIZE(array);
  }
  bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};

bool same_elements(nb::handle a, nb::handle b) {
  PyArrayObject *first = array_of(a), *second = array_of(b);
  return PyArray_BYTES(first) == PyArray_BYTES(second) &&
         std::equal(PyArray_STRIDES(first), PyArray_STRIDES(first) + PyArray_NDIM(first),
                    PyArray_STRIDES(second));
}

// x itself, or apart from every other array.
bool out_is_safe(nb::handle out, nb::handle x, std::initializer_list<nb::handle> others) {
  const Extent written(out);
  if (written.meets(Extent(x)) && !same_elements(out, x)) return false;
  return std::none_of(others.begin(), others.end(), [&](nb::handle other) {
    return !other.is_none() && written.meets(Extent(other));
  });
}

// Gives up the GIL for work that is worth it.
class Unlocked {
 public:
  explicit Unlocked(const Shape& shape) {
    if (shape.samples * shape.channels * shape.spatial > kBriefElements) released_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> released_;
};

// Doubles as an [N, G] array of the statistics' type.
nb::object statistics_array(const Problem& problem, const Values& values) {
  const bool wide = problem.dtype == DType::float64;
  PyArray_Descr* descr = PyArray_DescrFromType(wide ? NPY_DOUBLE : NPY_FLOAT);
  const nb::object owner = nb::steal(reinterpret_cast<PyObject*>(descr));
  nb::object array = empty_array({problem.shape.samples, problem.shape.groups()}, descr);
  void* data = data_of(array);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (wide) {
      static_cast<double*>(data)[i] = values[i];
    } else {
      static_cast<float*>(data)[i] = static_cast<float>(values[i]);
    }
  }
  return array;
}

// A C-contiguous float32 or float64 array as doubles.
void read_as_doubles(nb::handle object, Values& result) {
  PyArrayObject* array = array_of(object);
  const DType dtype = PyArray_TYPE(array) == NPY_DOUBLE ? DType::float64 : DType::float32;
  load_statistics(PyArray_DATA(array), dtype, static_cast<std::int64_t>(result.size()), result.data());
}

}  // namespace

nb::object forward_call(nb::handle x, nb::handle num_groups, nb::handle weight, nb::handle bias,
                        nb::handle eps, nb::handle activation, nb::handle scale, nb::handle shift,
                        nb::handle residual, nb::handle channel_axis, nb::handle out,
                        nb::handle return_stats) {
  Signature signature;
  signature.array(x).groups(num_groups).array(weight).array(bias).number(eps).activation(activation)
      .array(scale).array(shift).array(residual).integer(channel_axis).array(out)
      .boolean(return_stats);
  const std::shared_ptr<const ForwardPlan> plan = forwards().find(signature);
  if (plan == nullptr) return nb::none();
  if (!out.is_none() && !out_is_safe(out, x, {weight, bias, scale, shift, residual})) {
    return nb::none();
  }
  const Problem& problem = plan->problem;
  const nb::object y = out.is_none() ? plan->fresh.make(x) : nb::borrow(out);
  const nb::object sum = residual.is_none() ? nb::none() : plan->fresh.make(x);
  const Epilogue epilogue = problem.with_parameters(weight, bias, scale, shift);
  const Input x_in = input(x, plan->x), residual_in = input(residual, plan->residual);
  const Output sum_out = output(sum, plan->fresh.strides);
  const Output y_out = output(y, out.is_none() ? plan->fresh.strides : plan->out);
  Values mean(problem.statistics()), rstd(problem.statistics());
  {
    const Unlocked unlocked(problem.shape);
    forward(problem.shape, problem.dtype, x_in, residual_in, sum_out, plan->eps, epilogue, y_out,
            mean.data(), rstd.data());
  }
  if (residual.is_none() && return_stats.ptr() == Py_False) return y;
  return nb::make_tuple(y, statistics_array(problem, mean), statistics_array(problem, rstd), sum);
}

void learn_forward(nb::tuple arguments, const Problem& problem, Strides x, Strides residual,
                   Strides out, Strides fresh, const std::vector<npy_intp>& memory_shape,
                   const std::vector<npy_intp>& axes) {
  const auto& a = arguments;
  Signature signature;
  signature.array(a[0]).groups(a[1]).array(a[2]).array(a[3]).number(a[4]).activation(a[5])
      .array(a[6]).array(a[7]).array(a[8]).integer(a[9]).array(a[10]).boolean(a[11]);
  if (!signature.known()) return;
  forwards().learn(signature, {problem, nb::cast<double>(a[4]), x, residual, out,
                               {fresh, memory_shape, axes}});
}

nb::object backward_call(nb::handle dy, nb::handle x, nb::handle mean, nb::handle rstd,
                         nb::handle num_groups, nb::handle weight, nb::handle bias,
                         nb::handle activation, nb::handle scale, nb::handle shift,
                         nb::handle channel_axis, nb::handle output_mask) {
  Signature signature;
  signature.array(dy).array(x).array(mean).array(rstd).groups(num_groups).array(weight).array(bias)
      .activation(activation).array(scale).array(shift).integer(channel_axis).booleans(output_mask);
  const std::shared_ptr<const BackwardPlan> plan = backwards().find(signature);
  if (plan == nullptr) return nb::none();
  const Problem& problem = plan->problem;
  const auto wanted = [&](Py_ssize_t i) {
    return PyTuple_GET_ITEM(output_mask.ptr(), i) == Py_True;
  };
  const nb::object dx = wanted(0) ? plan->fresh.make(x) : nb::none();
  const nb::object dweight = wanted(1) ? empty_like(weight) : nb::none();
  const nb::object dbias = wanted(2) ? empty_like(bias) : nb::none();
  const nb::object dscale = empty_like(scale), dshift = empty_like(shift);
  const Epilogue epilogue = problem.with_parameters(weight, bias, scale, shift);
  Values means(problem.statistics()), rstds(problem.statistics());
  read_as_doubles(mean, means);
  read_as_doubles(rstd, rstds);
  const Input dy_in = input(dy, plan->dy), x_in = input(x, plan->x);
  const Output dx_out = output(dx, plan->fresh.strides);
  const ParameterGradients gradients = {data_of(dweight), data_of(dbias), data_of(dscale),
                                        data_of(dshift)};
  {
    const Unlocked unlocked(problem.shape);
    all_gradients(problem.shape, problem.dtype, epilogue, dy_in, x_in, means.data(), rstds.data(),
                  dx_out, gradients);
  }
  return nb::make_tuple(dx, dweight, dbias, dscale, dshift);
}

void learn_backward(nb::tuple arguments, const Problem& problem, Strides dy, Strides x,
                    Strides fresh, const std::vector<npy_intp>& memory_shape,
                    const std::vector<npy_intp>& axes) {
  const auto& a = arguments;
  Signature signature;
  signature.array(a[0]).array(a[1]).array(a[2]).array(a[3]).groups(a[4]).array(a[5]).array(a[6])
      .activation(a[7]).array(a[8]).array(a[9]).integer(a[10]).booleans(a[11]);
  backwards().learn(signature, {problem, dy, x, {fresh, memory_shape, axes}});
}

std::size_t known_calls() { return forwards().size() + backwards().size(); }
void forget_calls() {
  forwards().clear();
  backwards().clear();
}

}  // namespace groupnorm
