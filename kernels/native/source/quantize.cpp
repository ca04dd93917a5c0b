#include "quantize.h"

namespace millrace {

namespace {

constexpr int64_t MOST = 256;      // numbers of a group
constexpr int64_t LANES = 16;      // that sums run in on every machine, so that all choose the same scales
constexpr float ALL_BUT_ZERO = 1e-30f;

F clamp(F x) { return max(splat(-8.0f), sub(zero(), max(sub(zero(), x), splat(-7.0f)))); }

// How well x is met by the levels nearest to `inverse` times it: sums of x * level and of level * level.
void fit(const float* x, int64_t size, float inverse, float* cross, float* square) {
    F crosses[LANES / W], squares[LANES / W];
    for (int v = 0; v < LANES / W; v++) crosses[v] = squares[v] = zero();
    for (int64_t i = 0; i < size; i += LANES) {
        for (int v = 0; v < LANES / W; v++) {
            F numbers = load(x + i + v * W), level = clamp(round(mul(numbers, splat(inverse))));
            crosses[v] = fma(numbers, level, crosses[v]), squares[v] = fma(level, level, squares[v]);
        }
    }
    if (LANES / W == 2) crosses[0] = add(crosses[0], crosses[1]), squares[0] = add(squares[0], squares[1]);
    *cross = sum_of(crosses[0]), *square = sum_of(squares[0]);
}

}  // namespace

bf16 to_int4(const float* x, int64_t count, uint8_t* codes) {
    alignas(64) float numbers[MOST] = {};  // past the last one 0, which adds nothing
    float most = 0, nan = 0, best = 0, scale = 0;
    for (int64_t i = 0; i < count; i++) {
        numbers[i] = x[i], nan += x[i] * 0.0f;
        if (std::fabs(x[i]) > std::fabs(most)) most = x[i];
    }
    if (std::isnan(nan) || std::fabs(most) < ALL_BUT_ZERO) {
        std::memset(codes, 8, count);
        return std::isnan(nan) ? to_bf16(nan) : 0;
    }
    for (int step = -10; step <= 10; step++) {
        float cross, square;
        fit(numbers, (count + LANES - 1) / LANES * LANES, -(8.0f + 0.1f * float(step)) / most, &cross, &square);
        if (square > 0 && cross * cross > best * square) best = cross * cross / square, scale = cross / square;
    }
    bf16 rounded = to_bf16(scale);
    float inverse = 1.0f / widen(rounded);
    for (int64_t i = 0; i < count; i++)
        codes[i] = uint8_t(8 + std::lrintf(std::min(7.0f, std::max(-8.0f, x[i] * inverse))));
    return rounded;
}

}  // namespace millrace
