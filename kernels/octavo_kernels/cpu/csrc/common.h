// What every translation unit shares: dtypes, the argument blocks of the ops, and the table of kernels that one
// instruction set provides. Kernels trust their arguments; `api.cpp` checks them.
#pragma once

#include <cstdint>

namespace octavo {

class Pool;

enum DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kI8 = 3 };

inline int64_t item_size(int32_t dtype) { return dtype == kF32 ? 4 : dtype == kI8 ? 1 : 2; }

// Columns of one packed panel: three vectors of 16.
constexpr int64_t kPanelColumns = 48;
// Longest head whose K and V may be of 8 bits: sums of 16-bit queries and 8-bit keys fit into 32 bits.
constexpr int64_t kMostInt8HeadDim = 512;

// K that share a scale and a minimum in weights of 4 bits, and their bytes in a panel.
constexpr int64_t kInt4Group = 32;
constexpr int64_t kInt4GroupBytes = kPanelColumns * (2 * 2 + kInt4Group / 2);

// Weights of one linear layer in panels of 48 columns, zero-padded.
//   f32, f16: panel[k][48]            bf16: panel[k / 2][48][k % 2]
//   8 bits: panel[k / 4][48][k % 4], unsigned and 128 too large, times `scales` of the column
//   4 bits: for every 32 of K, panel[k / 32]: fp16 scales[48] and minimums[48], then bytes [k % 32 / 8][48][k % 4],
//           whose low halves have k % 8 < 4; a weight is scale times 0..15 plus minimum
struct PackedLinear {
  int32_t dtype;      // of activations, and of weights of no fewer bits
  int32_t out_dtype;  // of results: dtype or fp32
  int32_t bits;       // of weights: 8, 4, or 0 where they are of `dtype`
  int64_t in_features;
  int64_t out_features;
  int64_t num_panels;
  int64_t panel_bytes;
  char* data;
  float* bias;    // null, or num_panels * 48, zero-padded
  float* scales;  // weights of 8 bits: num_panels * 48, zero-padded
  int64_t group;  // weights of 8 bits: K that share a scale of the activations, a multiple of 64
};

// The greatest result of a row in one panel, NaN where one of them is, and the lowest column that has it. Where none of
// the panel can be the greatest of the row: something less.
struct Winner {
  float value;
  int32_t column;
};

// Where the greatest results of a linear layer's rows are written. bests: what was found of each row so far, by any
// thread, or less: a panel whose results are all below it need not write any.
struct Winners {
  Winner* panels;  // rows x num_panels
  float* bests;    // rows
};

struct LinearArgs {
  const PackedLinear* layer;
  const char* x;  // rows of the layer's dtype
  int64_t x_stride;
  int64_t rows;
  const char* residual;  // null, or rows of the layer's dtype, which is out_dtype then
  int64_t residual_stride;
  char* out;               // contiguous; null where winners are wanted
  const Winners* winners;  // null, or where these are written instead of results
};

// Rows are (outer, inner) pairs, so that the heads of a strided projection need no copy. `out` is contiguous.
struct RmsNormArgs {
  int32_t dtype;
  int32_t weight_dtype;
  const char* x;
  int64_t outer, outer_stride, inner, inner_stride;
  int64_t n;
  const char* weight;
  float eps;
  char* out;
};

struct RotaryArgs {
  int32_t dtype;
  char* x;
  int64_t tokens, token_stride, heads, head_stride;
  const int32_t* positions;
  const float* cos_sin;
  int64_t rotary_dim;
};

struct SiluMulArgs {
  int32_t dtype;
  const char* gate_up;
  int64_t rows, row_stride, n;
  char* out;
};

// Strides are in elements. K of a (block, head) is (head_dim, block_size), V is (block_size, head_dim), contiguous. Of
// 8 bits, each is followed by the fp32 scales of its block_size positions.
struct PagedKV {
  int32_t dtype;
  char* k;
  char* v;
  int64_t block_stride, head_stride;
  int64_t num_blocks, num_kv_heads, head_dim, block_size;
};

struct WriteKVArgs {
  PagedKV kv;
  const char* k;
  const char* v;
  int64_t tokens, k_token_stride, v_token_stride;
  const int32_t* slots;
  int32_t dtype;  // of k and v given, where the cache's is kI8
};

struct AttentionArgs {
  PagedKV kv;
  const char* q;
  int64_t q_token_stride;
  int64_t num_tokens, num_heads, num_sequences;
  const int32_t* positions;
  const int32_t* query_starts;
  const int32_t* block_tables;
  int64_t block_table_stride;
  float scale;
  int64_t sliding_window;  // 0: none
  char* out;
  int32_t dtype;  // of q and out, where the cache's is kI8
};

struct GumbelArgs {
  const float* logits;
  int64_t rows, row_stride, vocab;
  const float* temperatures;
  const int64_t* seeds;
  const int64_t* positions;
  int64_t* out;
};

// The ops of one instruction set.
struct Kernels {
  const char* name;
  void (*linear)(Pool&, const LinearArgs&);
  void (*linear_int8)(Pool&, const LinearArgs&);
  void (*linear_int4)(Pool&, const LinearArgs&);
  void (*rms_norm)(Pool&, const RmsNormArgs&);
  void (*rotary)(Pool&, const RotaryArgs&);
  void (*silu_mul)(Pool&, const SiluMulArgs&);
  void (*write_kv)(Pool&, const WriteKVArgs&);
  void (*paged_attention)(Pool&, const AttentionArgs&);
  void (*gumbel_argmax)(Pool&, const GumbelArgs&);
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx2_vnni;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512_vnni;
extern const Kernels kernels_avx512_bf16;
#endif

}  // namespace octavo
