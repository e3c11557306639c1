// A block of a matrix product, in registers.
//
// Every number of the result adds its products up in order, whatever the block's size: what a row comes
// to does not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "cpu_vector.h"

namespace outrider {

// Memory to be fetched early while a block is computed: some cache lines at each step along the depth, from one
// place up to a step, from another one after it.
struct Fetch {
  const void* from[2] = {nullptr, nullptr};
  int64_t until = 0;
  int64_t lines[2] = {0, 0};
};

constexpr int64_t kLineBytes = 64;

// c[kRows, kVectors * kWidth] = c * scale + a[kRows, depth] @ b[depth, ...]; without scale, c starts at 0.
template <int kRows, int kVectors, bool kFetches, typename Element>
inline void multiply_block(const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t depth,
                           float* c, int64_t c_stride, const float* scale, const Fetch& fetch) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) {
      sums[row][i] = scale ? load(c + row * c_stride + i * kWidth) * scale[row] : Floats{};
    }
  }
  int64_t k = 0;
  for (int part = kFetches ? 0 : 1; part < 2; part++) {
    const char* from = static_cast<const char*>(fetch.from[part]);
    for (const int64_t end = part == 0 ? fetch.until : depth; k < end; k++) {
      if constexpr (kFetches) {
        for (int64_t line = 0; line < fetch.lines[part]; line++, from += kLineBytes) {
          part == 0 ? __builtin_prefetch(from) : __builtin_prefetch(from, 0, 2);
        }
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
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) store(c + row * c_stride + i * kWidth, sums[row][i]);
  }
}

// The same for at most kRows rows.
template <int kVectors, int kRows, bool kFetches, typename Element>
inline void multiply_up_to(int64_t rows, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride,
                           int64_t depth, float* c, int64_t c_stride, const float* scale, const Fetch& fetch) {
  if (rows == kRows) {
    multiply_block<kRows, kVectors, kFetches>(a, a_stride, b, b_stride, depth, c, c_stride, scale, fetch);
  } else if constexpr (kRows > 1) {
    multiply_up_to<kVectors, kRows - 1, kFetches>(rows, a, a_stride, b, b_stride, depth, c, c_stride, scale, fetch);
  }
}

// The same for any number of rows.
template <int kVectors, typename Element>
inline void multiply_rows(int64_t rows, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride,
                          int64_t depth, float* c, int64_t c_stride, const float* scale) {
  for (int64_t row = 0; row < rows; row += kRowsPerBlock) {
    multiply_up_to<kVectors, kRowsPerBlock, false>(std::min<int64_t>(kRowsPerBlock, rows - row), a + row * a_stride,
                                                   a_stride, b, b_stride, depth, c + row * c_stride, c_stride,
                                                   scale ? scale + row : nullptr, Fetch{});
  }
}

}  // namespace outrider
