#include "grouped/super_sums.h"

#include <immintrin.h>

#include <atomic>
#include <cstring>

#define BYTE_DOTS 0

namespace millrace {

#include "grouped/super_sums.inc"

const SuperKernels PLAIN_KERNELS = KERNELS;

namespace {

std::atomic<bool> is_plain_forced{false};

bool has_byte_dot() {
#if defined(__AVX512F__)
    static const bool HAS = __builtin_cpu_supports("avx512vnni");
    return HAS;
#else
    return false;
#endif
}

}  // namespace

const SuperKernels& super_kernels() {
    return has_byte_dot() && !is_plain_forced ? BYTE_DOT_KERNELS : PLAIN_KERNELS;
}

void use_plain_kernels(bool is_plain) { is_plain_forced = is_plain; }

}  // namespace millrace
