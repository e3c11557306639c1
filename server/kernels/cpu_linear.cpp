// The operators outrider::cpu_pack_linear and outrider::cpu_linear; cpu_linear.py documents them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <type_traits>

#include "cpu_multiply.h"

namespace outrider {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A block of rows reads the weights once. Its sums stay in registers: 8 x 3 of 32, or 6 x 2 of 16.
constexpr int kRows = kWidth == 16 ? 8 : 6;
constexpr int kVectors = kWidth == 16 ? 3 : 2;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr int64_t kRowsPerUnit = 24 * kRows;  // with a tile's columns they fit into the L2 cache
constexpr int64_t kAhead = 32;  // steps along the depth that the weights of a step are fetched early
constexpr int64_t kMinWork = 1 << 18;  // weights that waking a thread is worth

template <typename Number>
using ElementOf = std::conditional_t<std::is_same_v<Number, BFloat16>, PairElement, FloatElement>;

bool is_bfloat16(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Float, name, " must be float32 or bfloat16");
  return type == ScalarType::BFloat16;
}

Tensor empty(std::initializer_list<int64_t> sizes, bool is_bf16) {
  int64_t strides[4], stride = 1;
  for (int64_t i = sizes.size() - 1; i >= 0; i--) {
    strides[i] = stride;
    stride *= sizes.begin()[i];
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.begin(), strides, is_bf16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32(),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// packed[tile, in / kNumbers, kColumns, kNumbers]: in the order in which the product reads it.
template <typename Number>
void pack(const Tensor& weight, Tensor& packed) {
  constexpr int64_t kNumbers = ElementOf<Number>::kNumbers;
  const int64_t num_outputs = weight.size(0), num_inputs = weight.size(1);
  const Number* from = static_cast<const Number*>(weight.const_data_ptr());
  Number* to = static_cast<Number*>(packed.mutable_data_ptr());
  torch::stable::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
    Number* next = to + begin * num_inputs * kColumns;
    for (int64_t tile = begin; tile < end; tile++) {
      for (int64_t k = 0; k < num_inputs; k += kNumbers) {
        for (int64_t column = tile * kColumns; column < (tile + 1) * kColumns; column++) {
          for (int64_t i = 0; i < kNumbers; i++) {
            *next++ = column < num_outputs ? from[column * num_inputs + k + i] : Number{};
          }
        }
      }
    }
  });
}

Tensor pack_linear(const Tensor weight) {
  const bool is_bf16 = is_bfloat16(weight, "weight");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight must be [out, in], contiguous");
  const int64_t num_outputs = weight.size(0), num_inputs = weight.size(1);
  STD_TORCH_CHECK(num_inputs % 2 == 0, "in is ", num_inputs, ", an odd number");
  Tensor packed = empty({(num_outputs + kColumns - 1) / kColumns, num_inputs * kColumns}, is_bf16);
  (is_bf16 ? pack<BFloat16> : pack<float>)(weight, packed);
  return packed;
}

template <typename Number>
struct Product {
  using Element = ElementOf<Number>;

  const Number* input;   // [rows, in], rows input_stride apart
  const Number* packed;  // [tiles, in * kColumns]
  const Number* bias;    // [out] or null
  Number* output;        // [rows, out]
  int64_t rows, num_inputs, num_outputs, input_stride;

  void run() const {
    const int64_t num_tiles = (num_outputs + kColumns - 1) / kColumns;
    const int64_t num_units = (rows + kRowsPerUnit - 1) / kRowsPerUnit * num_tiles;
    const int64_t threads = std::min<int64_t>(num_units, torch::stable::get_num_threads());
    std::atomic<int64_t> next{0};
    // A thread takes unit after unit, for one may be held up: by the client's work, say. It knows the one after
    // this one, to fetch its weights.
    const auto work = [&](int64_t, int64_t) {
      bool is_first = true;
      for (int64_t unit = next.fetch_add(1), following; unit < num_units; unit = following, is_first = false) {
        following = next.fetch_add(1);
        const int64_t first = unit / num_tiles * kRowsPerUnit;
        multiply(first, std::min(rows, first + kRowsPerUnit), unit % num_tiles,
                 following < num_units ? following % num_tiles : -1, is_first);
      }
    };
    if (threads < 2 || num_inputs * num_outputs * std::min<int64_t>(rows, kRows) < kMinWork) {
      work(0, 1);
    } else {
      torch::stable::parallel_for(0, threads, 1, work);
    }
  }

 private:
  const Element* weights(int64_t tile) const {
    return reinterpret_cast<const Element*>(packed + tile * num_inputs * kColumns);
  }

  // Rows [first, end) and the columns of a tile. The memory is kept busy meanwhile: a single block of rows fetches the
  // tile a little early; several share in fetching the following one, which is in the cache when its turn comes.
  void multiply(int64_t first, int64_t end, int64_t tile, int64_t following, bool is_first) const {
    constexpr int64_t kLinesPerStep = kColumns * sizeof(Element) / kLineBytes;
    alignas(64) float sums[kRows * kColumns];
    const Element* own = weights(tile);
    const Element* after = weights(following < 0 ? tile : following);
    const int64_t depth = num_inputs / Element::kNumbers, stride = input_stride / Element::kNumbers;
    const int64_t column = tile * kColumns, num_columns = std::min(kColumns, num_outputs - column);
    const int64_t num_blocks = (end - first + kRows - 1) / kRows;
    int64_t lines_left = following < 0 ? 0 : kLinesPerStep;  // of the following tile, per step along the depth
    for (int64_t block = 0; block < num_blocks; block++) {
      const int64_t row = first + block * kRows, count = std::min<int64_t>(kRows, end - row);
      Fetch fetch;
      const bool fetches_own = block == 0 && (num_blocks == 1 || is_first);
      if (fetches_own) {
        fetch.from[0] = own + kAhead * kColumns;
        fetch.lines[0] = kLinesPerStep;
        fetch.until = std::max<int64_t>(0, depth - kAhead);
      }
      if (!fetches_own || num_blocks == 1) {
        fetch.from[1] = reinterpret_cast<const char*>(after) + (kLinesPerStep - lines_left) * kLineBytes * depth;
        fetch.lines[1] = (lines_left + num_blocks - block - 1) / (num_blocks - block);
        lines_left -= fetch.lines[1];
      }
      multiply_up_to<kVectors, kRows, true>(count, reinterpret_cast<const Element*>(input + row * input_stride), stride,
                                            own, kColumns, depth, sums, kColumns, nullptr, fetch);
      for (int64_t i = 0; i < count; i++) {
        write(sums + i * kColumns, column, num_columns, output + (row + i) * num_outputs + column);
      }
    }
  }

  void write(const float* sums, int64_t column, int64_t num_columns, Number* to) const {
    if (num_columns < kColumns) {
      alignas(64) Number all[kColumns];
      alignas(64) Number own_bias[kColumns] = {};
      if (bias) std::copy(bias + column, bias + column + num_columns, own_bias);
      write_all(sums, own_bias, all);
      std::copy(all, all + num_columns, to);
    } else {
      write_all(sums, bias ? bias + column : nullptr, to);
    }
  }

  static void write_all(const float* sums, const Number* bias, Number* to) {
    for (int64_t i = 0; i < kColumns; i += kWidth) {
      store(to + i, bias ? load(sums + i) + load(bias + i) : load(sums + i));
    }
  }
};

template <typename Number>
void multiply(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, Tensor& output,
              int64_t input_stride) {
  Product<Number>{
      static_cast<const Number*>(input.const_data_ptr()),
      static_cast<const Number*>(packed.const_data_ptr()),
      bias ? static_cast<const Number*>(bias->const_data_ptr()) : nullptr,
      static_cast<Number*>(output.mutable_data_ptr()),
      input.size(0),
      input.size(1),
      output.size(1),
      input_stride,
  }.run();
}

Tensor linear(const Tensor input, const Tensor packed, const std::optional<Tensor> bias, int64_t num_outputs) {
  const bool is_bf16 = is_bfloat16(input, "input");
  STD_TORCH_CHECK(input.dim() == 2 && (input.stride(1) == 1 || input.size(1) == 1), "input must be [rows, in], its "
                  "last dimension contiguous");
  const int64_t rows = input.size(0), num_inputs = input.size(1);
  const int64_t input_stride = rows > 1 ? input.stride(0) : num_inputs;
  STD_TORCH_CHECK(input_stride % 2 == 0, "rows of input are ", input_stride, " numbers apart, an odd number");
  STD_TORCH_CHECK(packed.scalar_type() == input.scalar_type() && packed.dim() == 2 && packed.is_contiguous(),
                  "packed must come from cpu_pack_linear, and be of input's type");
  STD_TORCH_CHECK(packed.size(1) == num_inputs * kColumns && num_outputs > 0 &&
                      packed.size(0) == (num_outputs + kColumns - 1) / kColumns,
                  "packed does not hold ", num_outputs, " x ", num_inputs, " weights");
  if (bias) {
    STD_TORCH_CHECK(bias->scalar_type() == input.scalar_type() && bias->is_contiguous() &&
                        bias->numel() == num_outputs, "bias must be [out], of input's type");
  }
  Tensor output = empty({rows, num_outputs}, is_bf16);
  (is_bf16 ? multiply<BFloat16> : multiply<float>)(input, packed, bias, output, input_stride);
  return output;
}

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("cpu_pack_linear(Tensor weight) -> Tensor");
  library.def("cpu_linear(Tensor input, Tensor packed, Tensor? bias, int num_outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("cpu_pack_linear", TORCH_BOX(&pack_linear));
  library.impl("cpu_linear", TORCH_BOX(&linear));
}

}  // namespace
}  // namespace outrider
