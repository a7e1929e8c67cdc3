// Errors that torch shows in Python as another type than RuntimeError.
//
// Why: its C interface has no word for the type. Its bindings ask an exception of class torch::PyTorchError; C++ knows
// a class of another library by its name, and calls a virtual function by its place. So a class of that name, whose
// functions are in the same places, is asked as well. It is used where torch is of a version that has been seen to
// have them there; elsewhere such an error is a std::runtime_error, which is a RuntimeError.
#pragma once

#include <Python.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace torch {

class __attribute__((visibility("default"))) PyTorchError : public std::exception {
 public:
  virtual PyObject* python_type() = 0;
};

}  // namespace torch

namespace groupnorm {

class TorchNotImplementedError final : public torch::PyTorchError {
 public:
  explicit TorchNotImplementedError(std::string text) : text_(std::move(text)) {}
  PyObject* python_type() override { return PyExc_NotImplementedError; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

[[noreturn]] inline void throw_not_implemented(const std::string& text, bool torch_asks_for_the_type) {
  if (torch_asks_for_the_type) throw TorchNotImplementedError(text);
  throw std::runtime_error(text);
}

}  // namespace groupnorm
