// Compiled with the instructions for dot products of bytes, where the instruction set is AVX-512: see build.py. The
// functions run only on machines that have them.

#include "grouped/super_sums.h"

#include <immintrin.h>

#include <cstring>

#if defined(__AVX512VNNI__)

#define BYTE_DOTS 1

namespace millrace {

#include "grouped/super_sums.inc"

const SuperKernels BYTE_DOT_KERNELS = KERNELS;

}  // namespace millrace

#else

namespace millrace {

const SuperKernels BYTE_DOT_KERNELS{};  // never used

}  // namespace millrace

#endif
