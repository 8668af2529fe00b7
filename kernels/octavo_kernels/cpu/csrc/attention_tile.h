// One tile of attention at work, and the shapes of what its passes hold in registers. Included only by `attention.h`.

// Positions of V that stay in the first-level cache while all rows of a tile use them. Blocks of as many positions
// begin at multiples of it in the sequence, wherever a tile begins.
constexpr int64_t kValueBlock = 128;
// Scores of a tile should stay in the second-level cache.
constexpr int64_t kScoreBytes = 384 << 10;
constexpr int64_t kTileTokens = 16;

// Rows of one register tile of scores, and of values.
#if OCTAVO_VECTOR_BYTES == 64
constexpr int kRows = 8, kValueRows = 6;
#elif OCTAVO_VECTOR_BYTES == 32 || defined(__aarch64__)
constexpr int kRows = 4, kValueRows = 4;
#else
constexpr int kRows = 2, kValueRows = 2;
#endif
// So few rows wait for memory: they fetch ahead.
constexpr int kFewRows = kRows / 2;
// How many groups of 16 positions they fetch ahead at most: what is computed meanwhile takes about as long as memory
// does to answer.
constexpr int kAhead = 8;
// Groups of 16 positions that a register tile of scores holds beside its rows, and vectors of V in one of values.
constexpr int score_width(int rows) {
  if (OCTAVO_VECTOR_BYTES == 64) return rows <= kFewRows ? 4 : 2;
  if (OCTAVO_VECTOR_BYTES == 32) return rows <= kFewRows ? 2 : 1;
  return 1;
}
constexpr int value_width(int rows) { return OCTAVO_VECTOR_BYTES == 64 ? 4 : score_width(rows); }

struct Item {
  int32_t sequence;
  int32_t token;   // first query token of the tile
  int32_t tokens;
  int32_t head;    // KV head
};

// Where eight positions of K and V of one head lie, and their scales where they are quantized.
struct Half {
  const char* k;
  const char* v;
  const float* k_scales;
  const float* v_scales;
};

// Lines of memory that K or V of a group of positions take up, `step` bytes apart.
struct Lines {
  const char* at;
  int64_t step;
  const float* scales;

  OCTAVO_INLINE void fetch(int64_t line) const { __builtin_prefetch(at + line * step); }
};

// Rows of K, at 16 positions, that a line holds.
template <class Item>
constexpr int64_t kKeyRows = 64 / (kLanes * int64_t{sizeof(Item)});

// All memory is scratch of the thread.
struct Tile {
  const AttentionArgs* args;
  Half* halves;          // of positions base, base + 8, ..., then of the thread's next tile's first ones
  int64_t base;          // multiple of 16
  int64_t groups;        // of 16 positions
  int64_t ahead;         // how many groups to fetch ahead
  int64_t rows;
  int64_t* first;        // per row: positions [first, last), relative to base
  int64_t* last;
  char* q;               // rows x q_stride items: fp32, or 16 bits in pairs
  int64_t q_stride;
  float* q_scales;       // per row: what a score is multiplied by
  int64_t shared_begin;  // groups [shared_begin, shared_end) are whole for every row: all rows attend to all of them;
  int64_t shared_end;    // both are multiples of the groups that a register tile of scores holds
  float* maxima;         // rows x 16: the largest scores of those groups, lane by lane
  float* scores;         // rows x score_stride; afterwards the weights of V, fp32 or of 16 bits
  int64_t score_stride;
  float* weight_scales;  // rows x value_blocks: of weights that are 16-bit integers
  int64_t value_blocks;
  float* acc;            // rows x acc_stride
  int64_t acc_stride;    // head_dim rounded up to whole register tiles
  float* sums;

  OCTAVO_INLINE bool is_shared(int64_t group) const { return group >= shared_begin && group < shared_end; }

  // What is read `ahead` groups behind the scores of a group: K, or else V.
  template <class Item>
  OCTAVO_INLINE Lines behind_scores(int64_t group) const {
    group += ahead;
    return group < groups ? keys<Item>(group) : values(group - groups);
  }
  // What is read `ahead` groups behind V of a group: V, or else K of the next tile.
  template <class Item>
  OCTAVO_INLINE Lines behind_values(int64_t group) const {
    group += ahead;
    return group < groups ? values(group) : keys<Item>(group);
  }

 private:
  template <class Item>
  OCTAVO_INLINE Lines keys(int64_t group) const {
    const Half& half = halves[2 * group];
    return {half.k, args->kv.block_size * kKeyRows<Item> * int64_t{sizeof(Item)}, half.k_scales};
  }
  OCTAVO_INLINE Lines values(int64_t group) const {
    const Half& half = halves[2 * group];
    return {half.v, 64, half.v_scales};
  }
};

OCTAVO_INLINE int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
constexpr OCTAVO_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr OCTAVO_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// How many positions lie together, a template's SPAN: kEight in each half of a group, kSixteen in blocks of 16, where
// the next row of K follows right behind, and kMore in larger blocks that hold whole groups.
enum Span { kEight = 8, kSixteen = 16, kMore = 32 };

// 16 numbers, of two halves.
template <int SPAN>
OCTAVO_INLINE F load_halves(const float* a, const float* b) {
  if constexpr (SPAN != kEight) return load(a);
#if OCTAVO_VECTOR_BYTES == 64
  F r;
  r.part[0] = (vf)_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
  return r;
#else
  float both[kLanes];
  __builtin_memcpy(both, a, 8 * sizeof(float));
  __builtin_memcpy(both + 8, b, 8 * sizeof(float));
  return load(both);
#endif
}
