#include "../simd/avx512.h"
// The simd header comes first: the kernels are written in its terms.
#include "../kernels-inl.h"

namespace groupnorm {

const Kernels& kernels_avx512() {
  static const Kernels table = make_kernels<Contents::all_but_narrow_in_double>("avx512");
  return table;
}

}  // namespace groupnorm
