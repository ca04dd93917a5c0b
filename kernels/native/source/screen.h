// Where the largest logits of few rows are, found without reading all of the head.
//
// A step of few rows waits for memory, and a quarter of what it reads may be the head. In int8 that is half of bf16's bytes, and
// how far such a logit can be from the head's own is known: no more than the length of what is multiplied times `misses`.
// So a panel whose largest logit in int8 is further below the best one than both can be wrong does not have the largest.
// What is left, some panels for each row, is multiplied by the head itself: the likeliest tokens are its own, to the bit,
// and so are equals and rows that are broken.
//
// Knows how wrong a logit can be. Refuses to know how tokens are found among logits.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "rows.h"

namespace millrace {

// Rows up to which that pays: the numbers of int8 have to become others first. In Qwen3-0.6B's shape steps of 1 / 8 / 12 rows
// take 10 / 3 / 0 % less where bf16 is multiplied and memory gives 76 GB/s, of 16 rows 1 % more; of 1 / 2 / 4 rows 9 / 8 / 5 %
// less in float32 with AVX-512, and 13 / 12 / -1 with AVX2 (two cores of a Zen 5 class EPYC). bf16 in tile registers: nobody
// has looked.
template <class Weight>
constexpr int64_t SCREENED_ROWS = IN_AMX<InputOf<Weight>> ? 0 : sizeof(InputOf<Weight>) == 2 ? GEMM_ROWS : W == 16 ? 4 : 2;

constexpr int64_t SCREENED_BYTES = 4 << 20;  // of a head; less may be in a cache

// Where more panels than one in so many are left, so many steps go without.
constexpr int64_t LEFT_TO_TELL = 4, STEPS_OFF = 64;

inline bool wants_screen(const Linear& head) {
    int64_t rows = head.type == BFLOAT16 ? SCREENED_ROWS<bf16> : head.type == FLOAT32 ? SCREENED_ROWS<float> : 0;
    return rows > 0 && head.weight_bytes() >= SCREENED_BYTES;
}

// How far products with a row of the head and with its numbers in int8 can be from each other, for what has length 1: no sum
// of products is larger than the lengths multiplied, and each of `count` additions rounds. The factors are larger than it
// takes, since the lengths are rounded, too; the last number is for squares and products too small for float32.
inline float miss_of(const float* row, const int8_t* codes, float scale, int64_t count) {
    F squares[2] = {zero(), zero()};  // of what is missed, and of the row
    auto add = [&](F numbers, F known) {
        F missed = sub(numbers, mul(known, splat(scale)));
        squares[0] = fma(missed, missed, squares[0]), squares[1] = fma(numbers, numbers, squares[1]);
    };
    int64_t whole = count / W * W;
    for (int64_t i = 0; i < whole; i += W) add(load(row + i), load(codes + i));
    if (whole < count) {
        float last[W] = {};
        int8_t last_codes[W] = {};
        std::copy(row + whole, row + count, last), std::copy(codes + whole, codes + count, last_codes);
        add(load(last), load(last_codes));
    }
    float missed = std::sqrt(sum_of(squares[0])), size = std::sqrt(sum_of(squares[1]));
    float rounds = 4.0f * float(count) * std::numeric_limits<float>::epsilon();
    return 1.01f * missed + rounds * (size + missed) + 2e-19f * std::sqrt(float(count));
}

// Of a row by its squares' sum, before its numbers are rounded. Infinite where sums of products with it may be: nothing is
// known of it then.
inline float length_at_most(double squares) {
    double length = 1.01 * std::sqrt(squares + 1e-30);
    return length < 1e18 ? float(length) : std::numeric_limits<float>::infinity();
}

// A row that is looked for.
struct Screened {
    float length = 0;  // of what is multiplied, or a little more
    float least = -std::numeric_limits<float>::infinity();  // that the largest logit is; NaN: nothing is known of it

    void see(float largest, float miss) {
        float sure = largest - length * miss;
        join(std::isfinite(sure) ? sure : NAN);
    }
    void join(float other) { least = std::isnan(other) || other > least ? other : least; }  // NaN stays: nothing is above it
    bool may_have(float largest, float miss) const { return !(largest + length * miss < least); }
};

// Takes tiles of the product with the screen, as `Rows` does, for one thread.
struct LargestOfPanels {
    float* largest;  // [rows][panels]
    int64_t num_panels;
    const float* misses;  // [panels]
    Screened* rows;       // of this thread

    void expect(int64_t, int, int64_t) const {}

    void take(float* tile, int64_t first_row, int count, int64_t panel, int64_t columns) const {
        for (int r = 0; r < count; r++, tile += PANEL) {
            float most = largest_of(tile, columns);
            largest[(first_row + r) * num_panels + panel] = most;
            rows[first_row + r].see(most, misses[panel]);
        }
    }
};

}  // namespace millrace
