#include "step/step.h"

#include <algorithm>

namespace millrace {

// Compiled in separate units, step_bfloat16.cpp, step_float32.cpp and step_grouped.cpp.
template <class Weight>
void run_typed(Model& model, const StepInputs& inputs, int num_threads);
template <class Weight>
void run_head_typed(Model& model, const float* hidden, int64_t count, float* logits, int num_threads);
template <class Weight>
int64_t step_bytes_typed(const Model& model, int64_t num_tokens, int64_t num_logits);

namespace {

// Calls use(a number of the type for which the step is compiled).
template <class Use>
auto with_weight_type(const Model& model, const Use& use) {
    if (model.is_grouped) return use(Grouped());
    return model.shape.dtype == BFLOAT16 ? use(uint16_t()) : use(float());
}

// Threads that pay: one for a model that is done before another thread wakes up.
int threads_for(const Model& model, int64_t num_rows) {
    int64_t work = model.weights_bytes() * std::max<int64_t>(1, num_rows / 4);
    return int(std::min<int64_t>(model.pool->limit.load(), std::max<int64_t>(1, work / model.min_work_per_thread)));
}

// Whether a slot has an adapter, or stands for none.
bool has_adapter(const Model& model, int64_t slot) {
    return slot == 0 || (slot > 0 && slot < int64_t(model.adapters.size()) && model.adapters[slot]);
}

}  // namespace

Error check(const Model& model, const StepInputs& in) {
    const Shape& shape = model.shape;
    for (int64_t t = 0; t < in.num_tokens; t++) {
        if (in.input_ids[t] < 0 || in.input_ids[t] >= shape.vocab_size) return BAD_TOKEN;
        if (in.positions[t] < 0 || in.positions[t] >= model.num_positions) return BAD_POSITION;
        if (in.slot_mapping[t] >= in.num_blocks * in.block_size) return BAD_SLOT;
        if (in.adapters && !has_adapter(model, in.adapters[t])) return BAD_ADAPTER;
    }
    for (int64_t s = 0; s < in.num_sequences; s++) {
        int64_t count = int64_t(in.query_starts[s + 1]) - in.query_starts[s], length = in.lengths[s];
        if (in.query_starts[s] < 0 || count < 0 || in.query_starts[s + 1] > in.num_tokens) return BAD_SEQUENCE;
        if (length < count || length > in.table_width * in.block_size) return BAD_SEQUENCE;
        for (int64_t i = 0; i < ceil_div(length, in.block_size); i++) {
            int32_t block = in.block_tables[s * in.table_width + i];
            if (block < 0 || block >= in.num_blocks) return BAD_BLOCK;
        }
    }
    for (int64_t i = 0; i < in.num_logits; i++)
        if (in.logits_rows[i] < 0 || in.logits_rows[i] >= in.num_tokens) return BAD_ROW;
    return FINE;
}

void run_step(Model& model, const StepInputs& inputs) {
    std::lock_guard<std::mutex> lock(model.is_running);
    with_weight_type(model, [&](auto weight) {
        run_typed<decltype(weight)>(model, inputs, threads_for(model, inputs.num_tokens));
    });
}

Error decode(Model& model, const DecodeSlots& in, int64_t num_rows, const StepOutputs& outputs) {
    DecodeBuffers& buffers = model.decode_buffers;
    int64_t longest = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        if (in.slots[row] < 0 || in.slots[row] >= in.num_slots) return BAD_ROW;
        if (in.starts[row] < in.num_known[in.slots[row]]) return IS_PROMPT;
        longest = std::max(longest, in.starts[row] + 1);
    }
    int64_t width = ceil_div(longest, in.block_size);
    if (width > in.blocks_per_slot) return BAD_SEQUENCE;
    buffers.input_ids.resize(num_rows), buffers.slot_mapping.resize(num_rows), buffers.rows.resize(num_rows);
    buffers.lengths.resize(num_rows), buffers.query_starts.resize(num_rows + 1),
        buffers.block_tables.resize(num_rows * width);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = in.slots[row], start = in.starts[row];
        const int32_t* table = in.tables + slot * in.blocks_per_slot;
        buffers.input_ids[row] = in.last_tokens[slot];
        buffers.slot_mapping[row] = table[start / in.block_size] * in.block_size + start % in.block_size;
        buffers.rows[row] = row;
        buffers.lengths[row] = int32_t(start + 1);
        buffers.query_starts[row + 1] = int32_t(row + 1);
        std::copy(table, table + width, buffers.block_tables.begin() + row * width);
    }
    const int64_t* positions = in.starts;
    if (in.rope_offsets) {
        buffers.positions.resize(num_rows);
        for (int64_t row = 0; row < num_rows; row++)
            buffers.positions[row] = in.starts[row] + in.rope_offsets[in.slots[row]];
        positions = buffers.positions.data();
    }
    if (in.adapters) {
        buffers.adapters.resize(num_rows);
        for (int64_t row = 0; row < num_rows; row++) buffers.adapters[row] = in.adapters[in.slots[row]];
    }
    StepInputs inputs{num_rows, num_rows, width, num_rows, buffers.input_ids.data(), positions, buffers.slot_mapping.data(),
                      buffers.block_tables.data(), buffers.query_starts.data(), buffers.lengths.data(), buffers.rows.data(),
                      in.cache, in.num_blocks, in.layer_stride_blocks, in.block_size, nullptr, outputs.logits,
                      outputs.argmax, outputs.is_broken, in.adapters ? buffers.adapters.data() : nullptr};
    Error error = check(model, inputs);
    if (error == FINE && num_rows > 0) run_step(model, inputs);
    return error;
}

void run_head(Model& model, const float* hidden, int64_t count, float* logits) {
    std::lock_guard<std::mutex> lock(model.is_running);
    with_weight_type(model, [&](auto weight) {
        run_head_typed<decltype(weight)>(model, hidden, count, logits, threads_for(model, count));
    });
}

int64_t step_bytes(const Model& model, int64_t num_tokens, int64_t num_logits) {
    return with_weight_type(
        model, [&](auto weight) { return step_bytes_typed<decltype(weight)>(model, num_tokens, num_logits); });
}

}  // namespace millrace
