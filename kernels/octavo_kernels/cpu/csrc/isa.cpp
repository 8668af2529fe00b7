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

#include "attention.h"
#include "sampling.h"

}  // namespace
}  // namespace OCTAVO_ISA

const Kernels OCTAVO_TABLE(OCTAVO_ISA) = {
    OCTAVO_NAME(OCTAVO_ISA),
    OCTAVO_ISA::linear::run,
    OCTAVO_ISA::elementwise::rms_norm,
    OCTAVO_ISA::elementwise::rotary,
    OCTAVO_ISA::elementwise::silu_mul,
    OCTAVO_ISA::elementwise::write_kv,
    OCTAVO_ISA::attention::run,
    OCTAVO_ISA::sampling::run,
};

}  // namespace octavo
