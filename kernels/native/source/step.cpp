#include "step.h"

#include <algorithm>

namespace millrace {

// Compiled apart, in step_bfloat16.cpp and step_float32.cpp.
template <class Weight>
void run_typed(Model& model, const StepInputs& inputs, int num_threads);
template <class Weight>
void run_head_typed(Model& model, const float* hidden, int64_t count, float* logits, int num_threads);
template <class Weight>
int64_t step_bytes_typed(const Model& model, int64_t num_rows);

namespace {

// Threads that pay: one for a model that is done before another has woken up.
int threads_for(const Model& model, int64_t num_rows) {
    int64_t work = model.weights_bytes() * std::max<int64_t>(1, num_rows / 4);
    return int(std::min<int64_t>(model.pool->limit, std::max<int64_t>(1, work / model.worth_a_thread)));
}

}  // namespace

Error check(const Model& model, const StepInputs& in) {
    const Shape& shape = model.shape;
    for (int64_t t = 0; t < in.num_tokens; t++) {
        if (in.input_ids[t] < 0 || in.input_ids[t] >= shape.vocab_size) return BAD_TOKEN;
        if (in.positions[t] < 0 || in.positions[t] >= model.num_positions) return BAD_POSITION;
        if (in.slot_mapping[t] >= in.num_blocks * in.block_size) return BAD_SLOT;
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
    auto run = model.shape.dtype == BFLOAT16 ? run_typed<uint16_t> : run_typed<float>;
    run(model, inputs, threads_for(model, inputs.num_tokens));
}

void run_head(Model& model, const float* hidden, int64_t count, float* logits) {
    std::lock_guard<std::mutex> lock(model.is_running);
    auto run = model.shape.dtype == BFLOAT16 ? run_head_typed<uint16_t> : run_head_typed<float>;
    run(model, hidden, count, logits, threads_for(model, count));
}

int64_t step_bytes(const Model& model, int64_t num_tokens, int64_t num_logits) {
    auto bytes = model.shape.dtype == BFLOAT16 ? step_bytes_typed<uint16_t> : step_bytes_typed<float>;
    return bytes(model, std::max(num_tokens, num_logits));
}

}  // namespace millrace
