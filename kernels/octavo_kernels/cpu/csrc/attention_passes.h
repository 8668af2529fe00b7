// The three passes of attention over a tile: scores, softmax, values. Included only by `attention.h`.

// Scores of R rows at P groups of 16 positions.
template <class M, int SPAN, int R, int P>
OCTAVO_INLINE void score_tile(const Tile& tile, int64_t row, int64_t group) {
  typedef typename M::Item Item;
  constexpr int64_t kStepLines = most(1, M::kStep / kKeyRows<Item>), kLineRows = kStepLines * kKeyRows<Item>;
  const int64_t head_dim = tile.args->kv.head_dim, block_size = tile.args->kv.block_size, q_stride = tile.q_stride;
  const typename M::Query* q = reinterpret_cast<const typename M::Query*>(tile.q) + row * q_stride;
  typename M::Sum acc[R][P];
  const Item *low[P], *high[P];
  Lines next[P];
  OCTAVO_UNROLL for (int p = 0; p < P; ++p) {
    const Half* half = tile.halves + 2 * (group + p);
    low[p] = reinterpret_cast<const Item*>(half[0].k);
    high[p] = reinterpret_cast<const Item*>(half[1].k);
    if (R <= kFewRows) next[p] = tile.behind_scores<Item>(group + p);
    if (M::kScaled && R <= kFewRows) __builtin_prefetch(next[p].scales);
  }
  OCTAVO_UNROLL for (int r = 0; r < R; ++r)
    OCTAVO_UNROLL for (int p = 0; p < P; ++p) acc[r][p] = typename M::Sum{};
  const auto ahead = [&](int64_t d) __attribute__((always_inline)) {
    if (R <= kFewRows)
      OCTAVO_UNROLL for (int p = 0; p < P; ++p)
        OCTAVO_UNROLL for (int64_t i = 0; i < kStepLines; ++i) next[p].fetch(d / kKeyRows<Item> + i);
  };
  const auto step = [&](int64_t d, int64_t rows) __attribute__((always_inline)) {
    typename M::Vector keys[P];
    OCTAVO_UNROLL for (int p = 0; p < P; ++p) keys[p] = M::template keys<SPAN>(low[p], high[p], block_size, d, rows);
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
      const auto query = M::broadcast(q + r * q_stride + d);
      OCTAVO_UNROLL for (int p = 0; p < P; ++p) M::add(acc[r][p], query, keys[p]);
    }
  };
  int64_t d = 0;
  for (; d + kLineRows <= head_dim; d += kLineRows) {
    ahead(d);
    OCTAVO_UNROLL for (int64_t i = 0; i < kLineRows; i += M::kStep) step(d + i, d + i + M::kStep);
  }
  if (d < head_dim) ahead(d);
  for (; d + M::kStep <= head_dim; d += M::kStep) step(d, d + M::kStep);
  if (d < head_dim) step(d, head_dim);
  F scales[P];
  OCTAVO_UNROLL for (int p = 0; p < P; ++p) scales[p] = M::template key_scales<SPAN>(tile.halves + 2 * (group + p));
  // What is read of `tile` is read first: what is written might lie there, for all that compilers know.
  const int64_t stride = tile.score_stride;
  const float* q_scales = tile.q_scales + row;
  float* scores = tile.scores + row * stride + group * kLanes;
  float* maxima = tile.maxima + row * kLanes;
  const bool is_shared = tile.is_shared(group);
  OCTAVO_UNROLL for (int r = 0; r < R; ++r, scores += stride, maxima += kLanes) {
    const F scale = splat(q_scales[r]);
    F top = load(maxima);
    OCTAVO_UNROLL for (int p = 0; p < P; ++p) {
      const F score = M::score(acc[r][p], scale, scales[p]);
      store(scores + p * kLanes, score);
      top = maximum(score, top);
    }
    if (is_shared) store(maxima, top);
  }
}

template <class M, int SPAN, int P, int R>
OCTAVO_INLINE void score_rest(const Tile& tile, int64_t row, int64_t rows, int64_t group) {
  if constexpr (R > 0) {
    if (rows == R) {
      score_tile<M, SPAN, R, P>(tile, row, group);
    } else {
      score_rest<M, SPAN, P, R - 1>(tile, row, rows, group);
    }
  }
}

template <class M, int SPAN, int P>
void score_groups(const Tile& tile, int64_t group) {
  int64_t row = 0;
  for (; row + kRows <= tile.rows; row += kRows) score_tile<M, SPAN, kRows, P>(tile, row, group);
  score_rest<M, SPAN, P, kRows - 1>(tile, row, tile.rows - row, group);
}

template <class M, int SPAN>
void scores(const Tile& tile) {
  constexpr int kFew = score_width(1), kMany = score_width(kRows);
  int64_t group = 0;
  if (tile.rows <= kFewRows) {
    for (; group + kFew <= tile.groups; group += kFew) score_groups<M, SPAN, kFew>(tile, group);
  } else {
    for (; group + kMany <= tile.groups; group += kMany) score_groups<M, SPAN, kMany>(tile, group);
  }
  for (; group < tile.groups; ++group) score_groups<M, SPAN, 1>(tile, group);
}

// Which lanes of a group of positions a row attends to.
struct Range {
  int64_t first, last;

  OCTAVO_INLINE bool whole(int64_t group) const { return group * kLanes >= first && (group + 1) * kLanes <= last; }
  OCTAVO_INLINE U inside(int64_t group) const {
    const U position = iota() + splat_u(static_cast<uint32_t>(group * kLanes));
    return less_signed(splat_u(static_cast<uint32_t>(first - 1)), position) &
           less_signed(position, splat_u(static_cast<uint32_t>(last)));
  }
  OCTAVO_INLINE F keep_inside(int64_t group, F a) const { return whole(group) ? a : keep(inside(group), a); }
};

// Fetches the first half of V while few rows' softmax leaves memory idle: a few lines each time.
struct ValueFetch {
  const Tile& tile;
  const int64_t turns;  // that a group takes
  const int64_t line_count;
  int64_t group, turn;

  explicit OCTAVO_INLINE ValueFetch(const Tile& of, int64_t row, int64_t item_bytes)
      : tile(of),
        turns(2 * of.rows),
        line_count(of.rows <= kFewRows ? of.args->kv.head_dim * kLanes * item_bytes / 64 : 0),
        group(row * of.groups / turns),
        turn(row * of.groups % turns) {}
  OCTAVO_INLINE void advance() {
    for (int64_t line = turn; line < line_count; line += turns)
      __builtin_prefetch(tile.halves[2 * group].v + 64 * line, 0, 2);
    if (++turn == turns) {
      turn = 0;
      ++group;
    }
  }
};

// Calls edge(group) for the groups that a row attends to in part, and whole(group) for the others, in their order.
template <class Edge, class Whole>
OCTAVO_INLINE void over_groups(Range range, const Edge& edge, const Whole& whole) {
  const int64_t whole_begin = (range.first + kLanes - 1) / kLanes, whole_end = range.last / kLanes;
  const int64_t end = (range.last + kLanes - 1) / kLanes;
  int64_t group = range.first / kLanes;
  for (; group < least(whole_begin, end); ++group) edge(group);
  for (; group < whole_end; ++group) whole(group);
  for (; group < end; ++group) edge(group);
}

// Only the groups that not all rows attend to are still to be looked at.
OCTAVO_INLINE F largest_score(const Tile& tile, int64_t row, Range range) {
  const float* scores = tile.scores + row * tile.score_stride;
  const F lowest = splat(-__builtin_inff());
  F maxima = load(tile.maxima + row * kLanes);
  const auto over = [&](int64_t group, int64_t end) __attribute__((always_inline)) {
    for (; group < end; ++group) {
      const F values = load(scores + group * kLanes);
      maxima = maximum(range.whole(group) ? values : choose(range.inside(group), values, lowest), maxima);
    }
  };
  over(range.first / kLanes, tile.shared_begin);
  over(tile.shared_end, (range.last + kLanes - 1) / kLanes);
  return splat(largest(maxima));
}

// Turns a row's scores into unnormalized probabilities and returns their sum. Lanes of the first and last group
// outside the row's range become zero.
template <class M, bool FETCH>
OCTAVO_INLINE float softmax(const Tile& tile, int64_t row) {
  float* scores = tile.scores + row * tile.score_stride;
  typename M::Probability* out = reinterpret_cast<typename M::Probability*>(scores);
  const Range range{tile.first[row], tile.last[row]};
  const F top = largest_score(tile, row, range);
  F total = zero();
  ValueFetch fetch(tile, row, sizeof(typename M::Item));
  const auto weigh = [&](int64_t group, F p) __attribute__((always_inline)) {
    if (FETCH) fetch.advance();
    total = total + p;
    M::write_probabilities(out + group * kLanes, p);  // 16-bit ones overtake nothing still to be read
  };
  over_groups(
      range,
      [&](int64_t group) __attribute__((always_inline)) {
        weigh(group, keep(range.inside(group), M::weight(load(scores + group * kLanes) - top)));
      },
      [&](int64_t group) __attribute__((always_inline)) {
        weigh(group, M::weight(load(scores + group * kLanes) - top));
      });
  return sum(total);
}

// The same where V has scales: every probability is multiplied by its position's, and each block of kValueBlock
// positions becomes 16-bit integers with one scale. Everything outside the row's range becomes zero.
template <class M, int SPAN>
OCTAVO_INLINE float softmax_scaled(const Tile& tile, int64_t row) {
  float* scores = tile.scores + row * tile.score_stride;
  typename M::Probability* out = reinterpret_cast<typename M::Probability*>(scores);
  const Range range{tile.first[row], tile.last[row]};
  const F top = largest_score(tile, row, range);
  const U no_sign = splat_u(0x7fffffff);
  F total = zero();
  ValueFetch fetch(tile, row, sizeof(typename M::Item));
  int64_t group = 0;
  for (int64_t block = 0; block < tile.value_blocks; ++block) {
    const int64_t begin = group;
    const int64_t end = least(tile.groups, ((block + 1) * kValueBlock - tile.base % kValueBlock) / kLanes);
    U magnitudes = splat_u(0);  // compare as integers, NaN above all
    for (; group < end; ++group) {
      float* at = scores + group * kLanes;
      fetch.advance();
      if ((group + 1) * kLanes <= range.first || group * kLanes >= range.last) {
        store(at, zero());
        continue;
      }
      const Half* half = tile.halves + 2 * group;
      const F p = range.keep_inside(group, M::weight(load(at) - top));
      const F weight = range.keep_inside(group, p * load_halves<SPAN>(half[0].v_scales, half[1].v_scales));
      total = total + p;
      magnitudes = larger_signed(magnitudes, as_uint(weight) & no_sign);
      store(at, weight);
    }
    const float inverse = M::start_weights(magnitudes, tile.weight_scales + row * tile.value_blocks + block);
    for (int64_t g = begin; g < end; ++g) M::write_weights(out + g * kLanes, load(scores + g * kLanes), inverse);
  }
  return sum(total);
}

// Scores of all rows, then the weights of V in their place, and their sums.
template <class M, int SPAN>
void weigh(const Tile& tile) {
  scores<M, SPAN>(tile);
  for (int64_t row = 0; row < tile.rows; ++row) {
    if constexpr (M::kScaled) {
      tile.sums[row] = softmax_scaled<M, SPAN>(tile, row);
    } else if (tile.rows <= kFewRows) {
      tile.sums[row] = softmax<M, true>(tile, row);
    } else {
      tile.sums[row] = softmax<M, false>(tile, row);
    }
  }
}

// acc += p * V of R rows for V vectors of columns over the positions [begin, end), relative to base. FULL: the
// columns all exist and the range holds whole steps.
template <class M, bool FULL, int R, int V>
void value_tile(const Tile& tile, int64_t row, int64_t column, int64_t block, int64_t begin, int64_t end) {
  typedef typename M::Item Item;
  typedef typename M::Probability Probability;
  constexpr int64_t kLine = 64 / sizeof(Item);
  const int64_t head_dim = tile.args->kv.head_dim, left = head_dim - column;
  float* out = tile.acc + row * tile.acc_stride + column;
  const Probability* p[R];
  typename M::Sum acc[R][V];
  OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
    p[r] = reinterpret_cast<const Probability*>(tile.scores + (row + r) * tile.score_stride);
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = M::start(out + r * tile.acc_stride + kLanes * j);
  }
  for (int64_t position = begin / M::kStep * M::kStep; position < end;) {
    const Half* half = tile.halves + position / 8;
    const int64_t offset = position % 8 * head_dim + column;
    const Item* v = reinterpret_cast<const Item*>(half[0].v) + offset;
    Lines next;
    if (R <= kFewRows) next = tile.behind_values<Item>(position / kLanes);
    const int64_t stop = least(end, position / 8 * 8 + 8);
    for (; position < stop; position += M::kStep, v += M::kStep * head_dim) {
      if (R <= kFewRows) {
        const int64_t line = (column * kLanes + position % kLanes * V * kLanes) / kLine;
        OCTAVO_UNROLL for (int64_t i = 0; i < (M::kStep * V * kLanes + kLine - 1) / kLine; ++i) next.fetch(line + i);
      }
      typename M::Vector values[V];
      M::template values<FULL>(v, head_dim, position >= begin, position + 1 < end, left, values);
      OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        const auto probability = M::broadcast(p[r] + position);
        OCTAVO_UNROLL for (int j = 0; j < V; ++j) M::add(acc[r][j], probability, values[j]);
      }
    }
  }
  OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
    const float scale = M::kScaled ? tile.weight_scales[(row + r) * tile.value_blocks + block] : 1.0f;
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) M::finish(out + r * tile.acc_stride + kLanes * j, acc[r][j], scale);
  }
}

// The same for V vectors of columns that may exist in part, over any positions: half a step, whole steps, half a step.
template <class M, int R, int V>
OCTAVO_INLINE void value_columns(const Tile& tile, int64_t row, int64_t column, int64_t block, int64_t begin,
                                 int64_t end) {
  if (column + V * kLanes > tile.args->kv.head_dim) {
    return value_tile<M, false, R, V>(tile, row, column, block, begin, end);
  }
  const int64_t whole_begin = round_up(begin, M::kStep), whole_end = end / M::kStep * M::kStep;
  if (begin < whole_begin) value_tile<M, false, R, V>(tile, row, column, block, begin, whole_begin);
  if (whole_begin < whole_end) value_tile<M, true, R, V>(tile, row, column, block, whole_begin, whole_end);
  if (most(whole_begin, whole_end) < end) value_tile<M, false, R, V>(tile, row, column, block, whole_end, end);
}

template <class M, int R>
OCTAVO_INLINE void value_rows(const Tile& tile, int64_t row, int64_t block, int64_t begin, int64_t end) {
  constexpr int kNarrow = M::kColumns, kWide = value_width(R) < kNarrow ? kNarrow : value_width(R);
  if (begin >= end) return;
  const int64_t head_dim = tile.args->kv.head_dim;
  int64_t column = 0;
  for (; column + kWide * kLanes <= head_dim; column += kWide * kLanes)
    value_columns<M, R, kWide>(tile, row, column, block, begin, end);
  for (; column < head_dim; column += kNarrow * kLanes)
    value_columns<M, R, kNarrow>(tile, row, column, block, begin, end);
}

// Rows of one register tile over one block of positions: the positions all rows attend to together, what stands
// before and behind row by row. Weights of 0 do that by themselves.
template <class M, int R>
OCTAVO_INLINE void value_block(const Tile& tile, int64_t row, int64_t block, int64_t begin, int64_t end) {
  if constexpr (M::kScaled) {
    value_rows<M, R>(tile, row, block, begin, end);
  } else {
    const auto single = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
      OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        value_rows<M, 1>(tile, row + r, block, most(from, tile.first[row + r]), least(to, tile.last[row + r]));
    };
    int64_t shared_begin = begin, shared_end = end;
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
      shared_begin = most(shared_begin, tile.first[row + r]);
      shared_end = least(shared_end, tile.last[row + r]);
    }
    shared_begin = round_up(shared_begin, M::kStep);
    shared_end = shared_end / M::kStep * M::kStep;
    if (R == 1 || shared_begin >= shared_end) return single(begin, end);
    single(begin, shared_begin);
    value_rows<M, R>(tile, row, block, shared_begin, shared_end);
    single(shared_end, end);
  }
}

template <class M, int R>
OCTAVO_INLINE void value_rest(const Tile& tile, int64_t row, int64_t rows, int64_t block, int64_t begin, int64_t end) {
  if constexpr (R > 0) {
    if (rows == R) {
      value_block<M, R>(tile, row, block, begin, end);
    } else {
      value_rest<M, R - 1>(tile, row, rows, block, begin, end);
    }
  }
}

template <class M>
void values(const Tile& tile) {
  const int64_t end = tile.groups * kLanes;
  int64_t begin = 0;
  for (int64_t block = 0; block < tile.value_blocks; ++block) {
    const int64_t stop = least(end, (block + 1) * kValueBlock - tile.base % kValueBlock);
    int64_t row = 0;
    for (; row + kValueRows <= tile.rows; row += kValueRows) value_block<M, kValueRows>(tile, row, block, begin, stop);
    value_rest<M, kValueRows - 1>(tile, row, tile.rows - row, block, begin, stop);
    begin = stop;
  }
}
