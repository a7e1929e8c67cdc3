// The part of torch's C interface that our operators need, found in the running process.
//
// Why: an extension built against torch fits one version of it. These functions keep their meaning from
// version to version, so one build serves all that have them, and torch is not needed to build it.
//
// Guarantees: nothing here loads torch; TorchAbi::load() finds it where it is loaded already. No call
// through it needs the GIL. Errors are thrown as std::runtime_error, which torch turns into RuntimeError.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "groupnorm.h"

namespace groupnorm {

using StableValue = std::uint64_t;  // a value on torch's stack: a number, or a pointer to what it is
using Kernel = void (*)(StableValue* stack, std::uint64_t arguments, std::uint64_t results);

struct TorchTensor;
struct TorchList;
struct TorchString;
struct TorchLibrary;

struct TorchAbi {
  using Status = std::int32_t;  // 0: done

  Status (*get_data_ptr)(TorchTensor*, void**);
  Status (*get_storage_size)(TorchTensor*, std::int64_t* bytes);
  Status (*get_dim)(TorchTensor*, std::int64_t*);
  Status (*get_sizes)(TorchTensor*, std::int64_t**);
  Status (*get_strides)(TorchTensor*, std::int64_t**);
  Status (*get_dtype)(TorchTensor*, std::int32_t*);
  Status (*get_device_type)(TorchTensor*, std::int32_t*);
  Status (*is_defined)(TorchTensor*, bool*);
  Status (*delete_tensor)(TorchTensor*);
  Status (*undefined_tensor)(TorchTensor**);
  Status (*empty_strided)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t,
                          std::int32_t, std::int32_t, TorchTensor**);
  Status (*copy)(TorchTensor* to, TorchTensor* from, std::int32_t non_blocking);
  Status (*list_size)(TorchList*, std::size_t*);
  Status (*list_item)(TorchList*, std::size_t, StableValue*);
  Status (*delete_list)(TorchList*);
  Status (*string_characters)(TorchString*, const char**);
  Status (*delete_string)(TorchString*);
  Status (*num_threads)(std::uint32_t*);
  Status (*library_define)(const char* ns, const char* file, std::uint32_t line, TorchLibrary**);
  Status (*library_implement)(const char* ns, const char* key, const char* file, std::uint32_t line,
                              TorchLibrary**);
  Status (*define)(TorchLibrary*, const char* schema);
  Status (*implement)(TorchLibrary*, const char* name, Kernel, std::uint64_t version);
  Status (*delete_library)(TorchLibrary*);
  // These came later; null where torch is older.
  Status (*delete_value)(StableValue*);
  Status (*from_blob)(void* data, std::int64_t, const std::int64_t* sizes,
                      const std::int64_t* strides, std::int64_t offset, std::int32_t dtype,
                      std::int32_t device, std::int32_t device_index, TorchTensor**,
                      std::int32_t layout, const std::uint8_t* metadata, std::int64_t metadata_size,
                      void (*deleter)(void* data, void* context), void* context);

  // Torch's numbers of our types, in the order of DType.
  std::int32_t types[kDTypes];

  // Empty where all of the above but those two were found, else what is missing.
  static std::string load();

 private:
  friend const TorchAbi& torch_abi();
  static TorchAbi found;
};

inline const TorchAbi& torch_abi() { return TorchAbi::found; }

}  // namespace groupnorm
