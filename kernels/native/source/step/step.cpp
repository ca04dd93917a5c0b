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
    int64_t work = model.weights_bytes(model.max_top_k) * std::max<int64_t>(1, num_rows / 4);
    return int(std::min<int64_t>(model.pool->limit.load(), std::max<int64_t>(1, work / model.min_work_per_thread)));
}

// Whether a slot has an adapter, or stands for none.
bool has_adapter(const Model& model, int64_t slot) {
    return slot == 0 || (slot > 0 && slot < int64_t(model.adapters.size()) && model.adapters[slot]);
}

// The first key that a query at `position` sees of a kind's.
int64_t first_key_of(const CacheKind& kind, int64_t position) {
    return kind.window > 0 ? std::max<int64_t>(0, position - kind.window + 1) : 0;
}

// Whether the blocks that queries at [start, end) see exist.
bool has_valid_blocks(const StepInputs& in, int64_t sequence, int64_t kind, int64_t start, int64_t end) {
    const CacheKind& its = in.cache->kinds[kind];
    const int32_t* table = in.block_tables[kind] + sequence * in.table_width;
    int64_t block_size = in.cache->block_size;
    for (int64_t i = first_key_of(its, start) / block_size; i < ceil_div(end, block_size); i++)
        if (table[i] < 0 || table[i] >= its.num_blocks) return false;
    return true;
}

}  // namespace

Error check(const Model& model, const StepInputs& in) {
    const Shape& shape = model.shape;
    const CacheSlabs& cache = *in.cache;
    for (int64_t t = 0; t < in.num_tokens; t++) {
        if (in.input_ids[t] < 0 || in.input_ids[t] >= shape.vocab_size) return BAD_TOKEN;
        if (in.positions[t] < 0 || in.positions[t] >= model.num_positions) return BAD_POSITION;
        for (int64_t kind = 0; kind < cache.num_kinds; kind++)
            if (in.slot_mapping[kind][t] >= cache.kinds[kind].num_blocks * cache.block_size) return BAD_SLOT;
        if (in.adapters && !has_adapter(model, in.adapters[t])) return BAD_ADAPTER;
    }
    if (model.state_bytes > 0 && (!cache.states || !in.slots || cache.state_stride < model.state_bytes)) return BAD_STATE;
    for (int64_t s = 0; s < in.num_sequences; s++) {
        if (model.state_bytes > 0 && (in.slots[s] < 0 || in.slots[s] >= cache.num_states)) return BAD_STATE;
        int64_t count = int64_t(in.query_starts[s + 1]) - in.query_starts[s], length = in.lengths[s];
        if (in.query_starts[s] < 0 || count < 0 || in.query_starts[s + 1] > in.num_tokens) return BAD_SEQUENCE;
        if (length < count || length > in.table_width * cache.block_size) return BAD_SEQUENCE;
        for (int64_t kind = 0; kind < cache.num_kinds; kind++)
            if (!has_valid_blocks(in, s, kind, length - count, length)) return BAD_BLOCK;
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
    const CacheSlabs& cache = *in.cache;
    int64_t longest = 0, block_size = cache.block_size;
    for (int64_t row = 0; row < num_rows; row++) {
        if (in.slots[row] < 0 || in.slots[row] >= in.num_slots) return BAD_ROW;
        if (in.starts[row] < in.num_known[in.slots[row]]) return IS_PROMPT;
        longest = std::max(longest, in.starts[row] + 1);
    }
    int64_t width = ceil_div(longest, block_size);
    if (width > in.blocks_per_slot) return BAD_SEQUENCE;
    buffers.input_ids.resize(num_rows), buffers.rows.resize(num_rows);
    buffers.lengths.resize(num_rows), buffers.query_starts.resize(num_rows + 1);
    buffers.slot_mapping.resize(cache.num_kinds * num_rows), buffers.block_tables.resize(cache.num_kinds * num_rows * width);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = in.slots[row], start = in.starts[row];
        buffers.input_ids[row] = in.last_tokens[slot];
        buffers.rows[row] = row;
        buffers.lengths[row] = int32_t(start + 1);
        buffers.query_starts[row + 1] = int32_t(row + 1);
        for (int64_t kind = 0; kind < cache.num_kinds; kind++) {
            const int32_t* table = in.tables[kind] + slot * in.blocks_per_slot;
            buffers.slot_mapping[kind * num_rows + row] = table[start / block_size] * block_size + start % block_size;
            int64_t first = first_key_of(cache.kinds[kind], start) / block_size, end = start / block_size + 1;
            std::copy(table + first, table + end, buffers.block_tables.begin() + (kind * num_rows + row) * width + first);
        }
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
    StepInputs inputs{};
    inputs.num_tokens = inputs.num_sequences = inputs.num_logits = num_rows, inputs.table_width = width;
    inputs.input_ids = buffers.input_ids.data(), inputs.positions = positions;
    for (int64_t kind = 0; kind < cache.num_kinds; kind++) {
        inputs.slot_mapping[kind] = buffers.slot_mapping.data() + kind * num_rows;
        inputs.block_tables[kind] = buffers.block_tables.data() + kind * num_rows * width;
    }
    inputs.query_starts = buffers.query_starts.data(), inputs.lengths = buffers.lengths.data();
    inputs.logits_rows = buffers.rows.data(), inputs.cache = in.cache;
    inputs.logits = outputs.logits, inputs.argmax = outputs.argmax, inputs.is_broken = outputs.is_broken;
    inputs.adapters = in.adapters ? buffers.adapters.data() : nullptr;
    inputs.slots = in.slots;
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
