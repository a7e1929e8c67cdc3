#include "torch_abi.h"

#ifdef __unix__
#include <dlfcn.h>
#endif

namespace groupnorm {

TorchAbi TorchAbi::found{};

std::string TorchAbi::load() {
#ifdef __linux__
  // Not RTLD_DEFAULT: Python loads torch with RTLD_LOCAL, so its symbols are in no global table.
  void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) return "libtorch_cpu.so is not loaded";
  std::string missing;
  const auto optional = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
  };
  const auto needed = [&](auto& function, const char* name) {
    optional(function, name);
    if (function == nullptr && missing.empty()) missing = std::string("torch has no ") + name;
  };
  TorchAbi abi{};
  needed(abi.get_data_ptr, "aoti_torch_get_data_ptr");
  needed(abi.get_storage_size, "aoti_torch_get_storage_size");
  needed(abi.get_dim, "aoti_torch_get_dim");
  needed(abi.get_sizes, "aoti_torch_get_sizes");
  needed(abi.get_strides, "aoti_torch_get_strides");
  needed(abi.get_dtype, "aoti_torch_get_dtype");
  needed(abi.get_device_type, "aoti_torch_get_device_type");
  needed(abi.is_defined, "aoti_torch_is_defined");
  needed(abi.delete_tensor, "aoti_torch_delete_tensor_object");
  needed(abi.undefined_tensor, "aoti_torch_new_uninitialized_tensor");
  needed(abi.empty_strided, "aoti_torch_empty_strided");
  needed(abi.copy, "aoti_torch_copy_");
  needed(abi.list_size, "torch_list_size");
  needed(abi.list_item, "torch_list_get_item");
  needed(abi.delete_list, "torch_delete_list");
  needed(abi.string_characters, "torch_string_c_str");
  needed(abi.delete_string, "torch_delete_string");
  needed(abi.num_threads, "torch_get_num_threads");
  needed(abi.library_define, "aoti_torch_library_init_def");
  needed(abi.library_implement, "aoti_torch_library_init_impl");
  needed(abi.define, "aoti_torch_library_def");
  needed(abi.implement, "torch_library_impl");
  needed(abi.delete_library, "aoti_torch_delete_library_object");
  const auto type = [&](DType dtype, const char* name) {
    std::int32_t (*number)() = nullptr;
    needed(number, name);
    if (number != nullptr) abi.types[static_cast<int>(dtype)] = number();
  };
  type(DType::float32, "aoti_torch_dtype_float32");
  type(DType::float64, "aoti_torch_dtype_float64");
  type(DType::float16, "aoti_torch_dtype_float16");
  type(DType::bfloat16, "aoti_torch_dtype_bfloat16");
  optional(abi.delete_value, "torch_delete_stable_ivalue");
  optional(abi.from_blob, "torch_from_blob");
  if (missing.empty()) found = abi;
  return missing;
#else
  return "torch's C interface is looked for on Linux only";
#endif
}

}  // namespace groupnorm
