// Sampling of tokens from logits, row by row. The result of a row depends on that row alone.
//
// Called through api.cpp, or by StepChain after a step, on the step's thread; rows are split over the pool's threads.

#pragma once

#include <cstdint>

#include "weights/model.h"

namespace millrace {

struct DrawFields;  // the numbers of a draw: temperature and cuts

// Sampling parameters per slot, [S] each. All but the first are read only where `is_random` is 1.
struct SlotSampling {  // mirrored by `SlotSampling` in library.py
    const uint8_t* is_random;
    const DrawFields* draws;  // temperatures above 0
    const uint64_t* seeds;
    const int32_t* num_prompt;  // tokens before the first generated one
};

// L rows of V logits to sample.
struct SamplingRows {  // mirrored by `SamplingRows` in library.py
    float* logits;     // overwritten where masks hide tokens
    int64_t num_rows, vocab_size;
    const int64_t *slots, *positions;  // [L] slot of each row, and index of its token among the generated ones
    const uint32_t* masks;             // [M, num_words] bit t: token t is allowed; null: all are
    int64_t num_words;                 // enough for V bits
    const int64_t* mask_rows;          // [L] mask of each row; negative: none
    int64_t* token_ids;                // [L] result
    uint8_t* is_broken;                // [L] result: no finite maximum, or a NaN; the token is 0
};

// The names of the numbers in `DrawFields`, in order, with spaces between.
const char* draw_field_names();

// Waits for a running step.
void sample(Model& model, const SlotSampling& asked, const SamplingRows& rows);

}  // namespace millrace
