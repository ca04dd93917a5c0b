#include "step/step_chain.h"

#include <algorithm>
#include <new>

namespace millrace {

void StepChain::begin(int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling, int64_t num_rows) {
    model_.step_thread->wait(&step(number));  // of a step that was never waited for
    std::lock_guard<std::mutex> lock(mutex_);
    fill(&step(number), number, decode_slots, sampling, num_rows);
    step(number).before = nullptr;
    model_.step_thread->submit(&step(number));
}

bool StepChain::follow(int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling, int64_t num_rows) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock || number < 1) return false;
    const ChainedStep& before = step(number - 1);
    if (before.number != number - 1 || step(number).number >= 0 || !model_.step_thread->is_queued(&before)) return false;
    fill(&step(number), number, decode_slots, sampling, num_rows);
    step(number).before = &before;
    if (model_.step_thread->submit_after(&step(number), &before)) return true;
    step(number).number = -1;
    return false;
}

Error StepChain::wait(int64_t number, int64_t num_rows, int64_t* token_ids, uint8_t* is_broken) {
    ChainedStep& sampling = step(number);
    model_.step_thread->wait(&sampling);
    std::lock_guard<std::mutex> lock(mutex_);
    if (sampling.number != number || int64_t(sampling.slots.size()) != num_rows) return BAD_ROW;
    std::copy(sampling.token_ids.begin(), sampling.token_ids.end(), token_ids);
    std::copy(sampling.is_broken.begin(), sampling.is_broken.end(), is_broken);
    sampling.number = -1;
    if (model_.thread_times) std::copy(sampling.thread_times.begin(), sampling.thread_times.end(), model_.thread_times);
    return sampling.error;
}

void StepChain::fill(ChainedStep* step, int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling,
                     int64_t num_rows) {
    step->number = number, step->decode_slots = decode_slots, step->sampling = sampling, step->error = FINE;
    step->slots.assign(decode_slots.slots, decode_slots.slots + num_rows);
    step->starts.assign(decode_slots.starts, decode_slots.starts + num_rows);
    step->decode_slots.slots = step->slots.data(), step->decode_slots.starts = step->starts.data();
    step->positions.resize(num_rows), step->token_ids.resize(num_rows), step->is_broken.resize(num_rows);
}

Error StepChain::run(ChainedStep& step) {
    Error error = step.before ? step.before->error : FINE;
    try {
        if (error == FINE) error = decode_and_sample(step);
    } catch (const std::bad_alloc&) {
        error = NO_MEMORY;
    }
    step.thread_times = model_.pool->thread_times;
    return error;
}

Error StepChain::decode_and_sample(ChainedStep& step) {
    int64_t num_rows = int64_t(step.slots.size()), vocab_size = model_.shape.vocab_size;
    auto is_random = [&](int64_t slot) {  // `decode` reports an invalid slot
        return slot >= 0 && slot < step.decode_slots.num_slots && step.sampling.is_random[slot];
    };
    bool any_random = std::any_of(step.slots.begin(), step.slots.end(), is_random);
    StepOutputs outputs{nullptr, step.token_ids.data(), step.is_broken.data()};
    if (any_random) {
        grow(&logits_, num_rows * vocab_size * 4);
        outputs = {logits_.as<float>()};
    }
    Error error = decode(model_, step.decode_slots, num_rows, outputs);
    if (error != FINE) return error;
    if (any_random) {
        for (int64_t row = 0; row < num_rows; row++)  // the token after the one that was read
            step.positions[row] = step.starts[row] + 1 - step.sampling.num_prompt[step.slots[row]];
        sample(model_, step.sampling,
               {outputs.logits, num_rows, vocab_size, step.slots.data(), step.positions.data(), nullptr, 0, nullptr,
                step.token_ids.data(), step.is_broken.data()});
    }
    for (int64_t row = 0; row < num_rows; row++) step.decode_slots.last_tokens[step.slots[row]] = step.token_ids[row];
    return FINE;
}

}  // namespace millrace
