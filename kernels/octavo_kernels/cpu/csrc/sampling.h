// Sampling by arg max of logits plus Gumbel noise. Included only by `isa.cpp`.
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

namespace sampling {

// 32 x 32 -> 64 bits of the even lanes.
OCTAVO_INLINE vq multiply_even(vu a, vu b) {
#if OCTAVO_VECTOR_BYTES == 64
  return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif OCTAVO_VECTOR_BYTES == 32
  return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vq)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return ((vq)a & 0xffffffffull) * ((vq)b & 0xffffffffull);
#endif
}

OCTAVO_INLINE void multiply(U a, uint32_t factor, U* high, U* low) {
  const U b = splat_u(factor);
  OCTAVO_PARTS {
    const vq even = multiply_even(a.part[i], b.part[i]);
    const vq odd = multiply_even((vu)((vq)a.part[i] >> 32), b.part[i]);
    low->part[i] = (vu)((even & 0xffffffffull) | (odd << 32));
    high->part[i] = (vu)((even >> 32) | (odd & 0xffffffff00000000ull));
  }
}

OCTAVO_INLINE void philox(U (&counter)[4], uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    U high0, low0, high1, low1;
    multiply(counter[0], 0xD2511F53u, &high0, &low0);
    multiply(counter[2], 0xCD9E8D57u, &high1, &low1);
    counter[0] = high1 ^ counter[1] ^ splat_u(k0);
    counter[1] = low1;
    counter[2] = high0 ^ counter[3] ^ splat_u(k1);
    counter[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// -log(-log(u)) of u = (word >> 8) * 2^-24 + 2^-25. The 25 bits of u do not fit fp32 near 1, where 1 - u does: the
// reduced argument of the logarithm is made exactly in either case.
OCTAVO_INLINE F gumbel(U word) {
  const U odd = shift_left<1>(shift_right<8>(word)) | splat_u(1);  // u * 2^25
  F f, e;
  split(to_float(odd), &f, &e);
  e = e - splat(25.0f);
  const F rest = to_float(splat_u(1u << 25) - odd) * splat(0x1p-25f);  // 1 - u, exact where u > 1/2
  const U near_one = less_signed(splat_u(23726566), odd);              // u > sqrt(1/2)
  const U above_half = less_signed(splat_u(1u << 24), odd);
  f = choose(above_half, choose(near_one, zero() - rest, splat(1.0f) - (rest + rest)), f);
  e = choose(above_half, choose(near_one, zero(), splat(-1.0f)), e);
  return zero() - log(zero() - log_reduced(f, e));
}

// Four vectors of four-word lanes to sixteen words in order each, when lane 4 l + i holds counter 4 i + l.
OCTAVO_INLINE void transpose(U (&w)[4]) {
#if OCTAVO_VECTOR_BYTES >= 32
  OCTAVO_PARTS {
#if OCTAVO_VECTOR_BYTES == 64
    const __m512i a = (__m512i)w[0].part[i], b = (__m512i)w[1].part[i];
    const __m512i c = (__m512i)w[2].part[i], d = (__m512i)w[3].part[i];
    const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
    const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
    w[0].part[i] = (vu)_mm512_unpacklo_epi64(ab0, cd0);
    w[1].part[i] = (vu)_mm512_unpackhi_epi64(ab0, cd0);
    w[2].part[i] = (vu)_mm512_unpacklo_epi64(ab1, cd1);
    w[3].part[i] = (vu)_mm512_unpackhi_epi64(ab1, cd1);
#else
    const __m256i a = (__m256i)w[0].part[i], b = (__m256i)w[1].part[i];
    const __m256i c = (__m256i)w[2].part[i], d = (__m256i)w[3].part[i];
    const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    w[0].part[i] = (vu)_mm256_unpacklo_epi64(ab0, cd0);
    w[1].part[i] = (vu)_mm256_unpackhi_epi64(ab0, cd0);
    w[2].part[i] = (vu)_mm256_unpacklo_epi64(ab1, cd1);
    w[3].part[i] = (vu)_mm256_unpackhi_epi64(ab1, cd1);
#endif
  }
#else
  uint32_t from[4][kLanes], to[4][kLanes];
  for (int j = 0; j < 4; ++j) store_u(from[j], w[j]);
  for (int i = 0; i < 4; ++i)
    for (int l = 0; l < 4; ++l)
      for (int j = 0; j < 4; ++j) to[i][4 * l + j] = from[j][4 * l + i];
  for (int j = 0; j < 4; ++j) w[j] = load_u(to[j]);
#endif
}

// The best value a lane has seen, and the lowest id that had it.
struct Best {
  F value;
  U id;

  OCTAVO_INLINE void offer(F candidate, U candidate_id) {
    const U better = less(value, candidate);
    value = choose(better, candidate, value);
    id = choose(better, candidate_id, id);
  }
  OCTAVO_INLINE int64_t winner() const {
    float values[kLanes];
    uint32_t ids[kLanes];
    store(values, value);
    store_u(ids, id);
    int best = 0;
    for (int i = 1; i < kLanes; ++i)
      if (values[i] > values[best] || (values[i] == values[best] && ids[i] < ids[best])) best = i;
    return ids[best];
  }
};

// Lanes beyond the vocabulary hold -inf.
OCTAVO_INLINE F read_logits(const float* row, int64_t index, int64_t vocab) {
  if (index + kLanes <= vocab) return load(row + index);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = index + i < vocab ? row[index + i] : -__builtin_inff();
  return load(lanes);
}

void row(void* context, int64_t index, int) {
  const GumbelArgs& args = *static_cast<const GumbelArgs*>(context);
  const float* logits = args.logits + index * args.row_stride;
  const F lowest = splat(-__builtin_inff());
  Best greedy{lowest, splat_u(0)};
  U nan = splat_u(0);
  for (int64_t i = 0; i < args.vocab; i += kLanes) {
    const F x = read_logits(logits, i, args.vocab);
    nan = nan | is_nan(x);
    greedy.offer(x, iota() + splat_u(static_cast<uint32_t>(i)));
  }
  const float top = largest(greedy.value);
  if (any(nan) || top == __builtin_inff() || top == -__builtin_inff()) {
    args.out[index] = -1;
    return;
  }
  const float temperature = args.temperatures[index];
  if (temperature == 0.0f) {
    args.out[index] = greedy.winner();
    return;
  }
  const uint64_t position = static_cast<uint64_t>(args.positions[index]);
  static const uint32_t lane_counter[kLanes] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const U first_counter = load_u(lane_counter);
  Best sampled{lowest, splat_u(0)};
  for (int64_t i = 0; i < args.vocab; i += 4 * kLanes) {
    U words[4] = {first_counter + splat_u(static_cast<uint32_t>(i / 4)), splat_u(0),
                  splat_u(static_cast<uint32_t>(position)), splat_u(static_cast<uint32_t>(position >> 32))};
    philox(words, static_cast<uint64_t>(args.seeds[index]));
    transpose(words);
    for (int j = 0; j < 4; ++j) {
      const int64_t id = i + j * kLanes;
      const F x = (read_logits(logits, id, args.vocab) - splat(top)) / splat(temperature);
      sampled.offer(x + gumbel(words[j]), iota() + splat_u(static_cast<uint32_t>(id)));
    }
  }
  args.out[index] = sampled.winner();
}

void run(Pool& pool, const GumbelArgs& args) { pool.run(args.rows, row, const_cast<GumbelArgs*>(&args)); }

}  // namespace sampling
