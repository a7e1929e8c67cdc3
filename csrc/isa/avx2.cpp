#include "../simd/avx2.h"
// The simd header comes first: the kernels are written in its terms.
#include "../kernels-inl.h"

namespace groupnorm {

const Kernels& kernels_avx2() {
  static const Kernels table = make_kernels<Contents::all_but_narrow_in_double>("avx2");
  return table;
}

}  // namespace groupnorm
