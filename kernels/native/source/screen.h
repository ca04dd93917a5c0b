// Where the largest logits of few rows are, found without reading all of the head.
//
// A step of few rows waits for memory, and a quarter of what it reads may be the head. In int8 that is half of the bytes, and
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
// less in float32 with AVX-512, and 13 / 12 / -1 with AVX2 (two cores of a Zen 5 class EPYC). In tile registers nobody has
// looked.
template <class Weight>
constexpr int64_t SCREENED_ROWS = IN_AMX<InputOf<Weight>> ? 0 : sizeof(InputOf<Weight>) == 2 ? GEMM_ROWS : W == 16 ? 4 : 2;

constexpr int64_t SCREENED_BYTES = 4 << 20;  // of a head; less may be in a cache

// Where more panels than one in so many are left, so many steps go without.
constexpr int64_t LEFT_TO_TELL = 4, STEPS_OFF = 64;

inline bool wants_screen(const Linear& head) {
    int64_t rows = head.type == BFLOAT16 ? SCREENED_ROWS<bf16> : head.type == FLOAT32 ? SCREENED_ROWS<float> : 0;
    return rows > 0 && head.weight_bytes() >= SCREENED_BYTES;
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
