// Quantization of a row of numbers to int8 or int4 codes and bf16 scales.
//
// Used by pack.cpp at load and by attention/kv_layout.h for an int8 cache, on any thread. The same bits on every
// machine.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "machine/simd.h"

namespace millrace {

// The smallest bf16 number not below `x`, which must not be negative. NaN for NaN.
inline bf16 bf16_above(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bf16((bits >> 16) + ((bits & 0xffff) != 0));
}

// Quantizes `count` numbers to codes in [-127, 127] and returns the scale, the largest magnitude / 127. A NaN or
// infinity makes the scale NaN. Numbers that are all nearly 0 become 0.
inline bf16 to_int8(const float* x, int64_t count, int8_t* codes) {
    F maximum = zero(), nothing = zero();
    int64_t whole = count / W * W;
    for (int64_t i = 0; i < whole; i += W) {
        F numbers = load(x + i);
        maximum = max(maximum, max(numbers, sub(zero(), numbers)));
        nothing = fma(numbers, zero(), nothing);
    }
    float largest = max_of(maximum), nan = sum_of(nothing);
    for (int64_t i = whole; i < count; i++) largest = std::max(largest, std::fabs(x[i])), nan += x[i] * 0.0f;
    bf16 scale = bf16_above(largest / 127.0f + nan);
    if (!(widen(scale) >= FLT_MIN)) {
        std::memset(codes, 0, count);
        return std::isnan(nan) ? to_bf16(nan) : 0;
    }
    float inverse = 1.0f / widen(scale);
    for (int64_t i = 0; i < whole; i += W) store(codes + i, mul(load(x + i), splat(inverse)));
    for (int64_t i = whole; i < count; i++) codes[i] = int8_t(std::lrintf(x[i] * inverse));
    return scale;
}

// Quantizes `count` numbers to codes of INT4_VALUES and returns the scale: of several scales near the one that maps the
// largest number to the lowest level, the one with the least sum of squared errors.
bf16 to_int4(const float* x, int64_t count, uint8_t* codes);

}  // namespace millrace
