// Sixteen lanes of fp32 or int32, whatever the instruction set: one, two or four machine vectors. Included only by
// `isa.cpp`, inside the namespace of one instruction set, so that nothing here is shared between differently
// compiled units.
//
// Multiply-add is always the explicit `fma`; the units are compiled with -ffp-contract=off. So a value's bits depend
// on the order written down, not on the shape of the loop around it.

#define OCTAVO_INLINE inline __attribute__((always_inline))

// Loops over a register tile must vanish, or its accumulators live in memory.
#if defined(__clang__)
#define OCTAVO_UNROLL _Pragma("clang loop unroll(full)")
#else
#define OCTAVO_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX512_BF16)
#define OCTAVO_VECTOR_BYTES 64
#elif defined(OCTAVO_AVX2)
#define OCTAVO_VECTOR_BYTES 32
#else
#define OCTAVO_VECTOR_BYTES 16
#endif

constexpr int kLanes = 16;
constexpr int kWidth = OCTAVO_VECTOR_BYTES / 4;
constexpr int kParts = kLanes / kWidth;

typedef float vf __attribute__((vector_size(OCTAVO_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(OCTAVO_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(OCTAVO_VECTOR_BYTES)));
typedef uint64_t vq __attribute__((vector_size(OCTAVO_VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(OCTAVO_VECTOR_BYTES / 2)));
typedef float vf_unaligned __attribute__((vector_size(OCTAVO_VECTOR_BYTES), aligned(1), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(OCTAVO_VECTOR_BYTES), aligned(1), may_alias));
typedef uint16_t vh_unaligned __attribute__((vector_size(OCTAVO_VECTOR_BYTES / 2), aligned(1), may_alias));

struct F {
  vf part[kParts];
};
struct U {
  vu part[kParts];
};

#define OCTAVO_PARTS OCTAVO_UNROLL for (int i = 0; i < kParts; ++i)

OCTAVO_INLINE F splat(float value) {
  F r;
  OCTAVO_PARTS r.part[i] = value - vf{};
  return r;
}
OCTAVO_INLINE U splat_u(uint32_t value) {
  U r;
  OCTAVO_PARTS r.part[i] = value + vu{};
  return r;
}
OCTAVO_INLINE F zero() { return splat(0.0f); }

OCTAVO_INLINE F load(const float* p) {
  F r;
  OCTAVO_PARTS r.part[i] = *reinterpret_cast<const vf_unaligned*>(p + i * kWidth);
  return r;
}
OCTAVO_INLINE U load_u(const void* p) {
  U r;
  OCTAVO_PARTS r.part[i] = *reinterpret_cast<const vu_unaligned*>(static_cast<const uint32_t*>(p) + i * kWidth);
  return r;
}
OCTAVO_INLINE void store(float* p, F a) {
  OCTAVO_PARTS *reinterpret_cast<vf_unaligned*>(p + i * kWidth) = a.part[i];
}
OCTAVO_INLINE void store_u(void* p, U a) {
  OCTAVO_PARTS *reinterpret_cast<vu_unaligned*>(static_cast<uint32_t*>(p) + i * kWidth) = a.part[i];
}

#define OCTAVO_BINARY(TYPE, NAME, OP)                        \
  OCTAVO_INLINE TYPE NAME(TYPE a, TYPE b) {                  \
    TYPE r;                                                  \
    OCTAVO_PARTS r.part[i] = a.part[i] OP b.part[i];         \
    return r;                                                \
  }
OCTAVO_BINARY(F, operator+, +)
OCTAVO_BINARY(F, operator-, -)
OCTAVO_BINARY(F, operator*, *)
OCTAVO_BINARY(F, operator/, /)
OCTAVO_BINARY(U, operator+, +)
OCTAVO_BINARY(U, operator-, -)
OCTAVO_BINARY(U, operator&, &)
OCTAVO_BINARY(U, operator|, |)
OCTAVO_BINARY(U, operator^, ^)

template <int N>
OCTAVO_INLINE U shift_left(U a) {
  U r;
  OCTAVO_PARTS r.part[i] = a.part[i] << N;
  return r;
}
template <int N>
OCTAVO_INLINE U shift_right(U a) {
  U r;
  OCTAVO_PARTS r.part[i] = a.part[i] >> N;
  return r;
}

OCTAVO_INLINE F as_float(U a) {
  F r;
  OCTAVO_PARTS r.part[i] = (vf)a.part[i];
  return r;
}
OCTAVO_INLINE U as_uint(F a) {
  U r;
  OCTAVO_PARTS r.part[i] = (vu)a.part[i];
  return r;
}
// Signed, as the hardware has it.
OCTAVO_INLINE F to_float(U a) {
  F r;
  OCTAVO_PARTS r.part[i] = __builtin_convertvector((vi)a.part[i], vf);
  return r;
}

// All-ones lanes where true.
OCTAVO_INLINE U less(F a, F b) {
  U r;
  OCTAVO_PARTS r.part[i] = (vu)(a.part[i] < b.part[i]);
  return r;
}
// Whether that is so in all lanes; not where there is a NaN.
OCTAVO_INLINE bool all_less(F a, F b) {
#if OCTAVO_VECTOR_BYTES == 64
  return _mm512_cmp_ps_mask((__m512)a.part[0], (__m512)b.part[0], _CMP_NLT_UQ) == 0;
#else
  uint32_t lanes[kLanes], all = ~0u;
  store_u(lanes, less(a, b));
  for (int i = 0; i < kLanes; ++i) all &= lanes[i];
  return all != 0;
#endif
}
OCTAVO_INLINE U is_nan(F a) {
  U r;
  OCTAVO_PARTS r.part[i] = (vu)(a.part[i] != a.part[i]);
  return r;
}
OCTAVO_INLINE U less_signed(U a, U b) {
  U r;
  OCTAVO_PARTS r.part[i] = (vu)((vi)a.part[i] < (vi)b.part[i]);
  return r;
}
OCTAVO_INLINE U choose(U mask, U a, U b) {
  U r;
  OCTAVO_PARTS r.part[i] = (a.part[i] & mask.part[i]) | (b.part[i] & ~mask.part[i]);
  return r;
}
OCTAVO_INLINE F choose(U mask, F a, F b) { return as_float(choose(mask, as_uint(a), as_uint(b))); }
OCTAVO_INLINE F keep(U mask, F a) { return as_float(as_uint(a) & mask); }
OCTAVO_INLINE bool any(U mask) {
#if OCTAVO_VECTOR_BYTES == 64
  return _mm512_test_epi32_mask((__m512i)mask.part[0], (__m512i)mask.part[0]) != 0;
#else
  uint32_t lanes[kLanes], all = 0;
  store_u(lanes, mask);
  for (int i = 0; i < kLanes; ++i) all |= lanes[i];
  return all != 0;
#endif
}

// a * b + c. Targets without a fused form round twice, always.
OCTAVO_INLINE F fma(F a, F b, F c) {
  F r;
#if OCTAVO_VECTOR_BYTES == 64
  OCTAVO_PARTS r.part[i] = (vf)_mm512_fmadd_ps((__m512)a.part[i], (__m512)b.part[i], (__m512)c.part[i]);
#elif OCTAVO_VECTOR_BYTES == 32
  OCTAVO_PARTS r.part[i] = (vf)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#elif defined(__aarch64__)
  OCTAVO_PARTS r.part[i] = (vf)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]);
#else
  OCTAVO_PARTS r.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
  return r;
}

// The larger; b where a or b is NaN.
OCTAVO_INLINE F maximum(F a, F b) {
#if OCTAVO_VECTOR_BYTES == 64
  F r;
  OCTAVO_PARTS r.part[i] = (vf)_mm512_max_ps((__m512)a.part[i], (__m512)b.part[i]);
  return r;
#elif OCTAVO_VECTOR_BYTES == 32
  F r;
  OCTAVO_PARTS r.part[i] = (vf)_mm256_max_ps((__m256)a.part[i], (__m256)b.part[i]);
  return r;
#else
  return choose(less(b, a), a, b);
#endif
}
OCTAVO_INLINE F minimum(F a, F b) {
#if OCTAVO_VECTOR_BYTES == 64
  F r;
  OCTAVO_PARTS r.part[i] = (vf)_mm512_min_ps((__m512)a.part[i], (__m512)b.part[i]);
  return r;
#elif OCTAVO_VECTOR_BYTES == 32
  F r;
  OCTAVO_PARTS r.part[i] = (vf)_mm256_min_ps((__m256)a.part[i], (__m256)b.part[i]);
  return r;
#else
  return choose(less(a, b), a, b);
#endif
}

// Always the same tree: halves added to halves.
OCTAVO_INLINE float sum(F a) {
  float lane[kLanes];
  store(lane, a);
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  return lane[0];
}
// Of numbers without NaN.
OCTAVO_INLINE float largest(F a) {
#if OCTAVO_VECTOR_BYTES == 64
  return _mm512_reduce_max_ps((__m512)a.part[0]);
#else
  float lane[kLanes];
  store(lane, a);
  float result = lane[0];
  for (int i = 1; i < kLanes; ++i) result = lane[i] > result ? lane[i] : result;
  return result;
#endif
}

OCTAVO_INLINE U larger_signed(U a, U b) {
#if OCTAVO_VECTOR_BYTES == 64
  U r;
  OCTAVO_PARTS r.part[i] = (vu)_mm512_max_epi32((__m512i)a.part[i], (__m512i)b.part[i]);
  return r;
#elif OCTAVO_VECTOR_BYTES == 32
  U r;
  OCTAVO_PARTS r.part[i] = (vu)_mm256_max_epi32((__m256i)a.part[i], (__m256i)b.part[i]);
  return r;
#else
  return choose(less_signed(a, b), b, a);
#endif
}
OCTAVO_INLINE int32_t largest_of(U a) {
#if OCTAVO_VECTOR_BYTES == 64
  return _mm512_reduce_max_epi32((__m512i)a.part[0]);
#else
  int32_t lane[kLanes];
  store_u(lane, a);
  int32_t result = lane[0];
  for (int i = 1; i < kLanes; ++i) result = lane[i] > result ? lane[i] : result;
  return result;
#endif
}
// Modulo 2^32.
OCTAVO_INLINE uint32_t sum_of(U a) {
#if OCTAVO_VECTOR_BYTES == 64
  return static_cast<uint32_t>(_mm512_reduce_add_epi32((__m512i)a.part[0]));
#else
  uint32_t lane[kLanes], result = 0;
  store_u(lane, a);
  for (int i = 0; i < kLanes; ++i) result += lane[i];
  return result;
#endif
}

// 0, 1, ... 15
OCTAVO_INLINE U iota() {
  static const uint32_t lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_u(lanes);
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------------

OCTAVO_INLINE U widen(const uint16_t* p) {
  U r;
  OCTAVO_PARTS {
    const vh half = *reinterpret_cast<const vh_unaligned*>(p + i * kWidth);
    r.part[i] = __builtin_convertvector(half, vu);
  }
  return r;
}
OCTAVO_INLINE void narrow(uint16_t* p, U a) {
  OCTAVO_PARTS *reinterpret_cast<vh_unaligned*>(p + i * kWidth) = __builtin_convertvector(a.part[i], vh);
}

// Round to nearest even; NaN stays NaN.
OCTAVO_INLINE U bf16_bits(F a) {
  const U bits = as_uint(a);
  const U rounded = bits + splat_u(0x7fff) + (shift_right<16>(bits) & splat_u(1));
  return shift_right<16>(choose(is_nan(a), bits | splat_u(0x400000), rounded));
}

// IEEE half to single: exponent rebias by an exact multiplication, which also normalizes subnormals.
OCTAVO_INLINE F half_to_float(U h) {
  const U sign = shift_left<16>(h & splat_u(0x8000));
  const U magnitude = shift_left<13>(h & splat_u(0x7fff));
  const F scaled = as_float(magnitude) * splat(0x1p112f);
  const U special = less_signed(splat_u((0x7c00u << 13) - 1), magnitude);
  return as_float(choose(special, magnitude | splat_u(0x7f800000), as_uint(scaled)) | sign);
}
// Single to half, round to nearest even. Normal results round by integer carry; subnormal ones by adding a constant
// whose unit in the last place is that of the subnormals.
OCTAVO_INLINE U float_to_half(F a) {
  const U bits = as_uint(a);
  const U sign = shift_right<16>(bits) & splat_u(0x8000);
  const U magnitude = bits & splat_u(0x7fffffff);
  const U odd = shift_right<13>(magnitude) & splat_u(1);
  U normal = shift_right<13>(magnitude - splat_u(112u << 23) + splat_u(0xfff) + odd);
  normal = choose(less_signed(splat_u(0x477fefff), magnitude), splat_u(0x7c00), normal);
  const U tiny = as_uint(as_float(magnitude) + splat(0.5f)) - splat_u(0x3f000000);
  U result = choose(less_signed(magnitude, splat_u(113u << 23)), tiny, normal);
  result = choose(less_signed(splat_u(0x7f800000), magnitude), splat_u(0x7e00), result);
  return result | sign;
}

// Types of memory; arithmetic is always fp32.
struct F32 {
  typedef float item;
  static constexpr int32_t dtype = kF32;
  static OCTAVO_INLINE F read(const item* p) { return load(p); }
  static OCTAVO_INLINE void write(item* p, F a) { store(p, a); }
};
struct BF16 {
  typedef uint16_t item;
  static constexpr int32_t dtype = kBF16;
  static OCTAVO_INLINE F read(const item* p) { return as_float(shift_left<16>(widen(p))); }
  static OCTAVO_INLINE void write(item* p, F a) { narrow(p, bf16_bits(a)); }
};
struct F16 {
  typedef uint16_t item;
  static constexpr int32_t dtype = kF16;
  static OCTAVO_INLINE F read(const item* p) {
#if OCTAVO_VECTOR_BYTES == 64
    F r;
    r.part[0] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return r;
#elif OCTAVO_VECTOR_BYTES == 32
    F r;
    OCTAVO_PARTS r.part[i] = (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kWidth)));
    return r;
#else
    return half_to_float(widen(p));
#endif
  }
  static OCTAVO_INLINE void write(item* p, F a) {
#if OCTAVO_VECTOR_BYTES == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph((__m512)a.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif OCTAVO_VECTOR_BYTES == 32
    OCTAVO_PARTS _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * kWidth),
                                  _mm256_cvtps_ph((__m256)a.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    narrow(p, float_to_half(a));
#endif
  }
};

// Out of line: rare, and unrolled it would be most of the library.
template <class Item>
__attribute__((noinline)) void copy_items(Item* to, const Item* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

// The first n (1..16) items; the other lanes are zero and memory behind them is not touched.
template <class T>
OCTAVO_INLINE F read_some(const typename T::item* p, int64_t n) {
  if (n >= kLanes) return T::read(p);
  typename T::item lanes[kLanes] = {};
  copy_items(lanes, p, n);
  return T::read(lanes);
}
template <class T>
OCTAVO_INLINE void write_some(typename T::item* p, F a, int64_t n) {
  if (n >= kLanes) return T::write(p, a);
  typename T::item lanes[kLanes];
  T::write(lanes, a);
  copy_items(p, lanes, n);
}

// Calls f with a value of the type that stands for dtype.
template <class Function>
OCTAVO_INLINE void with_dtype(int32_t dtype, const Function& f) {
  if (dtype == kF32) {
    f(F32{});
  } else if (dtype == kBF16) {
    f(BF16{});
  } else {
    f(F16{});
  }
}

// ---- functions -----------------------------------------------------------------------------------------------------

// e^x to about 1 ulp for x in [-87.3, 88.3], clamped outside; NaN stays NaN. Cody and Waite's reduction, Cephes'
// polynomial.
OCTAVO_INLINE F exp(F x) {
  x = maximum(splat(-87.3f), x);
  x = minimum(splat(88.3f), x);
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = fma(x, splat(1.44269504088896341f), magic);
  const F n = shifted - magic;
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  return as_float(as_uint(p) + shift_left<23>(as_uint(shifted)));
}

// e^x to 2^-18 of itself for x in [-87.3, 88.3], 0.9999993 for 0; clamped below, NaN stays NaN. For results that are
// rounded to 16 bits. A minimax polynomial for 2^r.
OCTAVO_INLINE F exp_short(F x) {
  const F log2e = splat(1.44269504088896341f), magic = splat(12582912.0f);
  x = maximum(splat(-87.3f), x);
  const F shifted = fma(x, log2e, magic);
  const F r = fma(x, log2e, magic - shifted);
  F p = splat(9.570101276e-3f);
  p = fma(p, r, splat(5.591785908e-2f));
  p = fma(p, r, splat(2.402474433e-1f));
  p = fma(p, r, splat(6.931217909e-1f));
  p = fma(p, r, splat(9.999992847e-1f));
  return as_float(as_uint(p) + shift_left<23>(as_uint(shifted)));
}

// log(1 + f) + e * log(2) for f in [sqrt(1/2) - 1, sqrt(2) - 1]. Cephes' polynomial.
OCTAVO_INLINE F log_reduced(F f, F e) {
  F p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  const F square = f * f;
  F r = p * f * square;
  r = fma(e, splat(-2.12194440e-4f), r);
  r = fma(square, splat(-0.5f), r);
  return fma(e, splat(0.693359375f), f + r);
}

// Splits a positive normal x into f and e of log_reduced: x = (1 + f) * 2^e.
OCTAVO_INLINE void split(F x, F* f, F* e) {
  // Offset so that the exponent field steps at sqrt(1/2).
  const U shifted = as_uint(x) - splat_u(0x3f3504f3);
  U exponent = shift_right<23>(shifted);
  exponent = exponent | choose(less_signed(shifted, splat_u(0)), splat_u(0xfffffe00), splat_u(0));
  const U mantissa = (shifted & splat_u(0x007fffff)) + splat_u(0x3f3504f3);
  *f = as_float(mantissa) - splat(1.0f);
  *e = to_float(exponent);
}

OCTAVO_INLINE F log(F x) {
  F f, e;
  split(x, &f, &e);
  return log_reduced(f, e);
}
