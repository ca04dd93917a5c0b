// What comes after a step's layers: hidden states, logits, or the likeliest tokens of rows.
//
// Refuses to know how rows got there, and which rows are asked for.

#pragma once

#include "step/batch.h"
#include "step/argmax.h"
#include "step/norms.h"
#include "step/argmax_screen.h"
#include "step/phase_times.h"

namespace millrace {

template <class Weight>
class Ending {
    using Input = InputOf<Weight>;
    using Seat = Party::Seat;

  public:
    // `is_screened`: likeliest tokens are found with the screen.
    Ending(Model& model, const StepInputs& inputs, int num_threads, bool is_screened)
        : model_(model), shape_(model.shape), inputs_(inputs), num_threads_(num_threads), is_screened_(is_screened) {
        if (inputs.likeliest) found_.resize(num_threads * found_apart());
        if (is_screened_) screening_.resize(model.head, inputs.num_logits, num_threads);
    }

    // Hidden states, and logits or the likeliest of them, to whoever asked for these.
    void run(const Batch<Input>& batch, PartTimes& times, Phases& phases) {
        const StepInputs& inputs = batch.inputs;
        const Activations<Input>& at = batch.at;
        int64_t hidden = shape_.hidden_size;
        TiledRows<Input> normed{at.normed.data, inputs.num_logits, hidden};
        if (inputs.hidden) {
            times.pass(phases, REST, [&](Seat seat) {
                each_row(seat, inputs.num_tokens, [&](int64_t t) {
                    std::memcpy(inputs.hidden + t * hidden, at.residual + t * at.hidden_stride, hidden * 4);
                });
            });
        }
        if (!inputs.logits && !inputs.likeliest) return;
        auto row = [&](int64_t i) { return at.residual + inputs.logits_rows[i] * at.hidden_stride; };
        if (is_screened_) return find_screened(normed, row, times, phases);
        times.pass(phases, REST, [&](Seat seat) {
            seat.each_piece(inputs.num_logits, ROWS, [&](int64_t first, int64_t last, int64_t) {
                norm_to(normed, first, last, row, model_.final_norm.data(), shape_.rms_norm_eps);
            });
        });
        Rows logits{inputs.logits, shape_.vocab_size, Into::STORE};
        if (inputs.logits)
            return times.pass(phases, LINEARS, [&](Seat seat) { multiply<Weight>(model_, model_.head, normed, logits, seat); });
        times.pass(phases, LINEARS, [&](Seat seat) {
            LikeliestOfRows likeliest{found_.data() + seat.rank * found_apart()};
            multiply<Weight>(model_, model_.head, normed, likeliest, seat);
        });
    }

    // Once all have gone through it: of what each thread has found, where that was asked for.
    void tell() {
        if (!inputs_.likeliest) return;
        for (int64_t row = 0; row < inputs_.num_logits; row++) {
            Likeliest most = found_[row];
            for (int thread = 1; thread < num_threads_; thread++) {
                const Likeliest& other = found_[thread * found_apart() + row];
                if (most.is_behind(other.logit, other.id)) most = other;
            }
            inputs_.is_broken[row] = most.is_broken();
            inputs_.likeliest[row] = most.is_broken() ? 0 : most.id;
            if (is_screened_ && !most.is_broken()) model_.screen.expected.note(most.logit / screening_.length(row));
        }
        if (!is_screened_) return;
        Screen& screen = model_.screen;
        screen.num_left = std::max<int64_t>(0, screen.num_left) + screening_.num_left();
        screen.num_closer += screening_.num_closer();
        if (screening_.tells_little()) screen.num_steps_off = STEPS_OFF;
    }

  private:
    // The likeliest of rows; `row(i)` is where the i-th begins before its norm. Where the screen tells little, all of the
    // head is multiplied after it.
    template <class Row>
    void find_screened(const TiledRows<Input>& normed, const Row& row, PartTimes& times, Phases& phases) {
        const Screen& screen = model_.screen;
        const Linear& head = model_.head;
        times.pass(phases, REST, [&](Seat seat) {
            int64_t k = head.k;
            thread_local std::vector<float> numbers;
            numbers.resize(k);
            seat.each_piece(normed.num_rows, 1, [&](int64_t i, int64_t, int64_t) {
                norm_row(row(i), model_.final_norm.data(), k, shape_.rms_norm_eps, numbers.data());
                normed.put(i, 0, k, numbers.data());
                screening_.put(screen, i, numbers.data());
            });
        });
        times.pass(phases, LINEARS, [&](Seat seat) { screening_.look(screen, seat, model_.is_passing); });
        auto find = [&](Seat seat, int64_t panel, int64_t i, int64_t next) {
            LikeliestOfRows likeliest{found_.data() + seat.rank * found_apart()};
            alignas(64) float tile[PANEL];
            multiply_row<Weight>(head, screening_.row(i), panel, next, tile);
            hand_over(head, likeliest, tile, i, 1, panel);
            return likeliest.found[i].logit;
        };
        times.pass(phases, LINEARS, [&](Seat seat) {
            seat.each_piece(normed.num_rows, ROWS, [&](int64_t first, int64_t last, int64_t) {
                for (int64_t i = first; i < last; i++) {
                    int64_t panel = screening_.first_panel(i), next = screening_.first_panel(std::min(i + 1, last - 1));
                    screening_.know(i, panel, find(seat, panel, i, next));
                }
            });
        });
        times.pass(phases, REST, [&](Seat seat) { screening_.mark(seat); });
        times.pass(phases, LINEARS, [&](Seat seat) {
            LikeliestOfRows likeliest{found_.data() + seat.rank * found_apart()};
            if (screening_.tells_little()) return multiply<Weight>(model_, head, normed, likeliest, seat);
            screening_.each_left(seat, [&](int64_t panel, int64_t i, int64_t next) { find(seat, panel, i, next); });
        });
    }

    // From what one thread has found to what the next one has: no two write to the same line.
    int64_t found_apart() const { return inputs_.num_logits + 64 / int64_t(sizeof(Likeliest)); }

    Model& model_;
    const Shape& shape_;
    StepInputs inputs_;  // the step's; `batch.inputs` may count rows anew
    int num_threads_;
    std::vector<Likeliest> found_;  // of each thread, where that is asked for
    bool is_screened_;              // by what follows
    Screening<Input> screening_;
};

template <class Weight>
void run_head_typed(Model& model, const float* hidden, int64_t count, float* logits, int num_threads) {
    using Input = InputOf<Weight>;
    const Shape& shape = model.shape;
    ensure(&model.activations, activation_bytes<Input>(model, count));
    reserve_room<Weight>(&model, count, num_threads);
    TiledRows<Input> normed{model.activations.as<Input>(), count, shape.hidden_size};
    Rows out{logits, shape.vocab_size, Into::STORE};
    model.is_shared_by_rows = model.is_passing = false;
    model.pool->run(num_threads, [&](int thread) {
        Phases phases(model.pool.get(), thread);
        phases.run([&](Party::Seat seat) {
            auto row = [&](int64_t i) { return hidden + i * shape.hidden_size; };
            seat.each_piece(count, ROWS, [&](int64_t first, int64_t last, int64_t) {
                norm_to(normed, first, last, row, model.final_norm.data(), shape.rms_norm_eps);
            });
        });
        phases.run([&](Party::Seat seat) { multiply<Weight>(model, model.head, normed, out, seat); });
    });
}

inline void norm_rows(const Model& model, const float* hidden, int64_t count, float* normed) {
    int64_t size = model.shape.hidden_size;
    for (int64_t i = 0; i < count; i++)
        norm_row(hidden + i * size, model.final_norm.data(), size, model.shape.rms_norm_eps, normed + i * size);
}

}  // namespace millrace
