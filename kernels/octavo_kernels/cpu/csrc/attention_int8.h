// How attention multiplies K and V of 8 bits (see `attention_math.h`). Included only by `attention.h`.
//
// Queries become 16-bit integers with one scale a row; so do the weights of V, probabilities times V's scales, with
// one a row and block of positions. Products are summed in int32, which is exact: 32,767 * 127 times the 128 positions
// of a block, or the at most kMostInt8HeadDim entries of a head, stay below 2^31. So neither order nor instruction set
// enters the sums, and a weight of 0 cancels whatever lies in V.

// Queries as 16-bit integers, for linear_int8::quantize_group.
struct QueryWriter {
  typedef int16_t item;
  static OCTAVO_INLINE void write(item* to, U values) { narrow(reinterpret_cast<uint16_t*>(to), values); }
};

typedef int8_t vb __attribute__((vector_size(16)));

struct Integers {
  typedef int8_t Item;
  typedef int16_t Query;
  typedef uint16_t Probability;
  typedef U Sum;
  static constexpr bool kScaled = true;
  static constexpr int kStep = 2, kColumns = OCTAVO_VECTOR_BYTES == 64 ? 2 : 1;
  static constexpr int kLargest = 32767;
  struct Vector {
    U value;  // pairs of 16-bit numbers
  };

  static OCTAVO_INLINE F weight(F x) { return exp_short(x); }

  static OCTAVO_INLINE void add(U& acc, vu pair, const Vector& x) {
#if defined(OCTAVO_AVX512_BF16)
    // In assembly because compilers spill the accumulators of the intrinsic.
    asm("vpdpwssd %2, %1, %0" : "+v"(acc.part[0]) : "v"(x.value.part[0]), "v"(pair));
#else
    OCTAVO_PARTS acc.part[i] += linear_int8::dot_halves(x.value.part[i], pair);
#endif
  }
  template <class Number>
  static OCTAVO_INLINE vu broadcast(const Number* p) {
    uint32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return pair + vu{};
  }

  // Rows d and d + 1 of K at 16 positions, interleaved. Behind the last row lie scales, and the query is zero.
  template <int SPAN>
  static OCTAVO_INLINE Vector keys(const Item* a, const Item* b, int64_t stride, int64_t d, int64_t) {
    a += d * stride;
    b += d * stride;
#if OCTAVO_VECTOR_BYTES == 64
    __m256i rows;
    if constexpr (SPAN == kSixteen) {
      rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    } else {
      const __m128i first = (__m128i)row<SPAN>(a, b), second = (__m128i)row<SPAN>(a + stride, b + stride);
      rows = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
    }
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    Vector r;
    r.value.part[0] = (vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), _mm512_cvtepi8_epi16(rows));
    return r;
#else
    return {interleave(row<SPAN>(a, b), row<SPAN>(a + stride, b + stride))};
#endif
  }
  template <int SPAN>
  static OCTAVO_INLINE vb row(const Item* a, const Item* b) {
    vb both;
    __builtin_memcpy(&both, a, SPAN == kEight ? 8 : 16);
    if (SPAN == kEight) __builtin_memcpy(reinterpret_cast<char*>(&both) + 8, b, 8);
    return both;
  }
  template <int SPAN>
  static OCTAVO_INLINE F key_scales(const Half* half) {
    return load_halves<SPAN>(half[0].k_scales, half[1].k_scales);
  }
  static OCTAVO_INLINE F score(U sum, F scale, F key_scale) { return to_float(sum) * scale * key_scale; }

  // 16 * V columns of two positions, of which n exist, in the order that `columns` undoes.
  template <bool FULL, int V>
  static OCTAVO_INLINE void values(const Item* p, int64_t head_dim, bool, bool, int64_t n, Vector (&out)[V]) {
#if OCTAVO_VECTOR_BYTES == 64
    OCTAVO_UNROLL for (int j = 0; j < V; j += 2) {
      const int64_t left = n - kLanes * j;
      const __mmask32 mask = FULL || left >= 32 ? ~__mmask32{0} : left > 0 ? (__mmask32{1} << left) - 1 : 0;
      const __m512i a = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, p + kLanes * j));
      const __m512i b = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, p + head_dim + kLanes * j));
      out[j].value.part[0] = (vu)_mm512_unpacklo_epi16(a, b);
      out[j + 1].value.part[0] = (vu)_mm512_unpackhi_epi16(a, b);
    }
#else
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
      const int64_t left = n - kLanes * j;
      const Item* a = p + kLanes * j;
      if (FULL || left >= kLanes) {
        out[j].value = interleave(row<kMore>(a, a), row<kMore>(a + head_dim, a));
      } else {
        Item both[2][kLanes] = {};
        copy_items(both[0], a, left);
        copy_items(both[1], a + head_dim, left);
        out[j].value = interleave(row<kMore>(both[0], both[0]), row<kMore>(both[1], both[1]));
      }
    }
#endif
  }

#if OCTAVO_VECTOR_BYTES < 64
  // Lanes of 32 bits: an item of a below one of b, both widened to 16.
  static OCTAVO_INLINE U interleave(vb a, vb b) {
    U r;
#if OCTAVO_VECTOR_BYTES == 32
    r.part[0] = (vu)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8((__m128i)a, (__m128i)b));
    r.part[1] = (vu)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8((__m128i)a, (__m128i)b));
#elif defined(__SSE2__)
    const __m128i low = _mm_unpacklo_epi8((__m128i)a, (__m128i)b), high = _mm_unpackhi_epi8((__m128i)a, (__m128i)b);
    r.part[0] = (vu)_mm_srai_epi16(_mm_unpacklo_epi8(low, low), 8);
    r.part[1] = (vu)_mm_srai_epi16(_mm_unpackhi_epi8(low, low), 8);
    r.part[2] = (vu)_mm_srai_epi16(_mm_unpacklo_epi8(high, high), 8);
    r.part[3] = (vu)_mm_srai_epi16(_mm_unpackhi_epi8(high, high), 8);
#else
    uint32_t lanes[kLanes];
    for (int i = 0; i < kLanes; ++i)
      lanes[i] = static_cast<uint16_t>(a[i]) | static_cast<uint32_t>(static_cast<uint16_t>(b[i])) << 16;
    r = load_u(lanes);
#endif
    return r;
  }
#endif

  template <class T>
  static OCTAVO_INLINE float write_query(Query* to, const typename T::item* from, int64_t n, int64_t) {
    float scale;
    int32_t sum;
    linear_int8::quantize_group<T, QueryWriter, kLargest>(from, n, to, &scale, &sum);
    return scale;
  }

  // Writes the scale of weights whose magnitudes' bits are given; returns what to multiply them by.
  static OCTAVO_INLINE float start_weights(U magnitudes, float* scale) {
    return linear_int8::start_group<kLargest>(magnitudes, scale);
  }
  static OCTAVO_INLINE void write_weights(Probability* to, F weights, float inverse) {
    narrow(to, linear_int8::round_scaled(weights, splat(inverse)));
  }

  static OCTAVO_INLINE U start(const float*) { return splat_u(0); }
  static OCTAVO_INLINE void finish(float* acc, U sum, float scale) {
    store(acc, fma(to_float(sum), splat(scale), load(acc)));
  }
  static OCTAVO_INLINE F columns(const float* acc, int64_t d) {
#if OCTAVO_VECTOR_BYTES == 64
    return unpacked_columns(acc, d);
#else
    return load(acc + d);
#endif
  }
};
