// Linear layers with weights of 4 bits in groups of 32 and activations of 8. Included only by `isa.cpp`, behind
// `linear_int8.h`.
//
// A group of a column has a scale and a minimum, a group of a row one scale. Its products are summed in int32, which is
// exact; the minimum meets the sum of the group's activations. Groups are added in fp32 from first to last. So a row
// has the same bits whatever rows stand beside it.
//
// A byte of a packed panel holds two weights, so that one load and two masks give two vectors for four K each.

namespace linear_int4 {

using linear::Ahead;

constexpr int kPairs = kInt4Group / 8;  // loads of a vector of columns in a group
constexpr int64_t kNumberBytes = kPanelColumns * 2;

// vpdpbusd.
struct Dots {
  typedef linear_int8::Bytes Activations;
#if OCTAVO_VECTOR_BYTES >= 32
  // acc[r][j] = the products of group `x` of each row and of the columns at `w`, summed.
  template <int R, int V>
  static OCTAVO_INLINE void run(const int8_t* x, int64_t stride, const char* w, Ahead& ahead, U (&acc)[R][V]) {
    const U mask = splat_u(0x0f0f0f0f);
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = splat_u(0);
    OCTAVO_UNROLL for (int pair = 0; pair < kPairs; ++pair, x += 8, w += 4 * kPanelColumns) {
      ahead.advance();
      U low[V], high[V];
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
        const U both = load_u(w + 4 * kLanes * j);
        low[j] = both & mask;
        high[j] = shift_right<4>(both) & mask;
      }
      OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        uint32_t quads[2];
        __builtin_memcpy(quads, x + r * stride, 8);
        OCTAVO_UNROLL for (int j = 0; j < V; ++j) OCTAVO_PARTS {
          linear_int8::dot_bytes(acc[r][j].part[i], low[j].part[i], quads[0] + vu{});
          linear_int8::dot_bytes(acc[r][j].part[i], high[j].part[i], quads[1] + vu{});
        }
      }
    }
  }
#endif
};

// Multiplications of bytes to sums of two in 16 bits (pmaddubsw), for processors without vpdpbusd: half a byte by a
// byte does not saturate, and the eight sums of a group stay within 8 * 2 * 15 * 127 = 30,480.
struct Pairs {
  typedef linear_int8::Bytes Activations;
#if OCTAVO_VECTOR_BYTES >= 32
  static OCTAVO_INLINE vu add_pairs(vu acc, vu w, vu x) {
#if OCTAVO_VECTOR_BYTES == 64
    return (vu)_mm512_add_epi16((__m512i)acc, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#else
    return (vu)_mm256_add_epi16((__m256i)acc, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#endif
  }

  template <int R, int V>
  static OCTAVO_INLINE void run(const int8_t* x, int64_t stride, const char* w, Ahead& ahead, U (&acc)[R][V]) {
    const U mask = splat_u(0x0f0f0f0f);
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = splat_u(0);
    OCTAVO_UNROLL for (int pair = 0; pair < kPairs; ++pair, x += 8, w += 4 * kPanelColumns) {
      ahead.advance();
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
        const U both = load_u(w + 4 * kLanes * j);
        const U low = both & mask, high = shift_right<4>(both) & mask;
        OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
          uint32_t quads[2];
          __builtin_memcpy(quads, x + r * stride, 8);
          OCTAVO_PARTS {
            acc[r][j].part[i] = add_pairs(acc[r][j].part[i], low.part[i], quads[0] + vu{});
            acc[r][j].part[i] = add_pairs(acc[r][j].part[i], high.part[i], quads[1] + vu{});
          }
        }
      }
    }
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j)
        OCTAVO_PARTS acc[r][j].part[i] = linear_int8::dot_halves(acc[r][j].part[i], 0x00010001u + vu{});
  }
#endif
};

// Multiplications of 16 bits: for any processor.
struct Products {
  typedef linear_int8::Halves Activations;

  template <int R, int V>
  static OCTAVO_INLINE void run(const int16_t* x, int64_t stride, const char* w, Ahead& ahead, U (&acc)[R][V]) {
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) acc[r][j] = splat_u(0);
    for (int pair = 0; pair < kPairs; ++pair, x += 8, w += 4 * kPanelColumns) {
      ahead.advance();
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
        const U both = load_u(w + 4 * kLanes * j);
        OCTAVO_PARTS {
          const vu mask = 0x000f000fu + vu{};  // bytes 0 and 2, or 1 and 3, of the four
          const vu quads[4] = {both.part[i] & mask, both.part[i] >> 8 & mask, both.part[i] >> 4 & mask,
                               both.part[i] >> 12 & mask};
          OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
            uint32_t pairs[4];
            __builtin_memcpy(pairs, x + r * stride, 16);
            OCTAVO_UNROLL for (int q = 0; q < 4; ++q)
              acc[r][j].part[i] += linear_int8::dot_halves(quads[q], pairs[q] + vu{});
          }
        }
      }
    }
  }
};

// Rows of one register tile, and how many vectors of 16 columns it spans at a given number of rows.
constexpr int kTileRows = OCTAVO_VECTOR_BYTES == 64 ? 6 : 4;
constexpr int tile_vectors(int rows) { return OCTAVO_VECTOR_BYTES == 64 || rows == 1 ? 3 : 1; }

struct Job {
  const LinearArgs* args;
  char* x;           // quantized rows
  int64_t x_stride;  // items
  float* scales;     // (rows, groups)
  float* sums;       // (rows, groups): the scale times the sum of the group's quantized values
  int64_t groups;
  int64_t chunks;
  int64_t chunk_rows;
};

template <class T, class D>
void quantize_row(void* context, int64_t row, int) {
  typedef typename D::Activations X;
  const Job& job = *static_cast<const Job*>(context);
  const int64_t n = job.args->layer->in_features;
  const typename T::item* x = reinterpret_cast<const typename T::item*>(job.args->x) + row * job.args->x_stride;
  typename X::item* to = reinterpret_cast<typename X::item*>(job.x) + row * job.x_stride;
  for (int64_t g = 0; g < job.groups; ++g) {
    const int64_t first = g * kInt4Group;
    float scale;
    int32_t sum;
    linear_int8::quantize_group<T, X>(x + first, n - first < kInt4Group ? n - first : kInt4Group, to + first, &scale,
                                      &sum);
    job.scales[row * job.groups + g] = scale;
    job.sums[row * job.groups + g] = scale * static_cast<float>(sum);
  }
}

template <class T, class D, int R>
void tile(const Job& job, int64_t panel, int64_t row, Ahead& ahead) {
  typedef typename D::Activations::item item_type;
  const PackedLinear& layer = *job.args->layer;
  constexpr int V = tile_vectors(R);
  const float* scales = job.scales + row * job.groups;
  const float* sums = job.sums + row * job.groups;
  for (int first = 0; first < 3; first += V) {
    const item_type* x = reinterpret_cast<const item_type*>(job.x) + row * job.x_stride;
    const char* group = layer.data + panel * layer.panel_bytes;
    F total[R][V];
    OCTAVO_UNROLL for (int r = 0; r < R; ++r)
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) total[r][j] = zero();
    for (int64_t g = 0; g < job.groups; ++g, x += kInt4Group, group += kInt4GroupBytes) {
      U acc[R][V];
      D::template run<R, V>(x, job.x_stride, group + 2 * kNumberBytes + first * 4 * kLanes, ahead, acc);
      const uint16_t* numbers = reinterpret_cast<const uint16_t*>(group) + first * kLanes;
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
        const F scale = F16::read(numbers + j * kLanes);
        const F minimum = F16::read(numbers + kPanelColumns + j * kLanes);
        OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
          total[r][j] = fma(to_float(acc[r][j]) * scale, splat(scales[r * job.groups + g]), total[r][j]);
          total[r][j] = fma(minimum, splat(sums[r * job.groups + g]), total[r][j]);
        }
      }
    }
    linear::finish<T>(*job.args, row, panel * kPanelColumns + first * kLanes, total);
  }
}

// Rows known only at run time.
template <class T, class D, int R>
OCTAVO_INLINE void some_tile(const Job& job, int64_t panel, int64_t row, int64_t rows, Ahead& ahead) {
  if constexpr (R > 0) {
    if (rows == R) {
      tile<T, D, R>(job, panel, row, ahead);
    } else {
      some_tile<T, D, R - 1>(job, panel, row, rows, ahead);
    }
  }
}

// One item: a chunk of rows times one panel. Tiles share the rows evenly: one of a single row costs almost as much as
// one of three.
template <class T, class D>
void item(void* context, int64_t index, int) {
  const Job& job = *static_cast<const Job*>(context);
  const PackedLinear& layer = *job.args->layer;
  const int64_t panel = index / job.chunks;
  int64_t row = (index % job.chunks) * job.chunk_rows;
  const int64_t end = row + job.chunk_rows < job.args->rows ? row + job.chunk_rows : job.args->rows;
  int64_t tiles = (end - row + kTileRows - 1) / kTileRows;
  const int64_t steps = 3 / tile_vectors(kTileRows) * job.groups * kPairs;
  Ahead ahead =
      linear::fetch_ahead(layer, panel, index % job.chunks, job.chunks, tiles, steps, end - row < kTileRows / 2);
  for (; tiles > 0; --tiles) {
    const int64_t rows = (end - row + tiles - 1) / tiles;
    some_tile<T, D, kTileRows>(job, panel, row, rows, ahead);
    row += rows;
  }
}

template <class T, class D>
void run_typed(Pool& pool, const LinearArgs& args) {
  typedef typename D::Activations::item item_type;
  const PackedLinear& layer = *args.layer;
  const int64_t rows = args.rows;
  Job job{&args, nullptr, (layer.in_features + 63) / 64 * 64, nullptr, nullptr, 0, 1, 0};
  job.groups = (layer.in_features + kInt4Group - 1) / kInt4Group;
  const int64_t x_bytes = rows * job.x_stride * int64_t{sizeof(item_type)};
  job.x = pool.shared_scratch(static_cast<size_t>(x_bytes + rows * job.groups * 8));
  job.scales = reinterpret_cast<float*>(job.x + x_bytes);
  job.sums = job.scales + rows * job.groups;
  if (rows * layer.in_features < 32768) {
    for (int64_t row = 0; row < rows; ++row) quantize_row<T, D>(&job, row, 0);
  } else {
    pool.run(rows, quantize_row<T, D>, &job);
  }
  job.chunks = (rows + linear::kChunkRows - 1) / linear::kChunkRows;
  job.chunk_rows = (rows + job.chunks - 1) / job.chunks;
  job.chunk_rows = (job.chunk_rows + kTileRows - 1) / kTileRows * kTileRows;
  job.chunks = (rows + job.chunk_rows - 1) / job.chunk_rows;
  pool.run(layer.num_panels * job.chunks, item<T, D>, &job);
}

template <class D>
void run(Pool& pool, const LinearArgs& args) {
  with_dtype(args.layer->dtype, [&](auto t) { run_typed<decltype(t), D>(pool, args); });
}

}  // namespace linear_int4
