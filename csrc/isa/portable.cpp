#include "../simd/portable.h"
// The simd header comes first: the kernels are written in its terms.
#include "../kernels-inl.h"

namespace groupnorm {

const Kernels& kernels_portable() {
  static const Kernels table = make_kernels<Contents::all_but_narrow_in_double>("portable");
  return table;
}

}  // namespace groupnorm
