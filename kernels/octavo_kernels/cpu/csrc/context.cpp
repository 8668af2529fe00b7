#include "context.h"

#include <cstdarg>
#include <cstdio>

namespace octavo {

thread_local std::string last_error;

void refuse(const char* format, ...) {
  char text[256];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  throw Refused{text};
}

void check_rotary_positions(const int32_t* positions, int64_t tokens, int64_t max_positions) {
  for (int64_t i = 0; i < tokens; ++i)
    if (positions[i] < 0 || positions[i] >= max_positions)
      refuse("position %d of token %lld is outside the rotary table of %lld positions", positions[i],
             static_cast<long long>(i), static_cast<long long>(max_positions));
}

void check_slots(const PagedKV& kv, const int32_t* slots, int64_t tokens) {
  const int64_t num_slots = kv.num_blocks * kv.block_size;
  for (int64_t i = 0; i < tokens; ++i)
    if (slots[i] < 0 || slots[i] >= num_slots)
      refuse("slot %d of token %lld is outside the pool of %lld slots", slots[i], static_cast<long long>(i),
             static_cast<long long>(num_slots));
}

void check_batch(const PagedKV& kv, int64_t tokens, int64_t sequences, const int32_t* positions,
                 const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                 int64_t table_stride, int64_t table_columns) {
  if (query_starts[0] != 0 || query_starts[sequences] != tokens)
    refuse("query_starts goes from %d to %d; it must go from 0 to the number of tokens, %lld", query_starts[0],
           query_starts[sequences], static_cast<long long>(tokens));
  for (int64_t s = 0; s < sequences; ++s) {
    const int number = static_cast<int>(s);
    if (query_starts[s + 1] < query_starts[s]) refuse("query_starts falls at sequence %d", number);
    for (int64_t t = query_starts[s]; t < query_starts[s + 1]; ++t) {
      if (positions[t] < 0 || positions[t] >= context_lens[s] ||
          (t > query_starts[s] && positions[t] != positions[t - 1] + 1))
        refuse("position %d of sequence %d does not follow the one before it inside its context of %d", positions[t],
               number, context_lens[s]);
    }
    const int64_t blocks = (context_lens[s] + kv.block_size - 1) / kv.block_size;
    if (blocks > table_columns)
      refuse("sequence %d has a context of %d; its block table holds %lld blocks", number, context_lens[s],
             static_cast<long long>(table_columns));
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t id = block_tables[s * table_stride + b];
      if (id < 0 || id >= kv.num_blocks)
        refuse("block %d of sequence %d is outside the pool of %lld blocks", id, number,
               static_cast<long long>(kv.num_blocks));
    }
  }
}

}  // namespace octavo
