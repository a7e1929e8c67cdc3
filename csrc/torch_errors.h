// Errors that torch shows in Python as another type than RuntimeError.
//
// Why: its C interface has no word for the type. Its bindings ask an exception of class torch::PyTorchError; C++ knows
// a class of another library by its name, and calls a virtual function by its place. So a class of that name, whose
// functions are in the same places, is asked as well. Torch 2.13 has them there, and so had it in 2020; what lies between
// is taken to be the same. Whether an error is thrown so is the caller's word (torch/overriding.py); else it is a
// std::runtime_error, which torch shows as a RuntimeError.
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
