// Vectors of the widest kind the compiler targets, and the few functions attention needs on them.
//
// GCC's and clang's vector extensions do the rest: the same source becomes AVX-512, AVX2, NEON or
// SSE code, and scalar code where there is nothing.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define OUTRIDER_BF16_DOT 1
#endif

namespace outrider {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kVectorsPerBlock = 4;  // 6 x 4 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int kWidth = 8;
constexpr int kVectorsPerBlock = 2;  // 6 x 2 accumulators of 16 registers
#else
constexpr int kWidth = 4;
constexpr int kVectorsPerBlock = 2;
#endif
constexpr int kRowsPerBlock = 6;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct BFloat16 {
  uint16_t bits;
};

// float8_e4m3fn: a sign, 4 bits of exponent less 7, 3 of mantissa; no infinity.
struct Float8 {
  uint8_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<From>);
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Vector>
inline Vector load_as(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

inline Floats broadcast(float value) { return value - Floats{}; }

inline Floats load(const float* from) { return load_as<Floats>(from); }

inline Floats load(const BFloat16* from) {
  return bit_cast<Floats>(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}

// Exact, but for the two NaN, which become 480: the cache holds none.
inline Floats load(const Float8* from) {
  const Words bits = __builtin_convertvector(load_as<Bytes>(from), Words);
  // Exponent and mantissa are those of a float32 that is 2^-120 of it; subnormal ones are as well.
  return bit_cast<Floats>((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 0x1p120f;
}

inline void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof(vector)); }

// To nearest, ties to even, as torch rounds; subnormals are kept and NaN stays NaN.
inline void store(BFloat16* to, Floats vector) {
  const Words bits = bit_cast<Words>(vector);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = (bits >> 16) | 0x40;
  const Halves halves = __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

// To nearest, ties to even, as torch rounds; for numbers up to 448, the largest that there is.
inline void store(Float8* to, Floats vector) {
  const Words bits = bit_cast<Words>(vector), magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude - (120 << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  // Below 2^-6 steps are 2^-9 wide, as wide as those of a float32 from 2^14 on.
  const Floats shifted = bit_cast<Floats>(magnitude) + 0x1p14f;
  const Words subnormal = bit_cast<Words>(shifted) - bit_cast<uint32_t>(0x1p14f);
  const Words rounded = (magnitude < bit_cast<uint32_t>(0x1p-6f) ? subnormal : normal) | bits >> 31 << 7;
  const Bytes bytes = __builtin_convertvector(rounded, Bytes);
  std::memcpy(to, &bytes, sizeof(bytes));
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// Lane i of the result is lane kLanes[i] of a and, behind it, b.
template <typename Vector, int... kLanes>
inline Vector pick(Vector a, Vector b, std::integer_sequence<int, kLanes...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kLanes...);
#else
  return __builtin_shuffle(a, b, decltype(a == b){kLanes...});
#endif
}

// Lane i of the result is lane (i + kShift) % kWidth.
template <int kShift, int... kLane>
inline Words rotate(Words a, std::integer_sequence<int, kLane...>) {
  return pick(a, a, std::integer_sequence<int, (kLane + kShift) % kWidth...>{});
}

using Lanes = std::make_integer_sequence<int, kWidth>;

template <int kShift = kWidth / 2>
inline float reduce_max(Floats a) {
  const Floats other = bit_cast<Floats>(rotate<kShift>(bit_cast<Words>(a), Lanes{}));
  const Floats larger = maximum(a, other);
  if constexpr (kShift == 1) {
    return larger[0];
  } else {
    return reduce_max<kShift / 2>(larger);
  }
}

template <int kShift = kWidth / 2>
inline float reduce_sum(Floats a) {
  const Floats sum = a + bit_cast<Floats>(rotate<kShift>(bit_cast<Words>(a), Lanes{}));
  if constexpr (kShift == 1) {
    return sum[0];
  } else {
    return reduce_sum<kShift / 2>(sum);
  }
}

// Swaps the upper right and lower left quarters of every 2 * kStep x 2 * kStep square.
template <int kStep, int... kLane>
inline void swap_quarters(Words& a, Words& b, std::integer_sequence<int, kLane...>) {
  const Words old_a = a;
  a = pick(old_a, b, std::integer_sequence<int, (kLane & kStep) ? kWidth + kLane - kStep : kLane...>{});
  b = pick(old_a, b, std::integer_sequence<int, (kLane & kStep) ? kWidth + kLane : kLane + kStep...>{});
}

template <int kStep = kWidth / 2>
inline void transpose(Words (&rows)[kWidth]) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; i++) {
    if ((i & kStep) == 0) swap_quarters<kStep>(rows[i], rows[i + kStep], Lanes{});
  }
  if constexpr (kStep > 1) transpose<kStep / 2>(rows);
}

// Relative error below 2e-7 for x <= 0; exp(0) is exactly 1, and 0 comes back below -87, -inf included.
// NaN stays NaN.
inline Floats exp(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x * 1.44269504088896341f + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // the polynomial of Cephes' expf
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Floats fraction = p * (r * r) + r + 1.0f;
  const Words exponent = (bit_cast<Words>(shifted) - bit_cast<uint32_t>(kRound) + 127) << 23;
  return x < -87.0f ? Floats{} : fraction * bit_cast<Floats>(exponent);
}

inline float exp(float x) { return exp(broadcast(x))[0]; }

// Absolute error below 3e-7.
inline Floats tanh(Floats x) {
  const Words sign = bit_cast<Words>(x) & 0x80000000u;
  const Floats shrunk = exp(bit_cast<Floats>(bit_cast<Words>(x) | 0x80000000u) * 2.0f);
  const Floats positive = (1.0f - shrunk) / (1.0f + shrunk);
  return bit_cast<Floats>(bit_cast<Words>(positive) | sign);
}

// What a dot product is made of: one number, or two bfloat16, which some CPUs multiply in pairs.
// multiply_add returns sum + a * b, in float32.
struct FloatElement {
  using Register = Floats;
  static constexpr int kNumbers = 1;

  static Floats broadcast(const FloatElement* a) { return outrider::broadcast(load_as<float>(a)); }
  static Floats multiply_add(Floats sum, Floats a, const FloatElement* b) { return sum + a * load_as<Floats>(b); }
  static void store(FloatElement* to, Floats numbers) { std::memcpy(to, &numbers, sizeof(numbers)); }

  float value;
};

#if defined(OUTRIDER_BF16_DOT)
struct PairElement {
  using Register = __m512bh;
  static constexpr int kNumbers = 2;

  static __m512bh broadcast(const PairElement* a) { return (__m512bh)_mm512_set1_epi32(load_as<int32_t>(a)); }
  static Floats multiply_add(Floats sum, __m512bh a, const PairElement* b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, a, load_as<__m512bh>(b));
  }
  static void store(PairElement* to, Floats numbers) {
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)numbers);
    std::memcpy(to, &halves, sizeof(halves));
  }
  // Pairs (even[i], odd[i]) of kWidth numbers each, or of twice as many, which are quicker.
  static void interleave(PairElement* to, const BFloat16* even, const BFloat16* odd) {
    const Words low = __builtin_convertvector(load_as<Halves>(even), Words);
    const Words pairs = low | __builtin_convertvector(load_as<Halves>(odd), Words) << 16;
    std::memcpy(to, &pairs, sizeof(pairs));
  }
  static void interleave_twice(PairElement* to, const BFloat16* even, const BFloat16* odd) {
    interleave_from<0>(to, even, odd, std::make_integer_sequence<int, 2 * kWidth>{});
    interleave_from<kWidth>(to + kWidth, even, odd, std::make_integer_sequence<int, 2 * kWidth>{});
  }
  template <int kFirst, int... kLane>
  static void interleave_from(PairElement* to, const BFloat16* even, const BFloat16* odd,
                              std::integer_sequence<int, kLane...>) {
    typedef uint16_t AllHalves __attribute__((vector_size(4 * kWidth)));
    using Order = std::integer_sequence<int, (kFirst + kLane / 2 + kLane % 2 * 2 * kWidth)...>;
    const AllHalves pairs = pick(load_as<AllHalves>(even), load_as<AllHalves>(odd), Order{});
    std::memcpy(to, &pairs, sizeof(pairs));
  }

  uint32_t value;
};
#else
struct PairElement {
  struct Register {
    Floats even, odd;
  };
  static constexpr int kNumbers = 2;

  static Register split(Words pairs) {
    return {bit_cast<Floats>(pairs << 16), bit_cast<Floats>(pairs & 0xffff0000u)};
  }
  static Register broadcast(const PairElement* a) { return split(Words{} + load_as<uint32_t>(a)); }
  static Floats multiply_add(Floats sum, const Register& a, const PairElement* b) {
    const Register numbers = split(load_as<Words>(b));
    return sum + a.even * numbers.even + a.odd * numbers.odd;
  }

  uint32_t value;
};
#endif

}  // namespace outrider
