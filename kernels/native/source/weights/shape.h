// The shape of a decoder: the sizes that all layers share, and what each layer computes.
//
// Plain structs, which library.py mirrors and fills from `NativeShape` (shape.py). Nothing here names a family.

#pragma once

#include <cstdint>

namespace millrace {

enum NormKind : int32_t { NO_NORM, RMS_NORM, LAYER_NORM };

// The function between a feed-forward network's products. XIELU and SWIGLU_CLAMPED have two parameters.
enum ActivationKind : int32_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, XIELU, SWIGLU_CLAMPED, NUM_ACTIVATION_KINDS };

struct NormShape {
    NormKind kind;
    float eps;
    int32_t is_exact;  // the weight and bias stay float32; else they are rounded to the model's dtype
};

// Experts of a layer, and how a token's are chosen: see step/route.h. Mirrored by `ExpertsStruct` in library.py.
struct ExpertsShape {
    int64_t num_experts;       // 0: the layer has none
    int64_t top_k;             // of a token
    int64_t intermediate_size;
    int64_t num_groups, num_groups_kept;  // runs of experts of equal length, and those whose experts can be chosen
    float norm_eps, norm_min;  // added to the sum of a token's weights before they are divided by it, and its least value
    float scale;               // multiplies the weights
    float alpha, limit;        // of SWIGLU_CLAMPED
    ActivationKind activation;
    int32_t is_gated;
    int32_t is_sigmoid;             // scores are sigmoids of the logits; else their softmax
    int32_t is_softmax_of_chosen;   // weights are the softmax of the chosen logits alone
    int32_t divides_by_sum;         // weights are divided by their sum
    int32_t sums_two_of_group;      // a group counts as its best two scores; else as its best
    int32_t scales_input;           // weights multiply what experts read; else what they give
    int32_t has_shared_gate;        // the other network's output is multiplied by a sigmoid
    NormShape router_norm;          // of the residual, which the router then reads; none: it reads what experts read
    // Of what experts read, which is then the residual, of their sum, and of the other network's output; none: no such
    NormShape own_norms;
};

// What each layer gets of a token besides the residual: see step/layer_inputs.h.
struct LayerInputsShape {  // mirrored by `LayerInputsStruct` in library.py
    int64_t rows, width;            // of the table, and of a layer's input; width 0: there are none
    float scale, projection_scale;  // of the table, rounded to the dtype before use, and of the projected residual
    ActivationKind activation;
    NormShape norm;  // of the projected residual, and with another weight of what is added
};

// Attention over latents: see latents/latent_step.h.
struct LatentShape {  // mirrored by `LatentsStruct` in library.py
    int64_t kv_rank;  // numbers of a latent; 0: the layer keeps keys and values
    int64_t q_rank;   // of the compressed query; 0: queries are projected directly
    int64_t nope_dim, rope_dim, value_dim;  // of a head: not rotated, rotated, of its value
};

enum RecurrentKind : int32_t { NOT_RECURRENT, GATED_DELTA, MAMBA2, SHORT_CONV };

// A layer whose state has one size, however long the sequence is. A token's numbers of its first product lie in this
// order:
//   GATED_DELTA  gates | queries, keys, values | step of each head | rate of each head
//   MAMBA2       gates | values, keys, queries | step of each head
//   SHORT_CONV   gate before the convolution | gate behind it | what it reads
// Mirrored by `RecurrentStruct` in library.py.
struct RecurrentShape {
    int64_t num_key_heads, num_value_heads;  // of queries and keys, which divide those of values
    int64_t key_dim, value_dim;              // of a head's state; key_dim 0: there is none
    int64_t conv_width;                      // tokens, the newest included
    int64_t norm_group;                      // numbers normed together, with weights of their own; 0: a head
    float step_min, step_max;                // of MAMBA2
    RecurrentKind kind;
    NormShape norm;  // of the output

    bool is_delta() const { return kind == GATED_DELTA; }
    int64_t key_size() const { return num_key_heads * key_dim; }
    int64_t inner_size() const { return num_value_heads * value_dim; }  // that the second product reads
    int64_t conv_channels() const { return 2 * key_size() + inner_size(); }
    int64_t matrices_bytes() const { return key_dim * inner_size() * 4; }
    int64_t tail_size() const { return (conv_width - 1) * conv_channels(); }

    // Where a token's numbers begin.
    int64_t mixed_at() const { return kind == SHORT_CONV ? 2 * inner_size() : inner_size(); }
    int64_t values_at() const { return mixed_at() + (is_delta() ? 2 * key_size() : 0); }
    int64_t keys_at() const { return mixed_at() + (is_delta() ? key_size() : inner_size()); }
    int64_t queries_at() const { return mixed_at() + (is_delta() ? 0 : inner_size() + key_size()); }
    int64_t steps_at() const { return mixed_at() + conv_channels(); }
    int64_t rates_at() const { return steps_at() + num_value_heads; }
    int64_t num_columns() const {
        return kind == SHORT_CONV ? steps_at() : rates_at() + (is_delta() ? num_value_heads : 0);
    }
};

struct LayerShape {  // mirrored by `LayerStruct` in library.py
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window;                // keys a query sees, itself included; 0: all
    int64_t intermediate_size;     // of the network that all tokens take; 0: there are experts alone
    int64_t temper_length;         // queries at position p are multiplied by 1 + temper * ln(1 + p / length); 0: not
    float temper;
    float attention_scale;         // of scores; 0: 1 / sqrt(head_dim)
    float soft_cap;                // scores become cap * tanh(score / cap); 0: none
    float residual_scale;          // multiplies what is added to the residual
    float alpha, limit;            // of SWIGLU_CLAMPED
    int32_t rope;                  // index of the rotary table; -1: not rotated
    ActivationKind activation;
    int32_t is_gated;              // activation(gate x) * up x; else activation(up x)
    int32_t is_parallel;           // mixer and feed read the same residual; a missing `pre_feed` is then `pre_mixer`
    int32_t is_reader;             // of another layer's cache; it writes none
    int32_t is_k_v;                // values are the keys before norm and rotation
    int32_t has_output_scale;      // the layer's output is multiplied by a number of the checkpoint
    int32_t is_qk_norm_over_row;   // all heads of a token together; else each head alone
    int32_t is_qk_norm_after_rope;
    int32_t has_weight_per_head;   // the q and k norms have a weight of their own per head
    int32_t has_mixer;             // attention or a recurrent layer before the network
    int32_t has_output_gate;       // attention is multiplied by the sigmoids of gates, behind the values in qkv
    NormShape pre_mixer, post_mixer, pre_feed, post_feed, qk_norm, v_norm;
    ExpertsShape experts;
    LatentShape latents;  // then a key/value head with heads of kv_rank + rope_dim numbers
    RecurrentShape recurrent;  // instead of attention

    bool has_latents() const { return latents.kv_rank > 0; }
    int64_t attended_size() const { return num_heads * (has_latents() ? latents.value_dim : head_dim); }
    int64_t query_dim() const { return latents.nope_dim + latents.rope_dim; }  // with latents
    // Columns of the product that queries have, or what they are made of.
    int64_t q_columns() const {
        if (!has_latents()) return num_heads * head_dim;
        return latents.q_rank > 0 ? latents.q_rank : num_heads * query_dim();
    }
    int64_t kv_size() const { return num_kv_heads * head_dim; }
    // Columns of the product, and numbers of a token once it has keys and values.
    int64_t qkv_columns() const {
        return q_columns() + (is_reader ? 0 : is_k_v || has_latents() ? 1 : 2) * kv_size() + gates_size();
    }
    int64_t qkv_size() const { return gates_at() + gates_size(); }
    int64_t gates_at() const { return q_columns() + 2 * kv_size(); }
    int64_t gates_size() const { return has_output_gate ? attended_size() : 0; }
};

struct Shape {  // mirrored by `ShapeStruct` in library.py
    int64_t vocab_size, hidden_size, num_layers;
    int64_t num_learned_positions, position_offset;  // rows of the table added to the embedding, and row of position 0
    int32_t dtype;       // FLOAT32 or BFLOAT16: of the computation, and the default of the next three
    int32_t linears;     // storage of the layers' matrices: dtype, INT8 or INT4
    int32_t head;        // storage of the head: dtype or INT8
    int32_t cache;       // storage of keys and values: dtype or INT8
    int32_t group_size;  // numbers of an INT4 row that share a scale; even
    int32_t has_head, is_tied, has_head_bias;
    float embedding_scale;            // rounded to the dtype before use
    float head_scale, head_soft_cap;  // logits = cap * tanh(scale * (W x + b) / cap); cap 0: none
    NormShape embedding_norm, final_norm;
    LayerInputsShape layer_inputs;
};

}  // namespace millrace
