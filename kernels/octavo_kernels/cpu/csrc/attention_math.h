// How attention multiplies floats: queries with K, probabilities with V. Included only by `attention.h`, which names
// such a type M. What a type M provides:
//
//   Item, Query, Probability       what K and V, a tile's queries, and the weights of V are made of
//   Sum, Vector                    what 16 results are added up in, and what one multiplication takes from K or V
//   kStep                          head_dim entries, or positions, per multiplication
//   kColumns                       vectors of V that `values` makes at least
//   kScaled                        whether K and V have scales; then weights of 0 cancel whatever lies in V
//   weight                         e^x, as exact as what it becomes

// What all that compute in fp32 have in common.
struct FloatSums {
  typedef F Sum;
  static constexpr bool kScaled = false;

  template <int SPAN>
  static OCTAVO_INLINE F key_scales(const Half*) {
    return F{};
  }
  static OCTAVO_INLINE F score(F sum, F scale, F) { return sum * scale; }
  static OCTAVO_INLINE F start(const float* acc) { return load(acc); }
  static OCTAVO_INLINE void finish(float* acc, F sum, float) { store(acc, sum); }
};

// Widened to fp32.
template <class T>
struct Widened : FloatSums {
  typedef typename T::item Item;
  typedef float Query;
  typedef float Probability;
  static constexpr int kStep = 1, kColumns = 1;
  struct Vector {
    F value;
  };

  static OCTAVO_INLINE F weight(F x) { return exp(x); }

  static OCTAVO_INLINE void add(F& acc, F query, const Vector& x) { acc = fma(query, x.value, acc); }
  static OCTAVO_INLINE F broadcast(const float* p) { return splat(*p); }

  // Row d of K at 16 positions.
  template <int SPAN>
  static OCTAVO_INLINE Vector keys(const Item* a, const Item* b, int64_t stride, int64_t d, int64_t) {
    if constexpr (SPAN != kEight) return {T::read(a + d * stride)};
    Item both[kLanes];
    __builtin_memcpy(both, a + d * stride, 8 * sizeof(Item));
    __builtin_memcpy(both + 8, b + d * stride, 8 * sizeof(Item));
    return {T::read(both)};
  }

  // 16 * V columns of one position, of which n exist. FULL: all of them do.
  template <bool FULL, int V>
  static OCTAVO_INLINE void values(const Item* p, int64_t, bool, bool, int64_t n, Vector (&out)[V]) {
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
      const int64_t left = n - kLanes * j;
      if (FULL || left >= kLanes) {
        out[j].value = T::read(p + kLanes * j);
      } else {
        out[j].value = left > 0 ? read_some<T>(p + kLanes * j, left) : zero();
      }
    }
  }

  // Writes a query of n entries, zeros behind them; returns what it is to be multiplied by.
  template <class>
  static OCTAVO_INLINE float write_query(Query* to, const Item* from, int64_t n, int64_t padded) {
    for (int64_t d = 0; d < padded; d += kLanes) store(to + d, d < n ? read_some<T>(from + d, n - d) : zero());
    return 1.0f;
  }
  static OCTAVO_INLINE void write_probabilities(Probability* to, F p) { store(to, p); }
  static OCTAVO_INLINE F columns(const float* acc, int64_t d) { return load(acc + d); }
};

#if OCTAVO_VECTOR_BYTES == 64
// 16 of the sums over V, whose columns stand in the order that unpacking two positions left, 32 by 32.
OCTAVO_INLINE F unpacked_columns(const float* acc, int64_t d) {
  static const uint32_t first[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
  static const uint32_t second[16] = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
  const float* block = acc + d / 32 * 32;
  const __m512i order = _mm512_loadu_si512(d % 32 == 0 ? first : second);
  F r;
  r.part[0] = (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(block), order, _mm512_loadu_ps(block + 16));
  return r;
}
#endif

#if defined(OCTAVO_AVX512_BF16)
// In pairs with vdpbf16ps: of head_dim for the scores, of positions (even, odd) for the values. Queries are bf16 as
// they come; probabilities are rounded to bf16.
struct Paired : FloatSums {
  typedef uint16_t Item;
  typedef uint16_t Query;
  typedef uint16_t Probability;
  static constexpr int kStep = 2, kColumns = 2;
  struct Vector {
    vu value;
  };

  static OCTAVO_INLINE void add(F& acc, vu query, const Vector& x) { linear::dot_pair(acc.part[0], query, x.value); }
  static OCTAVO_INLINE vu broadcast(const uint16_t* p) {
    uint32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return pair + vu{};
  }

  // Rows d and d + 1 of K at 16 positions, interleaved; behind the last row stand zeros.
  template <int SPAN>
  static OCTAVO_INLINE Vector keys(const Item* a, const Item* b, int64_t stride, int64_t d, int64_t head_dim) {
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    a += d * stride;
    b += d * stride;
    const bool is_last = d + 1 == head_dim;
    __m512i both;
    if constexpr (SPAN == kSixteen) {
      both = _mm512_maskz_loadu_epi16(is_last ? 0xffffu : ~__mmask32{0}, a);
    } else {
      const __m256i upper = is_last ? _mm256_setzero_si256() : row<SPAN>(a + stride, b + stride);
      both = _mm512_inserti64x4(_mm512_castsi256_si512(row<SPAN>(a, b)), upper, 1);
    }
    return {(vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both)};
  }
  template <int SPAN>
  static OCTAVO_INLINE __m256i row(const Item* a, const Item* b) {
    if constexpr (SPAN != kEight) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    return _mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
  }

  // 16 * V columns of a pair of positions, of which n exist, in the order that `columns` undoes. A position outside
  // the row's range (low or high of the pair) is read as zero, whatever lies there. FULL: everything exists.
  template <bool FULL, int V>
  static OCTAVO_INLINE void values(const Item* p, int64_t head_dim, bool low, bool high, int64_t n, Vector (&out)[V]) {
    OCTAVO_UNROLL for (int j = 0; j < V; j += 2) {
      const int64_t left = n - kLanes * j;
      const __mmask32 mask = FULL || left >= 32 ? ~__mmask32{0} : left > 0 ? (__mmask32{1} << left) - 1 : 0;
      const __m512i a = _mm512_maskz_loadu_epi16(FULL || low ? mask : 0, p + kLanes * j);
      const __m512i b = _mm512_maskz_loadu_epi16(FULL || high ? mask : 0, p + head_dim + kLanes * j);
      out[j].value = (vu)_mm512_unpacklo_epi16(a, b);
      out[j + 1].value = (vu)_mm512_unpackhi_epi16(a, b);
    }
  }

  template <class>
  static OCTAVO_INLINE float write_query(Query* to, const Item* from, int64_t n, int64_t padded) {
    for (int64_t d = 0; d < n; ++d) to[d] = from[d];
    for (int64_t d = n; d < padded; ++d) to[d] = 0;
    return 1.0f;
  }
  static OCTAVO_INLINE F weight(F x) { return exp_short(x); }
  // To nearest even, as bf16_bits does for what is neither NaN nor subnormal.
  static OCTAVO_INLINE void write_probabilities(Probability* to, F p) {
    __m256i bits;
    asm("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(p.part[0]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  }
  static OCTAVO_INLINE F columns(const float* acc, int64_t d) { return unpacked_columns(acc, d); }
};
#endif
