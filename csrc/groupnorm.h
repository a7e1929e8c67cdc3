// The operator in C++: plain pointers and strides in, plain pointers out.
//
// Guarantees: no Python, no SIMD type and no thread in this interface; nothing here throws on bad
// numbers, prints or aborts. Arguments are trusted: the Python side (problem.py) has checked them.
// Every result depends on a sample's own values, shape and layout only, never on the thread count
// or on the other samples, except the sums over samples of the parameter gradients, which are
// taken in the order of the samples.
#pragma once

#include <cstdint>
#include <vector>

namespace groupnorm {

enum class DType : int { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3 };
constexpr int kDTypes = 4;

// silu is swish with beta = 1.
enum class Activation : int { none = 0, relu = 1, swish = 2, gelu = 3, gelu_tanh = 4 };
constexpr int kActivations = 5;
constexpr bool is_smooth(Activation a) { return a != Activation::none && a != Activation::relu; }

// What a row of memory is: a channel's S positions (first), or a position's C channels (last).
enum class Layout : int { channels_first = 0, channels_last = 1 };

struct Shape {
  std::int64_t samples = 0, channels = 0, spatial = 0;
  std::vector<std::int64_t> group_begin;  // groups + 1 channel numbers, from 0 to channels
  Layout layout = Layout::channels_first;

  std::int64_t groups() const { return static_cast<std::int64_t>(group_begin.size()) - 1; }
  std::int64_t group_channels(std::int64_t k) const {
    const auto at = static_cast<std::size_t>(k);
    return group_begin[at + 1] - group_begin[at];
  }
};

// An array of samples x rows; elements inside a row are adjacent. Strides count elements.
template <class Pointer>
struct View {
  Pointer data = nullptr;
  std::int64_t sample_stride = 0, row_stride = 0;
};
using Input = View<const void*>;
using Output = View<void*>;

// A contiguous parameter array of any of the four types; absent where data is null.
struct Parameter {
  const void* data = nullptr;
  DType dtype = DType::float32;
};

// v = (weight * xhat + bias) * (1 + scale) + shift, then the activation.
struct Epilogue {
  Parameter weight, bias;   // [C]
  Parameter scale, shift;   // [N, C]
  Activation activation = Activation::none;
  double beta = 1.0;        // of swish
};

// Mergeable moments of a set of numbers: m2 is the sum of squared distances from the mean.
struct Moments {
  double count = 0.0, mean = 0.0, m2 = 0.0;
};

// First half of the forward: moments of each group, [N, G].
// With a residual, sum = round(x + residual) is written first and its moments are taken.
void moments(const Shape&, DType, Input x, Input residual, Output sum, Moments* result);

// Second half of the forward: y from x and the double statistics, each [N, G].
void normalize(const Shape&, DType, Input x, const double* mean, const double* rstd,
               const Epilogue&, Output y);

// Both halves, group by group while the group is in cache. mean and rstd are written, [N, G].
void forward(const Shape&, DType, Input x, Input residual, Output sum, double eps,
             const Epilogue&, Output y, double* mean, double* rstd);

// Which of the two sums per (n, c) are wanted.
struct Sums {
  double* a = nullptr;  // sum of dv, [N, C]
  double* b = nullptr;  // sum of dv * xhat, [N, C]
};

// First half of the backward.
void reduce(const Shape&, DType, Input dy, Input x, const double* mean, const double* rstd,
            const Epilogue&, Sums);

// Second half of the backward: dx from dy, x, the statistics and both sums.
void apply(const Shape&, DType, Input dy, Input x, const double* mean, const double* rstd,
           const Epilogue&, Sums, Output dx);

// Both halves, group by group while the group is in cache; a null dx.data asks for the sums only.
// The sums of several samples may be added up already: there are sum_rows() rows of them, not N.
std::int64_t sum_rows(const Shape&, const Epilogue&);
void backward(const Shape&, DType, Input dy, Input x, const double* mean, const double* rstd,
              const Epilogue&, Sums, Output dx);

// Parameter gradients from so many rows of the two sums: each result is contiguous and may be absent (null).
struct ParameterGradients {
  void* weight = nullptr;  // [C], dtype of the weight
  void* bias = nullptr;    // [C], dtype of the bias
  void* scale = nullptr;   // [N, C], dtype of the scale
  void* shift = nullptr;   // [N, C], dtype of the shift
};
void parameter_gradients(const Shape&, const Epilogue&, Sums, std::int64_t rows,
                         ParameterGradients);

// The two together, with memory for the sums: all gradients of a call; what is null is not computed.
void all_gradients(const Shape&, DType, const Epilogue&, Input dy, Input x, const double* mean,
                   const double* rstd, Output dx, ParameterGradients);

// A plain copy over the same threads, for comparison.
void copy_bytes(void* to, const void* from, std::int64_t bytes);

// Instruction sets, best first. why_not is null for one that this CPU can run.
struct IsaStatus {
  const char* name;
  const char* why_not;
  std::uint64_t kernel_calls;  // since the process started; of those at the same time perhaps only one
};
std::vector<IsaStatus> isa_list();
// The one that runs. Throws std::invalid_argument where a forced one cannot.
const char* isa_selected();
void isa_force(const char* name);  // null: back to GROUPNORM_ISA, then to the best

// Threads. The count follows OpenMP (OMP_NUM_THREADS, affinity) until it is set here.
int get_num_threads();
void set_num_threads(int count);
const char* threading_runtime();
// For calls from this thread only, before any of the above; 0: no longer. Returns what was set before.
int use_threads(int count);

}  // namespace groupnorm
