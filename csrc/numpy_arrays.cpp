#include "numpy_arrays.h"

#include <algorithm>
#include <cstring>

#include "result_memory.h"

namespace nb = nanobind;

namespace groupnorm {
namespace {

bool poisoned = false;

void* handler_malloc(void*, std::size_t bytes) { return acquire_result(bytes); }
void* handler_calloc(void*, std::size_t count, std::size_t bytes) {
  void* block = acquire_result(count * bytes);
  if (block != nullptr) std::memset(block, 0, count * bytes);
  return block;
}
void handler_free(void*, void* block, std::size_t) { release_result(block); }
void* handler_realloc(void*, void* block, std::size_t bytes) {
  void* moved = acquire_result(bytes);
  if (moved == nullptr) return nullptr;
  if (block != nullptr) std::memcpy(moved, block, std::min(bytes, result_size(block)));
  release_result(block);
  return moved;
}

PyDataMem_Handler handler = {
    "groupnorm_results", 1, {nullptr, handler_malloc, handler_calloc, handler_realloc, handler_free}};

// Immortal: arrays point to it as long as they live.
PyObject* handler_capsule() {
  static PyObject* capsule = PyCapsule_New(&handler, "mem_handler", nullptr);
  return capsule;
}

// NumPy takes its memory from the handler while one of these exists.
class ResultHandler {
 public:
  ResultHandler() : before_(nb::steal(PyDataMem_SetHandler(handler_capsule()))) {
    if (!before_.is_valid()) throw nb::python_error();
  }
  ~ResultHandler() { Py_XDECREF(PyDataMem_SetHandler(before_.ptr())); }
  ResultHandler(const ResultHandler&) = delete;
  ResultHandler& operator=(const ResultHandler&) = delete;

 private:
  nb::object before_;
};

nb::object new_array(const std::vector<npy_intp>& dims, PyArray_Descr* descr) {
  Py_INCREF(descr);
  PyObject* array = PyArray_Empty(static_cast<int>(dims.size()), dims.data(), descr, 0);
  if (array == nullptr) throw nb::python_error();
  return nb::steal(array);
}

}  // namespace

nb::object empty_array(const std::vector<npy_intp>& dims, PyArray_Descr* descr) {
  // In floating point, because a product that overflows must be large too.
  double bytes = static_cast<double>(PyDataType_ELSIZE(descr));
  for (const npy_intp dim : dims) bytes *= static_cast<double>(dim);
  nb::object array;
  if (bytes >= static_cast<double>(kLargeResult)) {
    const ResultHandler large;
    array = new_array(dims, descr);
  } else {
    array = new_array(dims, descr);
  }
  if (poisoned) std::memset(data_of(array), 0xff, static_cast<std::size_t>(bytes));
  return array;
}

nb::object empty_like(nb::handle array) {
  if (array.is_none()) return nb::none();
  PyArrayObject* like = array_of(array);
  return empty_array({PyArray_DIMS(like), PyArray_DIMS(like) + PyArray_NDIM(like)},
                     PyArray_DESCR(like));
}

void poison_results(bool enable) { poisoned = enable; }

}  // namespace groupnorm
