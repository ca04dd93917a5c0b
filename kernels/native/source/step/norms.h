// RMS norm of rows, to plain rows or to the tiles that products read.
//
// Called in phases of a step, on each compute thread for its rows. The bits of a row do not depend on other rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear/row_tiles.h"

namespace millrace {

// Scales a row to unit mean square, then by `weight`. Sums run over whole vectors, then over the rest.
inline void norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
    F squares = zero();
    int64_t whole = size / W * W;
    for (int64_t i = 0; i < whole; i += W) squares = fma(load(x + i), load(x + i), squares);
    float sum = sum_of(squares);
    for (int64_t i = whole; i < size; i++) sum = std::fma(x[i], x[i], sum);
    float scale = 1.0f / std::sqrt(sum / float(size) + eps);
    F scales = splat(scale);
    for (int64_t i = 0; i < whole; i += W) store(out + i, mul(mul(load(x + i), scales), load(weight + i)));
    for (int64_t i = whole; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// Normalizes rows [first, last) into a product's tiles; `row(i)` is where row i begins.
template <class T, class Row>
void norm_to(const TiledRows<T>& rows, int64_t first, int64_t last, const Row& row, const float* weight, float eps) {
    constexpr int64_t SOME = 4;
    thread_local std::vector<float> normed;
    normed.resize(SOME * rows.size);
    for (int64_t begin = first; begin < last; begin += SOME) {
        int64_t count = std::min(SOME, last - begin);
        for (int64_t i = 0; i < count; i++) norm_row(row(begin + i), weight, rows.size, eps, normed.data() + i * rows.size);
        rows.put_rows(begin, count, 0, rows.size, normed.data(), rows.size);
    }
}

}  // namespace millrace
