// The kernels for one instruction set. Compiled once for each, with OCTAVO_ISA naming the namespace and the table and
// flags that let the compiler use it. Everything lies in that namespace: an inline function shared between units
// would be merged by the linker into whichever version it met first.

#include "common.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define OCTAVO_JOIN(a, b) a##b
#define OCTAVO_TABLE(isa) OCTAVO_JOIN(kernels_, isa)
#define OCTAVO_TEXT(a) #a
#define OCTAVO_NAME(isa) OCTAVO_TEXT(isa)

namespace octavo {
namespace OCTAVO_ISA {
namespace {

#include "simd.h"

#include "elementwise.h"
#include "linear.h"
#include "linear_int8.h"
#include "linear_int4.h"

#include "attention.h"
#include "write_kv.h"
#include "sampling.h"

}  // namespace
}  // namespace OCTAVO_ISA

// One table; INT8 and INT4 are the arithmetic of layers with weights of 8 and of 4 bits.
#define OCTAVO_KERNELS(NAME, INT8, INT4)                                                                          \
  {                                                                                                               \
      OCTAVO_NAME(NAME), OCTAVO_ISA::linear::run, OCTAVO_ISA::linear_int8::run<OCTAVO_ISA::linear_int8::INT8>,    \
      OCTAVO_ISA::linear_int4::run<OCTAVO_ISA::linear_int4::INT4>,                                                \
      OCTAVO_ISA::elementwise::rms_norm, OCTAVO_ISA::elementwise::rotary, OCTAVO_ISA::elementwise::silu_mul,      \
      OCTAVO_ISA::elementwise::write_kv, OCTAVO_ISA::attention::run, OCTAVO_ISA::sampling::run,                   \
  }

// Every processor with the bf16 instructions of AVX-512 has vpdpbusd. Those without differ in nothing else, so one
// unit has both tables.
#if defined(OCTAVO_AVX512_BF16)
const Kernels kernels_avx512_bf16 = OCTAVO_KERNELS(avx512_bf16, Bytes, Dots);
#elif defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
const Kernels OCTAVO_TABLE(OCTAVO_ISA) = OCTAVO_KERNELS(OCTAVO_ISA, Halves, Pairs);
#else
const Kernels OCTAVO_TABLE(OCTAVO_ISA) = OCTAVO_KERNELS(OCTAVO_ISA, Halves, Products);
#endif
#if defined(OCTAVO_AVX512)
const Kernels kernels_avx512_vnni = OCTAVO_KERNELS(avx512_vnni, Bytes, Dots);
#elif defined(OCTAVO_AVX2)
const Kernels kernels_avx2_vnni = OCTAVO_KERNELS(avx2_vnni, Bytes, Dots);
#endif

}  // namespace octavo
