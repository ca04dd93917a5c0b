// AttentionStep: the attention phases of a step. Lists the tiles to read, computes the parts of the plan, and merges
// split chunks.
//
// The plan (attention_plan.h) says what the parts are; attention.h computes a chunk. Buffers are per thread, by
// `scratch_index`; partial results of a split plan are in `Model::partials`. Called by Step, on each compute thread.

#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "step/batch.h"
#include "step/phase_times.h"

namespace millrace {

template <class Input, class Cached>
class AttentionStep {
    using Member = ThreadTeam::Member;
    using Attention = ItemAttention<Cached>;

  public:
    // `layouts`: of each kind of blocks.
    AttentionStep(Model& model, const std::vector<CacheLayout<Cached>>& layouts)
        : model_(model), layouts_(layouts) {}

    // Decides, before reads are listed, whether the values of chunks are deferred where that pays (see
    // `AttentionPlan`): not if keys and values are prefetched a layer ahead.
    // NOTE: small blocks and AMX keep a chunk's values where the next chunk's would overwrite them, so they cannot
    // defer.
    void decide_deferral(bool prefetches_kv) { can_defer_ = !prefetches_kv && !USES_AMX<Cached> && layouts_[0].is_tiled(); }

    // Lists the tiles that each part reads, in the order in which `attend` reads them.
    void list_reads(const Batch<Input>& batch, AttentionPlan* plan) {
        plan->first_read.push_back(0);
        for (int64_t part = 0; part < plan->num_parts(); part++) {
            auto list = [&](size_t i, auto list_of) {
                auto [item, chunk] = plan->chunks[i];
                (item_attention(batch, *plan, plan->items[item], nullptr, nullptr, 0).*list_of)(chunk, &plan->reads);
            };
            std::array<size_t, 2> seen;
            plan->for_each_chunk(
                part, can_defer_, [&](size_t i, int half, bool) { list(seen[half] = i, &Attention::list_keys); },
                [&](int half) { list(seen[half], &Attention::list_values); });
            plan->first_read.push_back(int64_t(plan->reads.size()));
        }
        static_assert(TileReadOrder<Cached>::DISTANCE <= MAX_TILES_AHEAD,
                      "what is read ahead of the last tile is in the list");
        plan->reads.resize(plan->reads.size() + MAX_TILES_AHEAD);
    }

    // Attention of one layer, whose cache is given.
    void attend(const Batch<Input>& batch, const AttentionPlan& plan, const Layer& layer, const Cached* cache, Member member) {
        TileScope tiles;
        member.parallel_for(plan.num_parts(), 1, [&](int64_t part, int64_t, int64_t) {
            attend_part(batch, plan, layer, cache, part, member.scratch_index, tiles);
        });
    }

    // The phase after `attend`, if the plan is split.
    void merge_chunks(const Batch<Input>& batch, const AttentionPlan& plan, const Layer& layer, const Cached* cache,
                      Member member) {
        parallel_for_rows(member, int64_t(plan.items.size()), [&](int64_t i) {
            const AttentionItem& item = plan.items[i];
            Attention attention = item_attention(batch, plan, item, &layer, cache, member.scratch_index);
            for (int64_t chunk = item.first_chunk(); chunk < item.last_chunk(); chunk++) {
                const float* partial = partial_of(plan, item, chunk);
                attention.merge_chunk(partial, partial + MAX_QUERY_ROWS, partial + 2 * MAX_QUERY_ROWS,
                                      chunk == item.first_chunk());
            }
            finish(batch, attention);
        });
    }

  private:
    // A chunk that has begun, and its item.
    struct ChunkState {
        const AttentionItem* item;
        int64_t chunk;
        std::optional<Attention> attention;
        typename Attention::PendingChunk pending;
    };

    void attend_part(const Batch<Input>& batch, const AttentionPlan& plan, const Layer& layer, const Cached* cache,
                     int64_t part, int scratch_index, TileScope& tiles) {
        float scale = layer.shape.attention_scale;
        if (scale == 0.0f) scale = 1.0f / std::sqrt(float(layer.shape.head_dim));
        TileReadOrder<Cached> reads{cache, plan.reads.data() + plan.first_read[part]};
        std::array<ChunkState, 2> states;
        const AttentionItem* loaded = nullptr;  // whose queries are in the thread's buffers
        auto begin = [&](size_t i, int half, bool is_other_pending) {
            ChunkState& state = states[half];
            auto [item, chunk] = plan.chunks[i];
            state.item = &plan.items[item], state.chunk = chunk;
            Attention& attention =
                state.attention.emplace(item_attention(batch, plan, *state.item, &layer, cache, scratch_index));
            if constexpr (USES_AMX<Cached>) tiles.configure(attention.tile_config());
            if (std::exchange(loaded, state.item) != state.item)
                layer.shape.has_latents()
                    ? attention.load_queries(batch.buffers.absorbed, batch.buffers.absorbed_stride, scale)
                    : attention.load_queries(batch.buffers.qkv, batch.buffers.qkv_stride, scale);
            SoftmaxWeights<Cached>* deferred = is_other_pending ? &states[1 - half].pending.softmax : nullptr;
            attention.begin_chunk(chunk, &reads, half, deferred, &state.pending);
        };
        plan.for_each_chunk(part, can_defer_, begin,
                            [&](int half) { end_chunk(batch, plan, states[half], &reads, scratch_index); });
    }

    void end_chunk(const Batch<Input>& batch, const AttentionPlan& plan, ChunkState& state, TileReadOrder<Cached>* reads,
                   int scratch_index) {
        auto& [item, chunk, attention, pending] = state;
        AttentionScratch<Cached>* scratch = scratch_of(scratch_index);
        if (plan.is_split) {
            float* partial = partial_of(plan, *item, chunk);
            return attention->end_chunk(pending, reads, partial, partial + MAX_QUERY_ROWS, partial + 2 * MAX_QUERY_ROWS);
        }
        attention->end_chunk(pending, reads, scratch->chunk_largest, scratch->chunk_sum, scratch->chunk);
        attention->merge_chunk(scratch->chunk_largest, scratch->chunk_sum, scratch->chunk, chunk == item->first_chunk());
        if (chunk + 1 == item->last_chunk()) finish(batch, *attention);
    }

    // Writes an item's attention to where the output product reads it, or of latents, over its queries.
    void finish(const Batch<Input>& batch, Attention& attention) const {
        const Layer& layer = *attention.layer();
        const Activations<Input>& at = batch.buffers;
        if (layer.shape.has_latents())
            return attention.finish(
                SeenLatents{at.absorbed, at.absorbed_stride, layer.shape.head_dim, layer.shape.latents.kv_rank}, nullptr, 0);
        const float* gates = layer.shape.has_output_gate ? at.qkv + layer.shape.gates_at() : nullptr;
        attention.finish(batch.attended_of(layer), gates, at.qkv_stride);
    }

    // The partial result of a chunk: largest scores, sums of weights, sums of values.
    float* partial_of(const AttentionPlan& plan, const AttentionItem& item, int64_t chunk) const {
        return model_.partials.as<float>() + (item.partial + chunk - item.first_chunk()) * plan.partial_size;
    }

    // An item without its queries. `layer` is null where only its reads are listed.
    Attention item_attention(const Batch<Input>& batch, const AttentionPlan& plan, const AttentionItem& item,
                             const Layer* layer, const Cached* cache, int scratch_index) {
        return {layouts_[plan.kind], batch.sequences(plan.kind), item, layer, cache, plan.group, plan.window,
                scratch_of(scratch_index)};
    }

    AttentionScratch<Cached>* scratch_of(int scratch_index) const {
        return model_.scratch.as<AttentionScratch<Cached>>() + scratch_index;
    }

    Model& model_;
    std::vector<CacheLayout<Cached>> layouts_;
    bool can_defer_ = false;
};

}  // namespace millrace
