// The step itself, for one dtype and one type of the cache's numbers: a decoder's layers in phases, which threads go through
// together, or from some layer on one alone with its rows.
//
// Knows in which order the parts come. Refuses to know what each does: products (linear.h), attention (attending.h), what lies
// between the two (placing.h), and what comes after the layers (ending.h); and who goes through a step (ways.h).

#pragma once

#include <optional>

#include "attention/attention_step.h"
#include "step/output_head.h"
#include "step/norms.h"
#include "step/rope_and_cache_write.h"

namespace millrace {

// Who goes through a step: `num_threads` together; or one of `num_beside` alone, at its `place` among them.
struct Crew {
    int num_threads, place = 0, num_beside = num_threads;
};

template <class Weight, class Cached>
class Step {
    using Input = InputOf<Weight>;
    using Seat = Party::Seat;

  public:
    // `memory`: of its activations. What else threads need is there: see `reserve`.
    Step(Model& model, const StepInputs& inputs, Crew crew, char* memory, bool is_screened)
        : model_(model), shape_(model.shape), crew_(crew), times_(model.part_ns),
          layout_{inputs.blocks_apart, inputs.block_size, shape_.num_kv_heads, shape_.head_dim}, asked_rows_(inputs),
          all_(model, memory, inputs), asked_(model, all_.at.end, asked_rows_.of(inputs)), placing_(model, layout_, inputs),
          attending_(model, layout_), ending_(model, inputs, crew.num_threads, is_screened) {
        int num_threads = crew.num_threads;
        for (const Layer& layer : model.layers)
            (&layer == &model.layers.back() ? last_batch() : all_).plan(model, layer.window, num_threads, ROWS_TOGETHER<Cached>);
        int64_t num_floats = 0;
        each_plan([&](const Batch<Input>&, const Plan& plan) {
            if (plan.is_split) num_floats = std::max(num_floats, plan.partial_size * int64_t(plan.chunks.size()));
        });
        ensure(&model.partials, num_floats * 4);
        bool looks_ahead = is_worth_looking_ahead();
        model.is_shared_by_rows = num_threads == 2 && can_share_rows<Weight>(model.layers[0].qkv, all_.at.normed.num_tiles());
        model.is_passing = inputs.num_tokens <= passing_rows<Weight>(model.layers[0].qkv) ||
                           (inputs.num_logits > 0 && inputs.num_logits <= passing_rows<Weight>(model.head));
        if ((looks_ahead || model.is_shared_by_rows || model.is_passing) && !is_any_kept())
            looks_ahead = model.is_shared_by_rows = model.is_passing = false;
        if (looks_ahead) upcoming_.resize(num_threads);
        attending_.decide_waiting(looks_ahead);
    }

    // Memory of a step of so many threads: for its activations, and what each thread has. Here a lack of it can be told.
    static char* reserve(Model& model, int64_t num_tokens, int64_t num_logits, int num_threads, int64_t activation_bytes) {
        ensure(&model.activations, activation_bytes);
        ensure(&model.scratch, Attending<Input, Cached>::scratch_bytes(num_threads));
        reserve_room<Weight>(&model, std::max(num_tokens, num_logits), num_threads);
        return model.activations.as<char>();
    }

    // All of it.
    void run(int thread) {
        Phases phases(model_.pool.get(), thread);
        begin(phases);
        run_layers(0, phases);
    }

    // From its beginning to the layer before which all threads are there; to the last one, if that never is. None for who
    // comes when that is over.
    std::optional<int> run_until_all_are_there(Phases& phases) {
        begin(phases);
        for (int i = 0; i < last_layer(); i++) {
            if (phases.is_next_shared() && phases.seat().count == crew_.num_threads) return i;
            begin_layer(i, phases);
            end_layer(i, all_, phases);
        }
        return phases.is_next_shared() ? std::optional<int>(last_layer()) : std::nullopt;
    }

    // What another step has left of its rows from `first` on before that layer is what this one, of these rows, goes on with,
    // by this thread alone.
    void go_on(const Step& before, int64_t first, int layer) {
        Phases phases(crew_.place);
        all_.at.residual = before.all_.at.residual + first * before.all_.at.hidden_stride;
        times_.start();
        list_all_reads(phases);
        run_layers(layer, phases);
    }

    // Once all have gone through it: what was found, and what becomes known of the model.
    void tell() {
        ending_.tell();
        for (const Upcoming& upcoming : upcoming_) model_.num_bytes_beside += upcoming.num_bytes();
    }

    // Adds the times of its parts.
    void tell_times(int64_t* part_ns) const { times_.tell(part_ns); }

  private:
    // Who goes through what comes after the last layer's keys and values.
    Batch<Input>& last_batch() { return asked_rows_.is_cut ? asked_ : all_; }

    template <class Use>
    void each_plan(const Use& use) {
        for (Batch<Input>* batch : {&all_, &asked_})
            for (auto& [window, plan] : batch->plans) use(*batch, plan);
    }

    int last_layer() const { return int(model_.layers.size()) - 1; }

    void begin(Phases& phases) {
        list_all_reads(phases);
        times_.pass(phases, REST, [&](Seat seat) { embed(seat); });
    }

    // By who comes first alone, while the others come.
    void list_all_reads(Phases& phases) {
        times_.pass(phases, REST, [&](Seat) {
            each_plan([&](const Batch<Input>& batch, Plan& plan) { attending_.list_reads(batch, &plan); });
        });
    }

    // From the layer `first` on, to the end.
    void run_layers(int first, Phases& phases) {
        int last = last_layer();
        for (int i = first; i < last; i++) {
            begin_layer(i, phases);
            end_layer(i, all_, phases);
        }
        begin_layer(last, phases);
        if (asked_rows_.is_cut) times_.pass(phases, REST, [&](Seat seat) { keep_asked(seat); });
        end_layer(last, last_batch(), phases);
        ending_.run(last_batch(), times_, phases);
    }

    void embed(Seat seat) {
        int64_t hidden = shape_.hidden_size;
        each_row(seat, all_.inputs.num_tokens, [&](int64_t t) {
            int64_t id = all_.inputs.input_ids[t];
            float* to = all_.at.residual + t * all_.at.hidden_stride;
            if (!shape_.is_tied) {
                const Weight* row = model_.embedding.as<Weight>() + id * hidden;
                for (int64_t i = 0; i < hidden; i++) to[i] = widen(row[i]);
                return;
            }
            read_row<Weight>(model_.head, id, to);
        });
    }

    Cached* cache_of(int index) const { return static_cast<Cached*>(all_.inputs.cache) + index * layout_.layer_stride(); }

    // Where rows begin before they are normed.
    static auto residual_of(const Batch<Input>& batch) {
        return [&at = batch.at](int64_t t) { return at.residual + t * at.hidden_stride; };
    }

    // A product of a layer's, of rows that are normed first. Of few rows each thread norms all of them, for itself, and nobody
    // waits for the others and reads what they have normed: 1 to 12 rows take 1 to 4 % less where memory is fast, perhaps as
    // the cores are on different dies then, and as long where it is slow (two threads, AVX-512 with bf16, Zen 4 class EPYC).
    template <class Out>
    void pass_normed(Phases& phases, const Batch<Input>& batch, const std::vector<float>& norm_weight, const Linear& linear,
                     const Out& out) {
        const TiledRows<Input>& normed = batch.at.normed;
        if (normed.num_rows > NORMED_BY_ALL<Input>) {
            times_.pass(phases, REST, [&](Seat seat) { norm(batch, norm_weight, seat); });
            return pass_product(phases, linear, normed, out);
        }
        times_.pass(phases, LINEARS, [&](Seat seat) {
            TiledRows<Input> own{reinterpret_cast<Input*>(model_.room_of(seat.place)), normed.num_rows, normed.size};
            norm_to(own, 0, own.num_rows, residual_of(batch), norm_weight.data(), shape_.rms_norm_eps);
            multiply<Weight>(model_, linear, own, out, seat);
        });
    }

    // A product of a layer's.
    template <class Out>
    void pass_product(Phases& phases, const Linear& linear, const TiledRows<Input>& x, const Out& out) {
        times_.pass(phases, LINEARS, [&](Seat seat) { multiply<Weight>(model_, linear, x, out, seat, upcoming_of(seat)); });
    }

    // By the cache behind the cores' own, which is measured if nobody knows.
    bool is_any_kept() {
        return model_.kept.measured(model_.weights.as<char>(), model_.weights.num_bytes(), times_.since_ns()) > 0;
    }

    // Whether keys and values are fetched a layer ahead, if they are kept until then: where products have time for it, and
    // decoding rows read any.
    bool is_worth_looking_ahead() {
        if (model_.layers.size() == 1 || !layout_.is_tiled()) return false;
        if (num_pairs_beside<Weight>(model_.layers[0].qkv, all_.at.normed) == 0) return false;
        bool is_read = false;
        each_plan([&](const Batch<Input>&, const Plan& plan) {
            for (const Item& item : plan.items) is_read |= is_fetched_ahead(item.num_rows);
        });
        return is_read;
    }

    Upcoming* upcoming_of(Seat seat) { return upcoming_.empty() ? nullptr : &upcoming_[seat.rank]; }

    // From here on this thread fetches its part of what layer `index` reads, the one after the layer it is in; of the layer
    // it is in nothing more, and nothing at all in the last one.
    void look_ahead(int index, Seat seat) {
        int last = last_layer();
        if (upcoming_.empty()) return;
        if (index > last) return upcoming_[seat.rank].stop();
        const Layer &before = model_.layers[index - 1], &layer = model_.layers[index];
        const Plan& plan = (index == last ? last_batch() : all_).plans.at(layer.window);
        int64_t first, end, num_pairs = 0;
        share(plan.num_parts(), seat.rank, seat.count, &first, &end);
        for (const Linear* linear : {&before.output, &before.gate_up, &before.down, &layer.qkv})
            num_pairs += num_pairs_beside<Weight>(*linear, all_.at.normed) / seat.count;
        int64_t tile_bytes = TILE * layout_.padded_dim() * int64_t(sizeof(Cached));
        int64_t most_bytes = model_.kept.num_bytes() / 2 / crew_.num_beside;  // the other half is for what is read meanwhile
        const int64_t* reads = plan.reads.data();
        upcoming_[seat.rank].begin(cache_of(index), reads + plan.first_read[first], reads + plan.first_read[end], tile_bytes,
                                   most_bytes, num_pairs);
    }

    // Until the cache has the layer's keys and values.
    void begin_layer(int index, Phases& phases) {
        const Layer& layer = model_.layers[index];
        pass_normed(phases, all_, layer.input_norm, layer.qkv, Rows{all_.at.qkv, all_.at.qkv_stride, Into::STORE});
        times_.pass(phases, REST, [&](Seat seat) { place_tokens(layer, cache_of(index), seat); });
    }

    void end_layer(int index, const Batch<Input>& batch, Phases& phases) {
        const Layer& layer = model_.layers[index];
        const Plan& plan = batch.plans.at(layer.window);
        const Cached* cache = cache_of(index);
        const Activations<Input>& at = batch.at;
        Rows residual{at.residual, at.hidden_stride, Into::ADD};
        times_.pass(phases, ATTENTION, [&](Seat seat) { attending_.attend(batch, plan, cache, seat); });
        if (plan.is_split)
            times_.pass(phases, ATTENTION, [&](Seat seat) { attending_.put_chunks_together(batch, plan, cache, seat); });
        times_.pass(phases, LINEARS, [&](Seat seat) {
            look_ahead(index + 1, seat);
            multiply<Weight>(model_, layer.output, at.attended, residual, seat, upcoming_of(seat));
        });
        pass_normed(phases, batch, layer.post_norm, layer.gate_up, SiluMul<Input>{at.inner});
        pass_product(phases, layer.down, at.inner, residual);
    }

    // Residuals and queries of the rows that are asked for, to where those are by themselves.
    void keep_asked(Seat seat) {
        const Activations<Input>&from = all_.at, &to = asked_.at;
        each_row(seat, asked_.inputs.num_tokens, [&](int64_t i) {
            int64_t row = asked_rows_.rows[i];
            std::memcpy(to.residual + i * to.hidden_stride, from.residual + row * from.hidden_stride,
                        shape_.hidden_size * 4);
            std::memcpy(to.qkv + i * to.qkv_stride, from.qkv + row * from.qkv_stride, model_.attended_size() * 4);
        });
    }

    void norm(const Batch<Input>& batch, const std::vector<float>& weight, Seat seat) {
        seat.each_piece(batch.inputs.num_tokens, ROWS, [&](int64_t first, int64_t last, int64_t) {
            norm_to(batch.at.normed, first, last, residual_of(batch), weight.data(), shape_.rms_norm_eps);
        });
    }

    // Norms and rotates queries and keys, and writes keys and values into the cache.
    void place_tokens(const Layer& layer, Cached* cache, Seat seat) {
        each_row(seat, all_.inputs.num_tokens,
                 [&](int64_t t) { placing_.place(layer, cache, t, all_.at.qkv + t * all_.at.qkv_stride); });
    }

    Model& model_;
    const Shape& shape_;
    Crew crew_;
    PartTimes times_;
    CacheLayout<Cached> layout_;
    AskedRows asked_rows_;
    Batch<Input> all_, asked_;
    std::vector<Upcoming> upcoming_;  // of each thread, where anything is fetched a layer ahead
    Placing<Cached> placing_;
    Attending<Input, Cached> attending_;
    Ending<Weight> ending_;
};

}  // namespace millrace
