#include "weights/quantize.h"

namespace millrace {

namespace {

constexpr int LANES = 16;  // candidate scales, side by side; the same on every machine, with the same sums
constexpr float ALL_BUT_ZERO = 1e-30f;

F clamp(F x) { return max(splat(-8.0f), sub(zero(), max(sub(zero(), x), splat(-7.0f)))); }

// The scale that represents `count` numbers, the largest of which is `maximum`, best. For each candidate rounding the
// scale of least squares is sum(x * level) / sum(level * level); it reduces the error by the square of the first sum
// over the second.
float best_scale(const float* x, int64_t count, float maximum) {
    constexpr int V = LANES / W;
    float unit = std::ldexp(1.0f, -std::ilogb(maximum));  // a unit in which no square overflows or underflows
    F inverses[V], crosses[V], squares[V];
    UNROLL for (int v = 0; v < V; v++) {
        F tries = add(iota(), splat(float(v * W)));  // maximum becomes -7 to -8.875
        inverses[v] = div(fma(tries, splat(-0.125f), splat(-7.0f)), splat(maximum * unit));
        crosses[v] = squares[v] = zero();
    }
    for (int64_t i = 0; i < count; i++) {
        F number = splat(x[i] * unit);
        UNROLL for (int v = 0; v < V; v++) {
            F level = clamp(round(mul(number, inverses[v])));
            crosses[v] = fma(number, level, crosses[v]), squares[v] = fma(level, level, squares[v]);
        }
    }
    float cross[LANES], square[LANES], best = 0, scale = 0;
    for (int v = 0; v < V; v++) store(cross + v * W, crosses[v]), store(square + v * W, squares[v]);
    for (int i = 0; i < LANES; i++)
        if (cross[i] * cross[i] > best * square[i]) best = cross[i] * cross[i] / square[i], scale = cross[i] / square[i];
    return scale / unit;
}

}  // namespace

bf16 to_int4(const float* x, int64_t count, uint8_t* codes) {
    float maximum = 0, nan = 0;
    for (int64_t i = 0; i < count; i++) {
        nan += x[i] * 0.0f;
        if (std::fabs(x[i]) > std::fabs(maximum)) maximum = x[i];
    }
    if (std::isnan(nan) || std::fabs(maximum) < ALL_BUT_ZERO) {
        std::memset(codes, 8, count);
        return std::isnan(nan) ? to_bf16(nan) : 0;
    }
    bf16 scale = to_bf16(best_scale(x, count, maximum));
    float inverse = 1.0f / widen(scale);
    for (int64_t i = 0; i < count; i++)
        codes[i] = uint8_t(8 + std::lrintf(std::min(7.0f, std::max(-8.0f, x[i] * inverse))));
    return scale;
}

}  // namespace millrace
