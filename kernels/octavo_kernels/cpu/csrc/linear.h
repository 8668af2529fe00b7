// Linear layers over packed panels. Included only by `isa.cpp`.
//
// Every output element is one fp32 lane that accumulates over K from first to last, in every tile shape alike: a row
// has the same bits whatever rows stand beside it.

namespace linear {

// Rows of one register tile, and how many vectors of 16 columns it spans at a given number of rows.
#if OCTAVO_VECTOR_BYTES == 64
constexpr int kTileRows = 8;
constexpr int tile_vectors(int) { return 3; }
#elif OCTAVO_VECTOR_BYTES == 32
constexpr int kTileRows = 6;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 3 : 1; }
#elif defined(__aarch64__)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 3 : 1; }
#else
constexpr int kTileRows = 3;
constexpr int tile_vectors(int rows) { return rows == 1 ? 3 : 1; }
#endif

// Rows that share one pass over a panel; more rows make more items.
constexpr int64_t kChunkRows = 128;

// Bytes between what is multiplied and what is fetched where every byte is used once: what is computed meanwhile takes
// about as long as memory does to answer.
constexpr int64_t kFetchDistance = 4 << 10;

// Fetches weights, a little every step, so that memory and arithmetic overlap: into the second-level cache what several
// tiles use, past it what is used once. So whatever else a step needs stays there, not least the interpreter's own code
// and data between two steps.
struct Ahead {
  const char* at;
  int64_t step;  // bytes for every step over k
  int64_t lines;
  bool is_used_once;

  OCTAVO_INLINE void advance() {
    if (is_used_once) {
      for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 0);
    } else {
      for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    }
    at += step;
  }
};

// For a chunk of rows that goes over a panel in `tiles` tiles of `steps` steps each. One tile fetches what it needs
// soon itself, more tiles their chunk's share of the next panel. is_fast: the processor fetches better itself, as
// where a few rows meet weights of 8 bits or less.
inline Ahead fetch_ahead(const PackedLinear& layer, int64_t panel, int64_t chunk, int64_t chunks, int64_t tiles,
                         int64_t steps, bool is_fast) {
  const char* const data = layer.data + panel * layer.panel_bytes;
  const int64_t share = layer.panel_bytes / chunks, step = share / (tiles * steps);
  const bool is_one_tile = chunks * tiles == 1;
  const int64_t distance = is_one_tile ? kFetchDistance : layer.panel_bytes + chunk * share;
  // A tile that is narrower than its panel goes over it several times, and fetches all of it each time.
  return {data + distance, step, is_fast ? 0 : (step + 63) / 64, is_one_tile && tile_vectors(kTileRows) == 3};
}

// acc[r][j] += a[r][k] * panel[k][j] for k ascending; `a` holds fp32.
struct WidenedTile {
  template <class T, int R, int V>
  static OCTAVO_INLINE void run(const float* a, int64_t stride, const char* panel, int64_t k_size, Ahead ahead,
                                F (&acc)[R][V]) {
    const typename T::item* w = reinterpret_cast<const typename T::item*>(panel);
    if constexpr (T::dtype == kBF16) {
      // Pairs (k, k + 1) interleaved: the low half is the even one.
      for (int64_t k = 0; k < k_size; k += 2, w += 2 * kPanelColumns) {
        ahead.advance();
        F even[V], odd[V];
        OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
          const U pair = load_u(w + 2 * kLanes * j);
          even[j] = as_float(shift_left<16>(pair));
          odd[j] = as_float(pair & splat_u(0xffff0000u));
        }
        OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
          const F x = splat(a[r * stride + k]);
          OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = fma(x, even[j], acc[r][j]);
        }
        OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
          const F x = splat(a[r * stride + k + 1]);
          OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = fma(x, odd[j], acc[r][j]);
        }
      }
    } else {
      for (int64_t k = 0; k < k_size; ++k, w += kPanelColumns) {
        ahead.advance();
        F row[V];
        OCTAVO_UNROLL for (int j = 0; j < V; ++j) row[j] = T::read(w + kLanes * j);
        OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
          const F x = splat(a[r * stride + k]);
          OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = fma(x, row[j], acc[r][j]);
        }
      }
    }
  }
};

#if defined(OCTAVO_AVX512_BF16)
// Two k at a time with vdpbf16ps. In assembly because compilers spill the accumulators of the intrinsic.
OCTAVO_INLINE void dot_pair(vf& acc, vu a, vu b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
}

struct Bf16Tile {
  template <int R, int V>
  static OCTAVO_INLINE void run(const uint16_t* a, int64_t stride, const char* panel, int64_t k_size, Ahead ahead,
                                F (&acc)[R][V]) {
    const uint32_t* w = reinterpret_cast<const uint32_t*>(panel);
    for (int64_t k = 0; k < k_size; k += 2, w += kPanelColumns) {
      ahead.advance();
      vu row[V];
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) row[j] = load_u(w + kLanes * j).part[0];
      OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        uint32_t pair;
        __builtin_memcpy(&pair, a + r * stride + k, 4);
        const vu x = pair + vu{};
        OCTAVO_UNROLL for (int j = 0; j < V; ++j) dot_pair(acc[r][j].part[0], x, row[j]);
      }
    }
  }
};
#endif

struct Job {
  const LinearArgs* args;
  const char* a;      // rows as the tile wants them
  int64_t a_stride;   // elements
  int64_t chunks;
  int64_t chunk_rows;
  int64_t k_steps;    // iterations of a tile's loop over K
};

// Writes a register tile, of which n columns exist.
template <class T, int R, int V>
OCTAVO_INLINE void write_tile(char* out, int64_t stride, int64_t n, const F (&values)[R][V]) {
  typename T::item* to = reinterpret_cast<typename T::item*>(out);
  OCTAVO_UNROLL for (int r = 0; r < R; ++r, to += stride) {
    if (n >= V * kLanes) {
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) T::write(to + j * kLanes, values[r][j]);
    } else {
      // Not a loop up to n: values that are chosen at run time lie in memory, and so would the sums they come from.
      OCTAVO_UNROLL for (int j = 0; j < V; ++j)
        if (j * kLanes < n) write_some<T>(to + j * kLanes, values[r][j], n - j * kLanes);
    }
  }
}

// Brings columns of a panel, vectors * 16 from `column` on, into its winners; of equals the earlier column stays. Out
// of line, with results in memory: it is rare, and what results come from stays in registers.
__attribute__((noinline)) void write_winners(const LinearArgs& args, int64_t row, int64_t column, const float* results,
                                             int rows, int vectors) {
  const PackedLinear& layer = *args.layer;
  Winner* winners = args.winners->panels + row * layer.num_panels + column / kPanelColumns;
  float* bests = args.winners->bests + row;
  const int64_t n = layer.out_features - column, count = n < vectors * kLanes ? n : vectors * kLanes;
  for (int r = 0; r < rows; ++r, ++bests, winners += layer.num_panels, results += vectors * kLanes) {
    Winner found{results[0], 0};
    for (int64_t i = 1; i < count; ++i)
      if (!(results[i] <= found.value || found.value != found.value)) found = {results[i], static_cast<int32_t>(i)};
    found.column += static_cast<int32_t>(column);
    if (!(found.value <= winners->value || winners->value != winners->value)) *winners = found;
    float best;
    __atomic_load(bests, &best, __ATOMIC_RELAXED);
    if (found.value > best) __atomic_store(bests, &found.value, __ATOMIC_RELAXED);
  }
}

// Adds bias and residual to a register tile in fp32, rounds once and writes it, or finds its winners. All that is read
// of `args` is read first: what is written might lie there, for all that compilers know.
template <class T, int R, int V>
OCTAVO_INLINE void finish(const LinearArgs& args, int64_t row, int64_t column, F (&values)[R][V]) {
  typedef typename T::item item;
  const PackedLinear& layer = *args.layer;
  const int64_t stride = layer.out_features, n = stride - column;
  if (n <= 0) return;
  if (layer.bias != nullptr)
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
      const F bias = load(layer.bias + column + j * kLanes);
      OCTAVO_UNROLL for (int r = 0; r < R; ++r) values[r][j] = values[r][j] + bias;
    }
  if (args.residual != nullptr) {
    const int64_t step = args.residual_stride;
    const item* residual = reinterpret_cast<const item*>(args.residual) + row * step + column;
    OCTAVO_UNROLL for (int r = 0; r < R; ++r, residual += step)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j)
        if (j * kLanes < n) values[r][j] = values[r][j] + read_some<T>(residual + j * kLanes, n - j * kLanes);
  }
  if (args.winners != nullptr) {
    bool is_below = n >= V * kLanes;
    OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
      float best;
      __atomic_load(args.winners->bests + row + r, &best, __ATOMIC_RELAXED);
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) is_below &= all_less(values[r][j], splat(best));
    }
    if (is_below) return;
    float results[R][V * kLanes];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) store(results[r] + j * kLanes, values[r][j]);
    write_winners(args, row, column, results[0], R, V);
  } else if (layer.out_dtype == T::dtype) {
    write_tile<T>(args.out + (row * stride + column) * int64_t{sizeof(item)}, stride, n, values);
  } else {
    write_tile<F32>(args.out + (row * stride + column) * int64_t{sizeof(float)}, stride, n, values);
  }
}

// T: type of weights, inputs and outputs; NATIVE: inputs stay bf16 pairs.
template <class T, bool NATIVE, int R>
void tile(const Job& job, int64_t panel, int64_t row, Ahead& ahead) {
  const LinearArgs& args = *job.args;
  const PackedLinear& layer = *args.layer;
  constexpr int V = tile_vectors(R);
  constexpr int64_t kVectorBytes = kLanes * (T::dtype == kF16 ? 2 : 4);  // one vector of columns in a panel row
  const char* weights = layer.data + panel * layer.panel_bytes;
  for (int first = 0; first < 3; first += V) {
    F acc[R][V];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = zero();
    const char* columns = weights + first * kVectorBytes;
#if defined(OCTAVO_AVX512_BF16)
    if constexpr (NATIVE) {
      const uint16_t* a = reinterpret_cast<const uint16_t*>(job.a) + row * job.a_stride;
      Bf16Tile::run<R, V>(a, job.a_stride, columns, layer.in_features, ahead, acc);
    } else
#endif
    {
      const float* a = reinterpret_cast<const float*>(job.a) + row * job.a_stride;
      WidenedTile::run<T, R, V>(a, job.a_stride, columns, layer.in_features, ahead, acc);
    }
    finish<T>(args, row, panel * kPanelColumns + first * kLanes, acc);
    ahead.at += ahead.step * job.k_steps;
  }
}

template <class T, bool NATIVE, int R>
OCTAVO_INLINE void last_tile(const Job& job, int64_t panel, int64_t row, int64_t rows, Ahead& ahead) {
  if constexpr (R > 0) {
    if (rows == R) {
      tile<T, NATIVE, R>(job, panel, row, ahead);
    } else {
      last_tile<T, NATIVE, R - 1>(job, panel, row, rows, ahead);
    }
  }
}

// One item: a chunk of rows times one panel.
template <class T, bool NATIVE>
void item(void* context, int64_t index, int) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t panel = index / job.chunks;
  int64_t row = (index % job.chunks) * job.chunk_rows;
  const int64_t end = row + job.chunk_rows < job.args->rows ? row + job.chunk_rows : job.args->rows;
  const int64_t tiles = (end - row + kTileRows - 1) / kTileRows;
  Ahead ahead = fetch_ahead(*job.args->layer, panel, index % job.chunks, job.chunks, tiles, job.k_steps, false);
  for (; row + kTileRows <= end; row += kTileRows) tile<T, NATIVE, kTileRows>(job, panel, row, ahead);
  last_tile<T, NATIVE, kTileRows - 1>(job, panel, row, end - row, ahead);
}

struct CopyJob {
  const LinearArgs* args;
  char* to;
  int64_t stride;
};

// Inputs as fp32, or as bf16 padded to whole pairs.
template <class T, bool NATIVE>
void copy_row(void* context, int64_t row, int) {
  const CopyJob& job = *static_cast<const CopyJob*>(context);
  const int64_t n = job.args->layer->in_features;
  const typename T::item* from = reinterpret_cast<const typename T::item*>(job.args->x) + row * job.args->x_stride;
  if constexpr (NATIVE) {
    uint16_t* to = reinterpret_cast<uint16_t*>(job.to) + row * job.stride;
    __builtin_memcpy(to, from, static_cast<size_t>(n) * 2);
    for (int64_t k = n; k < job.stride; ++k) to[k] = 0;
  } else {
    float* to = reinterpret_cast<float*>(job.to) + row * job.stride;
    for (int64_t k = 0; k < job.stride; k += kLanes)
      store(to + k, k < n ? read_some<T>(from + k, n - k) : zero());
  }
}

template <class T, bool NATIVE>
void run_typed(Pool& pool, const LinearArgs& args) {
  const int64_t k_size = args.layer->in_features;
  Job job{&args, args.x, args.x_stride, 1, args.rows, T::dtype == kBF16 ? (k_size + 1) / 2 : k_size};
  // fp32 inputs, and bf16 pairs without a remainder, are read where they lie.
  if ((NATIVE && k_size % 2 != 0) || (!NATIVE && T::dtype != kF32)) {
    job.a_stride = (k_size + kLanes - 1) / kLanes * kLanes;
    char* copy = pool.shared_scratch(static_cast<size_t>(args.rows * job.a_stride * (NATIVE ? 2 : 4)));
    CopyJob copying{&args, copy, job.a_stride};
    if (args.rows * k_size < 65536) {
      for (int64_t row = 0; row < args.rows; ++row) copy_row<T, NATIVE>(&copying, row, 0);
    } else {
      pool.run(args.rows, copy_row<T, NATIVE>, &copying);
    }
    job.a = copy;
  }
  job.chunks = (args.rows + kChunkRows - 1) / kChunkRows;
  job.chunk_rows = (args.rows + job.chunks - 1) / job.chunks;
  job.chunk_rows = (job.chunk_rows + kTileRows - 1) / kTileRows * kTileRows;
  job.chunks = (args.rows + job.chunk_rows - 1) / job.chunk_rows;
  pool.run(args.layer->num_panels * job.chunks, item<T, NATIVE>, &job);
}

void run(Pool& pool, const LinearArgs& args) {
  switch (args.layer->dtype) {
    case kF32:
      return run_typed<F32, false>(pool, args);
    case kF16:
      return run_typed<F16, false>(pool, args);
    default:
#if defined(OCTAVO_AVX512_BF16)
      return run_typed<BF16, true>(pool, args);
#else
      return run_typed<BF16, false>(pool, args);
#endif
  }
}

}  // namespace linear
