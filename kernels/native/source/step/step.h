// One step of a decoder: from token ids to hidden states and logits.

#pragma once

#include <cstdint>

#include "weights/model.h"

namespace millrace {

struct StepInputs {  // as `_StepInputs` of library.py
    int64_t num_tokens, num_sequences, table_width, num_logits;
    const int64_t *input_ids, *positions, *slot_mapping;                // [T]
    const int32_t *block_tables, *query_starts, *lengths;               // [S, M], [S + 1], [S]
    const int64_t* logits_rows;                                         // [L]
    void* cache;                                                        // [layers] of `CacheLayout`
    int64_t num_blocks;    // of a layer
    int64_t layer_stride_blocks;  // from the beginning of one layer to that of the next
    int64_t block_size;    // tokens
    float* hidden;  // [T, hidden], or none
    float* logits;  // [L, V], or none
    int64_t* argmax;  // [L] in their place: each row's token, and whether the row is broken, as `Choices` of rows that are
    uint8_t* is_broken;  // not random; or none, both of them
};

// What a step can be wrong in, 0 if in nothing.
enum Error : int32_t { FINE, BAD_TOKEN, BAD_POSITION, BAD_SLOT, BAD_SEQUENCE, BAD_BLOCK, BAD_ROW, NO_MEMORY, IS_PROMPT };

Error check(const Model& model, const StepInputs& inputs);

// Runs a step that has been checked.
void run_step(Model& model, const StepInputs& inputs);

// What is known of each slot's sequence, [S] each, and which slots a step has.
struct DecodeSlots {  // as `Decoding` of library.py
    const int64_t *slots, *starts;  // [S] whose the step's rows are, and where each row's token comes
    int64_t* last_tokens;           // [S] each slot's newest token
    const int64_t* num_known;       // [S] tokens from the first that are not newest ones, but of a prompt
    const int32_t* tables;          // [S, blocks_per_slot] block ids in token order
    int64_t num_slots, blocks_per_slot;
    void* cache;  // this and the rest as in StepInputs
    int64_t num_blocks, layer_stride_blocks, block_size;
};

// What is wanted of a step, as in StepInputs.
struct StepOutputs {
    float* logits;
    int64_t* argmax = nullptr;
    uint8_t* is_broken = nullptr;
};

// Runs a step of `num_rows` slots, each of which reads its newest token. IS_PROMPT, and nothing is done, if one reads
// another.
Error decode(Model& model, const DecodeSlots& decode_slots, int64_t num_rows, const StepOutputs& outputs);

// The final norm of `hidden` [n, hidden], to `normed` likewise; and logits [n, V] of it.
void run_norm(const Model& model, const float* hidden, int64_t count, float* normed);
void run_head(Model& model, const float* hidden, int64_t count, float* logits);

// Memory that steps of so many tokens take, the output left out.
int64_t step_bytes(const Model& model, int64_t num_tokens, int64_t num_logits);

}  // namespace millrace
