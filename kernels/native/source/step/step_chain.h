// Decoding steps with the choice of their tokens, each of which may be handed over while the one before it runs: what is
// chosen there is what it reads.

#pragma once

#include <array>
#include <mutex>
#include <vector>

#include "step/step_thread.h"
#include "sampling/sampling.h"
#include "step/step.h"

namespace millrace {

// What a step reads of its slots may be changed for others meanwhile, but for its own only when it is over: who gives up
// waiting for a step has to `Line::call` first.
class StepChain {
  public:
    explicit StepChain(Model& model) : model_(model) {
        for (ChainedStep& step : steps_) step.step_chain = this;
    }

    // A step of `num_rows` slots begins when all that the model was asked for is over. Their columns in `decoding` and
    // `asked` are read while it runs, and each slot's newest token is written there. `number` is the step's, and rises.
    void begin(int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling, int64_t num_rows);
    // The same, but only right behind step `number - 1`; false, and nothing is done, if that has not begun or is over, or
    // if the last of so many steps were not asked for. Never waits.
    bool follow(int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling, int64_t num_rows);
    // Waits for a step that has begun, whose rows were `num_rows`: token ids, and which rows are broken, as in `Choices`.
    // Nothing was done where there is an error, and nothing by those that follow it. To be asked for once.
    Error wait(int64_t number, int64_t num_rows, int64_t* token_ids, uint8_t* is_broken);

  private:
    struct ChainedStep : StepThread::Job {
        void run() override { error = step_chain->run(*this); }

        StepChain* step_chain = nullptr;
        int64_t number = -1;  // of a step that nobody has asked for; below 0: there is none
        const ChainedStep* before = nullptr;  // that it follows; none: it does not
        DecodeSlots decode_slots;
        SlotSampling sampling;
        std::vector<int64_t> slots, starts, places, token_ids;
        std::vector<uint8_t> is_broken;
        std::array<int64_t, NUM_THREAD_TIMES> thread_times;  // when it was over
        Error error = FINE;
    };
    static constexpr int64_t MAX_IN_FLIGHT = 4;  // in line, or over and not asked for: as many as engines have in flight

    ChainedStep& step(int64_t number) { return steps_[number % MAX_IN_FLIGHT]; }
    void fill(ChainedStep* step, int64_t number, const DecodeSlots& decode_slots, const SlotSampling& sampling,
              int64_t num_rows);
    Error run(ChainedStep& step);
    Error decode_and_choose(ChainedStep& step);

    Model& model_;
    std::mutex mutex_;
    std::array<ChainedStep, MAX_IN_FLIGHT> steps_;
    Memory logits_;  // [rows, V] of the step that runs, if one of them is random
};

}  // namespace millrace
