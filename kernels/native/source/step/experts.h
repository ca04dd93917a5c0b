// ExpertStep: the phases of a layer's experts. Each row is multiplied by the experts that the router chooses for it.
//
//   norm      rows to float32; again for the experts, where they and the router read rows of other norms
//   router    its product: a logit for each expert, and one for the gate of the network that all rows take, if it has one
//   route     experts and weights of each row (route.h); one thread sorts the pairs by expert (expert_rows.h)
//   gather    the rows of each expert, in the layout that products read
//   gate_up   of all experts that have rows, panel by panel
//   split     only with groups of codes: rows as 16-bit integers (grouped/split_rows.h)
//   down      likewise
//   combine   of each row the sum over its experts, best first, added to the residual; or a norm of the sum is, or of the
//             norms of the sum and of the output of the network beside
//
// One row alone is not gathered: each thread norms it for itself, before the router and before gate_up, and splits what
// it multiplies by down.
//
// NOTE: a pair's product does not depend on the expert's other rows, and a row's sum has the order of its own experts. So
// a row gives the same bits in every batch. Called by Step, on all compute threads.

#pragma once

#include "grouped/dense_product.h"
#include "step/expert_rows.h"
#include "step/norms.h"
#include "step/phase_times.h"
#include "step/route.h"

namespace millrace {

template <class Weight>
class ExpertStep {
    using Input = InputOf<Weight>;
    using Member = ThreadTeam::Member;
    static constexpr int64_t PANELS_PER_PIECE = 8, COLUMNS_PER_PIECE = 1024;

  public:
    ExpertStep(Model& model, int64_t num_rows)
        : model_(model), hidden_(model.shape.hidden_size), rows_(num_rows, model.max_experts, model.max_top_k) {}

    // Adds what the experts of a layer give to the residual of a batch, and what a network beside them has left in
    // `Activations::branch`.
    void run(const Batch<Input>& batch, int index, PhaseTimes& times, Phases& phases) {
        Layer& layer = model_.layers[index];
        const Activations<Input>& at = batch.buffers;
        int64_t num_rows = batch.inputs.num_tokens;
        bool is_one = num_rows == 1 && MAX_ROWS_NORMED_PER_THREAD<Input> > 0 && !layer.shape.experts.scales_input &&
                      !layer.experts.has_columns;
        is_one ? run_one(layer, at, times, phases) : run_all(layer, at, num_rows, times, phases);
        combine(layer, at, num_rows, times, phases);
    }

  private:
    void run_all(Layer& layer, const Activations<Input>& at, int64_t num_rows, PhaseTimes& times, Phases& phases) {
        times.run(phases, OTHER, [&](Member member) {
            parallel_for_rows(member, num_rows, [&](int64_t t) {
                norm_row(at.residual + t * at.hidden_stride, layer.router_norm(), hidden_,
                         at.normed_floats + t * at.hidden_stride);
            });
        });
        times.run(phases, LINEARS, [&](Member member) { multiply_router(layer, at, at.normed_floats, num_rows, member); });
        times.run(phases, OTHER, [&](Member member) { route(layer, at, num_rows, member); });
        times.run(phases, OTHER, [&](Member member) {
            member.parallel_for(1, 1, [&](int64_t, int64_t, int64_t) { sort(layer, num_rows); });
        });
        if (&layer.router_norm() != &layer.experts_norm())
            times.run(phases, OTHER, [&](Member member) {
                parallel_for_rows(member, num_rows, [&](int64_t t) {
                    norm_row(at.residual + t * at.hidden_stride, layer.experts_norm(), hidden_,
                             at.normed_floats + t * at.hidden_stride);
                });
            });
        times.run(phases, OTHER, [&](Member member) { gather(layer, at, member); });
        times.run(phases, LINEARS, [&](Member member) {
            multiply_gate_up(layer, at, member, [&](const ActiveExpert& one, const Linear& gate_up) {
                return inputs_of(at, one, gate_up);
            });
        });
        if constexpr (IS_GROUPED<Weight>)
            times.run(phases, OTHER, [&](Member member) { split_inner(layer, at, member); });
        times.run(phases, LINEARS, [&](Member member) {
            multiply_down(layer, at, member,
                          [&](const ActiveExpert& one, const Linear& down) { return inner_of(at, one, down); });
        });
    }

    void run_one(Layer& layer, const Activations<Input>& at, PhaseTimes& times, Phases& phases) {
        times.run(phases, LINEARS, [&](Member member) {
            thread_local std::vector<float> normed;
            normed.resize(hidden_);
            norm_row(at.residual, layer.router_norm(), hidden_, normed.data());
            multiply_router(layer, at, normed.data(), 1, member);
        });
        times.run(phases, OTHER, [&](Member member) {
            member.parallel_for(1, 1, [&](int64_t, int64_t, int64_t) {
                route(layer, at, 1, member.for_items(0, 1, 1));
                sort(layer, 1);
            });
        });
        times.run(phases, LINEARS, [&](Member member) {
            TiledRows<Input> own{own_rows(member), 1, hidden_};
            norm_to(own, 0, 1, [&](int64_t) { return at.residual; }, layer.experts_norm());
            multiply_gate_up(layer, at, member, [&](const ActiveExpert&, const Linear&) { return own; });
        });
        times.run(phases, LINEARS, [&](Member member) {
            const ActiveExpert* last = nullptr;
            multiply_down(layer, at, member, [&](const ActiveExpert& one, const Linear& down) {
                TiledRows<Input> inner = inner_of(at, one, down);
                if constexpr (IS_GROUPED<Weight>) {
                    TiledRows<Input> own = inner;
                    own.data = own_rows(member);
                    if (&one != last) inner.split(0, 1, own), last = &one;
                    return own;
                }
                return inner;
            });
        });
    }

    // Where this thread puts rows for itself.
    Input* own_rows(Member member) const { return reinterpret_cast<Input*>(model_.workspace_of(member.scratch_index)); }

    void multiply_router(const Layer& layer, const Activations<Input>& at, const float* x, int64_t num_rows,
                         Member member) const {
        layer.experts.router.type == BFLOAT16 ? multiply_router_of<bf16>(layer, at, x, num_rows, member)
                                              : multiply_router_of<float>(layer, at, x, num_rows, member);
    }

    // Always in float32: whichever experts a row goes to, it does with all builds.
    template <class Stored>
    void multiply_router_of(const Layer& layer, const Activations<Input>& at, const float* x, int64_t num_rows,
                            Member member) const {
        const Linear& router = layer.experts.router;
        FloatOutput out{at.router_logits, model_.router_stride(), StoreMode::STORE};
        int64_t size = router.panel_bytes() / int64_t(sizeof(Stored)), num_panels = router.num_panels();
        member.parallel_for(num_panels * ceil_div(num_rows, DENSE_ROWS), 1, [&](int64_t item, int64_t, int64_t) {
            alignas(64) float tile[DENSE_ROWS * PANEL];
            int64_t panel = item % num_panels, row = item / num_panels * DENSE_ROWS;
            int rows = int(std::min<int64_t>(DENSE_ROWS, num_rows - row));
            dense_tile_for<Stored>(rows)(x + row * at.hidden_stride, at.hidden_stride,
                                         router.weight.as<Stored>() + panel * size, router.k / 2, tile);
            emit_tile(router, out, tile, row, rows, panel);
        });
    }

    void route(const Layer& layer, const Activations<Input>& at, int64_t num_rows, Member member) {
        const ExpertsShape& shape = layer.shape.experts;
        const std::vector<float>&bias = layer.experts.choice_bias, &scales = layer.experts.scales;
        member.parallel_for(num_rows, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
            Router router(shape, bias.empty() ? nullptr : bias.data(), scales.empty() ? nullptr : scales.data());
            for (int64_t row = first; row < last; row++)
                router.route(at.router_logits + row * model_.router_stride(), &rows_.ids[row * shape.top_k],
                             &rows_.weights[row * shape.top_k]);
        });
    }

    void sort(Layer& layer, int64_t num_rows) {
        rows_.sort(num_rows, layer.shape.experts, hidden_);
        link_active(layer);
    }

    // Sets what is multiplied next, for prefetches: the experts that have rows, one after another. The last expert's
    // last product stays before that of the next layer: an expert behind all others, or one that is not used.
    void link_active(Layer& layer) const {
        std::vector<Expert>& experts = layer.experts.each;
        const Linear* after = experts.back().down.next;
        for (size_t i = 0; i < rows_.active.size(); i++) {
            Expert& expert = experts[rows_.active[i].expert];
            bool is_last = i + 1 == rows_.active.size();
            const Expert& next = experts[rows_.active[is_last ? 0 : i + 1].expert];
            expert.gate_up.next = is_last ? &next.down : &next.gate_up;
            expert.down.next = is_last ? after : &next.down;
        }
    }

    TiledRows<Input> inputs_of(const Activations<Input>& at, const ActiveExpert& one, const Linear& gate_up) const {
        return rows_for(gate_up, ExpertRows<Input>::rows_at(at.expert_inputs, one.input_at, one.num_rows, hidden_));
    }
    TiledRows<Input> inner_of(const Activations<Input>& at, const ActiveExpert& one, const Linear& down) const {
        return rows_for(down, ExpertRows<Input>::rows_at(at.expert_inner, one.inner_at, one.num_rows, down.k));
    }

    // Calls use(active expert, its first row, its last) for the chunks of rows that this thread takes.
    template <class Use>
    void for_each_chunk(Member member, const Use& use) const {
        member.parallel_for(int64_t(rows_.chunks.size()), 1, [&](int64_t i, int64_t, int64_t) {
            const ExpertChunk& chunk = rows_.chunks[i];
            use(rows_.active[chunk.index], chunk.first, chunk.last);
        });
    }

    void gather(const Layer& layer, const Activations<Input>& at, Member member) const {
        constexpr int64_t SOME = 4;
        const ExpertsShape& shape = layer.shape.experts;
        thread_local std::vector<float> some;
        some.resize(SOME * hidden_);
        for_each_chunk(member, [&](const ActiveExpert& one, int64_t first, int64_t last) {
            TiledRows<Input> rows = inputs_of(at, one, layer.experts.each[one.expert].gate_up);
            for (int64_t row = first; row < last; row += SOME) {
                int64_t count = std::min(SOME, last - row);
                for (int64_t i = 0; i < count; i++) {
                    int64_t pair = rows_.pairs[one.first_pair + row + i];
                    const float* from = at.normed_floats + pair / shape.top_k * at.hidden_stride;
                    float *to = some.data() + i * hidden_, weight = shape.scales_input ? rows_.weights[pair] : 1.0f;
                    for (int64_t c = 0; c < hidden_; c++) to[c] = weight * from[c];
                }
                rows.put_whole_rows(row, count, some.data(), hidden_);
            }
        });
    }

    // Calls use(active expert, this thread for some of its panels); all experts have as many.
    template <class Use>
    void for_each_part(Member member, int64_t num_panels, const Use& use) const {
        int64_t num = int64_t(rows_.active.size()) * num_panels;
        member.parallel_for(num, PANELS_PER_PIECE, [&](int64_t first, int64_t last, int64_t end) {
            for (int64_t begin = first, next; begin < last; begin = next) {
                int64_t index = begin / num_panels, base = index * num_panels;
                next = std::min(last, base + num_panels);
                use(rows_.active[index], member.for_items(begin - base, next - base, end - base));
            }
        });
    }

    // `inputs(active expert, linear)`: the expert's rows.
    template <class Inputs>
    void multiply_gate_up(const Layer& layer, const Activations<Input>& at, Member member, const Inputs& inputs) const {
        const Experts& experts = layer.experts;
        const ExpertsShape& shape = layer.shape.experts;
        for_each_part(member, experts.each[0].gate_up.num_panels(), [&](const ActiveExpert& one, const Member& part) {
            const Expert& expert = experts.each[one.expert];
            ActivatedOutput<Input> out(shape.activation, shape.is_gated, experts.activation_params,
                                       inner_of(at, one, expert.down), nullptr);
            multiply<Weight>(model_, expert.gate_up, inputs(one, expert.gate_up), out, part);
        });
    }

    void split_inner([[maybe_unused]] const Layer& layer, [[maybe_unused]] const Activations<Input>& at,
                     [[maybe_unused]] Member member) const {
        if constexpr (IS_GROUPED<Weight>)
            for_each_chunk(member, [&](const ActiveExpert& one, int64_t first, int64_t last) {
                TiledRows<Input> inner = inner_of(at, one, layer.experts.each[one.expert].down);
                inner.split(first, last, inner);
            });
    }

    template <class Inputs>
    void multiply_down(const Layer& layer, const Activations<Input>& at, Member member, const Inputs& inputs) const {
        const Experts& experts = layer.experts;
        for_each_part(member, experts.each[0].down.num_panels(), [&](const ActiveExpert& one, const Member& part) {
            const Linear& down = experts.each[one.expert].down;
            FloatOutput out{at.pair_outputs + one.first_pair * at.hidden_stride, at.hidden_stride, StoreMode::STORE};
            multiply<Weight>(model_, down, inputs(one, down), out, part);
        });
    }

    void combine(const Layer& layer, const Activations<Input>& at, int64_t num_rows, PhaseTimes& times, Phases& phases) {
        int64_t num_parts = ceil_div(hidden_, COLUMNS_PER_PIECE);
        bool has_norm = layer.shape.post_feed.kind != NO_NORM || layer.has_own_norms();
        float scale = layer.shape.residual_scale;
        times.run(phases, OTHER, [&](Member member) {
            member.parallel_for(num_rows * num_parts, 1, [&](int64_t item, int64_t, int64_t) {
                int64_t begin = item % num_parts * COLUMNS_PER_PIECE;
                combine_part(layer, at, item / num_parts, begin, std::min(hidden_, begin + COLUMNS_PER_PIECE), has_norm);
            });
        });
        if (!has_norm) return;
        times.run(phases, OTHER, [&](Member member) {
            parallel_for_rows(member, num_rows, [&](int64_t t) {
                int64_t offset = t * at.hidden_stride;
                if (layer.has_own_norms()) join_normed(layer, at.normed_floats + offset, at.branch + offset);
                add_normed(at.branch + offset, layer.post_feed, hidden_, scale, at.residual + offset);
            });
        });
    }

    // Puts the sum of a row of experts and one of the other network, each normed, in place of the latter.
    void join_normed(const Layer& layer, float* experts, float* other) const {
        norm_row(experts, layer.experts.after, hidden_, experts);
        if (layer.has_network()) norm_row(other, layer.experts.after_other, hidden_, other);
        for (int64_t i = 0; i < hidden_; i++) other[i] = layer.has_network() ? experts[i] + other[i] : experts[i];
    }

    // Columns [begin, end) of a row: to the residual, or to `branch` if a norm follows; to `normed_floats`, which are
    // read no more, if the other network's output has a norm of its own.
    void combine_part(const Layer& layer, const Activations<Input>& at, int64_t t, int64_t begin, int64_t end,
                      bool has_norm) const {
        const ExpertsShape& shape = layer.shape.experts;
        const int32_t* places = &rows_.place_of[t * shape.top_k];
        const float* weights = &rows_.weights[t * shape.top_k];
        float gate = 1.0f;
        if (shape.has_shared_gate) {
            gate = at.router_logits[t * model_.router_stride() + shape.num_experts];
            Router::sigmoid(&gate, 1);
        }
        float *branch = at.branch + t * at.hidden_stride, *residual = at.residual + t * at.hidden_stride;
        auto sum = [&](int64_t i) {
            F total = zero();
            for (int64_t rank = 0; rank < shape.top_k; rank++) {
                F numbers = load(at.pair_outputs + places[rank] * at.hidden_stride + i);
                total = shape.scales_input ? add(total, numbers) : fma(splat(weights[rank]), numbers, total);
            }
            return layer.has_network() && !layer.has_own_norms() ? fma(splat(gate), load(branch + i), total) : total;
        };
        // Rows are padded by more than a vector: what is behind their numbers is never read.
        for (int64_t i = begin; i < end; i += W)
            has_norm ? store((layer.has_own_norms() ? at.normed_floats + t * at.hidden_stride : branch) + i, sum(i))
                     : store(residual + i, add(load(residual + i), mul(splat(layer.shape.residual_scale), sum(i))));
    }

    Model& model_;
    int64_t hidden_;
    ExpertRows<Input> rows_;
};

}  // namespace millrace
