// One step of the decoder, for one dtype: the layers as a sequence of phases.
//
// The phases of a step, with a barrier after each (machine/threads.h):
//   list reads     rank 0 lists the key and value tiles that each part of attention reads, while the others join
//   embed          embedding rows to the residual, with positions and a norm if the model has them
//   per layer:
//     norm + qkv     norm, qkv product (linear/linear.h); up to one tile of rows each thread norms for itself
//     Where rows have adapters, the sums of each product's (lora/shrink.h) are a phase before it.
//     A recurrent layer has its phases up to the output product: see recurrent/recurrent_step.h. Otherwise:
//     rope + cache   q and k norms, RoPE, keys and values into the paged cache (rope_and_cache_write.h)
//     With latents their phases instead, and one behind attention: see latents/latent_step.h.
//     attention      per part of the plan (attention/attention_step.h)
//     merge          only if the plan is split over keys: merges the chunks
//     output         output product, added to the residual; prefetch of the next layer's keys and values begins
//     norm + gate_up norm, gate_up product with the activation as epilogue (linear/activations.h)
//     down           down product, added to the residual
//     With experts their phases instead, or behind: see experts.h.
//     Of models with inputs of each layer, gate and up of these, then a norm, see layer_inputs.h; the layer's scale.
//     A parallel layer runs gate_up before output. A norm behind output or down is a phase that adds to the residual.
//   select         in the last layer, after its cache write: gathers the rows whose logits are requested
//   output head    final norm, head; logits, or argmax with the screen (output_head.h)
//
// All compute threads go through the phases; step_split.h decides whether they share all rows or each takes half.

#pragma once

#include <optional>

#include "attention/cache_phases.h"
#include "linear/activations.h"
#include "recurrent/recurrent_step.h"
#include "step/experts.h"
#include "step/layer_inputs.h"
#include "step/output_head.h"
#include "step/norms.h"

namespace millrace {

// Calls use(a number of the cache's type).
template <class Weight, class Use>
auto with_cache_type(const Model& model, const Use& use) {
    if (model.shape.cache == INT8) return use(int8_t());
    if constexpr (!IS_GROUPED<Weight>)
        return use(Weight());
    else
        return model.shape.cache == BFLOAT16 ? use(bf16()) : use(float());
}

template <class Weight>
std::unique_ptr<CachePhases<InputOf<Weight>>> make_phases_of_cache(Model& model, const StepInputs& inputs) {
    return with_cache_type<Weight>(
        model, [&](auto cached) { return make_cache_phases<InputOf<Weight>, decltype(cached)>(model, inputs); });
}

// Memory of the threads' buffers for attention.
template <class Weight>
int64_t attention_scratch_bytes(const Model& model, int num_threads) {
    return with_cache_type<Weight>(
        model, [&](auto cached) { return int64_t(sizeof(AttentionScratch<decltype(cached)>)) * num_threads; });
}

// The threads of a step: `num_threads` together, or the one with index `thread_index` of `num_concurrent` alone.
struct ThreadAssignment {
    int num_threads, thread_index = 0, num_concurrent = num_threads;
};

template <class Weight>
class Step {
    using Input = InputOf<Weight>;
    using Member = ThreadTeam::Member;

  public:
    // `memory`: of its activations. The other buffers must exist: see `reserve`.
    Step(Model& model, const StepInputs& inputs, ThreadAssignment assignment, char* memory, bool uses_screen)
        : model_(model), shape_(model.shape), assignment_(assignment), times_(model.phase_ns),
          selected_rows_(inputs), no_adapters_(model, nullptr, 0), all_(model, memory, inputs), selected_(model, all_.buffers.end, selected_rows_.of(inputs)),
          experts_of_all_(model, inputs.num_tokens), experts_of_selected_(model, selected_.inputs.num_tokens),
          cache_(make_phases_of_cache<Weight>(model, inputs)), recurrent_(model),
          output_head_(model, inputs, assignment.num_threads, uses_screen) {
        int num_threads = assignment.num_threads;
        for (int i = 0; i <= last_layer(); i++)
            cache_->plan(i, i == last_layer() ? &last_batch() : &all_, num_threads);
        int64_t num_floats = 0;
        for_each_plan([&](const Batch<Input>&, const AttentionPlan& plan) {
            if (plan.is_split) num_floats = std::max(num_floats, plan.partial_size * int64_t(plan.chunks.size()));
        });
        grow(&model.partials, num_floats * 4);
        bool prefetches_kv = is_kv_prefetch_worthwhile();
        model.splits_rows = num_threads == 2 &&
                            can_split_rows<Weight>(model.layers[0].qkv, all_.buffers.normed.num_tiles());
        model.is_streaming = inputs.num_tokens <= streaming_rows<Weight>(model.layers[0].qkv) ||
                           (inputs.num_logits > 0 && inputs.num_logits <= streaming_rows<Weight>(model.head));
        if ((prefetches_kv || model.splits_rows || model.is_streaming) && !is_cache_retaining())
            prefetches_kv = model.splits_rows = model.is_streaming = false;
        if (prefetches_kv) kv_prefetchers_.resize(num_threads);
        cache_->decide_deferral(prefetches_kv);
    }

    // Allocates the activations and the buffers per thread. NOTE: here, where bad_alloc can be reported; not on a pool
    // thread.
    static char* reserve(Model& model, int64_t num_tokens, int64_t num_logits, int num_threads, int64_t activation_bytes) {
        grow(&model.activations, activation_bytes);
        grow(&model.scratch, attention_scratch_bytes<Weight>(model, num_threads));
        reserve_workspace<Weight>(&model, std::max(num_tokens, num_logits), num_threads);
        return model.activations.as<char>();
    }

    // The whole step, on one thread of the region.
    void run(int thread) {
        Phases phases(model_.pool.get(), thread);
        begin(phases);
        run_layers(0, phases);
    }

    // Runs from the start to the layer before which all threads have joined; to the last layer if they never have.
    // Returns that layer; none for a thread that joins after this part.
    std::optional<int> run_until_all_joined(Phases& phases) {
        begin(phases);
        for (int i = 0; i < last_layer(); i++) {
            if (phases.takes_part_in_next() && phases.member().count == assignment_.num_threads) return i;
            run_layer(i, phases);
        }
        return phases.takes_part_in_next() ? std::optional<int>(last_layer()) : std::nullopt;
    }

    // Continues another step's rows from `first` on before that layer, by this thread alone.
    void resume(const Step& before, int64_t first, int layer) {
        Phases phases(assignment_.thread_index);
        all_.buffers.residual = before.all_.buffers.residual + first * before.all_.buffers.hidden_stride;
        all_.buffers.layer_inputs = before.all_.buffers.layer_inputs + first * before.all_.buffers.layer_inputs_stride;
        times_.start();
        list_all_reads(phases);
        run_layers(layer, phases);
    }

    // After the region: writes the results, and updates the model's statistics.
    void publish_results() {
        output_head_.publish_results();
        for (const KvPrefetcher& kv_prefetcher : kv_prefetchers_) model_.kv_prefetched_bytes += kv_prefetcher.num_bytes();
    }

    // Adds the times of its phases.
    void add_times(int64_t* phase_ns) const { times_.add_to(phase_ns); }

  private:
    // The batch after the last layer's cache write.
    Batch<Input>& last_batch() { return selected_rows_.is_cut ? selected_ : all_; }

    template <class Use>
    void for_each_plan(const Use& use) {
        for (Batch<Input>* batch : {&all_, &selected_})
            for (auto& [key, plan] : batch->plans) use(*batch, plan);
    }

    int last_layer() const { return int(model_.layers.size()) - 1; }

    void begin(Phases& phases) {
        list_all_reads(phases);
        times_.run(phases, OTHER, [&](Member member) { embed(member); });
        if (model_.layer_inputs.exist()) make_layer_inputs(phases);
    }

    // By rank 0 alone, while the others join.
    void list_all_reads(Phases& phases) {
        times_.run(phases, OTHER, [&](Member) {
            for_each_plan([&](const Batch<Input>& batch, AttentionPlan& plan) { cache_->list_reads(batch, &plan); });
        });
    }

    // From layer `first` to the end.
    void run_layers(int first, Phases& phases) {
        int last = last_layer();
        for (int i = first; i < last; i++) run_layer(i, phases);
        run_qkv(last, phases);
        if (selected_rows_.is_cut) times_.run(phases, OTHER, [&](Member member) { gather_selected(member); });
        run_attention_and_mlp(last, last_batch(), phases);
        finish_layer(last, last_batch(), phases);
        output_head_.run(last_batch(), times_, phases);
    }

    // A layer before the last.
    void run_layer(int index, Phases& phases) {
        run_qkv(index, phases);
        run_attention_and_mlp(index, all_, phases);
        finish_layer(index, all_, phases);
    }

    void embed(Member member) {
        parallel_for_rows(member, all_.inputs.num_tokens, [&](int64_t t) {
            embed_token(all_.inputs.input_ids[t], all_.inputs.positions[t],
                        all_.buffers.residual + t * all_.buffers.hidden_stride);
        });
    }

    void embed_token(int64_t id, int64_t position, float* to) const {
        int64_t hidden = shape_.hidden_size;
        read_embedding(id, to);
        if (model_.embedding_scale != 1.0f)
            for (int64_t i = 0; i < hidden; i++) to[i] *= model_.embedding_scale;
        if (shape_.num_learned_positions > 0)
            for_table_row(model_.learned_positions, position + shape_.position_offset,
                          shape_.hidden_size, [=](int64_t i, float number) { to[i] += number; });
        norm_row(to, model_.embedding_norm, hidden, to);
    }

    void read_embedding(int64_t id, float* to) const {
        const Linear& codes = shape_.is_tied ? model_.head : model_.embedding_codes;
        if constexpr (IS_GROUPED<Weight>) {
            if (codes.weight.num_bytes() > 0) return read_any_row(codes, id, to);
        } else if (shape_.is_tied) {
            return read_row<Weight>(codes, id, to);
        }
        for_table_row(model_.embedding, id, shape_.hidden_size, [=](int64_t i, float number) { to[i] = number; });
    }

    // Calls use(i, number) for the numbers of a row of a table [rows, size] in the model's dtype.
    template <class Use>
    void for_table_row(const Memory& table, int64_t row, int64_t size, const Use& use) const {
        int64_t begin = row * size;
        auto read = [&](auto* numbers) {
            for (int64_t i = 0; i < size; i++) use(i, widen(numbers[begin + i]));
        };
        if constexpr (!IS_GROUPED<Weight>)
            read(table.as<Weight>());
        else
            shape_.dtype == BFLOAT16 ? read(table.as<bf16>()) : read(table.as<float>());
    }

    // The inputs of all layers, for the first residual.
    void make_layer_inputs(Phases& phases) {
        const LayerInputs& inputs = model_.layer_inputs;
        const Activations<Input>& at = all_.buffers;
        run_normed_product(phases, all_, Norm(), inputs.projection, no_update(),
                           FloatOutput{at.layer_inputs, at.layer_inputs_stride, StoreMode::STORE,
                                       shape_.layer_inputs.projection_scale});
        times_.run(phases, OTHER, [&](Member member) {
            parallel_for_rows(member, all_.inputs.num_tokens, [&](int64_t t) {
                float* row = at.layer_inputs + t * at.layer_inputs_stride;
                norm_layer_inputs(inputs, shape_, row);
                for_table_row(inputs.table, all_.inputs.input_ids[t], inputs.projection.n, [&](int64_t i, float number) {
                    row[i] = (row[i] + number * inputs.scale) * HALF_ROOT;
                });
            });
        });
    }

    // What a layer adds of its input, and its scale.
    void finish_layer(int index, const Batch<Input>& batch, Phases& phases) {
        const Layer& layer = model_.layers[index];
        const Activations<Input>& at = batch.buffers;
        if (model_.layer_inputs.exist()) {
            const int64_t* rows = &batch == &all_ ? nullptr : selected_rows_.rows.data();
            int64_t width = shape_.layer_inputs.width;
            TiledRows<Input> inner{at.inner.data, at.inner.num_rows, width};
            run_normed_product(phases, batch, Norm(), layer.input_gate, no_update(),
                               LayerInputOutput<Input>(shape_.layer_inputs.activation, inner,
                                                       {all_.buffers.layer_inputs + index * width,
                                                        all_.buffers.layer_inputs_stride, rows}));
            run_residual_product(phases, batch, layer.input_up, inner, no_update(), &layer.input_norm, 1.0f, [](Member) {});
        }
        if (layer.output_scale.empty()) return;
        times_.run(phases, OTHER, [&](Member member) {
            parallel_for_rows(member, batch.inputs.num_tokens, [&](int64_t t) {
                scale_numbers(at.residual + t * at.hidden_stride, shape_.hidden_size, layer.output_scale[0]);
            });
        });
    }

    // Where rows begin before their norm.
    static auto residual_of(const Batch<Input>& batch) {
        return [&at = batch.buffers](int64_t t) { return at.residual + t * at.hidden_stride; };
    }

    // For a product that adapters do not change.
    LoraUpdate no_update() const { return {no_adapters_, nullptr, 0, 0, LORA_QKV, USES_AMX<Input>}; }

    // What adapters add to a layer's product.
    LoraUpdate update_of(const Batch<Input>& batch, int layer, LoraTarget target) const {
        return {batch.adapted, batch.buffers.lora_sums, model_.num_lora_sums, layer, target, USES_AMX<Input>};
    }

    // A layer's product of normalized rows. For few rows each thread normalizes all of them, so that it neither waits
    // for the other threads nor reads their results. 1 to 12 rows take 1 to 4 % less where memory is fast, perhaps
    // because the cores are on different dies then, and as long where it is slow (two threads, AVX-512 with bf16, Zen 4
    // class EPYC).
    template <class Out>
    void run_normed_product(Phases& phases, const Batch<Input>& batch, const Norm& norm, const Linear& linear,
                            const LoraUpdate& update, const Out& out) {
        TiledRows<Input> normed = rows_for(linear, batch.buffers.normed);
        if (normed.num_rows > MAX_ROWS_NORMED_PER_THREAD<Input>) {
            times_.run(phases, OTHER, [&](Member member) { norm_all(normed, batch, norm, member); });
            run_shrink(phases, update, normed);
            return times_.run(phases, LINEARS, [&](Member member) {
                multiply<Weight>(model_, linear, normed, out, member, kv_prefetcher_of(member));
            });
        }
        auto norm_own = [&](Member member) {
            TiledRows<Input> own = normed;
            own.data = reinterpret_cast<Input*>(model_.workspace_of(member.scratch_index));
            norm_to(own, 0, own.num_rows, residual_of(batch), norm);
            return own;
        };
        if (!update.is_empty())
            times_.run(phases, LINEARS,
                       [&](Member member) { LoraShrink<Input>(update, norm_own(member)).run(member); });
        times_.run(phases, LINEARS,
                   [&](Member member) { multiply<Weight>(model_, linear, norm_own(member), out, member); });
    }

    void run_shrink(Phases& phases, const LoraUpdate& update, const TiledRows<Input>& x) {
        if (!update.is_empty())
            times_.run(phases, LINEARS, [&](Member member) { LoraShrink<Input>(update, x).run(member); });
    }

    // A layer's product of rows that outputs have put; `before` is called at its start, on each thread.
    template <class Out, class Before>
    void run_product(Phases& phases, const Linear& linear, const TiledRows<Input>& rows, const LoraUpdate& update,
                     const Out& out, const Before& before) {
        TiledRows<Input> x = rows_for(linear, rows);
        run_shrink(phases, update, x);
        if constexpr (IS_GROUPED<Weight>)
            if (x.num_rows > MAX_ROWS_SPLIT_PER_THREAD)
                times_.run(phases, OTHER, [&](Member member) {
                    member.parallel_for(x.num_rows, ROWS_PER_PIECE,
                                        [&](int64_t first, int64_t last, int64_t) { x.split(first, last, x); });
                });
        times_.run(phases, LINEARS, [&](Member member) {
            before(member);
            multiply<Weight>(model_, linear, split_by_itself(x, member), out, member, kv_prefetcher_of(member));
        });
    }

    // Few rows as products with groups of codes read them, split by this thread for itself; else the rows as they are.
    TiledRows<Input> split_by_itself(const TiledRows<Input>& x, [[maybe_unused]] Member member) const {
        if constexpr (IS_GROUPED<Weight>)
            if (x.num_rows <= MAX_ROWS_SPLIT_PER_THREAD) {
                TiledRows<Input> own = x;
                own.data = reinterpret_cast<Input*>(model_.workspace_of(member.scratch_index));
                x.split(0, x.num_rows, own);
                return own;
            }
        return x;
    }

    // A product that is added to the residual: directly, or in a phase of its own behind a norm, which may be null.
    template <class Before>
    void run_residual_product(Phases& phases, const Batch<Input>& batch, const Linear& linear, const TiledRows<Input>& x,
                              const LoraUpdate& update, const Norm* post_norm, float scale, const Before& before) {
        const Activations<Input>& at = batch.buffers;
        if (!post_norm)
            return run_product(phases, linear, x, update,
                               FloatOutput{at.residual, at.hidden_stride, StoreMode::ADD, scale, update.if_any()}, before);
        run_product(phases, linear, x, update,
                    FloatOutput{at.branch, at.hidden_stride, StoreMode::STORE, 1.0f, update.if_any()}, before);
        times_.run(phases, OTHER, [&](Member member) {
            parallel_for_rows(member, batch.inputs.num_tokens, [&](int64_t t) {
                int64_t offset = t * at.hidden_stride;
                add_normed(at.branch + offset, *post_norm, shape_.hidden_size, scale, at.residual + offset);
            });
        });
    }

    // Whether the shared cache retains anything; measured if it is not known.
    bool is_cache_retaining() {
        return model_.cache_probe.retained_bytes(model_.weights.as<char>(), model_.weights.num_bytes(),
                                                 times_.since_ns()) > 0;
    }

    // Whether to prefetch keys and values a layer ahead, provided that the cache retains them: products leave time for
    // it, and decoding rows read any.
    bool is_kv_prefetch_worthwhile() {
        if (model_.layers.size() == 1 || !cache_->is_tiled() || !model_.has_attention_alone()) return false;
        if (num_prefetch_pairs<Weight>(model_.layers[0].qkv, all_.buffers.normed) == 0) return false;
        bool is_read = false;
        for_each_plan([&](const Batch<Input>&, const AttentionPlan& plan) {
            for (const AttentionItem& item : plan.items) is_read |= uses_prefetch(item.num_rows);
        });
        return is_read;
    }

    KvPrefetcher* kv_prefetcher_of(Member member) {
        return kv_prefetchers_.empty() ? nullptr : &kv_prefetchers_[member.rank];
    }

    // From here on this thread prefetches its part of what layer `index`, the next one, reads. Ends the prefetch for
    // the current layer; in the last layer nothing is prefetched.
    void begin_kv_prefetch(int index, Member member) {
        int last = last_layer();
        if (kv_prefetchers_.empty()) return;
        if (index > last) return kv_prefetchers_[member.rank].stop();
        const Layer &before = model_.layers[index - 1], &layer = model_.layers[index];
        const AttentionPlan& plan = (index == last ? last_batch() : all_).plan_of(model_, index);
        int64_t first, end, num_pairs = 0;
        split_evenly(plan.num_parts(), member.rank, member.count, &first, &end);
        auto add_pairs = [&](const Linear& linear) {
            num_pairs += num_prefetch_pairs<Weight>(linear, all_.buffers.normed) / member.count;
        };
        add_pairs(before.output), add_pairs(layer.qkv);
        if (before.has_network()) add_pairs(before.down);
        if (before.has_network() && !before.shape.is_parallel) add_pairs(before.gate_up);
        // The other half is for what is read meanwhile.
        int64_t max_bytes = model_.cache_probe.num_bytes() / 2 / assignment_.num_concurrent;
        cache_->begin_prefetch(index, plan, first, end, max_bytes, num_pairs, &kv_prefetchers_[member.rank]);
    }

    // The layer up to its cache write, or the change of its states.
    void run_qkv(int index, Phases& phases) {
        const Layer& layer = model_.layers[index];
        if (!layer.shape.has_mixer) return;
        LoraUpdate update = update_of(all_, index, LORA_QKV);
        run_normed_product(
            phases, all_, layer.pre_mixer, layer.qkv, update,
            FloatOutput{all_.buffers.qkv, all_.buffers.qkv_stride, StoreMode::STORE, 1.0f, update.if_any()});
        if (layer.shape.has_latents()) return run_latents(index, phases);
        if (layer.is_recurrent()) return recurrent_.mix(all_, layer, times_, phases);
        times_.run(phases, OTHER, [&](Member member) { cache_->write_keys_and_values(index, all_, member); });
    }

    // Writes a layer's latents into the cache, and makes the queries for them: see latents/latent_step.h.
    void run_latents(int index, Phases& phases) {
        const Layer& layer = model_.layers[index];
        const Activations<Input>& at = all_.buffers;
        if (layer.query_up.n > 0) {
            TiledRows<Input> inner{at.inner.data, at.inner.num_rows, layer.query_up.k};
            times_.run(phases, OTHER, [&](Member member) {
                member.parallel_for(at.inner.num_rows, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
                    norm_to(inner, first, last, [&](int64_t t) { return at.qkv + t * at.qkv_stride; }, layer.q_norm);
                });
            });
            run_product(phases, layer.query_up, inner, no_update(),
                        FloatOutput{at.queries, at.queries_stride, StoreMode::STORE}, [](Member) {});
        }
        times_.run(phases, LINEARS, [&](Member member) { cache_->write_and_absorb(index, all_, member); });
    }

    void run_attention_and_mlp(int index, const Batch<Input>& batch, Phases& phases) {
        const Layer& layer = model_.layers[index];
        const Activations<Input>& at = batch.buffers;
        TiledRows<Input> inner{at.inner.data, at.inner.num_rows, layer.shape.intermediate_size};
        float scale = layer.shape.residual_scale;
        if (layer.has_attention()) run_attention(index, batch, phases);
        if (layer.is_recurrent())
            times_.run(phases, OTHER,
                       [&](Member member) { recurrent_.finish(batch, layer, batch.attended_of(layer), member); });
        auto run_gate_up = [&] {
            LoraUpdate update = update_of(batch, index, LORA_GATE_UP);
            run_normed_product(phases, batch, layer.feed_norm(), layer.gate_up, update,
                               ActivatedOutput<Input>(layer.shape.activation, layer.shape.is_gated, layer.activation_params,
                                                      inner, update.if_any()));
        };
        auto run_output = [&] {
            if (!layer.shape.has_mixer) return;
            const Norm* post_norm = layer.shape.post_mixer.kind == NO_NORM ? nullptr : &layer.post_mixer;
            run_residual_product(phases, batch, layer.output, batch.attended_of(layer), update_of(batch, index, LORA_OUTPUT), post_norm,
                                 scale, [&](Member member) { begin_kv_prefetch(index + 1, member); });
        };
        if (layer.has_experts()) {
            if (!layer.shape.is_parallel) run_output();
            if (layer.has_network()) {
                run_gate_up();
                LoraUpdate update = update_of(batch, index, LORA_DOWN);
                run_product(phases, layer.down, inner, update,
                            FloatOutput{at.branch, at.hidden_stride, StoreMode::STORE, 1.0f, update.if_any()}, [](Member) {});
            }
            (&batch == &all_ ? experts_of_all_ : experts_of_selected_).run(batch, index, times_, phases);
            if (layer.shape.is_parallel) run_output();
            return;
        }
        if (!layer.has_network()) return run_output();
        if (layer.shape.is_parallel) run_gate_up();  // before the residual changes
        const Norm* post_feed = layer.shape.post_feed.kind == NO_NORM ? nullptr : &layer.post_feed;
        run_output();
        if (!layer.shape.is_parallel) run_gate_up();
        run_residual_product(phases, batch, layer.down, inner, update_of(batch, index, LORA_DOWN), post_feed, scale,
                             [](Member) {});
    }

    void run_attention(int index, const Batch<Input>& batch, Phases& phases) {
        const AttentionPlan& plan = batch.plan_of(model_, index);
        times_.run(phases, ATTENTION, [&](Member member) { cache_->attend(index, batch, plan, member); });
        if (plan.is_split)
            times_.run(phases, ATTENTION, [&](Member member) { cache_->merge_chunks(index, batch, plan, member); });
        if (model_.layers[index].shape.has_latents())
            times_.run(phases, LINEARS, [&](Member member) { cache_->expand(index, batch, member); });
    }

    // Gathers residuals of the selected rows, and queries, or what else the last layer still needs of its first product.
    void gather_selected(Member member) {
        const Activations<Input>&from = all_.buffers, &to = selected_.buffers;
        const Layer& layer = model_.layers.back();
        bool needs_all = layer.is_recurrent() || layer.shape.has_output_gate;
        int64_t num_columns = !layer.shape.has_mixer ? 0 : needs_all ? layer.qkv.n : layer.shape.attended_size();
        parallel_for_rows(member, selected_.inputs.num_tokens, [&](int64_t i) {
            int64_t row = selected_rows_.rows[i];
            std::memcpy(to.residual + i * to.hidden_stride, from.residual + row * from.hidden_stride,
                        shape_.hidden_size * 4);
            if (layer.shape.has_latents())
                std::memcpy(to.absorbed + i * to.absorbed_stride, from.absorbed + row * from.absorbed_stride,
                            layer.shape.num_heads * layer.shape.head_dim * 4);
            else
                std::memcpy(to.qkv + i * to.qkv_stride, from.qkv + row * from.qkv_stride, num_columns * 4);
        });
    }

    void norm_all(const TiledRows<Input>& normed, const Batch<Input>& batch, const Norm& norm, Member member) {
        member.parallel_for(batch.inputs.num_tokens, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
            norm_to(normed, first, last, residual_of(batch), norm);
        });
    }

    Model& model_;
    const Shape& shape_;
    ThreadAssignment assignment_;
    PhaseTimes times_;
    SelectedRows selected_rows_;
    LoraRows no_adapters_;
    Batch<Input> all_, selected_;
    ExpertStep<Weight> experts_of_all_, experts_of_selected_;  // of the two batches
    std::vector<KvPrefetcher> kv_prefetchers_;  // per thread; empty if nothing is prefetched a layer ahead
    std::unique_ptr<CachePhases<Input>> cache_;
    RecurrentStep<Input> recurrent_;
    OutputHead<Weight> output_head_;
};

}  // namespace millrace
