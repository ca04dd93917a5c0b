// The rows that go through a step's layers together: their inputs, activations and attention plans.
//
// Activations lie in one buffer (`Model::activations`), in the order of `Activations`, each part aligned to 64 bytes.
// Built by Step on the calling thread, before the compute threads start.

#pragma once

#include <map>
#include <tuple>

#include "linear/linear.h"
#include "lora/shrink.h"
#include "attention/attention_plan.h"

namespace millrace {

// Most bytes of the rows of experts, each expert's in tiles of their own, for so many pairs of a row and an expert.
template <class Input>
int64_t expert_rows_bytes(int64_t num_pairs, int64_t size, int64_t num_experts) {
    if (num_pairs == 0) return 0;
    TiledRows<Input> one{nullptr, 1, size};
    int64_t bytes = num_pairs * one.padded_size() * int64_t(sizeof(Input));
    bytes += std::min(num_pairs, num_experts) * (one.bytes_behind() + 64);
    if constexpr (std::is_same<Input, SplitRow>::value) {  // whole tiles of each expert that has enough rows
        int64_t num_tiles = num_pairs / HalfRows::ROWS + std::min(num_experts, num_pairs / MIN_ROWS_IN_HALF_TILES);
        if (HAS_AMX) bytes += HalfRows::num_bytes(num_tiles * HalfRows::ROWS, size);
    }
    return round_up(bytes, 64);
}

// Addresses of a batch's activations.
template <class Input>
struct Activations {
    float *residual, *qkv;
    float* branch;  // products before their norm and sum with the residual, or those of a network beside experts
    // With experts, by pair of a row and an expert: what the pair adds to the row. Behind it the rows that experts read.
    float *normed_floats, *router_logits, *pair_outputs;
    char *expert_inputs, *expert_inner;
    float* layer_inputs;  // of all layers, [rows][layer_inputs_stride], if the model has such
    TiledRows<Input> normed, attended, inner;
    float* lora_sums;  // [rows][Model::num_lora_sums] of the product that is next: see LoraUpdate
    float *queries, *absorbed;  // of layers with latents: see latents/latent_step.h
    int64_t hidden_stride, qkv_stride, layer_inputs_stride, queries_stride, absorbed_stride;
    char* end;

    Activations(const Model& model, char* memory, int64_t num_rows)
        : hidden_stride(row_stride(model.shape.hidden_size)), qkv_stride(row_stride(model.max_qkv_size)),
          layer_inputs_stride(model.layer_inputs.exist() ? row_stride(model.layer_inputs.projection.n) : 0),
          queries_stride(model.max_query_size ? row_stride(model.max_query_size) : 0),
          absorbed_stride(model.max_absorbed_size ? row_stride(model.max_absorbed_size) : 0) {
        auto take = [&](auto** place, int64_t size) {
            *place = reinterpret_cast<std::remove_reference_t<decltype(*place)>>(memory);
            memory += round_up(num_rows * size * int64_t(sizeof(**place)), 64);
        };
        auto take_tiled = [&](TiledRows<Input>* rows, int64_t size) {
            rows->num_rows = num_rows, rows->size = size;
            take(&rows->data, rows->padded_size());
            if (num_rows > 0) memory += round_up(rows->bytes_behind(), 64);
        };
        take(&residual, hidden_stride);
        take(&qkv, qkv_stride);
        take(&branch, model.has_branches ? hidden_stride : 0);
        int64_t top_k = model.max_top_k, num_pairs = num_rows * top_k, num_experts = model.max_experts;
        take(&normed_floats, top_k ? hidden_stride : 0);
        take(&router_logits, top_k ? model.router_stride() : 0);
        take(&pair_outputs, top_k * hidden_stride);
        expert_inputs = memory, memory += expert_rows_bytes<Input>(num_pairs, model.shape.hidden_size, num_experts);
        expert_inner = memory, memory += expert_rows_bytes<Input>(num_pairs, model.max_expert_size, num_experts);
        take(&layer_inputs, layer_inputs_stride);
        take(&queries, queries_stride);
        take(&absorbed, absorbed_stride);
        take_tiled(&normed, model.shape.hidden_size);
        take_tiled(&attended, model.max_attended_size);
        take_tiled(&inner, model.intermediate_size);
        take(&lora_sums, model.num_lora_sums);
        memory += (AMX_ROWS - 1) * model.num_lora_sums * int64_t(sizeof(float));  // that are read behind the last row
        end = memory;
    }
};

template <class Input>
int64_t activation_bytes(const Model& model, int64_t num_rows) {
    return Activations<Input>(model, nullptr, num_rows).end - static_cast<char*>(nullptr);
}

// For all rows, and for the selected ones if these are fewer.
template <class Input>
int64_t step_activation_bytes(const Model& model, int64_t num_tokens, int64_t num_logits) {
    if (num_logits >= num_tokens) return activation_bytes<Input>(model, num_logits);
    return activation_bytes<Input>(model, num_tokens) + activation_bytes<Input>(model, num_logits);
}

// Rows that go through a layer together, where their activations are, and how their attention is divided.
template <class Input>
struct Batch {
    StepInputs inputs;
    Activations<Input> buffers;
    using PlanKey = std::tuple<int64_t, int64_t, int64_t>;
    std::map<PlanKey, AttentionPlan> plans;  // by kind, which says how many keys and values there are, window and heads
    LoraRows adapted;

    Batch(const Model& model, char* memory, const StepInputs& inputs)
        : inputs(inputs), buffers(model, memory, inputs.num_tokens),
          adapted(model, inputs.adapters, inputs.num_tokens) {}

    void plan(const Model& model, int64_t layer, int num_threads, int rows_together) {
        const LayerShape& shape = model.layers[layer].shape;
        if (!model.layers[layer].has_attention()) return;
        AttentionPlan& plan = plans[key_of(shape, layer)];
        if (plan.num_parts() < 0)
            plan = make_attention_plan(shape, inputs, inputs.cache->layer_kinds[layer], num_threads, rows_together);
    }
    const AttentionPlan& plan_of(const Model& model, int64_t layer) const {
        return plans.at(key_of(model.layers[layer].shape, layer));
    }
    // Where a layer's attention, or a recurrent layer, leaves what its output product reads.
    TiledRows<Input> attended_of(const Layer& layer) const {
        return {buffers.attended.data, buffers.attended.num_rows, layer.output.k};
    }
    SequenceTables sequences(int64_t kind) const {
        return {inputs.block_tables[kind], inputs.query_starts, inputs.lengths, inputs.num_sequences, inputs.table_width};
    }

  private:
    PlanKey key_of(const LayerShape& shape, int64_t layer) const {
        return {inputs.cache->layer_kinds[layer], shape.window, shape.num_heads};
    }
};

// The rows whose logits are requested, if these are the last ones of their sequences and not all: at most one per
// prompt chunk. The other rows are finished once the last layer's keys and values are in the cache.
struct SelectedRows {
    std::vector<int64_t> rows;  // of the step; unused unless `is_cut`
    std::vector<int32_t> query_starts;
    std::vector<int64_t> logits_rows;  // indices into `rows`
    std::vector<int64_t> adapters;     // of `rows`; empty if the step has none
    bool is_cut = false;

    explicit SelectedRows(const StepInputs& in) {
        if (in.hidden || in.num_logits >= in.num_tokens) return;
        std::vector<int64_t> firsts(in.query_starts + 1, in.query_starts + in.num_sequences + 1), sequences;
        for (int64_t i = 0; i < in.num_logits; i++) {
            auto end = std::upper_bound(in.query_starts, in.query_starts + in.num_sequences + 1, in.logits_rows[i]);
            int64_t s = end - in.query_starts - 1;
            if (s < 0 || s >= in.num_sequences) return;  // in no sequence: what becomes of it is undefined
            firsts[s] = std::min(firsts[s], in.logits_rows[i]);
            sequences.push_back(s);
        }
        query_starts.push_back(0);
        for (int64_t s = 0; s < in.num_sequences; s++) {
            for (int64_t row = firsts[s]; row < in.query_starts[s + 1]; row++) rows.push_back(row);
            query_starts.push_back(int32_t(rows.size()));
        }
        is_cut = int64_t(rows.size()) <= in.num_logits;
        if (in.adapters)
            for (int64_t row : rows) adapters.push_back(in.adapters[row]);
        for (int64_t i = 0; i < in.num_logits; i++)
            logits_rows.push_back(in.logits_rows[i] - firsts[sequences[i]] + query_starts[sequences[i]]);
    }

    // The inputs of the rest of the step.
    StepInputs of(const StepInputs& inputs) const {
        StepInputs selected = inputs;
        selected.num_tokens = int64_t(rows.size());
        selected.query_starts = query_starts.data(), selected.logits_rows = logits_rows.data();
        selected.adapters = adapters.empty() ? nullptr : adapters.data();
        selected.input_ids = selected.positions = nullptr;  // already used
        for (int64_t kind = 0; kind < MAX_KINDS; kind++) selected.slot_mapping[kind] = nullptr;  // likewise
        return selected;
    }
};

// Up to this many rows, each thread normalizes all of them for itself: one tile, whose products need no workspace for
// anything else. Not measured with AMX.
template <class Input>
constexpr int64_t MAX_ROWS_NORMED_PER_THREAD = USES_AMX<Input>                        ? 0
                                               : std::is_same<Input, SplitRow>::value ? MAX_ROWS_SPLIT_PER_THREAD
                                                                                      : GEMM_ROWS;

// Workspace per thread for any product of `num_rows` rows and for the norm before it, bytes.
template <class Weight>
int64_t max_workspace_bytes(const Model& model, int64_t num_rows) {
    using Input = InputOf<Weight>;
    int64_t maximum = workspace_bytes<Weight>(model, model.head, num_rows);
    if (model.layer_inputs.exist())
        maximum = std::max(maximum, workspace_bytes<Weight>(model, model.layer_inputs.projection, num_rows));
    TiledRows<Input> own{nullptr, MAX_ROWS_NORMED_PER_THREAD<Input>, model.shape.hidden_size};
    maximum = std::max(maximum, own.num_rows * own.padded_size() * int64_t(sizeof(Input)));
    for (const Layer& layer : model.layers)  // all experts have one shape
        layer.for_each_linear(
            [&](const Linear& linear) { maximum = std::max(maximum, workspace_bytes<Weight>(model, linear, num_rows)); }, 1);
    return round_up(maximum, 64);
}

template <class Weight>
void reserve_workspace(Model* model, int64_t num_rows, int num_threads) {
    model->workspace_stride = max_workspace_bytes<Weight>(*model, num_rows);
    grow(&model->workspace, model->workspace_stride * num_threads);
}

}  // namespace millrace
