// Norms of rows: RMS norm and LayerNorm, to plain rows or to the tiles that products read.
//
// Called in phases of a step, on each compute thread for its rows. The bits of a row do not depend on other rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear/row_tiles.h"

namespace millrace {

// The sum of use(vector or number) over a row: over whole vectors, then over the rest.
template <class AddVector, class AddNumber>
float sum_row(const float* x, int64_t size, const AddVector& add_vector, const AddNumber& add_number) {
    F sums = zero();
    int64_t whole = size / W * W;
    for (int64_t i = 0; i < whole; i += W) sums = add_vector(sums, load(x + i));
    float sum = sum_of(sums);
    for (int64_t i = whole; i < size; i++) sum = add_number(sum, x[i]);
    return sum;
}

// out = (x - mean) * scale * weight + bias; `weight` and `bias` may be null. SUBTRACTS: there is a mean.
template <bool SUBTRACTS>
void scale_row(const float* x, int64_t size, float mean, float scale, const float* weight, const float* bias, float* out) {
    int64_t whole = size / W * W;
    F means = splat(mean), scales = splat(scale);
    auto all = [&](auto has_weight, auto has_bias) {
        for (int64_t i = 0; i < whole; i += W) {
            F numbers = load(x + i);
            if (SUBTRACTS) numbers = sub(numbers, means);
            numbers = mul(numbers, scales);
            if (has_weight) numbers = mul(numbers, load(weight + i));
            if (has_bias) numbers = add(numbers, load(bias + i));
            store(out + i, numbers);
        }
        for (int64_t i = whole; i < size; i++) {
            float number = SUBTRACTS ? x[i] - mean : x[i];
            number *= scale;
            if (has_weight) number *= weight[i];
            out[i] = has_bias ? number + bias[i] : number;
        }
    };
    std::true_type yes;
    std::false_type no;
    if (weight)
        bias ? all(yes, yes) : all(yes, no);
    else
        bias ? all(no, yes) : all(no, no);
}

// A norm of a row, or of a part of a norm's row that begins at `offset`. `out` may be `x`. No norm copies the row.
inline void norm_row(const float* x, const Norm& norm, int64_t size, float* out, int64_t offset = 0) {
    auto part_of = [&](const std::vector<float>& numbers) { return numbers.empty() ? nullptr : numbers.data() + offset; };
    const float *weight = part_of(norm.weight), *bias = part_of(norm.bias);
    float eps = norm.shape.eps;
    if (norm.is_none()) {
        if (out != x) std::copy(x, x + size, out);
    } else if (norm.shape.kind == RMS_NORM) {
        float squares = sum_row(
            x, size, [](F sums, F number) { return fma(number, number, sums); },
            [](float sum, float number) { return std::fma(number, number, sum); });
        scale_row<false>(x, size, 0.0f, 1.0f / std::sqrt(squares / float(size) + eps), weight, bias, out);
    } else {
        float mean = sum_row(
                         x, size, [](F sums, F number) { return add(sums, number); },
                         [](float sum, float number) { return sum + number; }) /
                     float(size);
        F means = splat(mean);
        float squares = sum_row(
            x, size, [=](F sums, F number) { return fma(sub(number, means), sub(number, means), sums); },
            [=](float sum, float number) { return std::fma(number - mean, number - mean, sum); });
        scale_row<true>(x, size, mean, 1.0f / std::sqrt(squares / float(size) + eps), weight, bias, out);
    }
}

// Normalizes rows [first, last) into a product's tiles; `row(i)` is where row i begins.
template <class T, class Row>
void norm_to(const TiledRows<T>& rows, int64_t first, int64_t last, const Row& row, const Norm& norm) {
    constexpr int64_t SOME = 4;
    thread_local std::vector<float> normed;
    normed.resize(SOME * rows.size);
    for (int64_t begin = first; begin < last; begin += SOME) {
        int64_t count = std::min(SOME, last - begin);
        for (int64_t i = 0; i < count; i++) norm_row(row(begin + i), norm, rows.size, normed.data() + i * rows.size);
        rows.put_whole_rows(begin, count, normed.data(), rows.size);
    }
}

// to += scale * norm(x), of one row. `x` is overwritten.
inline void add_normed(float* x, const Norm& norm, int64_t size, float scale, float* to) {
    norm_row(x, norm, size, x);
    int64_t i = 0;
    for (; i + W <= size; i += W) store(to + i, add(load(to + i), mul(load(x + i), splat(scale))));
    for (; i < size; i++) to[i] += x[i] * scale;
}

}  // namespace millrace
