#include "../simd/avx512.h"
// The simd header comes first: the kernels are written in its terms.
#include "../kernels-inl.h"

namespace groupnorm {

const Kernels& kernels_avx512_bf16() {
  static const Kernels table = make_kernels<Contents::bfloat16>("avx512_bf16");
  return table;
}

}  // namespace groupnorm
