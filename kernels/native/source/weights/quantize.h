// Rows of numbers as whole numbers of 8 or 4 bits and scales of bf16.
//
// Knows how to choose a scale. Refuses to know where the results lie.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "machine/simd.h"

namespace millrace {

// The least number of bf16 that is not below `x`, which is not negative; NaN for NaN.
inline bf16 bf16_above(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bf16((bits >> 16) + ((bits & 0xffff) != 0));
}

// `count` numbers as codes in [-127, 127] times the scale that is returned, which is the largest of them over 127. A NaN
// or infinity among them makes the scale NaN; numbers that are all but 0 become 0.
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

// `count` numbers as codes of `LEVELS` times the scale that is returned: of some scales about the one that makes the
// largest of them the lowest level, the one with the least sum of squared errors.
bf16 to_int4(const float* x, int64_t count, uint8_t* codes);

}  // namespace millrace
