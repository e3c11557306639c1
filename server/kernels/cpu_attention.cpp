// The operators outrider::cpu_write_kv and outrider::cpu_paged_attention; cpu_attention.py documents them.
//
// Written against torch's stable ABI alone, which is also quick to compile.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "cpu_attention_tile.h"

namespace outrider {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRowsPerTile = 96;            // queries, scores and sums of a tile stay in the L2 cache
constexpr int64_t kUnitsPerThread = 4;          // below this, tiles are cut along the keys as well
constexpr int64_t kMaxPartialFloats = 1 << 24;  // what the cuts may take, 64 MiB
constexpr int64_t kMinWork = 1 << 19;           // multiply-adds that waking a thread is worth, some 10 microseconds
constexpr int64_t kMinCopied = 1 << 20;         // the same in copied numbers

// Memory that a thread keeps from call to call, on a cache line's border.
class Buffer {
 public:
  float* floats(int64_t count) {
    if (count > size_) {
      data_.reset(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
      STD_TORCH_CHECK(data_, "out of memory: attention needs ", count, " floats");
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

// Calls work(i, next) once for each i, the last ones first, on as many threads as there are; `next` is what the
// same thread does after it, or -1.
template <typename Work>
void for_each_unit(int64_t count, const Work& work) {
  std::atomic<int64_t> remaining{count};
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  // One range per thread, which takes unit after unit: their costs differ, and so may the threads' speeds.
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = remaining.fetch_sub(1) - 1, next; i >= 0; i = next) {
      next = std::max<int64_t>(-1, remaining.fetch_sub(1) - 1);
      work(i, next);
    }
  });
}

// A tile's queries of one KV head, and how many of its spans are still to come.
struct Job {
  Tile tile;
  int64_t kv_head, first_key, last_key, first_span, num_spans;
  int64_t partials;  // where its spans' states start, if each is a unit of its own
};

struct Unit {
  int32_t job, span;  // span counts from the job's first
};

template <typename Query, typename KV, typename Element>
class PagedAttention {
 public:
  PagedAttention(const Attention& attention, std::vector<Job> jobs, bool is_split)
      : attention_(attention), jobs_(std::move(jobs)), is_split_(is_split), remaining_(is_split ? jobs_.size() : 0) {}

  void run(float* partials, int64_t max_rows, bool is_parallel) {
    partials_ = partials;
    max_rows_ = max_rows;
    std::vector<Unit> units;
    for (size_t job = 0; job < jobs_.size(); job++) {
      const int64_t num_units = is_split_ ? jobs_[job].num_spans : 1;
      if (is_split_) remaining_[job].store(num_units, std::memory_order_relaxed);
      for (int64_t i = 0; i < num_units; i++) units.push_back({static_cast<int32_t>(job), static_cast<int32_t>(i)});
    }
    if (is_parallel) {
      for_each_unit(units.size(), [&](int64_t i, int64_t next) { run(units[i], next < 0 ? nullptr : &units[next]); });
    } else {
      for (size_t i = 0; i < units.size(); i++) run(units[i], i + 1 < units.size() ? &units[i + 1] : nullptr);
    }
  }

 private:
  using Kernel = TileKernel<Query, KV, Element>;

  // The keys a unit starts with; none for no unit.
  Upcoming keys_of(const Unit* unit) const {
    if (!unit) return {0, 0, 1, 0};
    const Job& job = jobs_[unit->job];
    const int64_t first = std::max(job.first_key / kKeysPerTile * kKeysPerTile,
                                   (job.first_span + unit->span) * kKeysPerSpan);
    return {job.tile.slot, job.kv_head, first, job.last_key};
  }

  void run(const Unit& unit, const Unit* next_unit) {
    static thread_local Buffer buffer;
    const Job& job = jobs_[unit.job];
    const int64_t rows = (job.tile.end - job.tile.begin) * attention_.heads_per_kv_head;
    const int64_t num_state = Softmax::num_floats(max_rows_, attention_.head_dim);
    float* scratch = buffer.floats(2 * num_state + Kernel::num_scratch_floats(max_rows_, attention_.head_dim));
    Softmax state(scratch, rows, attention_.head_dim), next(scratch + num_state, rows, attention_.head_dim);
    Kernel kernel(attention_, job.tile, job.kv_head, scratch + 2 * num_state);
    const Upcoming following = keys_of(next_unit);
    if (!is_split_ || job.num_spans == 1) {
      kernel.attend(job.first_span, state, following);
      for (int64_t i = 1; i < job.num_spans; i++) {
        kernel.attend(job.first_span + i, next, following);
        state.fold(next);
      }
      kernel.write(state);
      return;
    }
    const int64_t num_partial = Softmax::num_floats(rows, attention_.head_dim);
    float* partials = partials_ + job.partials;
    Softmax mine(partials + unit.span * num_partial, rows, attention_.head_dim);
    kernel.attend(job.first_span + unit.span, mine, following);
    // Whoever is the last folds all in order, as one thread alone would have.
    if (remaining_[unit.job].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    Softmax all(partials, rows, attention_.head_dim);
    for (int64_t i = 1; i < job.num_spans; i++) {
      all.fold(Softmax(partials + i * num_partial, rows, attention_.head_dim));
    }
    kernel.write(all);
  }

  const Attention& attention_;
  const std::vector<Job> jobs_;
  const bool is_split_;
  std::vector<std::atomic<int64_t>> remaining_;
  float* partials_ = nullptr;
  int64_t max_rows_ = 0;
};

// Cuts the rows into tiles and those into units of work. Raises for a position or block that does not exist.
template <typename Query, typename KV, typename Element>
void attend(const Attention& attention, const std::vector<Tile>& rows, int64_t num_kv_heads, int64_t blocks_per_slot,
            int64_t num_blocks) {
  static thread_local Buffer partials;
  const int64_t tokens_per_tile = std::max<int64_t>(1, kRowsPerTile / attention.heads_per_kv_head);
  std::vector<Job> jobs;
  int64_t num_partial_floats = 0, work = 0, max_rows = 0;
  for (const Tile& row : rows) {
    int64_t num_checked_blocks = row.start / attention.block_size;
    for (int64_t begin = row.begin; begin < row.end; begin += tokens_per_tile) {
      const Tile tile{row.slot, row.start, begin, std::min(begin + tokens_per_tile, row.end)};
      int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
      for (int64_t token = tile.begin; token < tile.end; token++) {
        STD_TORCH_CHECK(attention.positions[token] >= 0, "position of token ", token, " is negative");
        first = std::min(first, attention.first_key(tile, token));
        last = std::max(last, attention.positions[token]);
      }
      const int64_t num_used_blocks = last / attention.block_size + 1;
      STD_TORCH_CHECK(num_used_blocks <= blocks_per_slot, "slot ", row.slot, " reads position ", last, ", but has ",
                      blocks_per_slot, " blocks of ", attention.block_size);
      for (; num_checked_blocks < num_used_blocks; num_checked_blocks++) {
        const int64_t block = attention.block(row.slot, num_checked_blocks);
        STD_TORCH_CHECK(block >= 0 && block < num_blocks, "slot ", row.slot, " names block ", block, " of ",
                        num_blocks);
      }
      const int64_t num_tile_rows = (tile.end - tile.begin) * attention.heads_per_kv_head;
      const int64_t num_keys = std::max<int64_t>(0, last - first + 1);
      if (num_keys == 0) last = -1;  // all tokens lie below the start: one span, in which there is nothing
      const int64_t first_span = first / kKeysPerSpan;
      const int64_t num_spans = num_keys == 0 ? 1 : last / kKeysPerSpan - first_span + 1;
      for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
        jobs.push_back({tile, kv_head, first, last, first_span, num_spans, num_partial_floats});
        num_partial_floats += num_spans * Softmax::num_floats(num_tile_rows, attention.head_dim);
      }
      work += num_kv_heads * (num_tile_rows + 8) * num_keys * attention.head_dim;
      max_rows = std::max(max_rows, num_tile_rows);
    }
  }
  const int64_t threads = torch::stable::get_num_threads();
  const bool is_parallel = threads > 1 && work >= kMinWork;
  const bool is_split = is_parallel && static_cast<int64_t>(jobs.size()) < kUnitsPerThread * threads &&
                        num_partial_floats <= kMaxPartialFloats;
  PagedAttention<Query, KV, Element> paged(attention, std::move(jobs), is_split);
  paged.run(is_split ? partials.floats(num_partial_floats) : nullptr, max_rows, is_parallel);
}

bool is_bfloat16(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Float, name, " must be float32 or bfloat16");
  return type == ScalarType::BFloat16;
}

// Calls run with a number of the cache's type.
template <typename Run>
void with_kv_type(const Tensor& layer, const Run& run) {
  switch (layer.scalar_type()) {
    case ScalarType::Float:
      return run(float{});
    case ScalarType::BFloat16:
      return run(BFloat16{});
    case ScalarType::Float8_e4m3fn:
      return run(Float8{});
    default:
      STD_TORCH_CHECK(false, "layer must be float32, bfloat16 or float8_e4m3fn");
  }
}

bool is_int64(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, name, " must be int32 or int64");
  return type == ScalarType::Long;
}

const int64_t* indices(const Tensor& tensor, int64_t count, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(), name,
                  " must be contiguous int64");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == count, name, " must have ", count, " elements");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

void check_vectors(const Tensor& tensor, int64_t dims, int64_t size, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == dims && tensor.size(dims - 1) == size, name, " must have ", dims,
                  " dimensions, the last of them ", size);
  STD_TORCH_CHECK(tensor.stride(dims - 1) == 1, name, " must be contiguous in its last dimension");
}

std::vector<Tile> rows_of(const Tensor& first_token, const Tensor& num_query, const Tensor& slots,
                          const std::optional<Tensor>& starts, int64_t num_tokens, int64_t num_slots) {
  const int64_t num_rows = first_token.numel();
  const int64_t* begins = indices(first_token, num_rows, "first_token");
  const int64_t* counts = indices(num_query, num_rows, "num_query");
  const int64_t* slot_ids = indices(slots, num_rows, "slots");
  const int64_t* slot_starts = starts ? indices(*starts, num_slots, "starts") : nullptr;
  std::vector<Tile> rows;
  for (int64_t i = 0; i < num_rows; i++) {
    STD_TORCH_CHECK(begins[i] >= 0 && counts[i] >= 0 && counts[i] <= num_tokens - begins[i], "row ", i, " has ",
                    counts[i], " tokens from ", begins[i], " on, of ", num_tokens);
    STD_TORCH_CHECK(slot_ids[i] >= 0 && slot_ids[i] < num_slots, "row ", i, " is in slot ", slot_ids[i]);
    const int64_t start = slot_starts ? slot_starts[slot_ids[i]] : 0;
    STD_TORCH_CHECK(start >= 0, "slot ", slot_ids[i], " starts at ", start);
    rows.push_back({slot_ids[i], start, begins[i], begins[i] + counts[i]});
  }
  return rows;
}

Tensor paged_attention(const Tensor query, const Tensor layer, const Tensor first_token, const Tensor num_query,
                       const Tensor slots, const Tensor positions, const Tensor block_table, double scaling,
                       std::optional<int64_t> sliding_window, std::optional<double> softcap,
                       std::optional<Tensor> sinks, std::optional<Tensor> starts) {
  const int64_t head_dim = query.size(query.dim() - 1);
  check_vectors(query, 3, head_dim, "query");
  check_vectors(layer, 4, 2 * head_dim, "layer");
  STD_TORCH_CHECK(head_dim % 16 == 0, "head_dim is ", head_dim, ", not a multiple of 16");
  STD_TORCH_CHECK(layer.size(2) % kKeysPerGroup == 0, "block size is ", layer.size(2), ", not a multiple of 16");
  STD_TORCH_CHECK(query.size(1) % layer.size(1) == 0, query.size(1), " heads cannot share ", layer.size(1),
                  " KV heads");
  const int64_t num_tokens = query.size(0);
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.stride(1) == 1, "block_table must be [slots, blocks]");
  const std::vector<Tile> rows = rows_of(first_token, num_query, slots, starts, num_tokens, block_table.size(0));
  if (sinks) {
    STD_TORCH_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() &&
                        sinks->numel() == query.size(1), "sinks must be a float32 number per head");
  }
  const int64_t sizes[3] = {num_tokens, query.size(1), head_dim};
  const int64_t strides[3] = {query.size(1) * head_dim, head_dim, 1};
  const bool is_query_bf16 = is_bfloat16(query, "query");
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      3, sizes, strides, is_query_bf16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32(),
      aoti_torch_device_type_cpu(), 0, &handle));
  Tensor output(handle);
  int64_t num_row_tokens = 0;
  for (const Tile& row : rows) num_row_tokens += row.end - row.begin;
  if (num_row_tokens < num_tokens) {
    std::memset(output.mutable_data_ptr(), 0, output.numel() * (is_query_bf16 ? sizeof(BFloat16) : sizeof(float)));
  }

  const Attention attention{
      query.const_data_ptr(),
      layer.const_data_ptr(),
      block_table.const_data_ptr(),
      sinks ? static_cast<const float*>(sinks->const_data_ptr()) : nullptr,
      indices(positions, num_tokens, "positions"),
      output.mutable_data_ptr(),
      {query.stride(0), query.stride(1)},
      {layer.stride(0), layer.stride(1), layer.stride(2)},
      block_table.stride(0),
      query.size(1),
      query.size(1) / layer.size(1),
      head_dim,
      layer.size(2),
      sliding_window ? *sliding_window : std::numeric_limits<int64_t>::max() / 2,
      static_cast<float>(scaling),
      static_cast<float>(softcap.value_or(0.0)),
      is_int64(block_table, "block_table"),
  };
#if defined(OUTRIDER_BF16_DOT)
  using Element = PairElement;
#else
  using Element = FloatElement;
#endif
  with_kv_type(layer, [&](auto kv) {
    using KV = decltype(kv);
    using BFloat16Element = std::conditional_t<std::is_same_v<KV, BFloat16>, Element, FloatElement>;
    const auto run = is_query_bf16 ? attend<BFloat16, KV, BFloat16Element> : attend<float, KV, FloatElement>;
    run(attention, rows, layer.size(1), block_table.size(1), layer.size(0));
  });
  return output;
}

// What the cache may hold: NaN and infinity become 0, and what its type cannot hold the largest that it can.
template <typename To>
inline Floats storable(Floats numbers) {
  const Words bits = bit_cast<Words>(numbers);
  const Words magnitude = bits & 0x7fffffff;
  const uint32_t largest = std::is_same_v<To, Float8>     ? bit_cast<uint32_t>(448.0f)
                           : std::is_same_v<To, BFloat16> ? 0x7f7f0000
                                                          : 0x7f7fffff;
  const Words kept = magnitude > largest ? (bits & 0x80000000) | largest : bits;
  return bit_cast<Floats>(magnitude >= 0x7f800000 ? Words{} : kept);
}

template <typename From, typename To>
void write_tokens(const Tensor& from, Tensor& layer, int64_t offset, const int64_t* blocks, const int64_t* offsets) {
  const int64_t num_heads = from.size(1), head_dim = from.size(2), num_tokens = from.size(0);
  const int64_t token_stride = from.stride(0), head_stride = from.stride(1);
  const int64_t strides[3] = {layer.stride(0), layer.stride(1), layer.stride(2)};
  const From* source = static_cast<const From*>(from.const_data_ptr());
  To* target = static_cast<To*>(layer.mutable_data_ptr()) + offset;
  const auto write = [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) {
      for (int64_t head = 0; head < num_heads; head++) {
        const From* numbers = source + token * token_stride + head * head_stride;
        To* slot = target + blocks[token] * strides[0] + head * strides[1] + offsets[token] * strides[2];
        for (int64_t d = 0; d < head_dim; d += kWidth) store(slot + d, storable<To>(load(numbers + d)));
      }
    }
  };
  const int64_t grain = kMinCopied / (num_heads * head_dim) + 1;
  if (num_tokens <= grain) {
    write(0, num_tokens);
  } else {
    torch::stable::parallel_for(0, num_tokens, grain, write);
  }
}

void write_kv(Tensor layer, const Tensor key, const Tensor value, const Tensor blocks, const Tensor offsets) {
  const int64_t num_tokens = key.size(0), head_dim = key.size(key.dim() - 1);
  check_vectors(key, 3, head_dim, "key");
  check_vectors(value, 3, head_dim, "value");
  check_vectors(layer, 4, 2 * head_dim, "layer");
  STD_TORCH_CHECK(head_dim % 16 == 0, "head_dim is ", head_dim, ", not a multiple of 16");
  STD_TORCH_CHECK(value.size(0) == num_tokens && key.size(1) == layer.size(1) && value.size(1) == layer.size(1),
                  "key and value must be [tokens, ", layer.size(1), ", head_dim]");
  const int64_t* block_ids = indices(blocks, num_tokens, "blocks");
  const int64_t* slots = indices(offsets, num_tokens, "offsets");
  for (int64_t i = 0; i < num_tokens; i++) {
    STD_TORCH_CHECK(block_ids[i] >= 0 && block_ids[i] < layer.size(0) && slots[i] >= 0 && slots[i] < layer.size(2),
                    "token ", i, " goes to slot ", slots[i], " of block ", block_ids[i], ", which does not exist");
  }
  with_kv_type(layer, [&](auto kv) {
    using KV = decltype(kv);
    const auto write = [&](const Tensor& from, int64_t offset, const char* name) {
      const auto run = is_bfloat16(from, name) ? write_tokens<BFloat16, KV> : write_tokens<float, KV>;
      run(from, layer, offset, block_ids, slots);
    };
    write(key, 0, "key");
    write(value, head_dim, "value");
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("cpu_write_kv(Tensor(a!) layer, Tensor key, Tensor value, Tensor blocks, Tensor offsets) -> ()");
  library.def(
      "cpu_paged_attention(Tensor query, Tensor layer, Tensor first_token, Tensor num_query, Tensor slots, "
      "Tensor positions, Tensor block_table, float scaling, int? sliding_window=None, float? softcap=None, "
      "Tensor? sinks=None, Tensor? starts=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("cpu_write_kv", TORCH_BOX(&write_kv));
  library.impl("cpu_paged_attention", TORCH_BOX(&paged_attention));
}

}  // namespace
}  // namespace outrider
