// The C interface that Python loads with ctypes: checks what a wrong caller could get wrong, picks the instruction
// set, owns pools and packed layers. Functions return 0, or a Status with a message in octavo_last_error().

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "arena.h"
#include "context.h"

namespace octavo {
namespace {

constexpr int32_t kInterfaceVersion = 7;

// From the most to the least capable.
const Kernels* const kAllKernels[] = {
#if defined(__x86_64__)
    &kernels_avx512_bf16,
    &kernels_avx512_vnni,
    &kernels_avx512,
    &kernels_avx2_vnni,
    &kernels_avx2,
#endif
    &kernels_generic,
};

bool runs_here(const Kernels* kernels) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (kernels == &kernels_avx512_bf16) return avx512_vnni && __builtin_cpu_supports("avx512bf16");
  if (kernels == &kernels_avx512_vnni) return avx512_vnni;
  if (kernels == &kernels_avx512) return avx512;
  if (kernels == &kernels_avx2_vnni) return avx2 && __builtin_cpu_supports("avxvnni");
  if (kernels == &kernels_avx2) return avx2;
#endif
  return kernels == &kernels_generic;
}

struct PackJob {
  PackedLinear* layer;
  const char* weight;
  int64_t stride;
};

template <class Item, bool PAIRS>
void pack_panel(void* context, int64_t panel, int) {
  const PackJob& job = *static_cast<const PackJob*>(context);
  const PackedLinear& layer = *job.layer;
  Item* to = reinterpret_cast<Item*>(layer.data + panel * layer.panel_bytes);
  const int64_t first = panel * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, layer.out_features - first);
  for (int64_t j = 0; j < columns; ++j) {
    const Item* from = reinterpret_cast<const Item*>(job.weight) + (first + j) * job.stride;
    for (int64_t k = 0; k < layer.in_features; ++k)
      to[PAIRS ? (k / 2 * kPanelColumns + j) * 2 + k % 2 : k * kPanelColumns + j] = from[k];
  }
}

// Quantizes each output column: its scale is its largest magnitude over 127, its values round to nearest even. A
// column that is nothing but zeros (or next to it) gets scale 0; one that is not finite gets scale NaN.
void pack_panel_int8(void* context, int64_t panel, int) {
  const PackJob& job = *static_cast<const PackJob*>(context);
  const PackedLinear& layer = *job.layer;
  uint8_t* to = reinterpret_cast<uint8_t*>(layer.data + panel * layer.panel_bytes);
  std::memset(to, 128, static_cast<size_t>(layer.panel_bytes));
  const int64_t first = panel * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, layer.out_features - first);
  for (int64_t j = 0; j < columns; ++j) {
    const float* from = reinterpret_cast<const float*>(job.weight) + (first + j) * job.stride;
    uint32_t top = 0;  // magnitudes compare as integers, NaN above all
    for (int64_t k = 0; k < layer.in_features; ++k) {
      uint32_t bits;
      std::memcpy(&bits, from + k, sizeof bits);
      top = std::max(top, bits & 0x7fffffffu);
    }
    float magnitude;
    std::memcpy(&magnitude, &top, sizeof magnitude);
    if (top >= 0x7f800000u) {
      layer.scales[first + j] = __builtin_nanf("");
    } else if (magnitude >= 0x1p-100f) {
      layer.scales[first + j] = magnitude / 127.0f;
      const float inverse = 127.0f / magnitude;
      for (int64_t k = 0; k < layer.in_features; ++k) {
        const float shifted = from[k] * inverse + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
        uint32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        to[(k / 4 * kPanelColumns + j) * 4 + k % 4] = static_cast<uint8_t>(bits + 128);  // its low byte is the integer
      }
    }
  }
}

struct PackInt4Job {
  PackedLinear* layer;
  const uint8_t* integers;   // (out_features, in_features), 0..15
  const uint16_t* scales;    // (out_features, groups), fp16
  const uint16_t* minimums;  // as scales
};

void pack_panel_int4(void* context, int64_t panel, int) {
  const PackInt4Job& job = *static_cast<const PackInt4Job*>(context);
  const PackedLinear& layer = *job.layer;
  const int64_t groups = layer.panel_bytes / kInt4GroupBytes;
  const int64_t first = panel * kPanelColumns;
  const int64_t columns = std::min(kPanelColumns, layer.out_features - first);
  for (int64_t j = 0; j < columns; ++j) {
    const uint8_t* from = job.integers + (first + j) * layer.in_features;
    for (int64_t g = 0; g < groups; ++g) {
      char* group = layer.data + panel * layer.panel_bytes + g * kInt4GroupBytes;
      uint16_t* numbers = reinterpret_cast<uint16_t*>(group);
      numbers[j] = job.scales[(first + j) * groups + g];
      numbers[kPanelColumns + j] = job.minimums[(first + j) * groups + g];
      uint8_t* to = reinterpret_cast<uint8_t*>(numbers + 2 * kPanelColumns);
      const int64_t count = std::min(kInt4Group, layer.in_features - g * kInt4Group);
      for (int64_t k = 0; k < count; ++k) {
        const int half = from[g * kInt4Group + k] & 15;
        to[(k / 8 * kPanelColumns + j) * 4 + k % 4] |= static_cast<uint8_t>(k % 8 < 4 ? half : half << 4);
      }
    }
  }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

OCTAVO_API int32_t octavo_interface_version() { return kInterfaceVersion; }

OCTAVO_API const char* octavo_last_error() { return last_error.c_str(); }

// The name of the i-th instruction set that this machine runs, most capable first; null beyond the last.
OCTAVO_API const char* octavo_isa(int32_t index) {
  for (const Kernels* kernels : kAllKernels)
    if (runs_here(kernels) && index-- == 0) return kernels->name;
  return nullptr;
}

OCTAVO_API int32_t octavo_context_create(const char* isa, int32_t num_threads, int64_t spin_us, void** out) {
  return guarded([&] {
    for (const Kernels* kernels : kAllKernels) {
      if (std::strcmp(kernels->name, isa) != 0) continue;
      if (!runs_here(kernels)) refuse("this machine does not run %s", isa);
      if (num_threads < 1) refuse("num_threads is %d; it must be at least 1", num_threads);
      *out = new Context(kernels, num_threads, spin_us);
      return;
    }
    refuse("unknown instruction set %s", isa);
  });
}

OCTAVO_API void octavo_context_destroy(void* context) { delete static_cast<Context*>(context); }

OCTAVO_API int32_t octavo_linear_create(void* context, int32_t dtype, int32_t out_dtype, const void* weight,
                                        int64_t stride, int64_t out_features, int64_t in_features, const float* bias,
                                        void** out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    std::unique_ptr<PackedLinear> layer(new PackedLinear{});
    layer->dtype = dtype;
    layer->out_dtype = out_dtype;
    layer->in_features = in_features;
    layer->out_features = out_features;
    layer->num_panels = (out_features + kPanelColumns - 1) / kPanelColumns;
    const int64_t rows = dtype == kBF16 ? (in_features + 1) / 2 * 2 : in_features;
    layer->panel_bytes = rows * kPanelColumns * item_size(dtype);
    const int64_t bias_bytes = bias == nullptr ? 0 : layer->num_panels * kPanelColumns * int64_t{sizeof(float)};
    layer->data = static_cast<char*>(arena_allocate(static_cast<size_t>(layer->num_panels * layer->panel_bytes + bias_bytes)));
    if (bias != nullptr) {
      layer->bias = reinterpret_cast<float*>(layer->data + layer->num_panels * layer->panel_bytes);
      std::memcpy(layer->bias, bias, static_cast<size_t>(out_features) * sizeof(float));
    }
    PackJob job{layer.get(), static_cast<const char*>(weight), stride};
    Pool::Session session(ctx.pool);
    ItemFunction pack = dtype == kF32 ? pack_panel<uint32_t, false> : pack_panel<uint16_t, false>;
    if (dtype == kBF16) pack = pack_panel<uint16_t, true>;
    ctx.pool.run(layer->num_panels, pack, &job);
    *out = layer.release();
  });
}

// Quantizes fp32 weights to 8 bits. dtype: of the activations; group: see PackedLinear.
OCTAVO_API int32_t octavo_linear_create_int8(void* context, int32_t dtype, int32_t out_dtype, const void* weight,
                                             int64_t stride, int64_t out_features, int64_t in_features,
                                             const float* bias, int64_t group, void** out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    if (group < 64 || group % 64 != 0)
      refuse("group is %lld; it must be a multiple of 64", static_cast<long long>(group));
    // Sums of int32: 131,072 * 127 * 127 is just below 2^31.
    if (std::min(in_features, group) > 131072)
      refuse("in_features is %lld; 8-bit layers sum at most 131072", static_cast<long long>(in_features));
    std::unique_ptr<PackedLinear> layer(new PackedLinear{});
    layer->dtype = dtype;
    layer->out_dtype = out_dtype;
    layer->in_features = in_features;
    layer->out_features = out_features;
    layer->bits = 8;
    layer->group = group;
    layer->num_panels = (out_features + kPanelColumns - 1) / kPanelColumns;
    layer->panel_bytes = (in_features + 3) / 4 * 4 * kPanelColumns;
    const int64_t weight_bytes = layer->num_panels * layer->panel_bytes;
    const int64_t column_bytes = layer->num_panels * kPanelColumns * int64_t{sizeof(float)};
    layer->data = static_cast<char*>(
        arena_allocate(static_cast<size_t>(weight_bytes + (bias == nullptr ? 1 : 2) * column_bytes)));
    layer->scales = reinterpret_cast<float*>(layer->data + weight_bytes);
    if (bias != nullptr) {
      layer->bias = reinterpret_cast<float*>(layer->data + weight_bytes + column_bytes);
      std::memcpy(layer->bias, bias, static_cast<size_t>(out_features) * sizeof(float));
    }
    PackJob job{layer.get(), static_cast<const char*>(weight), stride};
    Pool::Session session(ctx.pool);
    ctx.pool.run(layer->num_panels, pack_panel_int8, &job);
    *out = layer.release();
  });
}

// Packs weights of 4 bits. dtype: of the activations; the others: see PackInt4Job, without gaps.
OCTAVO_API int32_t octavo_linear_create_int4(void* context, int32_t dtype, int32_t out_dtype,
                                             const uint8_t* integers, const uint16_t* scales,
                                             const uint16_t* minimums, int64_t out_features, int64_t in_features,
                                             const float* bias, void** out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    std::unique_ptr<PackedLinear> layer(new PackedLinear{});
    layer->dtype = dtype;
    layer->out_dtype = out_dtype;
    layer->bits = 4;
    layer->in_features = in_features;
    layer->out_features = out_features;
    layer->num_panels = (out_features + kPanelColumns - 1) / kPanelColumns;
    layer->panel_bytes = (in_features + kInt4Group - 1) / kInt4Group * kInt4GroupBytes;
    const int64_t weight_bytes = layer->num_panels * layer->panel_bytes;
    const int64_t bias_bytes = bias == nullptr ? 0 : layer->num_panels * kPanelColumns * int64_t{sizeof(float)};
    layer->data = static_cast<char*>(arena_allocate(static_cast<size_t>(weight_bytes + bias_bytes)));
    if (bias != nullptr) {
      layer->bias = reinterpret_cast<float*>(layer->data + weight_bytes);
      std::memcpy(layer->bias, bias, static_cast<size_t>(out_features) * sizeof(float));
    }
    PackInt4Job job{layer.get(), integers, scales, minimums};
    Pool::Session session(ctx.pool);
    ctx.pool.run(layer->num_panels, pack_panel_int4, &job);
    *out = layer.release();
  });
}

OCTAVO_API void octavo_linear_destroy(void* linear) {
  PackedLinear* layer = static_cast<PackedLinear*>(linear);
  arena_free(layer->data);
  delete layer;
}

OCTAVO_API int32_t octavo_linear(void* context, void* linear, const void* x, int64_t x_stride, int64_t rows,
                                 const void* residual, int64_t residual_stride, void* out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    const LinearArgs args{static_cast<const PackedLinear*>(linear), static_cast<const char*>(x), x_stride, rows,
                          static_cast<const char*>(residual), residual_stride, static_cast<char*>(out)};
    Pool::Session session(ctx.pool);
    ctx.linear(args);
  });
}

// The column of the greatest result in each row, the lowest of several; -1 where there is a NaN or the greatest is not
// finite. Results are those of octavo_linear for a layer that gives fp32, and stay where they are made.
OCTAVO_API int32_t octavo_linear_argmax(void* context, void* linear, const void* x, int64_t x_stride, int64_t rows,
                                        int64_t* out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    const PackedLinear& layer = *static_cast<const PackedLinear*>(linear);
    Pool::Session session(ctx.pool);
    const size_t count = static_cast<size_t>(rows * layer.num_panels);
    char* memory = ctx.activations.grow(count * sizeof(Winner) + static_cast<size_t>(rows) * sizeof(float));
    const Winners winners{reinterpret_cast<Winner*>(memory),
                          reinterpret_cast<float*>(memory + count * sizeof(Winner))};
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    std::fill_n(winners.panels, count, Winner{kLowest, 0});
    std::fill_n(winners.bests, rows, kLowest);
    ctx.linear({&layer, static_cast<const char*>(x), x_stride, rows, nullptr, 0, nullptr, &winners});
    struct Job {
      const Winner* winners;
      int64_t panels;
      int64_t* out;
    } job{winners.panels, layer.num_panels, out};
    ctx.pool.run(
        rows,
        [](void* of, int64_t row, int) {
          const Job& job = *static_cast<const Job*>(of);
          const Winner* winners = job.winners + row * job.panels;
          Winner best = winners[0];
          for (int64_t panel = 1; panel < job.panels; ++panel)
            if (!(winners[panel].value <= best.value || std::isnan(best.value))) best = winners[panel];
          job.out[row] = std::isfinite(best.value) ? best.column : -1;
        },
        &job);
  });
}

OCTAVO_API int32_t octavo_rms_norm(void* context, int32_t dtype, int32_t weight_dtype, const void* x, int64_t outer,
                                   int64_t outer_stride, int64_t inner, int64_t inner_stride, int64_t n,
                                   const void* weight, float eps, void* out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    const RmsNormArgs args{dtype, weight_dtype, static_cast<const char*>(x), outer, outer_stride, inner, inner_stride,
                           n, static_cast<const char*>(weight), eps, static_cast<char*>(out)};
    Pool::Session session(ctx.pool);
    ctx.kernels->rms_norm(ctx.pool, args);
  });
}

OCTAVO_API int32_t octavo_rotary(void* context, int32_t dtype, void* x, int64_t tokens, int64_t token_stride,
                                 int64_t heads, int64_t head_stride, const int32_t* positions, const float* cos_sin,
                                 int64_t max_positions, int64_t rotary_dim) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    check_rotary_positions(positions, tokens, max_positions);
    const RotaryArgs args{dtype, static_cast<char*>(x), tokens, token_stride, heads, head_stride, positions, cos_sin,
                          rotary_dim};
    Pool::Session session(ctx.pool);
    ctx.kernels->rotary(ctx.pool, args);
  });
}

OCTAVO_API int32_t octavo_silu_mul(void* context, int32_t dtype, const void* gate_up, int64_t rows, int64_t row_stride,
                                   int64_t n, void* out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    const SiluMulArgs args{dtype, static_cast<const char*>(gate_up), rows, row_stride, n, static_cast<char*>(out)};
    Pool::Session session(ctx.pool);
    ctx.kernels->silu_mul(ctx.pool, args);
  });
}

// dtype: of k and v.
OCTAVO_API int32_t octavo_write_kv(void* context, const PagedKV* kv, int32_t dtype, const void* k, int64_t k_stride,
                                   const void* v, int64_t v_stride, const int32_t* slots, int64_t tokens) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    check_slots(*kv, slots, tokens);
    const WriteKVArgs args{*kv, static_cast<const char*>(k), static_cast<const char*>(v), tokens, k_stride, v_stride,
                           slots, dtype};
    Pool::Session session(ctx.pool);
    ctx.kernels->write_kv(ctx.pool, args);
  });
}

// dtype: of q and out.
OCTAVO_API int32_t octavo_paged_attention(void* context, const PagedKV* kv, int32_t dtype, const void* q,
                                          int64_t q_stride, int64_t tokens, int64_t heads, int64_t sequences,
                                          const int32_t* positions, const int32_t* query_starts,
                                          const int32_t* context_lens, const int32_t* block_tables,
                                          int64_t table_stride, int64_t table_columns, float scale,
                                          int64_t sliding_window, void* out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    check_batch(*kv, tokens, sequences, positions, query_starts, context_lens, block_tables, table_stride,
                table_columns);
    const AttentionArgs args{*kv,       static_cast<const char*>(q), q_stride,     tokens, heads,          sequences,
                             positions, query_starts,                block_tables, table_stride, scale, sliding_window,
                             static_cast<char*>(out), dtype};
    Pool::Session session(ctx.pool);
    ctx.kernels->paged_attention(ctx.pool, args);
  });
}

OCTAVO_API int32_t octavo_gumbel_argmax(void* context, const float* logits, int64_t rows, int64_t row_stride,
                                        int64_t vocab, const float* temperatures, const int64_t* seeds,
                                        const int64_t* positions, int64_t* out) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    for (int64_t i = 0; i < rows; ++i)
      if (!(temperatures[i] >= 0.0f))
        refuse("temperature %g of row %lld is negative or not a number", static_cast<double>(temperatures[i]),
               static_cast<long long>(i));
    const GumbelArgs args{logits, rows, row_stride, vocab, temperatures, seeds, positions, out};
    Pool::Session session(ctx.pool);
    ctx.kernels->gumbel_argmax(ctx.pool, args);
  });
}

namespace {
struct BanJob {
  float* logits;
  int64_t row_stride;
  int64_t vocab;
  const int64_t* rows;
  const uint32_t* masks;
  int64_t words;
};

// Most words of a mask allow everything or nothing.
void ban_row(void* context, int64_t index, int) {
  const BanJob& job = *static_cast<const BanJob*>(context);
  float* row = job.logits + job.rows[index] * job.row_stride;
  const uint32_t* mask = job.masks + index * job.words;
  for (int64_t first = 0; first < job.vocab; first += 32) {
    const uint32_t word = mask[first / 32];
    if (word == 0xffffffffu) continue;
    const int64_t count = std::min<int64_t>(32, job.vocab - first);
    if (word == 0) {
      std::fill_n(row + first, count, -__builtin_inff());
      continue;
    }
    for (int64_t bit = 0; bit < count; ++bit)
      if ((word >> bit & 1) == 0) row[first + bit] = -__builtin_inff();
  }
}
}  // namespace

OCTAVO_API int32_t octavo_ban_tokens(void* context, float* logits, int64_t num_rows, int64_t row_stride, int64_t vocab,
                                     const int64_t* rows, int64_t count, const uint32_t* masks, int64_t words) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    for (int64_t i = 0; i < count; ++i)
      if (rows[i] < 0 || rows[i] >= num_rows)
        refuse("row %lld is outside 0..%lld", static_cast<long long>(rows[i]), static_cast<long long>(num_rows - 1));
    BanJob job{logits, row_stride, vocab, rows, masks, words};
    Pool::Session session(ctx.pool);
    ctx.pool.run(count, ban_row, &job);
  });
}

namespace {
struct MoveJob {
  const char* source;
  const int64_t* source_blocks;
  char* target;
  const int64_t* target_blocks;
  int64_t block_bytes;
};

void move_block(void* context, int64_t i, int) {
  const MoveJob& job = *static_cast<const MoveJob*>(context);
  std::memcpy(job.target + job.target_blocks[i] * job.block_bytes, job.source + job.source_blocks[i] * job.block_bytes,
              static_cast<size_t>(job.block_bytes));
}
}  // namespace

OCTAVO_API int32_t octavo_move_blocks(void* context, const void* source, int64_t num_source_blocks,
                                      const int64_t* source_blocks, void* target, int64_t num_target_blocks,
                                      const int64_t* target_blocks, int64_t count, int64_t block_bytes) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    for (int64_t i = 0; i < count; ++i) {
      if (source_blocks[i] < 0 || source_blocks[i] >= num_source_blocks)
        refuse("source block %lld is outside the pool of %lld blocks", static_cast<long long>(source_blocks[i]),
               static_cast<long long>(num_source_blocks));
      if (target_blocks[i] < 0 || target_blocks[i] >= num_target_blocks)
        refuse("target block %lld is outside the pool of %lld blocks", static_cast<long long>(target_blocks[i]),
               static_cast<long long>(num_target_blocks));
    }
    MoveJob job{static_cast<const char*>(source), source_blocks, static_cast<char*>(target), target_blocks,
                block_bytes};
    Pool::Session session(ctx.pool);
    if (count * block_bytes < (256 << 10)) {
      for (int64_t i = 0; i < count; ++i) move_block(&job, i, 0);
    } else {
      ctx.pool.run(count, move_block, &job);
    }
  });
}
