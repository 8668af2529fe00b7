// Causal attention over paged K and V. Included only by `isa.cpp`.
//
// One item is a tile of consecutive query tokens of one sequence times one KV head; its rows are (token, query head of
// the group). Scores of 16 consecutive positions lie in 16 lanes, each summed over head_dim from first to last; the
// maximum is exact; exponentials are summed in 16 partials keyed by position mod 16, then by a fixed tree; V is
// accumulated from the first position to the last. None of it depends on block size, tile or batch, and a row only
// ever multiplies V of positions it attends to, so a row's bits are its own.

namespace attention {

// Positions of V that stay in the first-level cache while all rows of a tile use them.
constexpr int64_t kValueBlock = 128;
// Scores of a tile should stay in the second-level cache.
constexpr int64_t kScoreBytes = 384 << 10;
constexpr int64_t kTileTokens = 16;

#if OCTAVO_VECTOR_BYTES == 64
constexpr int kRows = 8;
#elif OCTAVO_VECTOR_BYTES == 32 || defined(__aarch64__)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif
// So few rows wait for memory: they fetch ahead.
constexpr int kFewRows = kRows / 2;
// Groups of 16 positions, or vectors of V, that one register tile holds beside its rows.
constexpr int tile_width(int rows) {
  if (OCTAVO_VECTOR_BYTES == 64) return rows <= kFewRows ? 4 : 2;
  if (OCTAVO_VECTOR_BYTES == 32) return rows <= kFewRows ? 2 : 1;
  return 1;
}

struct Item {
  int32_t sequence;
  int32_t token;   // first query token of the tile
  int32_t tokens;
  int32_t head;    // KV head
};

// Where eight positions of K and V of one head lie.
struct Half {
  const char* k;
  const char* v;
};

// One tile at work; all memory is scratch of the thread.
struct Tile {
  const AttentionArgs* args;
  Half* halves;          // of positions base, base + 8, ...
  int64_t base;          // multiple of 16
  int64_t groups;        // of 16 positions
  int64_t rows;
  int64_t* first;        // per row: positions [first, last)
  int64_t* last;
  char* q;               // rows x q_stride items: fp32, or bf16 pairs on the bf16 path
  int64_t q_stride;
  float* scores;         // rows x score_stride; afterwards the probabilities, fp32 or bf16
  int64_t score_stride;
  float* acc;            // rows x acc_stride
  int64_t acc_stride;    // head_dim rounded up to whole register tiles
  float* sums;
};

OCTAVO_INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
OCTAVO_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// How K, V, queries and probabilities are multiplied: widened to fp32.
template <class T>
struct Widened {
  typedef typename T::item Item;
  typedef float Query;
  typedef float Probability;
  static constexpr int kStep = 1;  // head_dim entries, or positions, per multiplication
  struct Vector {
    F value;
  };

  static OCTAVO_INLINE void add(F& acc, F query, const Vector& x) { acc = fma(query, x.value, acc); }
  static OCTAVO_INLINE F broadcast(const float* p) { return splat(*p); }

  // Row d of K at 16 positions: contiguous (WHOLE), or eight and eight.
  template <bool WHOLE>
  static OCTAVO_INLINE Vector keys(const Item* a, const Item* b, int64_t stride, int64_t d, int64_t) {
    if constexpr (WHOLE) return {T::read(a + d * stride)};
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

  static OCTAVO_INLINE void write_query(Query* to, const Item* from, int64_t n, int64_t padded) {
    for (int64_t d = 0; d < padded; d += kLanes) store(to + d, d < n ? read_some<T>(from + d, n - d) : zero());
  }
  static OCTAVO_INLINE void write_probabilities(Probability* to, F p) { store(to, p); }
  static OCTAVO_INLINE F columns(const float* acc, int64_t d) { return load(acc + d); }
};

#if defined(OCTAVO_AVX512_BF16)
// In pairs with vdpbf16ps: of head_dim for the scores, of positions (even, odd) for the values. Queries are bf16 as
// they come; probabilities are rounded to bf16.
struct Paired {
  typedef uint16_t Item;
  typedef uint16_t Query;
  typedef uint16_t Probability;
  static constexpr int kStep = 2;
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
  template <bool WHOLE>
  static OCTAVO_INLINE Vector keys(const Item* a, const Item* b, int64_t stride, int64_t d, int64_t head_dim) {
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    a += d * stride;
    b += d * stride;
    __m256i upper = _mm256_setzero_si256();
    if (d + 1 < head_dim) upper = row<WHOLE>(a + stride, b + stride);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(row<WHOLE>(a, b)), upper, 1);
    return {(vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both)};
  }
  template <bool WHOLE>
  static OCTAVO_INLINE __m256i row(const Item* a, const Item* b) {
    if constexpr (WHOLE) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
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

  static OCTAVO_INLINE void write_query(Query* to, const Item* from, int64_t n, int64_t padded) {
    for (int64_t d = 0; d < n; ++d) to[d] = from[d];
    for (int64_t d = n; d < padded; ++d) to[d] = 0;
  }
  static OCTAVO_INLINE void write_probabilities(Probability* to, F p) { narrow(to, bf16_bits(p)); }
  static OCTAVO_INLINE F columns(const float* acc, int64_t d) {
    static const uint32_t first[16] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    static const uint32_t second[16] = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const float* block = acc + d / 32 * 32;
    const __m512i order = _mm512_loadu_si512(d % 32 == 0 ? first : second);
    F r;
    r.part[0] = (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(block), order, _mm512_loadu_ps(block + 16));
    return r;
  }
};
#endif

// Scores of R rows at P groups of 16 positions.
template <class M, bool WHOLE, int R, int P>
OCTAVO_INLINE void score_tile(const Tile& tile, int64_t row, int64_t group) {
  typedef typename M::Item Item;
  const int64_t head_dim = tile.args->kv.head_dim, block_size = tile.args->kv.block_size, q_stride = tile.q_stride;
  const typename M::Query* q = reinterpret_cast<const typename M::Query*>(tile.q) + row * q_stride;
  F acc[R][P];
  const Item *low[P], *high[P], *next[P];
  OCTAVO_UNROLL for (int p = 0; p < P; ++p) {
    const Half* half = tile.halves + 2 * (group + p);
    low[p] = reinterpret_cast<const Item*>(half[0].k);
    high[p] = reinterpret_cast<const Item*>(half[1].k);
    next[p] = reinterpret_cast<const Item*>(half[2 * P].k);  // the table ends with copies of its last entry
  }
  OCTAVO_UNROLL for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = zero();
  const auto step = [&](int64_t d, int64_t rows) __attribute__((always_inline)) {
    typename M::Vector keys[P];
    OCTAVO_UNROLL for (int p = 0; p < P; ++p) {
      if (R <= kFewRows) __builtin_prefetch(next[p] + d * block_size);
      keys[p] = M::template keys<WHOLE>(low[p], high[p], block_size, d, rows);
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
      const auto query = M::broadcast(q + r * q_stride + d);
      OCTAVO_UNROLL for (int p = 0; p < P; ++p) M::add(acc[r][p], query, keys[p]);
    }
  };
  int64_t d = 0;
  for (; d + M::kStep <= head_dim; d += M::kStep) step(d, d + M::kStep);
  if (d < head_dim) step(d, head_dim);
  OCTAVO_UNROLL for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL for (int p = 0; p < P; ++p)
      store(tile.scores + (row + r) * tile.score_stride + (group + p) * kLanes, acc[r][p] * splat(tile.args->scale));
}

template <class M, bool WHOLE, int P, int R>
OCTAVO_INLINE void score_rest(const Tile& tile, int64_t row, int64_t rows, int64_t group) {
  if constexpr (R > 0) {
    if (rows == R) {
      score_tile<M, WHOLE, R, P>(tile, row, group);
    } else {
      score_rest<M, WHOLE, P, R - 1>(tile, row, rows, group);
    }
  }
}

template <class M, bool WHOLE, int P>
void score_groups(const Tile& tile, int64_t group) {
  int64_t row = 0;
  for (; row + kRows <= tile.rows; row += kRows) score_tile<M, WHOLE, kRows, P>(tile, row, group);
  score_rest<M, WHOLE, P, kRows - 1>(tile, row, tile.rows - row, group);
}

template <class M, bool WHOLE>
void scores(const Tile& tile) {
  constexpr int kFew = tile_width(1), kMany = tile_width(kRows);
  int64_t group = 0;
  if (tile.rows <= kFewRows) {
    for (; group + kFew <= tile.groups; group += kFew) score_groups<M, WHOLE, kFew>(tile, group);
  } else {
    for (; group + kMany <= tile.groups; group += kMany) score_groups<M, WHOLE, kMany>(tile, group);
  }
  for (; group < tile.groups; ++group) score_groups<M, WHOLE, 1>(tile, group);
}

// Turns a row's scores into unnormalized probabilities and returns their sum. Lanes of the first and last group
// outside [first, last) become zero.
template <class M>
OCTAVO_INLINE float softmax(float* scores, int64_t first, int64_t last) {
  typename M::Probability* out = reinterpret_cast<typename M::Probability*>(scores);
  const int64_t begin = first / kLanes, end = (last + kLanes - 1) / kLanes;
  F maxima = splat(-__builtin_inff());
  const auto inside = [&](int64_t group) {
    const U position = iota() + splat_u(static_cast<uint32_t>(group * kLanes));
    return less_signed(splat_u(static_cast<uint32_t>(first - 1)), position) &
           less_signed(position, splat_u(static_cast<uint32_t>(last)));
  };
  const auto whole = [&](int64_t group) { return group * kLanes >= first && (group + 1) * kLanes <= last; };
  for (int64_t group = begin; group < end; ++group) {
    const F score = load(scores + group * kLanes);
    maxima = maximum(whole(group) ? score : choose(inside(group), score, splat(-__builtin_inff())), maxima);
  }
  const F top = splat(largest(maxima));
  F total = zero();
  for (int64_t group = begin; group < end; ++group) {
    F p = exp(load(scores + group * kLanes) - top);
    if (!whole(group)) p = keep(inside(group), p);
    total = total + p;
    M::write_probabilities(out + group * kLanes, p);  // 16-bit ones overtake nothing still to be read
  }
  return sum(total);
}

// acc += p * V of R rows for V vectors of columns over the positions [begin, end), relative to base. FULL: the
// columns all exist and the range holds whole steps.
template <class M, bool FULL, int R, int V>
void value_tile(const Tile& tile, int64_t row, int64_t column, int64_t begin, int64_t end) {
  typedef typename M::Item Item;
  typedef typename M::Probability Probability;
  constexpr int64_t kLine = 64 / sizeof(Item);
  const int64_t head_dim = tile.args->kv.head_dim, left = head_dim - column;
  float* out = tile.acc + row * tile.acc_stride + column;
  const Probability* p[R];
  F acc[R][V];
  OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
    p[r] = reinterpret_cast<const Probability*>(tile.scores + (row + r) * tile.score_stride);
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = load(out + r * tile.acc_stride + kLanes * j);
  }
  for (int64_t position = begin / M::kStep * M::kStep; position < end;) {
    const Half* half = tile.halves + position / 8;
    const int64_t offset = position % 8 * head_dim + column;
    const Item* v = reinterpret_cast<const Item*>(half[0].v) + offset;
    const Item* next = reinterpret_cast<const Item*>(half[2].v) + offset;
    const int64_t stop = least(end, position / 8 * 8 + 8);
    for (; position < stop; position += M::kStep, v += M::kStep * head_dim, next += M::kStep * head_dim) {
      if (R <= kFewRows)
        OCTAVO_UNROLL for (int s = 0; s < M::kStep; ++s)
          OCTAVO_UNROLL for (int64_t j = 0; j < V * kLanes; j += kLine) __builtin_prefetch(next + s * head_dim + j);
      typename M::Vector values[V];
      M::template values<FULL>(v, head_dim, position >= begin, position + 1 < end, left, values);
      OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        const auto probability = M::broadcast(p[r] + position);
        OCTAVO_UNROLL for (int j = 0; j < V; ++j) M::add(acc[r][j], probability, values[j]);
      }
    }
  }
  OCTAVO_UNROLL for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) store(out + r * tile.acc_stride + kLanes * j, acc[r][j]);
}

template <class M>
constexpr int value_width(int rows) {
  const int width = tile_width(rows);
  return width < M::kStep ? M::kStep : width;
}

template <class M, int R>
OCTAVO_INLINE void value_rows(const Tile& tile, int64_t row, int64_t begin, int64_t end) {
  constexpr int V = value_width<M>(R);
  const int64_t whole_begin = round_up(begin, M::kStep), whole_end = end / M::kStep * M::kStep;
  for (int64_t column = 0; column < tile.args->kv.head_dim && begin < end; column += V * kLanes) {
    if (column + V * kLanes > tile.args->kv.head_dim) {
      value_tile<M, false, R, V>(tile, row, column, begin, end);
      continue;
    }
    // Half a step, whole steps, half a step.
    if (begin < whole_begin) value_tile<M, false, R, V>(tile, row, column, begin, whole_begin);
    if (whole_begin < whole_end) value_tile<M, true, R, V>(tile, row, column, whole_begin, whole_end);
    if (most(whole_begin, whole_end) < end) value_tile<M, false, R, V>(tile, row, column, whole_end, end);
  }
}

// Rows of one register tile over one block of positions: the positions all rows attend to together, what stands
// before and behind row by row.
template <class M, int R>
OCTAVO_INLINE void value_block(const Tile& tile, int64_t row, int64_t begin, int64_t end) {
  int64_t shared_begin = begin, shared_end = end;
  OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
    shared_begin = most(shared_begin, tile.first[row + r]);
    shared_end = least(shared_end, tile.last[row + r]);
  }
  shared_begin = round_up(shared_begin, M::kStep);
  shared_end = shared_end / M::kStep * M::kStep;
  if (R == 1 || shared_begin >= shared_end) {
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      value_rows<M, 1>(tile, row + r, most(begin, tile.first[row + r]), least(end, tile.last[row + r]));
    return;
  }
  OCTAVO_UNROLL for (int r = 0; r < R; ++r) value_rows<M, 1>(tile, row + r, most(begin, tile.first[row + r]), shared_begin);
  value_rows<M, R>(tile, row, shared_begin, shared_end);
  OCTAVO_UNROLL for (int r = 0; r < R; ++r) value_rows<M, 1>(tile, row + r, shared_end, least(end, tile.last[row + r]));
}

template <class M, int R>
OCTAVO_INLINE void value_rest(const Tile& tile, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  if constexpr (R > 0) {
    if (rows == R) {
      value_block<M, R>(tile, row, begin, end);
    } else {
      value_rest<M, R - 1>(tile, row, rows, begin, end);
    }
  }
}

template <class M>
void values(const Tile& tile) {
  for (int64_t begin = 0; begin < tile.groups * kLanes; begin += kValueBlock) {
    const int64_t end = begin + kValueBlock;
    int64_t row = 0;
    for (; row + kRows <= tile.rows; row += kRows) value_block<M, kRows>(tile, row, begin, end);
    value_rest<M, kRows - 1>(tile, row, tile.rows - row, begin, end);
  }
}

// Lays out a tile in the thread's scratch memory and finds its blocks.
template <class M>
Tile prepare(Pool& pool, const AttentionArgs& args, const Item& item, int thread) {
  const PagedKV& kv = args.kv;
  const int64_t group_heads = args.num_heads / kv.num_kv_heads;
  Tile tile;
  tile.args = &args;
  tile.rows = item.tokens * group_heads;
  const int64_t begin = args.positions[item.token], end = args.positions[item.token + item.tokens - 1] + int64_t{1};
  const int64_t window = args.sliding_window;
  tile.base = (window > 0 ? most(0, begin - window + 1) : 0) / kLanes * kLanes;
  tile.groups = (end - tile.base + kLanes - 1) / kLanes;
  tile.q_stride = round_up(kv.head_dim, kLanes);
  tile.score_stride = tile.groups * kLanes + kLanes;  // a power of two would meet the same cache sets in every row
  tile.acc_stride = round_up(kv.head_dim, 4 * kLanes);
  constexpr int kAhead = 2 * 8;  // copies of the last entry, for prefetching
  const int64_t num_halves = 2 * tile.groups + kAhead;
  const int64_t bytes = round_up(num_halves * int64_t{sizeof(Half)}, 64) + round_up(tile.rows * 8, 64) * 2 +
                        tile.rows * (tile.q_stride + tile.score_stride + tile.acc_stride + 16) * 4 + 64;
  char* memory = pool.scratch(thread, static_cast<size_t>(bytes));
  const auto take = [&](int64_t size) {
    char* start = memory;
    memory += round_up(size, 64);
    return start;
  };
  tile.halves = reinterpret_cast<Half*>(take(num_halves * int64_t{sizeof(Half)}));
  tile.first = reinterpret_cast<int64_t*>(take(tile.rows * 8));
  tile.last = reinterpret_cast<int64_t*>(take(tile.rows * 8));
  tile.q = take(tile.rows * tile.q_stride * 4);
  tile.scores = reinterpret_cast<float*>(take(tile.rows * tile.score_stride * 4));
  tile.acc = reinterpret_cast<float*>(take(tile.rows * tile.acc_stride * 4));
  tile.sums = reinterpret_cast<float*>(take(tile.rows * 4));

  const int64_t size = item_size(kv.dtype);
  const int32_t* table = args.block_tables + item.sequence * args.block_table_stride;
  int64_t block = tile.base / kv.block_size, offset = tile.base % kv.block_size;
  for (int64_t h = 0; h < num_halves; ++h) {
    if (tile.base + 8 * h >= end) {
      tile.halves[h] = tile.halves[h - 1];
      continue;
    }
    const int64_t start = table[block] * kv.block_stride + item.head * kv.head_stride;
    tile.halves[h].k = kv.k + (start + offset) * size;
    tile.halves[h].v = kv.v + (start + offset * kv.head_dim) * size;
    offset += 8;
    if (offset == kv.block_size) {
      offset = 0;
      ++block;
    }
  }
  const typename M::Item* q = reinterpret_cast<const typename M::Item*>(args.q);
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t token = item.token + row / group_heads, head = item.head * group_heads + row % group_heads;
    const int64_t position = args.positions[token];
    tile.first[row] = (window > 0 ? most(0, position - window + 1) : 0) - tile.base;
    tile.last[row] = position + 1 - tile.base;
    M::write_query(reinterpret_cast<typename M::Query*>(tile.q) + row * tile.q_stride,
                   q + token * args.q_token_stride + head * kv.head_dim, kv.head_dim, tile.q_stride);
  }
  for (int64_t i = 0; i < tile.rows * tile.acc_stride; i += kLanes) store(tile.acc + i, zero());
  return tile;
}

struct Context {
  const AttentionArgs* args;
  const Item* items;
  Pool* pool;
};

// T: the dtype of queries and outputs; M: how to multiply.
template <class T, class M>
void item(void* context, int64_t index, int thread) {
  const Context& job = *static_cast<const Context*>(context);
  const AttentionArgs& args = *job.args;
  const Item& item = job.items[index];
  const Tile tile = prepare<M>(*job.pool, args, item, thread);
  // Blocks of a multiple of 16 hold whole groups.
  if (args.kv.block_size % kLanes == 0) {
    scores<M, true>(tile);
  } else {
    scores<M, false>(tile);
  }
  for (int64_t row = 0; row < tile.rows; ++row)
    tile.sums[row] = softmax<M>(tile.scores + row * tile.score_stride, tile.first[row], tile.last[row]);
  values<M>(tile);
  const int64_t head_dim = args.kv.head_dim, group_heads = args.num_heads / args.kv.num_kv_heads;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t token = item.token + row / group_heads, head = item.head * group_heads + row % group_heads;
    typename T::item* out = reinterpret_cast<typename T::item*>(args.out) + (token * args.num_heads + head) * head_dim;
    const F total = splat(tile.sums[row]);
    for (int64_t d = 0; d < head_dim; d += kLanes)
      write_some<T>(out + d, M::columns(tile.acc + row * tile.acc_stride, d) / total, head_dim - d);
  }
}

// Tiles of every sequence; short ones where the context is long, so that a tile's scores stay in cache.
int64_t make_items(const AttentionArgs& args, Item* items) {
  int64_t count = 0;
  const int64_t group_heads = args.num_heads / args.kv.num_kv_heads;
  for (int64_t s = 0; s < args.num_sequences; ++s) {
    const int32_t end = args.query_starts[s + 1];
    for (int32_t token = args.query_starts[s]; token < end;) {
      int64_t reach = args.positions[token] + kTileTokens;
      if (args.sliding_window > 0) reach = least(reach, args.sliding_window + kTileTokens);
      const int64_t room = most(1, kScoreBytes / (4 * reach * group_heads));
      const int32_t tokens = static_cast<int32_t>(least(least(kTileTokens, room), end - token));
      for (int32_t head = 0; head < args.kv.num_kv_heads; ++head, ++count)
        if (items != nullptr) items[count] = {static_cast<int32_t>(s), token, tokens, head};
      token += tokens;
    }
  }
  return count;
}

void run(Pool& pool, const AttentionArgs& args) {
  const int64_t count = make_items(args, nullptr);
  Item* items = reinterpret_cast<Item*>(pool.shared_scratch(static_cast<size_t>(count) * sizeof(Item)));
  make_items(args, items);
  Context context{&args, items, &pool};
  switch (args.kv.dtype) {
    case kF32:
      return pool.run(count, item<F32, Widened<F32>>, &context);
    case kF16:
      return pool.run(count, item<F16, Widened<F16>>, &context);
    default:
#if defined(OCTAVO_AVX512_BF16)
      return pool.run(count, item<BF16, Paired>, &context);
#else
      return pool.run(count, item<BF16, Widened<BF16>>, &context);
#endif
  }
}

}  // namespace attention
