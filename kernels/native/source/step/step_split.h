// How the threads divide a step: all threads share all rows, or each of two threads takes half of the rows.
//
// Allocates the activations, and runs the region on the pool. Runs on the thread that called `run_step`.

#pragma once

#include <array>
#include <functional>
#include <optional>

#include "step/decoder.h"

namespace millrace {

// Fewest rows of a step that may be split: each half is more than a tile. A half of one tile waits for memory, and
// prefetches no keys a layer ahead: 14 to 24 rows took 3 to 30 % more when split, wherever the cores were (AVX-512; not
// measured with AVX2).
constexpr int64_t MIN_SPLIT_ROWS = 2 * (GEMM_ROWS + 1);

// Whether the step uses the argmax screen: not for some steps after one in which it was ineffective. Counts these.
inline bool use_screen(ArgmaxScreen* screen, const StepInputs& inputs) {
    bool is_in_range = 0 < inputs.num_logits && inputs.num_logits <= MAX_SCREENED_ROWS;
    if (!inputs.argmax || !is_in_range || !screen->is_made()) return false;
    if (screen->num_steps_disabled == 0) return true;
    screen->num_steps_disabled--;
    return false;
}

// Whether each sequence has one token in the step, in order.
inline bool has_one_token_each(const StepInputs& inputs) {
    bool have = inputs.num_tokens == inputs.num_sequences;
    for (int64_t i = 0; have && i <= inputs.num_sequences; i++) have = inputs.query_starts[i] == i;
    return have;
}

// Not with groups of codes: each half would unpack all of them.
template <class Weight>
constexpr bool CAN_SPLIT_STEP = !USES_AMX<InputOf<Weight>> && !IS_GROUPED<Weight>;

// Whether the rows of a step can be split: rows of decoding sequences, without AMX, by two threads. Sequences share
// blocks of earlier steps only, so that no row reads what another row of the step writes.
template <class Weight>
bool can_split_step(const Model& model, const StepInputs& inputs, int num_threads) {
    if (!CAN_SPLIT_STEP<Weight> || model.max_experts > 0) return false;  // experts would be read by both threads
    if (num_threads != 2 || inputs.num_tokens != inputs.num_logits || inputs.hidden) return false;
    if (inputs.num_tokens < MIN_SPLIT_ROWS || !has_one_token_each(inputs)) return false;
    for (int64_t i = 0; i < inputs.num_tokens; i++)
        if (inputs.logits_rows[i] != i) return false;
    return true;
}

// The inputs of `num` sequences from `first` on, of a step whose rows can be split.
inline StepInputs slice_inputs(const StepInputs& inputs, int64_t first, int64_t num, int64_t vocab_size) {
    StepInputs part = inputs;  // rows are numbered from 0 again, in `query_starts` and `logits_rows`, too
    part.num_tokens = part.num_sequences = part.num_logits = num;
    part.input_ids += first, part.positions += first, part.lengths += first;
    for (int64_t kind = 0; kind < inputs.cache->num_kinds; kind++)
        part.slot_mapping[kind] += first, part.block_tables[kind] += first * inputs.table_width;
    if (inputs.adapters) part.adapters += first;
    if (inputs.slots) part.slots += first;
    if (inputs.logits) part.logits += first * vocab_size;
    if (inputs.argmax) part.argmax += first, part.is_broken += first;
    return part;
}

// Bytes of activations of each half. Halves begin on their own cache lines.
template <class Weight>
int64_t half_bytes(const Model& model, int64_t num_rows) {
    return round_up(activation_bytes<InputOf<Weight>>(model, ceil_div(num_rows, 2)), 128);
}

// Bytes of both halves, and of all rows before the split.
template <class Weight>
int64_t split_bytes(const Model& model, int64_t num_rows) {
    return 2 * half_bytes<Weight>(model, num_rows) + activation_bytes<InputOf<Weight>>(model, num_rows);
}

// Returns the duration in ns; so do the next two.
inline int64_t run_region(Model& model, int num_threads, const std::function<void(int)>& job) {
    int64_t began_ns = now_ns();
    model.pool->run(num_threads, job);
    return now_ns() - began_ns;
}

// Two threads go through layers together until both have joined, because one may get its core late; then each continues
// with half of the rows. If one thread stays alone it takes both halves from the last layer on.
template <class Weight>
int64_t run_split(Model& model, const StepInputs& inputs, bool uses_screen) {
    using OfRows = Step<Weight>;
    int64_t num = inputs.num_tokens, bytes = half_bytes<Weight>(model, num), vocab_size = model.shape.vocab_size;
    char* memory = OfRows::reserve(model, num, num, 2, split_bytes<Weight>(model, num));
    std::array<int64_t, 3> begins{0, num / 2, num};
    auto half = [&](int index) {
        StepInputs part = slice_inputs(inputs, begins[index], begins[index + 1] - begins[index], vocab_size);
        return OfRows(model, part, {1, index, 2}, memory + index * bytes, uses_screen);
    };
    std::array<OfRows, 2> halves{half(0), half(1)};
    StepInputs without_outputs = inputs;
    without_outputs.logits = nullptr, without_outputs.argmax = nullptr, without_outputs.is_broken = nullptr;
    OfRows whole(model, without_outputs, {2}, memory + 2 * bytes, false);  // last, as its state is the model's
    int64_t elapsed_ns = run_region(model, 2, [&](int thread) {
        Phases phases(model.pool.get(), thread);
        std::optional<int> layer = whole.run_until_all_joined(phases);
        if (!layer) return;
        ThreadTeam::Member member = phases.member();
        if (member.rank == 0) model.num_layers_before_split = member.count == 1 ? -1 : *layer;
        for (int index = member.rank; index < 2; index += member.count) halves[index].resume(whole, begins[index], *layer);
        phases.run([](const ThreadTeam::Member&) {});  // waits for a thread that has joined but not yet noticed
    });
    for (OfRows* step : {&whole, &halves[0], &halves[1]}) step->publish_results();
    if (model.phase_ns) {
        whole.add_times(model.phase_ns), halves[0].add_times(model.phase_ns);
        // Otherwise the halves ran at the same time.
        if (model.num_layers_before_split < 0) halves[1].add_times(model.phase_ns);
    }
    return elapsed_ns;
}

template <class Weight>
int64_t run_whole(Model& model, const StepInputs& inputs, int num_threads, bool uses_screen) {
    using Whole = Step<Weight>;
    int64_t bytes = step_activation_bytes<InputOf<Weight>>(model, inputs.num_tokens, inputs.num_logits);
    char* memory = Whole::reserve(model, inputs.num_tokens, inputs.num_logits, num_threads, bytes);
    Whole step(model, inputs, {num_threads}, memory, uses_screen);
    int64_t elapsed_ns = run_region(model, num_threads, [&](int thread) { step.run(thread); });
    step.publish_results();
    if (model.phase_ns) step.add_times(model.phase_ns);
    return elapsed_ns;
}

template <class Weight>
void run_typed(Model& model, const StepInputs& inputs, int num_threads) {
    bool uses_screen = use_screen(&model.screen, inputs), can_split = can_split_step<Weight>(model, inputs, num_threads);
    SplitTuner::Kind kind{inputs.num_tokens, uses_screen ? 2 : inputs.argmax ? 1 : 0};
    model.screen.num_candidates = -1, model.screen.num_refined = model.kv_prefetched_bytes = 0;
    model.is_step_split = can_split && model.split_tuner.should_split(kind);
    int64_t elapsed_ns = model.is_step_split ? run_split<Weight>(model, inputs, uses_screen)
                                     : run_whole<Weight>(model, inputs, num_threads, uses_screen);
    if (model.phase_ns) model.phase_ns[NUM_PHASE_KINDS]++;
    can_split ? model.split_tuner.record(kind, model.is_step_split, elapsed_ns) : model.split_tuner.skip();
}

template <class Weight>
int64_t step_bytes_typed(const Model& model, int64_t num_tokens, int64_t num_logits) {
    int64_t workspace = max_workspace_bytes<Weight>(model, std::max(num_tokens, num_logits));
    int64_t scratch_bytes = attention_scratch_bytes<Weight>(model, model.pool->size());
    int64_t activations = step_activation_bytes<InputOf<Weight>>(model, num_tokens, num_logits);
    int num_threads = model.pool->size();
    // Rows that may be split.
    int64_t num_split = !CAN_SPLIT_STEP<Weight> || num_threads == 1 || model.max_experts > 0 ? 0 : std::min(num_tokens, num_logits);
    if (num_split >= MIN_SPLIT_ROWS) activations = std::max(activations, split_bytes<Weight>(model, num_split));
    int64_t num_screened = model.screen.is_made() ? std::min(num_logits, MAX_SCREENED_ROWS) : 0;
    int64_t screening = 0;
    if (num_screened > 0) screening = ScreenedArgmax<InputOf<Weight>>::num_bytes(model.head, num_screened, num_threads);
    int64_t half = ceil_div(std::min(num_split, MAX_SCREENED_ROWS), 2);
    if (num_screened > 0 && half > 0)
        screening = std::max(screening, 2 * ScreenedArgmax<InputOf<Weight>>::num_bytes(model.head, half, 1));
    return activations + screening + scratch_bytes + workspace * num_threads;
}

}  // namespace millrace
