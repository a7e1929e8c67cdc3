// Rows into columns, for instruction sets with 256-bit registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "force_inline.h"

namespace groupnorm {
namespace {

// Four floats each of two rows, put together by a load: no shuffle has to cross the middle.
GROUPNORM_INLINE __m256 two_fours(const float* low, const float* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

// Four columns of eight rows.
GROUPNORM_INLINE void transpose_four(const float* from, std::int64_t from_stride, float* to,
                                     std::int64_t to_stride) {
  const float* const lower = from + 4 * from_stride;
  const __m256 row0 = two_fours(from, lower);
  const __m256 row1 = two_fours(from + from_stride, lower + from_stride);
  const __m256 row2 = two_fours(from + 2 * from_stride, lower + 2 * from_stride);
  const __m256 row3 = two_fours(from + 3 * from_stride, lower + 3 * from_stride);
  const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(row0, row1));
  const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(row0, row1));
  const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(row2, row3));
  const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(row2, row3));
  _mm256_storeu_ps(to, _mm256_castpd_ps(_mm256_unpacklo_pd(low01, low23)));
  _mm256_storeu_ps(to + to_stride, _mm256_castpd_ps(_mm256_unpackhi_pd(low01, low23)));
  _mm256_storeu_ps(to + 2 * to_stride, _mm256_castpd_ps(_mm256_unpacklo_pd(high01, high23)));
  _mm256_storeu_ps(to + 3 * to_stride, _mm256_castpd_ps(_mm256_unpackhi_pd(high01, high23)));
}

// Sixteen rows of sixteen.
GROUPNORM_INLINE void transpose(const float* from, std::int64_t from_stride, float* to,
                                std::int64_t to_stride) {
  for (int row = 0; row < 16; row += 8) {
    for (int column = 0; column < 16; column += 4) {
      transpose_four(from + row * from_stride + column, from_stride, to + column * to_stride + row,
                     to_stride);
    }
  }
}

// Four rows of four.
GROUPNORM_INLINE void transpose_four_doubles(const double* from, std::int64_t from_stride, double* to,
                                             std::int64_t to_stride) {
  const __m256d row0 = _mm256_loadu_pd(from), row1 = _mm256_loadu_pd(from + from_stride);
  const __m256d row2 = _mm256_loadu_pd(from + 2 * from_stride), row3 = _mm256_loadu_pd(from + 3 * from_stride);
  const __m256d low01 = _mm256_unpacklo_pd(row0, row1), high01 = _mm256_unpackhi_pd(row0, row1);
  const __m256d low23 = _mm256_unpacklo_pd(row2, row3), high23 = _mm256_unpackhi_pd(row2, row3);
  _mm256_storeu_pd(to, _mm256_permute2f128_pd(low01, low23, 0x20));
  _mm256_storeu_pd(to + to_stride, _mm256_permute2f128_pd(high01, high23, 0x20));
  _mm256_storeu_pd(to + 2 * to_stride, _mm256_permute2f128_pd(low01, low23, 0x31));
  _mm256_storeu_pd(to + 3 * to_stride, _mm256_permute2f128_pd(high01, high23, 0x31));
}

}  // namespace
}  // namespace groupnorm
