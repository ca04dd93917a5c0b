// The interface of a step: from token ids to hidden states, logits or argmax tokens.
//
// Inputs are flat arrays, described by StepInputs, or slot tables (DecodeSlots) from which `decode` builds the inputs
// of a decoding step. Called by api.cpp and StepChain, on the step thread or the caller's. One step runs at a time.

#pragma once

#include <cstdint>

#include "weights/model.h"

namespace millrace {

constexpr int64_t MAX_KINDS = 8;  // as in cache.py

// Blocks of one kind: of the layers whose keys live equally long. See kernels/layout/kv_layout.py.
struct CacheKind {  // mirrored by `CacheKindStruct` in library.py
    int64_t num_blocks, blocks_per_slab;
    int64_t window;  // keys that a query sees at most, so that older blocks may be gone; 0: all
    int64_t num_kv_heads, head_dim;
    int64_t value_dim;  // less than head_dim: of latents, which are keys and values at once
};

// The cache: slabs, each of which holds blocks of one kind, in the layout of attention/kv_layout.h.
struct CacheSlabs {  // mirrored by `CacheSlabsStruct` in library.py
    void* memory;
    int64_t slab_bytes, block_size, num_kinds;
    const CacheKind* kinds;               // [K]
    const int32_t *layer_kinds, *places;  // [layers] kind of each layer, and its index among the layers of that kind
    void* states;  // of recurrent layers, by slot; null: there are none
    int64_t state_stride, num_states;  // bytes from one to the next
};

struct StepInputs {  // mirrored by `StepInputsStruct` in library.py
    int64_t num_tokens, num_sequences, table_width, num_logits;
    const int64_t *input_ids, *positions;   // [T]
    const int64_t* slot_mapping[MAX_KINDS];  // [T] each
    const int32_t* block_tables[MAX_KINDS];  // [S, M] each; of blocks before a kind's window nothing is read
    const int32_t *query_starts, *lengths;  // [S + 1], [S]
    const int64_t* logits_rows;  // [L]
    const CacheSlabs* cache;
    float* hidden;  // [T, hidden], or null
    float* logits;  // [L, V], or null
    int64_t* argmax;  // [L] instead of logits: each row's argmax token; or null
    uint8_t* is_broken;  // [L] with argmax: as in SamplingRows, for rows that are not random; or null
    const int64_t* adapters = nullptr;  // [T] slot of each token's adapter, 0: none; or null
    const int64_t* slots = nullptr;  // [S] of each sequence's state in `CacheSlabs::states`; each once
};

// What is wrong with a step's inputs; 0: nothing.
enum Error : int32_t { FINE, BAD_TOKEN, BAD_POSITION, BAD_SLOT, BAD_SEQUENCE, BAD_BLOCK, BAD_ROW, NO_MEMORY, IS_PROMPT, BAD_ADAPTER, BAD_STATE };

Error check(const Model& model, const StepInputs& inputs);

// Runs a step whose inputs `check` accepted.
void run_step(Model& model, const StepInputs& inputs);

// The state of each slot's sequence, [S] each, and the slots of a step.
struct DecodeSlots {                // mirrored by `DecodeSlots` in library.py
    const int64_t *slots, *starts;  // [S] slot of each row of the step, and position of its token
    int64_t* last_tokens;           // [S] newest token of each slot
    const int64_t* num_known;       // [S] leading tokens that belong to the prompt and are not in `last_tokens`
    const int32_t* tables[MAX_KINDS];  // [S, blocks_per_slot] each: block ids in token order, of each kind
    int64_t num_slots, blocks_per_slot;
    const CacheSlabs* cache;
    const int64_t* rope_offsets;  // [S] added to positions, for rows of the rotary tables; or null
    const int64_t* adapters;  // [S] adapter slot of each sequence, 0: none; or null
};

// Requested outputs of a step, as in StepInputs.
struct StepOutputs {
    float* logits;
    int64_t* argmax = nullptr;
    uint8_t* is_broken = nullptr;
};

// Runs a step of `num_rows` slots, each of which reads its newest token. Does nothing and returns IS_PROMPT if a row
// reads a token of its prompt.
Error decode(Model& model, const DecodeSlots& decode_slots, int64_t num_rows, const StepOutputs& outputs);

// The final norm of `hidden` [n, hidden], to `normed` likewise; and logits [n, V] of it.
void run_norm(const Model& model, const float* hidden, int64_t count, float* normed);
void run_head(Model& model, const float* hidden, int64_t count, float* logits);

// The product of `num_rows` rows [k] with a matrix of a model with groups of codes, [n] each: the whole fused one.
void run_product(Model& model, const Linear& linear, const float* x, int64_t num_rows, float* out);

// Memory that a step takes, without its outputs.
int64_t step_bytes(const Model& model, int64_t num_tokens, int64_t num_logits);

}  // namespace millrace
