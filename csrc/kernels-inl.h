// The kernels, once, for every instruction set: included by isa/*.cpp after a simd header.
//
// Guarantees: sums are taken in double, or in float over a few terms and in double over those, in
// sixteen lanes that are added in one fixed tree, so a result depends on the plane's shape and values
// only. Nothing outside the plane is read or
// written. y may be x. Everything has internal linkage, so that no code built for a newer CPU can
// be linked into the baseline.
#pragma once

#include <cstdint>
#include <type_traits>

#include "apply-inl.h"
#include "channel_numbers-inl.h"
#include "kernels.h"
#include "moments-inl.h"
#include "normalize-inl.h"
#include "reduce-inl.h"
#include "samples-inl.h"

namespace groupnorm {
namespace {

template <class T, class Real, Activation A>
void fill_kernels(Kernels& table, DType dtype, bool in_double) {
  const auto t = static_cast<int>(dtype), a = static_cast<int>(A), r = static_cast<int>(in_double);
  constexpr auto first = static_cast<int>(Layout::channels_first);
  constexpr auto last = static_cast<int>(Layout::channels_last);
  table.normalize[t][a][first][r] = normalize<T, Real, A, false>;
  table.normalize[t][a][last][r] = normalize<T, Real, A, true>;
  table.reduce[t][a][first][r] = reduce<T, Real, A, false>;
  table.reduce[t][a][last][r] = reduce<T, Real, A, true>;
  // The plain version of a type fills in what knows no other.
  if (in_double == std::is_same_v<T, double>) {
    table.samples_forward[t][a] = samples_forward<T, A>;
    table.samples_backward[t][a] = samples_backward<T, A>;
  }
  table.apply[t][a][first][r] = apply<T, Real, A, false, false>;
  table.apply[t][a][last][r] = apply<T, Real, A, true, false>;
}

template <class T, class Real>
void fill_activations(Kernels& table, DType dtype, bool in_double) {
  fill_kernels<T, Real, Activation::none>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::relu>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::swish>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::gelu>(table, dtype, in_double);
  fill_kernels<T, Real, Activation::gelu_tanh>(table, dtype, in_double);
}

template <class T>
void fill_plain(Kernels& table, DType dtype) {
  const auto t = static_cast<int>(dtype);
  table.moments_run[t] = moments_run<T>;
  table.moments_columns[t] = moments_columns<T>;
  if constexpr (!std::is_same_v<T, double>) {
    table.apply_kept[t][static_cast<int>(Layout::channels_first)] =
        apply<T, float, Activation::none, false, true>;
    table.apply_kept[t][static_cast<int>(Layout::channels_last)] =
        apply<T, float, Activation::none, true, true>;
  }
}

// What a table has of its own; dispatch.cpp takes the rest from other tables. The kernels that compute
// narrower types in double are seldom used and exist once; AVX512_BF16 has nothing for the other types.
enum class Contents { all_but_narrow_in_double, narrow_in_double, bfloat16 };

template <Contents kContents>
Kernels make_kernels(const char* name) {
  Kernels table{};
  table.name = name;
  table.calls = &kernel_calls;
  table.joins_gradient_rows = joins_gradient_rows;
  if constexpr (kContents == Contents::narrow_in_double) {
    fill_activations<float, double>(table, DType::float32, true);
    fill_activations<Float16, double>(table, DType::float16, true);
    fill_activations<BFloat16, double>(table, DType::bfloat16, true);
  } else {
    fill_plain<BFloat16>(table, DType::bfloat16);
    fill_activations<BFloat16, float>(table, DType::bfloat16, false);
  }
  if constexpr (kContents == Contents::all_but_narrow_in_double) {
    fill_plain<float>(table, DType::float32);
    fill_plain<double>(table, DType::float64);
    fill_plain<Float16>(table, DType::float16);
    fill_activations<float, float>(table, DType::float32, false);
    fill_activations<double, double>(table, DType::float64, true);
    fill_activations<Float16, float>(table, DType::float16, false);
    table.channel_numbers[0] = channel_numbers<float>;
    table.channel_numbers[1] = channel_numbers<double>;
    table.gradient_numbers[0] = gradient_numbers<float>;
    table.gradient_numbers[1] = gradient_numbers<double>;
    table.put_back_xhat_low = put_back_xhat_low;
  }
  return table;
}

}  // namespace
}  // namespace groupnorm
