// One step of a decoder: from token ids to hidden states and logits.

#pragma once

#include <cstdint>

#include "model.h"

namespace millrace {

struct StepInputs {  // as `_StepInputs` of library.py
    int64_t num_tokens, num_sequences, table_width, num_logits;
    const int64_t *input_ids, *positions, *slot_mapping;                // [T]
    const int32_t *block_tables, *query_starts, *lengths;               // [S, M], [S + 1], [S]
    const int64_t* logits_rows;                                         // [L]
    void* cache;                                                        // [layers] of `CacheLayout`
    int64_t num_blocks, block_size;
    float* hidden;  // [T, hidden], or none
    float* logits;  // [L, V], or none
};

// What a step can be wrong in, 0 if in nothing.
enum Error : int32_t { FINE, BAD_TOKEN, BAD_POSITION, BAD_SLOT, BAD_SEQUENCE, BAD_BLOCK, BAD_ROW, NO_MEMORY };

Error check(const Model& model, const StepInputs& inputs);

// Runs a step that has been checked.
void run_step(Model& model, const StepInputs& inputs);

// The final norm of `hidden` [n, hidden], to `normed` likewise; and logits [n, V] of it.
void run_norm(const Model& model, const float* hidden, int64_t count, float* normed);
void run_head(Model& model, const float* hidden, int64_t count, float* logits);

// Memory that steps of so many tokens take, the output left out.
int64_t step_bytes(const Model& model, int64_t num_tokens, int64_t num_logits);

}  // namespace millrace
