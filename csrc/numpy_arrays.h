// NumPy arrays as the binding uses them: pointers out of them, and new ones for results.
//
// Guarantee: a new array owns its memory like any other; a large one takes it from result_memory.h
// and gives it back there when it dies. Call with the GIL held.
#pragma once

#define PY_ARRAY_UNIQUE_SYMBOL groupnorm_array_api
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#ifndef GROUPNORM_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

#include <vector>

namespace groupnorm {

inline PyArrayObject* array_of(nanobind::handle object) {
  return reinterpret_cast<PyArrayObject*>(object.ptr());
}

// Null for None.
inline void* data_of(nanobind::handle array) {
  if (array.is_none()) return nullptr;
  if (!PyArray_Check(array.ptr())) {
    throw nanobind::type_error("the core takes NumPy arrays only");
  }
  return PyArray_DATA(array_of(array));
}

// Unwritten, in C order. The descriptor is borrowed.
nanobind::object empty_array(const std::vector<npy_intp>& dims, PyArray_Descr* descr);
// Like a parameter; None for None.
nanobind::object empty_like(nanobind::handle array);

// For tests: new arrays are filled with bytes that make every float a NaN.
void poison_results(bool enable);

}  // namespace groupnorm
