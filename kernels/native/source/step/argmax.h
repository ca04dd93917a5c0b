// The likeliest token of each row, found while logits are computed: where rows are to have that one, nobody writes logits to
// memory and nobody reads them there. A step of 16 and 32 rows and the choice of its tokens take 2 % less so in Qwen3-0.6B's
// shape, and 3 to 4 % in SmolLM2-135M's (AVX-512, Zen 5 class EPYC).
//
// Knows tokens and their logits. Refuses to know which rows want the likeliest one.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear/row_tiles.h"

namespace millrace {

struct ArgmaxToken {  // of some tokens
    float logit = -std::numeric_limits<float>::infinity();  // past all numbers where one of them is none
    int32_t id = 0;

    // The lower id among equals, in whichever order they come.
    bool is_beaten_by(float other, int64_t other_id) const { return other > logit || (other == logit && other_id < id); }

    // As `Row::is_broken` of sampling.cpp.
    bool is_broken() const { return !std::isfinite(logit); }
};

// Takes tiles of a product whose columns are tokens, as `Rows` does, for one thread.
struct RowArgmax {
    ArgmaxToken* best;  // [rows]

    void prefetch_output(int64_t, int, int64_t) const {}

    void write(float* tile, int64_t first_row, int rows, int64_t panel, int64_t columns) const {
        ArgmaxToken* row = best + first_row;
        for (int r = 0; r < rows; r++, tile += PANEL, row++) {
            float largest = max_of_columns(tile, columns);
            int64_t begin = panel * PANEL;
            if (!row->is_beaten_by(largest, begin)) continue;
            int64_t id = begin + (std::find(tile, tile + columns, largest) - tile);  // past the end: what is no number
            if (row->is_beaten_by(largest, id)) *row = {largest, int32_t(id)};
        }
    }
};

}  // namespace millrace
