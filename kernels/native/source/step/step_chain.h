// StepChain: decoding steps with sampling, queued one behind the other, each reading the tokens that the one before
// sampled.
//
// `begin` and `wait` are called by the thread that waits for steps, `follow` by any one thread. The steps run on the
// step thread (step_thread.h).

#pragma once

#include <array>
#include <mutex>
#include <vector>

#include "step/step_thread.h"
#include "sampling/sampling.h"
#include "step/step.h"

namespace millrace {

// The slot tables that a step reads may change for other slots while it runs, for its own slots only after it. A caller
// that gives up on a step must call `StepThread::call` first.
class StepChain {
  public:
    explicit StepChain(Model& model) : model_(model) {
        for (ChainedStep& step : steps_) step.step_chain = this;
    }

    // Queues a step of `num_rows` slots behind everything that the model was asked to run. The step reads their columns
    // in `decode_slots` and `sampling` while it runs, and writes each slot's newest token. `number` identifies the step
    // and must rise.
    void begin(int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling, int64_t num_rows);
    // Like `begin`, but only directly behind step `number - 1`. Returns false and does nothing if that step has not
    // begun or is over, or if MAX_IN_FLIGHT steps have not been waited for. Never blocks.
    bool follow(int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling, int64_t num_rows);
    // Waits for a step that has begun, with `num_rows` rows: its token ids, and which rows are broken, as in
    // `SamplingRows`. On an error nothing was done, neither by it nor by the steps that follow it. Call once per step.
    Error wait(int64_t number, int64_t num_rows, int64_t* token_ids, uint8_t* is_broken);

  private:
    struct ChainedStep : StepThread::Job {
        void run() override { error = step_chain->run(*this); }

        StepChain* step_chain = nullptr;
        int64_t number = -1;  // of a step that was not waited for; negative: free
        const ChainedStep* before = nullptr;  // the step that it follows, or null
        DecodeSlots decode_slots;
        SlotSampling sampling;
        std::vector<int64_t> slots, starts, positions, token_ids;
        std::vector<uint8_t> is_broken;
        std::array<int64_t, NUM_THREAD_TIMES> thread_times;  // when the step was over
        Error error = FINE;
    };
    static constexpr int64_t MAX_IN_FLIGHT = 4;  // queued, or over and not waited for; an engine may have more planned

    ChainedStep& step(int64_t number) { return steps_[number % MAX_IN_FLIGHT]; }
    void fill(ChainedStep* step, int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling,
              int64_t num_rows);
    Error run(ChainedStep& step);
    Error decode_and_sample(ChainedStep& step);

    Model& model_;
    std::mutex mutex_;
    std::array<ChainedStep, MAX_IN_FLIGHT> steps_;
    Memory logits_;  // [rows, V] of the running step, if a row is random
};

}  // namespace millrace
