// Linear layers with 8-bit weights and activations. Included only by `isa.cpp`, behind `linear.h`.
//
// Weights are quantized once, symmetrically, with one scale for each output column; activations on the fly, with one
// scale for each row and group of K. Products of a group are summed in int32, which is exact; groups are added in fp32
// from first to last. So a row has the same bits whatever rows stand beside it.
//
// Packed weights are unsigned, 128 too large: vpdpbusd multiplies unsigned by signed bytes. A group's sum therefore
// begins at -128 times the sum of its quantized activations.

namespace linear_int8 {

using linear::Ahead;

// Four products of unsigned bytes of w and signed bytes of x in each lane of 32 bits, added to it without saturation.
// In assembly because compilers spill the accumulators of the intrinsic.
#if OCTAVO_VECTOR_BYTES == 64
OCTAVO_INLINE void dot_bytes(vu& acc, vu w, vu x) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }
#elif OCTAVO_VECTOR_BYTES == 32
OCTAVO_INLINE void dot_bytes(vu& acc, vu w, vu x) { asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x)); }
#endif

// Two products of signed 16-bit numbers in each lane of 32 bits, added.
OCTAVO_INLINE vu dot_halves(vu a, vu b) {
#if OCTAVO_VECTOR_BYTES == 64
  return (vu)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif OCTAVO_VECTOR_BYTES == 32
  return (vu)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vu)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return (vu)(((vi)(a << 16) >> 16) * ((vi)(b << 16) >> 16) + ((vi)a >> 16) * ((vi)b >> 16));
#endif
}

// Activations as signed bytes, and vpdpbusd.
struct Bytes {
  typedef int8_t item;
#if OCTAVO_VECTOR_BYTES >= 32
  static constexpr int kTileRows = linear::kTileRows;
  static constexpr int tile_vectors(int rows) { return linear::tile_vectors(rows); }

  // Writes 16 values, whose lanes are in [-127, 127].
  static OCTAVO_INLINE void write(item* to, U values) {
#if OCTAVO_VECTOR_BYTES == 64
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)values.part[0]));
#else
    __m256i halves = _mm256_packs_epi32((__m256i)values.part[0], (__m256i)values.part[1]);
    halves = _mm256_permute4x64_epi64(halves, 0xd8);  // the packing goes by halves of the vectors
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#endif
  }

  template <int R, int V>
  static OCTAVO_INLINE void dot(const item* x, int64_t stride, const char* w, int64_t steps, Ahead ahead,
                                U (&acc)[R][V]) {
    for (int64_t step = 0; step < steps; ++step, x += 4, w += 4 * kPanelColumns) {
      ahead.advance();
      U columns[V];
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) columns[j] = load_u(w + 4 * kLanes * j);
      OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        uint32_t quad;
        __builtin_memcpy(&quad, x + r * stride, 4);
        const vu lanes = quad + vu{};
        OCTAVO_UNROLL for (int j = 0; j < V; ++j)
          OCTAVO_PARTS dot_bytes(acc[r][j].part[i], columns[j].part[i], lanes);
      }
    }
  }
#endif
};

// Activations as 16-bit numbers, the even ones of four before the odd ones, and multiplications of 16 bits: for
// processors without vpdpbusd. The 8-bit multiply-add that they have (pmaddubsw) saturates.
struct Halves {
  typedef int16_t item;
#if OCTAVO_VECTOR_BYTES == 64
  static constexpr int kTileRows = 8;
  static constexpr int tile_vectors(int) { return 3; }
#else
  static constexpr int kTileRows = OCTAVO_VECTOR_BYTES == 32 ? 4 : 3;
  static constexpr int tile_vectors(int rows) { return rows == 1 ? 3 : 1; }
#endif

  static OCTAVO_INLINE void write(item* to, U values) {
    uint32_t lanes[kLanes];
    store_u(lanes, values);
    for (int i = 0; i < kLanes; i += 4) {
      to[i] = static_cast<item>(lanes[i]);
      to[i + 1] = static_cast<item>(lanes[i + 2]);
      to[i + 2] = static_cast<item>(lanes[i + 1]);
      to[i + 3] = static_cast<item>(lanes[i + 3]);
    }
  }

  template <int R, int V>
  static OCTAVO_INLINE void dot(const item* x, int64_t stride, const char* w, int64_t steps, Ahead ahead,
                                U (&acc)[R][V]) {
    for (int64_t step = 0; step < steps; ++step, x += 4, w += 4 * kPanelColumns) {
      ahead.advance();
      OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
        const U columns = load_u(w + 4 * kLanes * j);
        OCTAVO_PARTS {
          const vu even = columns.part[i] & 0x00ff00ffu, odd = columns.part[i] >> 8 & 0x00ff00ffu;
          OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
            uint32_t pairs[2];
            __builtin_memcpy(pairs, x + r * stride, 8);
            acc[r][j].part[i] += dot_halves(even, pairs[0] + vu{}) + dot_halves(odd, pairs[1] + vu{});
          }
        }
      }
    }
  }
};

struct Job {
  const LinearArgs* args;
  char* x;               // quantized rows
  int64_t x_stride;      // items
  float* scales;         // (rows, groups)
  int32_t* corrections;  // (rows, groups): -128 times the sum of the group's quantized values
  int64_t groups;
  int64_t k_steps;       // of four
  int64_t chunks;
  int64_t chunk_rows;
};

// Writes the scale of values whose magnitudes' bits are given, the largest of them over LARGEST; returns what to
// multiply values by, or 0 where all become zeros. Values that are nothing but zeros (or next to it) have scale 0;
// those that hold an infinity or a NaN have scale NaN, so that their row becomes NaN.
template <int LARGEST>
OCTAVO_INLINE float start_group(U magnitudes, float* scale) {
  const uint32_t top = static_cast<uint32_t>(largest_of(magnitudes));
  float magnitude;
  __builtin_memcpy(&magnitude, &top, 4);
  const bool is_finite = top < 0x7f800000u, is_some = is_finite && magnitude >= 0x1p-100f;
  *scale = is_some ? magnitude / LARGEST : is_finite ? 0.0f : __builtin_nanf("");
  return is_some ? LARGEST / magnitude : 0.0f;
}

// To nearest even.
OCTAVO_INLINE U round_scaled(F values, F inverse) {
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  return as_uint(values * inverse + magic) - as_uint(magic);
}

// Writes a group's integers, its scale (see start_group) and the integers' sum.
template <class T, class X, int LARGEST = 127>
OCTAVO_INLINE void quantize_group(const typename T::item* x, int64_t n, typename X::item* to, float* scale,
                                  int32_t* sum) {
  constexpr int kVectors = 4;  // most groups are as long: they are read once
  const U no_sign = splat_u(0x7fffffff);
  const bool is_short = n == kVectors * kLanes;
  F values[kVectors];
  U largest = splat_u(0);  // magnitudes compare as integers, NaN above all
  if (is_short) {
    OCTAVO_UNROLL for (int i = 0; i < kVectors; ++i) {
      values[i] = T::read(x + i * kLanes);
      largest = larger_signed(largest, as_uint(values[i]) & no_sign);
    }
  } else {
    for (int64_t k = 0; k < n; k += kLanes)
      largest = larger_signed(largest, as_uint(read_some<T>(x + k, n - k)) & no_sign);
  }
  const float inverse = start_group<LARGEST>(largest, scale);
  *sum = 0;
  if (inverse == 0.0f) {
    for (int64_t k = 0; k < n; k += kLanes) X::write(to + k, splat_u(0));
    return;
  }
  U total = splat_u(0);
  if (is_short) {
    OCTAVO_UNROLL for (int i = 0; i < kVectors; ++i) {
      const U value = round_scaled(values[i], splat(inverse));
      total = total + value;
      X::write(to + i * kLanes, value);
    }
  } else {
    for (int64_t k = 0; k < n; k += kLanes) {
      const U value = round_scaled(read_some<T>(x + k, n - k), splat(inverse));
      total = total + value;
      X::write(to + k, value);
    }
  }
  *sum = static_cast<int32_t>(sum_of(total));
}

template <class T, class X>
void quantize_row(void* context, int64_t row, int) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t n = job.args->layer->in_features, group = job.args->layer->group;
  const typename T::item* x = reinterpret_cast<const typename T::item*>(job.args->x) + row * job.args->x_stride;
  typename X::item* to = reinterpret_cast<typename X::item*>(job.x) + row * job.x_stride;
  for (int64_t g = 0; g < job.groups; ++g) {
    const int64_t first = g * group;
    int32_t sum;
    quantize_group<T, X>(x + first, n - first < group ? n - first : group, to + first,
                         job.scales + row * job.groups + g, &sum);
    job.corrections[row * job.groups + g] = -128 * sum;
  }
}

template <class T, class X, int R, bool GROUPED>
void tile(const Job& job, int64_t panel, int64_t row, Ahead& ahead) {
  const PackedLinear& layer = *job.args->layer;
  constexpr int V = X::tile_vectors(R);
  const int64_t groups = GROUPED ? job.groups : 1, x_stride = job.x_stride;
  const typename X::item* x = reinterpret_cast<const typename X::item*>(job.x) + row * x_stride;
  const float* scales = job.scales + row * groups;
  const int32_t* corrections = job.corrections + row * groups;
  const int64_t group_steps = layer.group / 4, k_steps = job.k_steps;
  for (int first = 0; first < 3; first += V) {
    const char* w = layer.data + panel * layer.panel_bytes + first * 4 * kLanes;
    const int64_t column = panel * kPanelColumns + first * kLanes;
    // Totals of groups lie in memory, where registers would not hold them beside the sums.
    alignas(64) float totals[GROUPED ? R : 1][GROUPED ? V : 1][kLanes] = {};
    F values[R][V];
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t done = g * group_steps;
      const int64_t steps = GROUPED && group_steps < k_steps - done ? group_steps : k_steps - done;
      U acc[R][V];
      OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        OCTAVO_UNROLL for (int j = 0; j < V; ++j)
          acc[r][j] = splat_u(static_cast<uint32_t>(corrections[r * groups + g]));
      X::template dot<R, V>(x + 4 * done, x_stride, w + 4 * done * kPanelColumns, steps, ahead, acc);
      OCTAVO_UNROLL for (int r = 0; r < R; ++r) {
        const F scale = splat(scales[r * groups + g]);
        OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
          if constexpr (GROUPED) {
            store(totals[r][j], fma(scale, to_float(acc[r][j]), load(totals[r][j])));
          } else {
            values[r][j] = scale * to_float(acc[r][j]);
          }
        }
      }
      if (GROUPED) asm volatile("" ::: "memory");  // else compilers take totals out of memory, and sums into it
      ahead.at += ahead.step * steps;
    }
    OCTAVO_UNROLL for (int j = 0; j < V; ++j) {
      const F scale = load(layer.scales + column + j * kLanes);
      OCTAVO_UNROLL for (int r = 0; r < R; ++r)
        values[r][j] = (GROUPED ? load(totals[r][j]) : values[r][j]) * scale;
    }
    linear::finish<T>(*job.args, row, column, values);
  }
}

template <class T, class X, int R, bool GROUPED>
OCTAVO_INLINE void last_tile(const Job& job, int64_t panel, int64_t row, int64_t rows, Ahead& ahead) {
  if constexpr (R > 0) {
    if (rows == R) {
      tile<T, X, R, GROUPED>(job, panel, row, ahead);
    } else {
      last_tile<T, X, R - 1, GROUPED>(job, panel, row, rows, ahead);
    }
  }
}

// One item: a chunk of rows times one panel.
template <class T, class X, bool GROUPED>
void item(void* context, int64_t index, int) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t panel = index / job.chunks;
  int64_t row = (index % job.chunks) * job.chunk_rows;
  const int64_t end = row + job.chunk_rows < job.args->rows ? row + job.chunk_rows : job.args->rows;
  const int64_t tiles = (end - row + X::kTileRows - 1) / X::kTileRows;
  Ahead ahead = linear::fetch_ahead(*job.args->layer, panel, index % job.chunks, job.chunks, tiles, job.k_steps,
                                    end - row < X::kTileRows / 2);
  for (; row + X::kTileRows <= end; row += X::kTileRows)
    tile<T, X, X::kTileRows, GROUPED>(job, panel, row, ahead);
  last_tile<T, X, X::kTileRows - 1, GROUPED>(job, panel, row, end - row, ahead);
}

template <class T, class X>
void run_typed(Pool& pool, const LinearArgs& args) {
  typedef typename X::item item_type;
  const PackedLinear& layer = *args.layer;
  const int64_t rows = args.rows;
  Job job{&args, nullptr, (layer.in_features + 63) / 64 * 64, nullptr, nullptr, 1, (layer.in_features + 3) / 4, 1, 0};
  job.groups = (layer.in_features + layer.group - 1) / layer.group;
  const int64_t x_bytes = rows * job.x_stride * int64_t{sizeof(item_type)};
  job.x = pool.shared_scratch(static_cast<size_t>(x_bytes + rows * job.groups * 8));
  job.scales = reinterpret_cast<float*>(job.x + x_bytes);
  job.corrections = reinterpret_cast<int32_t*>(job.scales + rows * job.groups);
  if (rows * layer.in_features < 32768) {
    for (int64_t row = 0; row < rows; ++row) quantize_row<T, X>(&job, row, 0);
  } else {
    pool.run(rows, quantize_row<T, X>, &job);
  }
  job.chunks = (rows + linear::kChunkRows - 1) / linear::kChunkRows;
  job.chunk_rows = (rows + job.chunks - 1) / job.chunks;
  job.chunk_rows = (job.chunk_rows + X::kTileRows - 1) / X::kTileRows * X::kTileRows;
  job.chunks = (rows + job.chunk_rows - 1) / job.chunk_rows;
  if (job.groups == 1) {
    pool.run(layer.num_panels * job.chunks, item<T, X, false>, &job);
  } else {
    pool.run(layer.num_panels * job.chunks, item<T, X, true>, &job);
  }
}

template <class X>
void run(Pool& pool, const LinearArgs& args) {
  with_dtype(args.layer->dtype, [&](auto t) { run_typed<decltype(t), X>(pool, args); });
}

}  // namespace linear_int8
