// A block of a matrix product, in registers.
//
// Every number of the result adds its products up in order, whatever the block's size: what a row comes
// to does not depend on the rows beside it.
#pragma once

#include "cpu_vector.h"

namespace outrider {

// c[kRows, kVectors * kWidth] = c * scale + a[kRows, depth] @ b[depth, ...]; without scale, c starts at 0.
// kAhead: rows of b that are fetched early; what lies beyond b's end is asked for as well, and never read.
template <int kRows, int kVectors, int kAhead, typename Element>
inline void multiply_block(const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t depth,
                           float* c, int64_t c_stride, const float* scale) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) {
      sums[row][i] = scale ? load(c + row * c_stride + i * kWidth) * scale[row] : Floats{};
    }
  }
  for (int64_t k = 0; k < depth; k++) {
    if constexpr (kAhead > 0) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) __builtin_prefetch(b + (k + kAhead) * b_stride + i * kWidth);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++) {
      const typename Element::Register factor = Element::broadcast(a + row * a_stride + k);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; i++) {
        sums[row][i] = Element::multiply_add(sums[row][i], factor, b + k * b_stride + i * kWidth);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) store(c + row * c_stride + i * kWidth, sums[row][i]);
  }
}

// The same for any number of rows.
template <int kVectors, int kAhead = 0, int kRows = kRowsPerBlock, typename Element>
inline void multiply_rows(int64_t rows, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride,
                          int64_t depth, float* c, int64_t c_stride, const float* scale) {
  for (; rows >= kRows; rows -= kRows) {
    multiply_block<kRows, kVectors, kAhead>(a, a_stride, b, b_stride, depth, c, c_stride, scale);
    a += kRows * a_stride;
    c += kRows * c_stride;
    scale += scale ? kRows : 0;
  }
  if constexpr (kRows > 1) {
    if (rows) multiply_rows<kVectors, kAhead, kRows - 1>(rows, a, a_stride, b, b_stride, depth, c, c_stride, scale);
  }
}

}  // namespace outrider
