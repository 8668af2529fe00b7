// Norms, rotary embedding and gated SiLU: one pass over memory each. Included only by `isa.cpp`.

namespace elementwise {

// Below this many elements a call is not worth a second thread.
constexpr int64_t kParallelElements = 32768;

// Calls rows_of(context, first, last) over [0, rows), in pieces over threads when there is much to do.
struct Rows {
  void (*rows_of)(const void* args, int64_t first, int64_t last);
  const void* args;
  int64_t rows;
  int64_t pieces;
};

void rows_item(void* context, int64_t piece, int) {
  const Rows& job = *static_cast<const Rows*>(context);
  job.rows_of(job.args, job.rows * piece / job.pieces, job.rows * (piece + 1) / job.pieces);
}

void over_rows(Pool& pool, int64_t rows, int64_t elements, void (*rows_of)(const void*, int64_t, int64_t),
               const void* args) {
  Rows job{rows_of, args, rows, 1};
  if (elements >= kParallelElements) {
    job.pieces = pool.num_threads() * int64_t{4};
    if (job.pieces > rows) job.pieces = rows;
  }
  if (job.pieces <= 1) {
    rows_of(args, 0, rows);
  } else {
    pool.run(job.pieces, rows_item, &job);
  }
}

template <class T, class W>
void rms_norm_rows(const void* context, int64_t first, int64_t last) {
  const RmsNormArgs& args = *static_cast<const RmsNormArgs*>(context);
  const typename W::item* weight = reinterpret_cast<const typename W::item*>(args.weight);
  for (int64_t row = first; row < last; ++row) {
    const typename T::item* x = reinterpret_cast<const typename T::item*>(args.x) +
                                row / args.inner * args.outer_stride + row % args.inner * args.inner_stride;
    typename T::item* out = reinterpret_cast<typename T::item*>(args.out) + row * args.n;
    F squares = zero();
    for (int64_t i = 0; i < args.n; i += kLanes) {
      const F value = read_some<T>(x + i, args.n - i);
      squares = fma(value, value, squares);
    }
    const float scale = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(args.n) + args.eps);
    for (int64_t i = 0; i < args.n; i += kLanes) {
      const F value = read_some<T>(x + i, args.n - i) * splat(scale) * read_some<W>(weight + i, args.n - i);
      write_some<T>(out + i, value, args.n - i);
    }
  }
}

void rms_norm(Pool& pool, const RmsNormArgs& args) {
  const int64_t rows = args.outer * args.inner;
  with_dtype(args.dtype, [&](auto t) {
    typedef decltype(t) T;
    if (args.weight_dtype == kF32) {
      over_rows(pool, rows, rows * args.n, rms_norm_rows<T, F32>, &args);
    } else {
      over_rows(pool, rows, rows * args.n, rms_norm_rows<T, T>, &args);
    }
  });
}

template <class T>
void rotary_rows(const void* context, int64_t first, int64_t last) {
  const RotaryArgs& args = *static_cast<const RotaryArgs*>(context);
  const int64_t half = args.rotary_dim / 2;
  for (int64_t token = first; token < last; ++token) {
    const float* cosines = args.cos_sin + args.positions[token] * args.rotary_dim;
    const float* sines = cosines + half;
    for (int64_t head = 0; head < args.heads; ++head) {
      typename T::item* x =
          reinterpret_cast<typename T::item*>(args.x) + token * args.token_stride + head * args.head_stride;
      for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t n = half - i;
        const F a = read_some<T>(x + i, n), b = read_some<T>(x + half + i, n);
        const F c = read_some<F32>(cosines + i, n), s = read_some<F32>(sines + i, n);
        write_some<T>(x + i, a * c - b * s, n);
        write_some<T>(x + half + i, b * c + a * s, n);
      }
    }
  }
}

void rotary(Pool& pool, const RotaryArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    over_rows(pool, args.tokens, args.tokens * args.heads * args.rotary_dim, rotary_rows<decltype(t)>, &args);
  });
}

template <class T>
void silu_mul_rows(const void* context, int64_t first, int64_t last) {
  const SiluMulArgs& args = *static_cast<const SiluMulArgs*>(context);
  for (int64_t row = first; row < last; ++row) {
    const typename T::item* gate = reinterpret_cast<const typename T::item*>(args.gate_up) + row * args.row_stride;
    const typename T::item* up = gate + args.n;
    typename T::item* out = reinterpret_cast<typename T::item*>(args.out) + row * args.n;
    for (int64_t i = 0; i < args.n; i += kLanes) {
      const F g = read_some<T>(gate + i, args.n - i), u = read_some<T>(up + i, args.n - i);
      const F e = T::dtype == kF32 ? exp(zero() - g) : exp_short(minimum(zero() - g, splat(88.3f)));
      write_some<T>(out + i, g / (splat(1.0f) + e) * u, args.n - i);
    }
  }
}

void silu_mul(Pool& pool, const SiluMulArgs& args) {
  with_dtype(args.dtype, [&](auto t) {
    over_rows(pool, args.rows, args.rows * args.n, silu_mul_rows<decltype(t)>, &args);
  });
}

}  // namespace elementwise
