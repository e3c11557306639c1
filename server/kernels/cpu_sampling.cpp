// The operators outrider::cpu_uniform, cpu_argmax, cpu_draw and cpu_verify_drafts; cpu_sampling.py documents them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu_vector.h"

namespace outrider {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kPerPart = 32 * kWidth;  // weights that are added up in float32; parts are, in float64

enum Method : int64_t { kStandard = 0, kBlock = 1 };

// noise.py, bit by bit.
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352D;
  x = (x ^ x >> 15) * 0x846CA68B;
  return x ^ x >> 16;
}

float uniform(uint64_t key, uint64_t position, uint64_t stream) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  const uint64_t state = mix(mix(key + kGolden * stream) + position * kGolden);
  const int32_t word = mix(mix(static_cast<uint32_t>(state)) ^ static_cast<uint32_t>(state >> 32));
  const float number = static_cast<float>(word) + (word < 0 ? 0x1p32f : 0.0f);
  return std::min((number + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
}

Floats load_up_to(const float* from, int64_t count) {
  if (count >= kWidth) return load(from);
  Floats vector = broadcast(-kInfinity);
  for (int64_t i = 0; i < count; i++) vector[i] = from[i];
  return vector;
}

// Of a row of logits. Where there is nothing to choose every probability is 0; where a logit is no number, NaN.
class Softmax {
 public:
  Softmax(const float* logits, int64_t size) : logits_(logits), size_(size) {
    Floats highest = broadcast(-kInfinity);
    for (int64_t i = 0; i < size; i += kWidth) highest = maximum(load_up_to(logits + i, size - i), highest);
    score_ = reduce_max(highest);
    base_ = score_ > -kInfinity ? score_ : 0;
    double total = 0;
    for (int64_t begin = 0; begin < size; begin += kPerPart) {
      Floats sum{};
      const int64_t end = std::min(size, begin + kPerPart);
      for (int64_t i = begin; i < end; i += kWidth) sum += exp(load_up_to(logits + i, size - i) - base_);
      total += reduce_sum(sum);
    }
    total_ = total == 0 ? 1 : static_cast<float>(total);
    if (std::isnan(total)) score_ = total_;
  }

  int64_t size() const { return size_; }

  // The highest logit: minus infinity where there is nothing to choose, NaN where a logit is NaN or infinite.
  float score() const { return score_; }

  float prob(int64_t id) const { return exp(logits_[id] - base_) / total_; }

  // Of the ids from `first` on; 0 beyond the last.
  Floats probs(int64_t first) const { return exp(load_up_to(logits_ + first, size_ - first) - base_) / total_; }

  // Of these ids; 0 of negative ones.
  Floats probs(Ints ids) const {
    Floats chosen;
    for (int lane = 0; lane < kWidth; lane++) chosen[lane] = ids[lane] < 0 ? -kInfinity : logits_[ids[lane]];
    return exp(chosen - base_) / total_;
  }

 private:
  const float* logits_;
  int64_t size_;
  float score_, base_, total_;
};

// The smallest id whose weight, with all before it, is more than `coin` of the whole; -1 if nothing weighs anything.
template <typename Weights>
int64_t draw(int64_t size, float coin, const Weights& weights) {
  static thread_local std::vector<double> parts;
  parts.clear();
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += kPerPart) {
    Floats sum{};
    for (int64_t i = begin; i < std::min(size, begin + kPerPart); i += kWidth) sum += weights(i);
    parts.push_back(reduce_sum(sum));
    total += parts.back();
  }
  if (!(total > 0)) return -1;
  double left = coin * total;
  int64_t chosen = -1;  // where rounding leads beyond the end, the last that weighs something
  for (size_t part = 0; part < parts.size(); part++) {
    if (parts[part] <= 0) continue;
    chosen = part;
    if (left < parts[part]) break;
    left -= parts[part];
  }
  const int64_t begin = chosen * kPerPart, end = std::min(size, begin + kPerPart);
  int64_t id = -1;
  for (int64_t i = begin; i < end; i += kWidth) {
    const Floats some = weights(i);
    for (int lane = 0; lane < kWidth && i + lane < end; lane++) {
      if (some[lane] <= 0) continue;
      id = i + lane;
      if (left < some[lane]) return id;
      left -= some[lane];
    }
  }
  return id;
}

// One sequence: k drafts, and what they were drawn from.
struct Drafts {
  const int64_t* ids;      // [k], the target's
  int64_t count;           // of them that exist
  const float* logits;     // [k, size], or null where drafts are certain
  int64_t size;
  const int32_t* to_draft; // [target's vocabulary], or null where it is the drafter's
};

// What the target has in excess of a drafter, at the place of one draft: max(0, chance * p - q).
class Residual {
 public:
  Residual(const Softmax& target, float chance, const Drafts& drafts, int64_t place)
      : target_(target), chance_(chance), id_(drafts.ids[place]), to_draft_(drafts.to_draft) {
    if (drafts.logits) drafter_.emplace(drafts.logits + place * drafts.size, drafts.size);
  }

  // The draft's own probability.
  float chosen_prob() const {
    if (!drafter_) return 1;
    const int64_t id = to_draft_ ? to_draft_[id_] : id_;
    return id < 0 ? 0 : drafter_->prob(id);
  }

  Floats operator()(int64_t first) const {
    const Floats p = target_.probs(first) * chance_;
    Floats q{};
    if (!drafter_) {
      if (id_ >= first && id_ < first + kWidth) q[id_ - first] = 1;
    } else if (to_draft_) {
      Ints ids = Ints{} - 1;
      const int64_t count = std::min<int64_t>(kWidth, target_.size() - first);
      for (int64_t lane = 0; lane < count; lane++) ids[lane] = to_draft_[first + lane];
      q = drafter_->probs(ids);
    } else {
      q = drafter_->probs(first);
    }
    return maximum(p - q, Floats{});
  }

  double sum() const {
    double total = 0;
    for (int64_t begin = 0; begin < target_.size(); begin += kPerPart) {
      Floats part{};
      for (int64_t i = begin; i < std::min(target_.size(), begin + kPerPart); i += kWidth) part += (*this)(i);
      total += reduce_sum(part);
    }
    return total;
  }

 private:
  const Softmax& target_;
  const float chance_;
  const int64_t id_;
  const int32_t* to_draft_;
  std::optional<Softmax> drafter_;
};

// Verifies the drafts of one sequence.
class Verification {
 public:
  Verification(const float* logits, int64_t size, const Drafts& drafts, float* scores)
      : logits_(logits), size_(size), drafts_(drafts), scores_(scores) {}

  // Returns how many are kept, and what follows them. uniforms: [k].
  std::pair<int64_t, int64_t> run(Method method, const float* uniforms, float coin) {
    const int64_t kept = method == kStandard ? count_standard(uniforms) : count_block(uniforms);
    const Softmax target = at(kept);
    int64_t id = -1;
    if (kept < drafts_.count) id = draw(size_, coin, Residual(target, chance_, drafts_, kept));
    // Of a draft that is refused although the two distributions are the same, rounding may leave nothing.
    if (id < 0) id = draw(size_, coin, [&](int64_t first) { return target.probs(first); });
    return {kept, std::max<int64_t>(0, id)};
  }

 private:
  Softmax at(int64_t place) {
    const Softmax target(logits_ + place * size_, size_);
    scores_[place] = target.score();
    return target;
  }

  // Leviathan et al. 2023, arXiv:2211.17192, algorithm 1.
  int64_t count_standard(const float* uniforms) {
    for (int64_t i = 0; i < drafts_.count; i++) {
      const Softmax target = at(i);
      const float q = Residual(target, 1, drafts_, i).chosen_prob();
      if (!(uniforms[i] * q < target.prob(drafts_.ids[i]))) return i;
    }
    return drafts_.count;
  }

  // Sun et al. 2024, arXiv:2403.10444, algorithm 2.
  int64_t count_block(const float* uniforms) {
    int64_t kept = 0;
    float chance = 1;  // of the beginning so far to be kept, or more of it
    for (int64_t i = 0; i < drafts_.count; i++) {
      const Softmax target = at(i);
      const float p = target.prob(drafts_.ids[i]), q = Residual(target, 1, drafts_, i).chosen_prob();
      const float grown = chance * p;
      chance = !(p > 0) ? 0 : grown < q ? grown / q : 1;
      double share = chance;
      if (i + 1 < drafts_.count) {
        const double mass = Residual(at(i + 1), chance, drafts_, i + 1).sum();
        const double whole = mass + (1 - chance);
        share = whole > 0 ? mass / whole : 1;
      }
      if (uniforms[i] < share) kept = i + 1, chance_ = chance;
    }
    return kept;
  }

  const float* logits_;  // [k + 1, size]
  const int64_t size_;
  const Drafts& drafts_;
  float* scores_;     // [k + 1]
  float chance_ = 1;  // of what is kept
};

Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
  int64_t strides[2], stride = 1;
  for (int64_t i = sizes.size() - 1; i >= 0; i--) {
    strides[i] = stride;
    stride *= sizes.begin()[i];
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides, dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

template <typename Number>
const Number* data(const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> sizes, const char* name) {
  bool fits = tensor.scalar_type() == type && tensor.is_contiguous() &&
              tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); i++) fits = tensor.size(i) == sizes.begin()[i];
  STD_TORCH_CHECK(fits, name, " does not have the type and the shape that it should, or is not contiguous");
  return static_cast<const Number*>(tensor.const_data_ptr());
}

Tensor uniforms_of(const Tensor key, const Tensor position, int64_t stream) {
  const int64_t count = key.numel();
  const int64_t* keys = data<int64_t>(key, ScalarType::Long, {count}, "key");
  const int64_t* positions = data<int64_t>(position, ScalarType::Long, {count}, "position");
  Tensor numbers = empty({count}, aoti_torch_dtype_float32());
  float* to = static_cast<float*>(numbers.mutable_data_ptr());
  for (int64_t i = 0; i < count; i++) to[i] = uniform(keys[i], positions[i], stream);
  return numbers;
}

std::tuple<Tensor, Tensor> argmax(const Tensor logits) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be [rows, vocab]");
  const int64_t rows = logits.size(0), size = logits.size(1);
  const float* numbers = data<float>(logits, ScalarType::Float, {rows, size}, "logits");
  Tensor ids = empty({rows}, aoti_torch_dtype_int64()), scores = empty({rows}, aoti_torch_dtype_float32());
  int64_t* chosen = static_cast<int64_t*>(ids.mutable_data_ptr());
  float* highest = static_cast<float*>(scores.mutable_data_ptr());
  torch::stable::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const float* from = numbers + row * size;
      Floats largest = broadcast(-kInfinity);
      Ints is_nan{};
      for (int64_t i = 0; i < size; i += kWidth) {
        const Floats some = load_up_to(from + i, size - i);
        largest = maximum(some, largest);
        is_nan |= some != some;
      }
      bool has_nan = false;
      for (int lane = 0; lane < kWidth; lane++) has_nan |= is_nan[lane] != 0;
      const float score = reduce_max(largest);
      const float* const place = std::find(from, from + size, score);
      chosen[row] = place < from + size ? place - from : 0;
      highest[row] = has_nan ? std::numeric_limits<float>::quiet_NaN() : score;
    }
  });
  return {ids, scores};
}

Tensor draw_tokens(const Tensor logits, const Tensor coins) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must be [rows, vocab]");
  const int64_t rows = logits.size(0), size = logits.size(1);
  const float* numbers = data<float>(logits, ScalarType::Float, {rows, size}, "logits");
  const float* uniforms = data<float>(coins, ScalarType::Float, {rows}, "coins");
  Tensor ids = empty({rows}, aoti_torch_dtype_int64());
  int64_t* chosen = static_cast<int64_t*>(ids.mutable_data_ptr());
  torch::stable::parallel_for(0, rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const Softmax softmax(numbers + row * size, size);
      const int64_t id = draw(size, uniforms[row], [&](int64_t first) { return softmax.probs(first); });
      chosen[row] = std::max<int64_t>(0, id);
    }
  });
  return ids;
}

std::tuple<Tensor, Tensor, Tensor> verify_drafts(const Tensor target_logits, const Tensor draft_ids,
                                                 const Tensor num_drafts, const Tensor uniforms, const Tensor coins,
                                                 int64_t method, const std::optional<Tensor> draft_logits,
                                                 const std::optional<Tensor> to_draft) {
  STD_TORCH_CHECK(method == kStandard || method == kBlock, "there is no method ", method);
  STD_TORCH_CHECK(target_logits.dim() == 3, "target_logits must be [rows, k + 1, vocab]");
  const int64_t rows = target_logits.size(0), k = target_logits.size(1) - 1, size = target_logits.size(2);
  const float* logits = data<float>(target_logits, ScalarType::Float, {rows, k + 1, size}, "target_logits");
  const int64_t* ids = data<int64_t>(draft_ids, ScalarType::Long, {rows, k}, "draft_ids");
  const int64_t* counts = data<int64_t>(num_drafts, ScalarType::Long, {rows}, "num_drafts");
  const float* chances = data<float>(uniforms, ScalarType::Float, {rows, k}, "uniforms");
  const float* last_chances = data<float>(coins, ScalarType::Float, {rows}, "coins");
  const int64_t draft_size = draft_logits ? draft_logits->size(draft_logits->dim() - 1) : 0;
  const float* drawn_from =
      draft_logits ? data<float>(*draft_logits, ScalarType::Float, {rows, k, draft_size}, "draft_logits") : nullptr;
  const int32_t* known = to_draft ? data<int32_t>(*to_draft, ScalarType::Int, {size}, "to_draft") : nullptr;
  STD_TORCH_CHECK(known || !drawn_from || draft_size == size, "the drafter has ", draft_size, " tokens of ", size);
  for (int64_t row = 0; row < rows; row++) {
    STD_TORCH_CHECK(counts[row] >= 0 && counts[row] <= k, "row ", row, " has ", counts[row], " drafts of ", k);
    for (int64_t i = 0; i < counts[row]; i++) {
      const int64_t id = ids[row * k + i];
      STD_TORCH_CHECK(id >= 0 && id < size, "draft ", i, " of row ", row, " is ", id);
    }
  }
  Tensor num_accepted = empty({rows}, aoti_torch_dtype_int64()), next_ids = empty({rows}, aoti_torch_dtype_int64());
  Tensor scores = empty({rows, k + 1}, aoti_torch_dtype_float32());
  int64_t* accepted = static_cast<int64_t*>(num_accepted.mutable_data_ptr());
  int64_t* next = static_cast<int64_t*>(next_ids.mutable_data_ptr());
  float* highest = static_cast<float*>(scores.mutable_data_ptr());
  std::fill(highest, highest + rows * (k + 1), 0.0f);
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const Drafts drafts{ids + row * k, counts[row], drawn_from ? drawn_from + row * k * draft_size : nullptr,
                          draft_size, known};
      Verification verification(logits + row * (k + 1) * size, size, drafts, highest + row * (k + 1));
      std::tie(accepted[row], next[row]) =
          verification.run(static_cast<Method>(method), chances + row * k, last_chances[row]);
    }
  });
  return {num_accepted, next_ids, scores};
}

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("cpu_uniform(Tensor key, Tensor position, int stream) -> Tensor");
  library.def("cpu_argmax(Tensor logits) -> (Tensor, Tensor)");
  library.def("cpu_draw(Tensor logits, Tensor coins) -> Tensor");
  library.def("cpu_verify_drafts(Tensor target_logits, Tensor draft_ids, Tensor num_drafts, Tensor uniforms, "
              "Tensor coins, int method, Tensor? draft_logits, Tensor? to_draft) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(outrider, CPU, library) {
  library.impl("cpu_uniform", TORCH_BOX(&uniforms_of));
  library.impl("cpu_argmax", TORCH_BOX(&argmax));
  library.impl("cpu_draw", TORCH_BOX(&draw_tokens));
  library.impl("cpu_verify_drafts", TORCH_BOX(&verify_drafts));
}

}  // namespace
}  // namespace outrider
