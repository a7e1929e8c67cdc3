#include "../simd/portable.h"
// The simd header comes first: the kernels are written in its terms.
#include "../kernels-inl.h"

namespace groupnorm {

const Kernels& kernels_narrow_in_double() {
  static const Kernels table = make_kernels<Contents::narrow_in_double>("narrow in double");
  return table;
}

}  // namespace groupnorm
