// From the sums of a backward to the gradients of weight, bias, scale and shift.
#include <new>

#include "buffer.h"
#include "channel_table.h"
#include "groupnorm.h"
#include "partition.h"
#include "result_memory.h"

namespace groupnorm {
namespace {

// Unwritten doubles for one call; many come from where large results come from, for the same reason.
class Doubles {
 public:
  explicit Doubles(std::size_t count)
      : few_(count * sizeof(double) < kLargeResult ? count : 0),
        many_(few_.size() == count ? nullptr : acquire_result(count * sizeof(double))) {
    if (few_.size() != count && many_ == nullptr) throw std::bad_alloc();
  }
  ~Doubles() {
    if (many_ != nullptr) release_result(many_);
  }
  Doubles(const Doubles&) = delete;
  Doubles& operator=(const Doubles&) = delete;

  double* data() { return many_ == nullptr ? few_.data() : static_cast<double*>(many_); }

 private:
  Buffer<double, 256> few_;
  void* many_;
};

}  // namespace

void parameter_gradients(const Shape& shape, const Epilogue& epilogue, Sums sums,
                         std::int64_t rows, ParameterGradients out) {
  const std::int64_t channels = shape.channels;
  // The sums over samples, each weighted with 1 + scale.
  const auto over_samples = [&](const double* per_row, void* result, DType dtype) {
    if (result == nullptr) return;
    Values total(index(channels), 0.0);
    for (std::int64_t n = 0; n < rows; ++n) {
      const double* values = per_row + n * channels;
      if (epilogue.scale.data == nullptr) {
        for (std::int64_t c = 0; c < channels; ++c) total[index(c)] += values[c];
      } else {
        for (std::int64_t c = 0; c < channels; ++c) {
          total[index(c)] += (1.0 + parameter_at(epilogue.scale, n * channels + c)) * values[c];
        }
      }
    }
    store_values(result, dtype, 1, channels, total.data());
  };
  over_samples(sums.a, out.bias, epilogue.bias.dtype);
  over_samples(sums.b, out.weight, epilogue.weight.dtype);
  if (out.shift == nullptr && out.scale == nullptr) return;
  for (std::int64_t i = 0; i < shape.samples * channels; ++i) {
    const std::int64_t c = i % channels;
    if (out.shift != nullptr) store_parameter(out.shift, epilogue.shift.dtype, i, sums.a[i]);
    if (out.scale != nullptr) {
      store_parameter(out.scale, epilogue.scale.dtype, i,
                      parameter_or(epilogue.weight, c, 1.0) * sums.b[i] +
                          parameter_or(epilogue.bias, c, 0.0) * sums.a[i]);
    }
  }
}

void all_gradients(const Shape& shape, DType dtype, const Epilogue& epilogue, Input dy, Input x,
                   const double* mean, const double* rstd, Output dx, ParameterGradients out) {
  const std::int64_t rows = sum_rows(shape, epilogue);
  const std::size_t count = index(rows * shape.channels);
  const bool needs_b = dx.data != nullptr || out.weight != nullptr || out.scale != nullptr;
  if (!needs_b && out.bias == nullptr && out.shift == nullptr) return;
  Doubles workspace((needs_b ? 2 : 1) * count);
  const Sums sums = {workspace.data(), needs_b ? workspace.data() + count : nullptr};
  backward(shape, dtype, dy, x, mean, rstd, epilogue, sums, dx);
  parameter_gradients(shape, epilogue, sums, rows, out);
}

}  // namespace groupnorm
