// A decoder but for its head in one call: the ops of `api.cpp`, one behind the other, without a way back to Python
// between them. Values are those of the single ops to the bit.

#include <algorithm>
#include <cstring>
#include <vector>

#include "context.h"

namespace octavo {
namespace {

// Norms' weights are of `norm_dtype`; those of queries and keys are null where there are none.
struct DecoderLayer {
  const PackedLinear* qkv;
  const PackedLinear* output;
  const PackedLinear* gate_up;
  const PackedLinear* down;
  const void* input_norm;
  const void* mlp_norm;
  const void* q_norm;
  const void* k_norm;
  int64_t sliding_window;  // 0: none
};

struct Decoder {
  int32_t dtype;
  int32_t norm_dtype;
  int64_t hidden_size;
  int64_t inner_size;  // of the gated layer
  int64_t num_heads;
  float norm_eps;
  float scale;            // of attention
  const char* embedding;  // (vocab_size, hidden_size)
  int64_t vocab_size;
  const DecoderLayer* layers;
  int64_t num_layers;
  const void* last_norm;
};

struct DecoderPass {
  int64_t tokens;
  const int32_t* token_ids;
  const int32_t* rotary_positions;
  const float* cos_sin;
  int64_t max_positions;
  int64_t rotary_dim;
  const int32_t* positions;
  const int32_t* slots;
  int64_t sequences;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t table_stride;
  int64_t table_columns;
  const int64_t* wanted;  // the rows whose results are wanted, ascending
  int64_t wanted_count;   // -1: all
};

// One pass through some of the layers.
class Run {
 public:
  Run(Context& context, const Decoder& decoder, const DecoderPass& pass, const PagedKV& kv, char* x)
      : context_(context), decoder_(decoder), pass_(pass), kv_(kv), x_(x), item_size_(item_size(decoder.dtype)) {
    q_width_ = decoder.num_heads * kv.head_dim;
    kv_width_ = kv.num_kv_heads * kv.head_dim;
    const int64_t qkv_width = q_width_ + 2 * kv_width_;
    const int64_t widths[] = {decoder.hidden_size, qkv_width,              q_width_ + kv_width_,
                              q_width_,            2 * decoder.inner_size, decoder.inner_size};
    char** const places[] = {&h_, &qkv_, &normed_, &attended_, &gate_up_, &inner_};
    size_t bytes = 0;
    for (int64_t width : widths) bytes += room(width);
    char* memory = context.activations.grow(bytes);
    for (int i = 0; i < 6; ++i) {
      *places[i] = memory;
      memory += room(widths[i]);
    }
  }

  // x becomes the tokens' embeddings.
  void embed() {
    const size_t bytes = static_cast<size_t>(decoder_.hidden_size * item_size_);
    for (int64_t i = 0; i < pass_.tokens; ++i)
      std::memcpy(x_ + static_cast<size_t>(i) * bytes, decoder_.embedding + static_cast<size_t>(pass_.token_ids[i]) * bytes,
                  bytes);
  }

  // The rows of x that are wanted are normed behind the last layer.
  void end() {
    if (pass_.tokens > 0) norm(decoder_.last_norm, x_, x_);
  }

  // x becomes what the layer makes of it. Behind the last layer nobody asks for rows that are not wanted: behind their
  // K and V they are left out, and the others move up.
  void layer(const DecoderLayer& layer, const PagedKV& kv, bool is_last) {
    norm(layer.input_norm, x_, h_);
    linear(*layer.qkv, h_, nullptr, qkv_);
    const Queries q = place(layer, kv);
    if (is_last && pass_.wanted_count >= 0) keep_wanted(q);
    if (pass_.tokens == 0) return;
    attend(layer, kv, q);
    linear(*layer.output, attended_, x_, x_);
    norm(layer.mlp_norm, x_, h_);
    linear(*layer.gate_up, h_, nullptr, gate_up_);
    const SiluMulArgs silu{decoder_.dtype, gate_up_, pass_.tokens, 2 * decoder_.inner_size, decoder_.inner_size, inner_};
    context_.kernels->silu_mul(context_.pool, silu);
    linear(*layer.down, inner_, x_, x_);
  }

 private:
  struct Queries {
    char* rows;
    int64_t stride;  // in elements
  };

  size_t room(int64_t width) const { return static_cast<size_t>((pass_.tokens * width * item_size_ + 63) / 64 * 64); }

  void norm(const void* weight, const char* from, char* to) {
    const RmsNormArgs args{decoder_.dtype,
                           decoder_.norm_dtype,
                           from,
                           pass_.tokens,
                           decoder_.hidden_size,
                           1,
                           0,
                           decoder_.hidden_size,
                           static_cast<const char*>(weight),
                           decoder_.norm_eps,
                           to};
    context_.kernels->rms_norm(context_.pool, args);
  }

  // A residual may be where the result goes: what a register tile adds is read before the tile is written.
  void linear(const PackedLinear& layer, const char* from, const char* residual, char* to) {
    const LinearArgs args{&layer, from, layer.in_features, pass_.tokens, residual, layer.out_features, to};
    context_.linear(args);
  }

  // Norms and rotates queries and keys, and stores K and V.
  Queries place(const DecoderLayer& layer, const PagedKV& kv) {
    const int64_t qkv_width = q_width_ + 2 * kv_width_;
    char *q = qkv_, *k = qkv_ + q_width_ * item_size_;
    int64_t q_stride = qkv_width, k_stride = qkv_width;
    if (layer.q_norm == nullptr) {
      rotate(qkv_, qkv_width, decoder_.num_heads + kv.num_kv_heads);
    } else {
      q = normed_;
      k = normed_ + pass_.tokens * q_width_ * item_size_;
      head_norm(layer.q_norm, qkv_, decoder_.num_heads, q);
      head_norm(layer.k_norm, qkv_ + q_width_ * item_size_, kv.num_kv_heads, k);
      q_stride = q_width_;
      k_stride = kv_width_;
      rotate(q, q_stride, decoder_.num_heads);
      rotate(k, k_stride, kv.num_kv_heads);
    }
    const char* v = qkv_ + (q_width_ + kv_width_) * item_size_;
    const WriteKVArgs write{kv, k, v, pass_.tokens, k_stride, qkv_width, pass_.slots, decoder_.dtype};
    context_.kernels->write_kv(context_.pool, write);
    return {q, q_stride};
  }

  // Rows of x, queries and the columns that attention reads move to the front, in their order.
  void keep_wanted(const Queries& q) {
    const int64_t x_bytes = decoder_.hidden_size * item_size_, q_bytes = q_width_ * item_size_;
    const int64_t q_stride = q.stride * item_size_;
    positions_.resize(static_cast<size_t>(pass_.wanted_count));
    query_starts_.assign(static_cast<size_t>(pass_.sequences + 1), 0);
    int64_t sequence = 0;
    for (int64_t i = 0; i < pass_.wanted_count; ++i) {
      const int64_t row = pass_.wanted[i];
      for (; row >= pass_.query_starts[sequence + 1]; ++sequence)
        query_starts_[static_cast<size_t>(sequence + 1)] = static_cast<int32_t>(i);
      positions_[static_cast<size_t>(i)] = pass_.positions[row];
      if (row == i) continue;
      std::memcpy(x_ + i * x_bytes, x_ + row * x_bytes, static_cast<size_t>(x_bytes));
      std::memcpy(q.rows + i * q_stride, q.rows + row * q_stride, static_cast<size_t>(q_bytes));
    }
    for (; sequence < pass_.sequences; ++sequence)
      query_starts_[static_cast<size_t>(sequence + 1)] = static_cast<int32_t>(pass_.wanted_count);
    pass_.tokens = pass_.wanted_count;
    pass_.positions = positions_.data();
    pass_.query_starts = query_starts_.data();
  }

  void attend(const DecoderLayer& layer, const PagedKV& kv, const Queries& q) {
    const AttentionArgs attention{kv,
                                  q.rows,
                                  q.stride,
                                  pass_.tokens,
                                  decoder_.num_heads,
                                  pass_.sequences,
                                  pass_.positions,
                                  pass_.query_starts,
                                  pass_.block_tables,
                                  pass_.table_stride,
                                  decoder_.scale,
                                  layer.sliding_window,
                                  attended_,
                                  decoder_.dtype};
    context_.kernels->paged_attention(context_.pool, attention);
  }

  void head_norm(const void* weight, const char* from, int64_t heads, char* to) {
    const RmsNormArgs args{decoder_.dtype,       decoder_.norm_dtype,
                           from,               pass_.tokens,
                           q_width_ + 2 * kv_width_, heads,
                           kv_.head_dim,       kv_.head_dim,
                           static_cast<const char*>(weight), decoder_.norm_eps,
                           to};
    context_.kernels->rms_norm(context_.pool, args);
  }

  void rotate(char* x, int64_t stride, int64_t heads) {
    const RotaryArgs args{decoder_.dtype, x, pass_.tokens, stride, heads, kv_.head_dim, pass_.rotary_positions,
                          pass_.cos_sin, pass_.rotary_dim};
    context_.kernels->rotary(context_.pool, args);
  }

  Context& context_;
  const Decoder& decoder_;
  DecoderPass pass_;
  const PagedKV& kv_;
  char* const x_;
  const int64_t item_size_;
  int64_t q_width_, kv_width_;
  std::vector<int32_t> positions_, query_starts_;  // of what is wanted
  char *h_, *qkv_, *normed_, *attended_, *gate_up_, *inner_;
};

void check_tokens(const Decoder& decoder, const DecoderPass& pass) {
  for (int64_t i = 0; i < pass.tokens; ++i)
    if (pass.token_ids[i] < 0 || pass.token_ids[i] >= decoder.vocab_size)
      refuse("token_ids[%lld] is %d; the embedding has %lld rows", static_cast<long long>(i), pass.token_ids[i],
             static_cast<long long>(decoder.vocab_size));
}

void check_wanted(const DecoderPass& pass) {
  for (int64_t i = 0; i < pass.wanted_count; ++i)
    if (pass.wanted[i] < (i == 0 ? 0 : pass.wanted[i - 1] + 1) || pass.wanted[i] >= pass.tokens)
      refuse("rows[%lld] is %lld; rows must ascend and be below the number of tokens, %lld", static_cast<long long>(i),
             static_cast<long long>(pass.wanted[i]), static_cast<long long>(pass.tokens));
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Computes `count` layers from the first one given on, over contiguous rows x, in place, and writes their K and V. The
// paged K and V of all of them, kv, have one shape; the layers' widths are the caller's to check. The first layer is
// given the tokens' embeddings; behind the last one x is normed, and has just the wanted rows at its front.
OCTAVO_API int32_t octavo_decoder_layers(void* context, const Decoder* decoder, const PagedKV* kv, int64_t first,
                                         int64_t count, const DecoderPass* pass, void* x) {
  return guarded([&] {
    Context& ctx = *static_cast<Context*>(context);
    check_rotary_positions(pass->rotary_positions, pass->tokens, pass->max_positions);
    check_slots(*kv, pass->slots, pass->tokens);
    check_batch(*kv, pass->tokens, pass->sequences, pass->positions, pass->query_starts, pass->context_lens,
                pass->block_tables, pass->table_stride, pass->table_columns);
    check_wanted(*pass);
    check_tokens(*decoder, *pass);
    Pool::Session session(ctx.pool);
    Run run(ctx, *decoder, *pass, *kv, static_cast<char*>(x));
    if (first == 0) run.embed();
    for (int64_t i = first; i < first + count; ++i) run.layer(decoder->layers[i], kv[i], i + 1 == decoder->num_layers);
    if (first + count == decoder->num_layers) run.end();
  });
}
