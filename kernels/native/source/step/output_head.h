// The output of a step: hidden states, logits, or the argmax of rows.
//
// The last phases of a step (final norm, head product), on all compute threads. Argmax rows use the screen
// (argmax_screen.h) or the whole head (argmax.h). `publish_results` merges the threads' results on the calling thread.

#pragma once

#include "step/batch.h"
#include "step/argmax.h"
#include "step/norms.h"
#include "step/argmax_screen.h"
#include "step/phase_times.h"
#include "machine/vector_math.h"

namespace millrace {

// Output of the head's product as logits [rows, V]: scaled, then capped. The argmax needs neither: both are monotone, and
// the scale is above 0.
struct LogitsOutput {
    FloatOutput logits;
    float cap;

    LogitsOutput(const Shape& shape, float* to)
        : logits{to, shape.vocab_size, StoreMode::STORE, shape.head_scale}, cap(shape.head_soft_cap) {}

    void prefetch_output(int64_t first_row, int rows, int64_t panel) const { logits.prefetch_output(first_row, rows, panel); }

    void write(float* tile, int64_t first_row, int rows, int64_t panel, int64_t columns) const {
        if (cap <= 0.0f) return logits.write(tile, first_row, rows, panel, columns);
        for (int i = 0; i < rows * PANEL; i += W)
            store(tile + i, soft_cap(mul(load(tile + i), splat(logits.scale)), cap));
        FloatOutput{logits.data, logits.stride, logits.mode}.write(tile, first_row, rows, panel, columns);
    }
};

template <class Weight>
class OutputHead {
    using Input = InputOf<Weight>;
    using Member = ThreadTeam::Member;

  public:
    // `uses_screen`: argmax rows use the screen.
    OutputHead(Model& model, const StepInputs& inputs, int num_threads, bool uses_screen)
        : model_(model), shape_(model.shape), inputs_(inputs), num_threads_(num_threads), uses_screen_(uses_screen) {
        if (inputs.argmax) argmax_.resize(num_threads * argmax_stride());
        if (uses_screen_) screening_.resize(model.head, inputs.num_logits, num_threads);
    }

    // Writes hidden states, and logits or argmax, as requested.
    void run(const Batch<Input>& batch, PhaseTimes& times, Phases& phases) {
        const StepInputs& inputs = batch.inputs;
        const Activations<Input>& at = batch.buffers;
        int64_t hidden = shape_.hidden_size;
        TiledRows<Input> normed{at.normed.data, inputs.num_logits, hidden};
        if (inputs.hidden) {
            times.run(phases, OTHER, [&](Member member) {
                parallel_for_rows(member, inputs.num_tokens, [&](int64_t t) {
                    std::memcpy(inputs.hidden + t * hidden, at.residual + t * at.hidden_stride, hidden * 4);
                });
            });
        }
        if (!inputs.logits && !inputs.argmax) return;
        auto row = [&](int64_t i) { return at.residual + inputs.logits_rows[i] * at.hidden_stride; };
        if constexpr (!IS_GROUPED<Weight>)
            if (uses_screen_) return find_screened(normed, row, times, phases);
        times.run(phases, OTHER, [&](Member member) {
            member.parallel_for(inputs.num_logits, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
                norm_to(normed, first, last, row, model_.final_norm);
            });
        });
        LogitsOutput logits(shape_, inputs.logits);
        if (inputs.logits)
            return times.run(phases, LINEARS,
                             [&](Member member) { multiply<Weight>(model_, model_.head, normed, logits, member); });
        times.run(phases, LINEARS, [&](Member member) {
            RowArgmax argmax{argmax_.data() + member.rank * argmax_stride()};
            multiply<Weight>(model_, model_.head, normed, argmax, member);
        });
    }

    // After the region: merges what the threads found, if argmax was requested.
    void publish_results() {
        if (!inputs_.argmax) return;
        for (int64_t row = 0; row < inputs_.num_logits; row++) {
            ArgmaxToken maximum = argmax_[row];
            for (int thread = 1; thread < num_threads_; thread++) {
                const ArgmaxToken& other = argmax_[thread * argmax_stride() + row];
                if (maximum.is_beaten_by(other.logit, other.id)) maximum = other;
            }
            inputs_.is_broken[row] = maximum.is_broken();
            inputs_.argmax[row] = maximum.is_broken() ? 0 : maximum.id;
            if (uses_screen_ && !maximum.is_broken()) model_.screen.expected.add(maximum.logit / screening_.norm(row));
        }
        if (!uses_screen_) return;
        ArgmaxScreen& screen = model_.screen;
        screen.num_candidates = std::max<int64_t>(0, screen.num_candidates) + screening_.num_candidates();
        screen.num_refined += screening_.num_refined();
        if (screening_.is_ineffective()) screen.num_steps_disabled = NUM_STEPS_DISABLED;
    }

  private:
    // Argmax with the screen; `row(i)` is where row i begins before its norm. Multiplies the whole head if the screen
    // was ineffective.
    template <class Row>
    void find_screened(const TiledRows<Input>& normed, const Row& row, PhaseTimes& times, Phases& phases) {
        const ArgmaxScreen& screen = model_.screen;
        const Linear& head = model_.head;
        times.run(phases, OTHER, [&](Member member) {
            int64_t k = head.k;
            thread_local std::vector<float> numbers;
            numbers.resize(k);
            member.parallel_for(normed.num_rows, 1, [&](int64_t i, int64_t, int64_t) {
                norm_row(row(i), model_.final_norm, k, numbers.data());
                normed.put(i, 0, k, numbers.data());
                screening_.put(screen, i, numbers.data());
            });
        });
        times.run(phases, LINEARS, [&](Member member) { screening_.screen_panels(screen, member, model_.is_streaming); });
        auto find = [&](Member member, int64_t panel, int64_t i, int64_t next) {
            RowArgmax argmax{argmax_.data() + member.rank * argmax_stride()};
            alignas(64) float tile[PANEL];
            multiply_row<Weight>(head, screening_.row(i), panel, next, tile);
            emit_tile(head, argmax, tile, i, 1, panel);
            return argmax.best[i].logit;
        };
        times.run(phases, LINEARS, [&](Member member) {
            member.parallel_for(normed.num_rows, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
                for (int64_t i = first; i < last; i++) {
                    int64_t panel = screening_.best_panel(i), next = screening_.best_panel(std::min(i + 1, last - 1));
                    screening_.set_known(i, panel, find(member, panel, i, next));
                }
            });
        });
        times.run(phases, OTHER, [&](Member member) { screening_.mark_candidates(member); });
        times.run(phases, LINEARS, [&](Member member) {
            RowArgmax argmax{argmax_.data() + member.rank * argmax_stride()};
            if (screening_.is_ineffective()) return multiply<Weight>(model_, head, normed, argmax, member);
            screening_.for_each_candidate(member,
                                          [&](int64_t panel, int64_t i, int64_t next) { find(member, panel, i, next); });
        });
    }

    // Distance of threads' entries. NOTE: the padding keeps threads from writing to the same cache line.
    int64_t argmax_stride() const { return inputs_.num_logits + 64 / int64_t(sizeof(ArgmaxToken)); }

    Model& model_;
    const Shape& shape_;
    StepInputs inputs_;  // the step's; `batch.inputs` may number rows differently
    int num_threads_;
    std::vector<ArgmaxToken> argmax_;  // per thread, if argmax is requested
    bool uses_screen_;                 // by `screening_`
    ScreenedArgmax<Input> screening_;
};

template <class Weight>
void run_head_typed(Model& model, const float* hidden, int64_t count, float* logits, int num_threads) {
    using Input = InputOf<Weight>;
    const Shape& shape = model.shape;
    grow(&model.activations, activation_bytes<Input>(model, count));
    reserve_workspace<Weight>(&model, count, num_threads);
    TiledRows<Input> normed{model.activations.as<Input>(), count, shape.hidden_size};
    LogitsOutput out(shape, logits);
    model.splits_rows = model.is_streaming = false;
    model.pool->run(num_threads, [&](int thread) {
        Phases phases(model.pool.get(), thread);
        phases.run([&](ThreadTeam::Member member) {
            auto row = [&](int64_t i) { return hidden + i * shape.hidden_size; };
            member.parallel_for(count, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
                norm_to(normed, first, last, row, model.final_norm);
            });
        });
        phases.run([&](ThreadTeam::Member member) { multiply<Weight>(model, model.head, normed, out, member); });
    });
}

inline void norm_rows(const Model& model, const float* hidden, int64_t count, float* normed) {
    int64_t size = model.shape.hidden_size;
    for (int64_t i = 0; i < count; i++)
        norm_row(hidden + i * size, model.final_norm, size, normed + i * size);
}

}  // namespace millrace
