// Choosing tokens from logits, row by row; what happens to a row depends on nothing but that row.

#pragma once

#include <cstdint>

#include "weights/model.h"

namespace millrace {

// What each slot's sequence asked for, [S] each; but for the first, not read where it is 0.
struct SlotSampling {  // as `Asked` of library.py
    const uint8_t* is_random;
    const double* temperature;    // above 0
    const int64_t* top_k;         // 0 is off
    const double *top_p, *min_p;  // 1 and 0 are off
    const uint64_t* seeds;
    const int32_t* num_prompt;  // tokens before the first of its answer
};

// L rows of V logits.
struct SamplingRows {  // as `Choices` of library.py
    float* logits;            // where there are masks, what they do not allow is lost
    int64_t num_rows, vocab_size;
    const int64_t *slots, *positions;  // [L] whose the row is, and which token of its answer, from 0
    const uint32_t* masks;      // [M, num_words] bit t says whether token t may be chosen; null: all may, everywhere
    int64_t num_words;          // enough for V bits
    const int64_t* mask_rows;   // which of the masks is whose; below 0, none
    int64_t* token_ids;         // the choices
    uint8_t* is_broken;         // rows without a finite maximum, or with a NaN; their token is 0
};

// Waits for a step that runs.
void sample(Model& model, const SlotSampling& asked, const SamplingRows& rows);

}  // namespace millrace
