// The write into the paged cache, as it comes or quantized to 8 bits. Included only by `isa.cpp`, behind
// `elementwise.h` and `linear_int8.h`.

namespace elementwise {

template <class Item>
void write_kv_rows(const void* context, int64_t first, int64_t last) {
  const WriteKVArgs& args = *static_cast<const WriteKVArgs*>(context);
  const PagedKV& kv = args.kv;
  for (int64_t token = first; token < last; ++token) {
    const int64_t block = args.slots[token] / kv.block_size, offset = args.slots[token] % kv.block_size;
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
      const Item* k = reinterpret_cast<const Item*>(args.k) + token * args.k_token_stride + head * kv.head_dim;
      const Item* v = reinterpret_cast<const Item*>(args.v) + token * args.v_token_stride + head * kv.head_dim;
      const int64_t tile = block * kv.block_stride + head * kv.head_stride;
      Item* k_tile = reinterpret_cast<Item*>(kv.k) + tile + offset;
      Item* v_row = reinterpret_cast<Item*>(kv.v) + tile + offset * kv.head_dim;
      for (int64_t d = 0; d < kv.head_dim; ++d) k_tile[d * kv.block_size] = k[d];
      __builtin_memcpy(v_row, v, static_cast<size_t>(kv.head_dim) * sizeof(Item));
    }
  }
}

// Signed bytes, for linear_int8::quantize_group.
struct ByteWriter {
  typedef int8_t item;
  static OCTAVO_INLINE void write(item* to, U values) {
#if OCTAVO_VECTOR_BYTES >= 32
    linear_int8::Bytes::write(to, values);
#else
    uint32_t lanes[kLanes];
    store_u(lanes, values);
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<item>(lanes[i]);
#endif
  }
};

template <class T>
void write_int8_kv_rows(const void* context, int64_t first, int64_t last) {
  const WriteKVArgs& args = *static_cast<const WriteKVArgs*>(context);
  const PagedKV& kv = args.kv;
  const int64_t tile_bytes = kv.head_dim * kv.block_size;
  int8_t values[kMostInt8HeadDim];
  float scale;
  int32_t sum;
  const auto quantize = [&](const char* x, int64_t index) {
    linear_int8::quantize_group<T, ByteWriter>(reinterpret_cast<const typename T::item*>(x) + index, kv.head_dim,
                                               values, &scale, &sum);
  };
  for (int64_t token = first; token < last; ++token) {
    const int64_t block = args.slots[token] / kv.block_size, offset = args.slots[token] % kv.block_size;
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
      const int64_t tile = block * kv.block_stride + head * kv.head_stride;
      quantize(args.k, token * args.k_token_stride + head * kv.head_dim);
      for (int64_t d = 0; d < kv.head_dim; ++d) kv.k[tile + d * kv.block_size + offset] = values[d];
      reinterpret_cast<float*>(kv.k + tile + tile_bytes)[offset] = scale;
      quantize(args.v, token * args.v_token_stride + head * kv.head_dim);
      __builtin_memcpy(kv.v + tile + offset * kv.head_dim, values, static_cast<size_t>(kv.head_dim));
      reinterpret_cast<float*>(kv.v + tile + tile_bytes)[offset] = scale;
    }
  }
}

void write_kv(Pool& pool, const WriteKVArgs& args) {
  const int64_t elements = args.tokens * args.kv.num_kv_heads * args.kv.head_dim;
  if (args.kv.dtype == kI8) {
    with_dtype(args.dtype, [&](auto t) {
      over_rows(pool, args.tokens, elements, write_int8_kv_rows<decltype(t)>, &args);
    });
  } else if (args.kv.dtype == kF32) {
    over_rows(pool, args.tokens, elements, write_kv_rows<uint32_t>, &args);
  } else {
    over_rows(pool, args.tokens, elements, write_kv_rows<uint16_t>, &args);
  }
}

}  // namespace elementwise
