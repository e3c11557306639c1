// Attention of one tile: the query heads of one KV head for a few adjacent tokens, over one span of keys.
//
// A tile's rows are (token, query head) pairs. Keys are taken in blocks of kKeysPerTile, copied into a
// layout that both products want:
//
//   scores[rows, keys] = queries[rows, head_dim] @ keys[head_dim, keys]      keys are transposed
//   out[rows, head_dim] += weights[rows, keys] @ values[keys, head_dim]
//
// What a row comes to depends on its own position, query, keys and values alone, bit for bit: every
// product adds up in order, blocks and spans start at multiples of their length whoever shares the
// tile, and a key, block or span that is masked or left out changes nothing (x * 1 + 0). So neither the batch, nor the
// number of query tokens, nor the number of threads changes an answer.
#pragma once

#include <algorithm>

#include "cpu_multiply.h"

namespace outrider {

constexpr int64_t kKeysPerGroup = 16;  // lie side by side in a KV block, whose size is a multiple of this
constexpr int64_t kKeysPerTile = 64;
constexpr int64_t kKeysPerSpan = 512;  // the unit of parallel work along the keys

// Adjacent tokens [begin, end) of the sequence in a slot, which see nothing below `start`.
struct Tile {
  int64_t slot, start, begin, end;
};

struct Attention {
  const void* query;    // [tokens, heads, head_dim]
  const void* layer;    // [blocks, kv_heads, block_size, 2 * head_dim]
  const void* table;    // [slots, blocks]
  const float* sinks;   // [heads] or null
  const int64_t* positions;
  void* output;         // [tokens, heads, head_dim], contiguous
  int64_t query_strides[2], layer_strides[3], table_stride;  // in elements
  int64_t heads, heads_per_kv_head, head_dim, block_size;
  int64_t window;       // keys a token sees, itself included
  float scaling, softcap;
  bool is_table_int64;

  int64_t block(int64_t slot, int64_t index) const {
    const int64_t at = slot * table_stride + index;
    return is_table_int64 ? static_cast<const int64_t*>(table)[at] : static_cast<const int32_t*>(table)[at];
  }

  // Of those a token sees; beyond its position if it sees none.
  int64_t first_key(const Tile& tile, int64_t token) const {
    return std::max(tile.start, positions[token] + 1 - window);
  }
};

// The state of an online softmax: for each row the largest score so far, and sums relative to it.
struct Softmax {
  float* out;      // [rows, head_dim]
  float* sum;      // [rows, kWidth], to be added up at the end
  float* largest;  // [rows]
  int64_t rows, head_dim;

  static int64_t num_floats(int64_t rows, int64_t head_dim) {
    return rows * (head_dim + kWidth) + (rows + 15) / 16 * 16;  // keeps what comes next on a cache line's border
  }

  Softmax(float* buffer, int64_t rows, int64_t head_dim)
      : out(buffer), sum(out + rows * head_dim), largest(sum + rows * kWidth), rows(rows), head_dim(head_dim) {}

  void clear() {
    std::fill(out, largest, 0.0f);
    std::fill(largest, largest + rows, -kInfinity);
  }

  // Takes in the state of the next span of keys.
  void fold(const Softmax& next) {
    for (int64_t row = 0; row < rows; row++) {
      const float both = std::max(largest[row], next.largest[row]);
      const float base = both == -kInfinity ? 0.0f : both;
      const float keep = exp(largest[row] - base), add = exp(next.largest[row] - base);
      largest[row] = both;
      store(sum + row * kWidth, load(sum + row * kWidth) * keep + load(next.sum + row * kWidth) * add);
      for (int64_t i = row * head_dim; i < (row + 1) * head_dim; i += kWidth) {
        store(out + i, load(out + i) * keep + load(next.out + i) * add);
      }
    }
  }
};

template <typename Element>
void multiply(int64_t rows, int64_t columns, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride,
              int64_t depth, float* c, int64_t c_stride, const float* scale) {
  int64_t column = 0;
  for (; column + kVectorsPerBlock * kWidth <= columns; column += kVectorsPerBlock * kWidth) {
    multiply_rows<kVectorsPerBlock>(rows, a, a_stride, b + column, b_stride, depth, c + column, c_stride, scale);
  }
  for (; column < columns; column += kWidth) {
    multiply_rows<1>(rows, a, a_stride, b + column, b_stride, depth, c + column, c_stride, scale);
  }
}

// Sixteen keys and values that lie side by side in a block.
template <typename KV>
struct KeyGroup {
  const KV* rows;
  int64_t stride, head_dim;

  const KV* key(int64_t i) const { return rows + i * stride; }
  const KV* value(int64_t i) const { return rows + i * stride + head_dim; }

  // Keys and values lie anywhere, which the CPU does not foresee; what comes next is fetched while this is packed,
  // line by line, for only so many may be on their way at once.
  void fetch_key(int64_t i, int64_t d) const { __builtin_prefetch(key(i) + d, 0, 2); }
  void fetch_value(int64_t i, int64_t d) const { __builtin_prefetch(value(i) + d, 0, 2); }
};

// The keys that a thread attends to next: those from `key` on, up to `last`, of a KV head of the sequence in a slot.
struct Upcoming {
  int64_t slot, kv_head, key, last;
};

// keys[d, kKeysPerTile] and values[key, head_dim], one number to an element.
template <typename KV>
inline void pack(const KeyGroup<KV>& group, const KeyGroup<KV>& next, FloatElement* keys, FloatElement* values) {
  for (int64_t first = 0; first < kKeysPerGroup; first += kWidth) {
    for (int64_t d = 0; d < group.head_dim; d += kWidth) {
      Words square[kWidth];
      for (int i = 0; i < kWidth; i++) {
        square[i] = bit_cast<Words>(load(group.key(first + i) + d));
        next.fetch_key(first + i, d);
      }
      transpose(square);
      for (int i = 0; i < kWidth; i++) std::memcpy(keys + (d + i) * kKeysPerTile + first, &square[i], sizeof(Words));
    }
  }
  for (int64_t i = 0; i < kKeysPerGroup; i++) {
    for (int64_t d = 0; d < group.head_dim; d += kWidth) {
      FloatElement::store(values + i * group.head_dim + d, load(group.value(i) + d));
      next.fetch_value(i, d);
    }
  }
}

#if defined(OUTRIDER_BF16_DOT)
// keys[d / 2, kKeysPerTile] of pairs (d, d + 1), and values[key / 2, head_dim] of pairs (key, key + 1).
inline void pack(const KeyGroup<BFloat16>& group, const KeyGroup<BFloat16>& next, PairElement* keys,
                 PairElement* values) {
  for (int64_t pair = 0; pair < group.head_dim / 2; pair += kWidth) {
    Words square[kWidth];
    // The last square of an odd head_dim / 16 reaches into the values; nobody reads what comes of it.
    for (int i = 0; i < kWidth; i++) {
      square[i] = load_as<Words>(group.key(i) + 2 * pair);
      next.fetch_key(i, 2 * pair);
    }
    transpose(square);
    for (int i = 0; i < kWidth; i++) std::memcpy(keys + (pair + i) * kKeysPerTile, &square[i], sizeof(Words));
  }
  for (int64_t i = 0; i < kKeysPerGroup; i += 2) {
    PairElement* to = values + i / 2 * group.head_dim;
    int64_t d = 0;
    for (; d + 2 * kWidth <= group.head_dim; d += 2 * kWidth) {
      PairElement::interleave_twice(to + d, group.value(i) + d, group.value(i + 1) + d);
      next.fetch_value(i, d);
      next.fetch_value(i + 1, d);
    }
    if (d < group.head_dim) PairElement::interleave(to + d, group.value(i) + d, group.value(i + 1) + d);
  }
}
#endif

template <typename Query, typename KV, typename Element>
class TileKernel {
 public:
  static int64_t num_scratch_floats(int64_t rows, int64_t head_dim) {
    // One square more than head_dim needs: see pack.
    return rows * (head_dim + kKeysPerTile + 1) + (2 * head_dim + kWidth) * kKeysPerTile + 4 * kWidth;
  }

  TileKernel(const Attention& attention, const Tile& tile, int64_t kv_head, float* scratch)
      : attention_(attention), tile_(tile), kv_head_(kv_head), head_dim_(attention.head_dim),
        heads_(attention.heads_per_kv_head), depth_(head_dim_ / Element::kNumbers) {
    const int64_t rows = (tile.end - tile.begin) * heads_;
    queries_ = reinterpret_cast<Element*>(scratch);
    keys_ = queries_ + rows * head_dim_;
    values_ = keys_ + (head_dim_ + kWidth) * kKeysPerTile;
    scores_ = reinterpret_cast<float*>(values_ + head_dim_ * kKeysPerTile);
    rescale_ = scores_ + rows * kKeysPerTile;
    for (int64_t row = 0; row < rows; row++) {
      const Query* from = static_cast<const Query*>(attention.query) +
                          (tile.begin + row / heads_) * attention.query_strides[0] +
                          (kv_head * heads_ + row % heads_) * attention.query_strides[1];
      copy_query(from, queries_ + row * depth_);
    }
  }

  // Attends to the keys of one span, [span, span + 1) * kKeysPerSpan, and fetches what comes after it.
  void attend(int64_t span, Softmax& state, const Upcoming& following) {
    state.clear();
    for (int64_t key = span * kKeysPerSpan; key < (span + 1) * kKeysPerSpan; key += kKeysPerTile) {
      attend_keys(key, state, following);
    }
  }

  void write(const Softmax& state) const {
    for (int64_t row = 0; row < state.rows; row++) {
      const int64_t head = kv_head_ * heads_ + row % heads_;
      float sum = reduce_sum(load(state.sum + row * kWidth)), keep = 1.0f;
      if (sum == 0.0f) sum = 1.0f;  // saw nothing
      if (attention_.sinks) {
        const float sink = attention_.sinks[head], base = std::max(sink, state.largest[row]);
        keep = exp(state.largest[row] - base);
        sum = sum * keep + exp(sink - base);
      }
      Query* to = static_cast<Query*>(attention_.output) +
                  ((tile_.begin + row / heads_) * attention_.heads + head) * head_dim_;
      for (int64_t d = 0; d < head_dim_; d += kWidth) {
        store(to + d, load(state.out + row * head_dim_ + d) * (keep / sum));
      }
    }
  }

 private:
  void copy_query(const Query* from, Element* to) const {
    if constexpr (Element::kNumbers == 1) {
      for (int64_t d = 0; d < head_dim_; d += kWidth) Element::store(to + d, load(from + d));
    } else {
      std::memcpy(to, from, head_dim_ * sizeof(Query));
    }
  }

  void attend_keys(int64_t first, Softmax& state, const Upcoming& following) {
    // Tokens that see none of these keys are left out at both ends: padding, mostly, whose position is 0.
    int64_t begin = tile_.begin, end = tile_.end;
    while (begin < end && !sees(begin, first)) begin++;
    while (begin < end && !sees(end - 1, first)) end--;
    if (begin == end) return;
    const int64_t last = *std::max_element(attention_.positions + begin, attention_.positions + end);
    int64_t lowest = last;
    for (int64_t token = begin; token < end; token++) lowest = std::min(lowest, attention_.first_key(tile_, token));
    const int64_t skipped = std::max<int64_t>(0, lowest - first) / kKeysPerGroup * kKeysPerGroup;
    const int64_t num_keys = std::min(kKeysPerTile, (last - first) / kKeysPerGroup * kKeysPerGroup + kKeysPerGroup);
    const bool goes_on = first + kKeysPerTile <= last;
    const Upcoming next = goes_on ? Upcoming{tile_.slot, kv_head_, first + kKeysPerTile, last} : following;
    for (int64_t key = skipped; key < num_keys; key += kKeysPerGroup) {
      const KeyGroup<KV> own = group(tile_.slot, kv_head_, first + key);
      const bool is_more = next.key + key <= next.last;
      pack(own, is_more ? group(next.slot, next.kv_head, next.key + key) : own, keys_ + key,
           values_ + key / Element::kNumbers * head_dim_);
    }
    const int64_t row = (begin - tile_.begin) * heads_, rows = (end - begin) * heads_;
    multiply(rows, num_keys - skipped, queries_ + row * depth_, depth_, keys_ + skipped, kKeysPerTile, depth_,
             scores_ + row * kKeysPerTile + skipped, kKeysPerTile, nullptr);
    for (int64_t i = row; i < row + rows; i++) weigh(i, first, skipped, num_keys, state);
    const int64_t left_out = skipped / Element::kNumbers;
    multiply(rows, head_dim_, reinterpret_cast<const Element*>(scores_ + row * kKeysPerTile) + left_out, kKeysPerTile,
             values_ + left_out * head_dim_, head_dim_, num_keys / Element::kNumbers - left_out,
             state.out + row * head_dim_, head_dim_, rescale_ + row);
  }

  bool sees(int64_t token, int64_t first) const {
    const int64_t first_key = attention_.first_key(tile_, token), position = attention_.positions[token];
    return position >= std::max(first, first_key) && first_key < first + kKeysPerTile;
  }

  KeyGroup<KV> group(int64_t slot, int64_t kv_head, int64_t key) const {
    const int64_t block = attention_.block(slot, key / attention_.block_size);
    const KV* rows = static_cast<const KV*>(attention_.layer) + block * attention_.layer_strides[0] +
                     kv_head * attention_.layer_strides[1] + key % attention_.block_size * attention_.layer_strides[2];
    return {rows, attention_.layer_strides[2], head_dim_};
  }

  // Turns a row's scores of keys [first + skipped, first + num_keys) into weights, in place, and moves its state on
  // to the new largest score.
  void weigh(int64_t row, int64_t first, int64_t skipped, int64_t num_keys, Softmax& state) {
    const int64_t token = tile_.begin + row / heads_, position = attention_.positions[token];
    const int64_t first_key = attention_.first_key(tile_, token);
    const bool is_masked = position < first + num_keys - 1 || first_key > first + skipped;
    float* scores = scores_ + row * kKeysPerTile;
    Floats largest = broadcast(-kInfinity);
    for (int64_t i = skipped; i < num_keys; i += kWidth) {
      Floats score = load(scores + i) * attention_.scaling;
      if (attention_.softcap > 0) score = tanh(score / attention_.softcap) * attention_.softcap;
      if (is_masked) score = mask(score, first_key - first - i, position - first - i);
      largest = maximum(score, largest);
      store(scores + i, score);
    }
    const float before = state.largest[row], after = std::max(before, reduce_max(largest));
    const float base = after == -kInfinity ? 0.0f : after;  // all masked, in this block and those before
    rescale_[row] = before == after ? 1.0f : exp(before - base);
    state.largest[row] = after;
    Floats sum = load(state.sum + row * kWidth) * rescale_[row];
    Element* weights = reinterpret_cast<Element*>(scores);
    for (int64_t i = skipped; i < num_keys; i += kWidth) {
      const Floats weight = exp(load(scores + i) - base);
      sum += weight;
      Element::store(weights + i / Element::kNumbers, weight);
    }
    store(state.sum + row * kWidth, sum);
  }

  // Keeps lanes [first, last].
  static Floats mask(Floats score, int64_t first, int64_t last) {
    Ints lane;
    for (int i = 0; i < kWidth; i++) lane[i] = i;
    const auto clamp = [](int64_t at) { return static_cast<int32_t>(std::clamp<int64_t>(at, -1, kWidth)); };
    return (lane >= clamp(first)) & (lane <= clamp(last)) ? score : broadcast(-kInfinity);
  }

  const Attention& attention_;
  const Tile& tile_;
  const int64_t kv_head_, head_dim_, heads_, depth_;
  Element *queries_, *keys_, *values_;
  float *scores_, *rescale_;
};

}  // namespace outrider
