// The operators in torch's dispatcher, as kernels for CPU tensors.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace groupnorm {

// Defines groupnorm::forward, forward_residual and backward, each with the schema that comes after its
// name here, and their CPU kernels, once. Empty where they are there now, else why torch's C interface
// does not serve. Call with torch imported.
std::string define_torch_operators(
    const std::vector<std::pair<std::string, std::string>>& schemas);

// Lets aten::native_group_norm and its backward run on this core, or no longer. The second says whether this torch
// may be given errors of torch_errors.h.
void override_aten(bool enable, bool asks_for_the_type);

}  // namespace groupnorm
