// Causal attention over paged K and V. Included only by `isa.cpp`.
//
// One item is a tile of consecutive query tokens of one sequence times one KV head; its rows are (token, query head of
// the group). Scores of 16 consecutive positions lie in 16 lanes, each summed over head_dim from first to last; the
// maximum is exact; exponentials are summed in 16 partials keyed by position mod 16, then by a fixed tree; V is
// accumulated from the first position to the last. None of it depends on block size, tile or batch, and a row only
// ever multiplies V of positions it attends to (or of 8 bits, by zero), so a row's bits are its own.

namespace attention {

#include "attention_tile.h"
#include "attention_math.h"
#include "attention_int8.h"
#include "attention_passes.h"

// The first position that a token attends to.
OCTAVO_INLINE int64_t first_seen(const AttentionArgs& args, int64_t position) {
  return args.sliding_window > 0 ? most(0, position - args.sliding_window + 1) : 0;
}

// Positions that a tile's rows attend to, from a multiple of 16 on.
struct Reach {
  int64_t base, end;

  Reach(const AttentionArgs& args, const Item& item) {
    base = first_seen(args, args.positions[item.token]) / kLanes * kLanes;
    end = args.positions[item.token + item.tokens - 1] + int64_t{1};
  }
  int64_t groups() const { return (end - base + kLanes - 1) / kLanes; }
};

// Writes where the first `count` groups of a tile lie; behind its last half stand copies of it.
void find_halves(const AttentionArgs& args, const Item& item, Reach reach, int64_t count, Half* halves) {
  const PagedKV& kv = args.kv;
  const int64_t size = item_size(kv.dtype);
  const int32_t* table = args.block_tables + item.sequence * args.block_table_stride;
  int64_t block = reach.base / kv.block_size, offset = reach.base % kv.block_size;
  for (int64_t h = 0; h < 2 * count; ++h) {
    if (reach.base + 8 * h >= reach.end) {
      halves[h] = halves[h - 1];
      continue;
    }
    const int64_t start = (table[block] * kv.block_stride + item.head * kv.head_stride) * size;
    Half& half = halves[h];
    half.k = kv.k + start + offset * size;
    half.v = kv.v + start + offset * kv.head_dim * size;
    half.k_scales = reinterpret_cast<const float*>(kv.k + start + kv.head_dim * kv.block_size) + offset;
    half.v_scales = reinterpret_cast<const float*>(kv.v + start + kv.head_dim * kv.block_size) + offset;
    offset += 8;
    if (offset == kv.block_size) {
      offset = 0;
      ++block;
    }
  }
}

// Lays out a tile in the thread's scratch memory. next: the item that the thread computes afterwards, or the same.
template <class T, class M>
Tile prepare(Pool& pool, const AttentionArgs& args, const Item& item, const Item& next, int thread) {
  const PagedKV& kv = args.kv;
  const int64_t group_heads = args.num_heads / kv.num_kv_heads;
  Tile tile;
  tile.args = &args;
  tile.rows = item.tokens * group_heads;
  const Reach reach(args, item);
  tile.base = reach.base;
  tile.groups = reach.groups();
  tile.ahead = least(kAhead, tile.groups);
  tile.q_stride = round_up(kv.head_dim, kLanes);
  tile.score_stride = tile.groups * kLanes + kLanes;  // a power of two would meet the same cache sets in every row
  tile.acc_stride = round_up(kv.head_dim, 4 * kLanes);
  tile.value_blocks = (tile.base % kValueBlock + tile.groups * kLanes + kValueBlock - 1) / kValueBlock;
  const int64_t num_halves = 2 * (tile.groups + tile.ahead);
  const int64_t row_bytes =
      4 * (tile.q_stride + tile.score_stride + tile.acc_stride + tile.value_blocks + kLanes + 16 + 6);
  const int64_t bytes = num_halves * int64_t{sizeof(Half)} + tile.rows * row_bytes + 10 * 64;
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
  tile.q_scales = reinterpret_cast<float*>(take(tile.rows * 4));
  tile.maxima = reinterpret_cast<float*>(take(tile.rows * kLanes * 4));
  tile.scores = reinterpret_cast<float*>(take(tile.rows * tile.score_stride * 4));
  tile.weight_scales = reinterpret_cast<float*>(take(tile.rows * tile.value_blocks * 4));
  tile.acc = reinterpret_cast<float*>(take(tile.rows * tile.acc_stride * 4));
  tile.sums = reinterpret_cast<float*>(take(tile.rows * 4));
  find_halves(args, item, reach, tile.groups, tile.halves);
  find_halves(args, next, Reach(args, next), tile.ahead, tile.halves + 2 * tile.groups);
  const typename T::item* q = reinterpret_cast<const typename T::item*>(args.q);
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t token = item.token + row / group_heads, head = item.head * group_heads + row % group_heads;
    const int64_t position = args.positions[token];
    tile.first[row] = first_seen(args, position) - tile.base;
    tile.last[row] = position + 1 - tile.base;
    const float q_scale =
        M::template write_query<T>(reinterpret_cast<typename M::Query*>(tile.q) + row * tile.q_stride,
                                   q + token * args.q_token_stride + head * kv.head_dim, kv.head_dim, tile.q_stride);
    tile.q_scales[row] = args.scale * q_scale;
  }
  // Rows are in the order of their positions, and so are the ends of what they attend to.
  const int64_t width = score_width(tile.rows <= kFewRows ? 1 : kRows);
  tile.shared_end = tile.last[0] / kLanes / width * width;
  tile.shared_begin = least(round_up((tile.first[tile.rows - 1] + kLanes - 1) / kLanes, width), tile.shared_end);
  for (int64_t row = 0; row < tile.rows; ++row) store(tile.maxima + row * kLanes, splat(-__builtin_inff()));
  for (int64_t i = 0; i < tile.rows * tile.acc_stride; i += kLanes) store(tile.acc + i, zero());
  return tile;
}

struct Context {
  const AttentionArgs* args;
  const Item* items;
  int64_t count;
  Pool* pool;
};

// T: the dtype of queries and outputs; M: how to multiply.
template <class T, class M>
void item(void* context, int64_t index, int thread) {
  const Context& job = *static_cast<const Context*>(context);
  const AttentionArgs& args = *job.args;
  const Item& item = job.items[index];
  const Item& next = job.items[least(index + 1, job.count - 1)];
  const Tile tile = prepare<T, M>(*job.pool, args, item, next, thread);
  if (args.kv.block_size % kLanes != 0) {
    weigh<M, kEight>(tile);
  } else if (M::kStep > 1 && args.kv.block_size == kSixteen) {
    weigh<M, (M::kStep > 1 ? kSixteen : kMore)>(tile);  // single rows know no difference
  } else {
    weigh<M, kMore>(tile);
  }
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
  Context context{&args, items, count, &pool};
  switch (args.kv.dtype) {
    case kI8:
      return with_dtype(args.dtype, [&](auto t) { pool.run(count, item<decltype(t), Integers>, &context); });
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
