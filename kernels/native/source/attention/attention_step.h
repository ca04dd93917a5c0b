// Attention's part of a step: what threads read for a plan, and what becomes of each chunk that one has seen.
//
// Knows in which memory. Refuses to know which parts there are (plan.h), and how a chunk is seen (attention.h).

#pragma once

#include <array>
#include <cmath>
#include <optional>

#include "step/batch.h"
#include "step/phase_times.h"

namespace millrace {

template <class Input, class Cached>
class Attending {
    using Seat = Party::Seat;
    using Attention = ItemAttention<Cached>;

  public:
    Attending(Model& model, const CacheLayout<Cached>& layout) : model_(model), shape_(model.shape), layout_(layout) {}

    // Before anything is listed: whether chunks' values wait where it is worth it (see `Plan`), so not where keys and values
    // are fetched a layer ahead.
    // NOTE: small blocks, and tile registers, keep a chunk's values where the next one's would overwrite them.
    void decide_waiting(bool looks_ahead) { can_wait_ = !looks_ahead && !IN_AMX<Cached> && layout_.is_tiled(); }

    // Memory of it, of so many threads.
    static int64_t scratch_bytes(int num_threads) { return int64_t(sizeof(Scratch<Cached>)) * num_threads; }

    // The tiles that each part of the plan reads, in the order in which `attend` does.
    void list_reads(const Batch<Input>& batch, Plan* plan) {
        plan->first_read.push_back(0);
        for (int64_t part = 0; part < plan->num_parts(); part++) {
            auto list = [&](size_t i, auto list_of) {
                auto [item, chunk] = plan->chunks[i];
                (look(batch, *plan, plan->items[item], nullptr, 0).*list_of)(chunk, &plan->reads);
            };
            std::array<size_t, 2> seen;
            plan->each_chunk(
                part, can_wait_, [&](size_t i, int half, bool) { list(seen[half] = i, &Attention::list_keys); },
                [&](int half) { list(seen[half], &Attention::list_values); });
            plan->first_read.push_back(int64_t(plan->reads.size()));
        }
        static_assert(Reads<Cached>::AHEAD <= MOST_AHEAD, "what is read ahead of the last tile is in the list");
        plan->reads.resize(plan->reads.size() + MOST_AHEAD);
    }

    // Of a layer, whose cache that is.
    void attend(const Batch<Input>& batch, const Plan& plan, const Cached* cache, Seat seat) {
        TilesInUse tiles;
        seat.each_piece(plan.num_parts(), 1, [&](int64_t part, int64_t, int64_t) {
            attend_part(batch, plan, cache, part, seat.place, tiles);
        });
    }

    // After it, where the plan is split.
    void put_chunks_together(const Batch<Input>& batch, const Plan& plan, const Cached* cache, Seat seat) {
        each_row(seat, int64_t(plan.items.size()), [&](int64_t i) {
            const Item& item = plan.items[i];
            Attention attention = look(batch, plan, item, cache, seat.place);
            for (int64_t chunk = item.first_chunk(); chunk < item.last_chunk(); chunk++) {
                const float* partial = partial_of(plan, item, chunk);
                attention.put_together(partial, partial + MAX_ROWS, partial + 2 * MAX_ROWS,
                                       chunk == item.first_chunk());
            }
            attention.finish(batch.at.attended);
        });
    }

  private:
    // A chunk that was begun, and who sees it.
    struct Sight {
        const Item* item;
        int64_t chunk;
        std::optional<Attention> attention;
        typename Attention::Begun begun;
    };

    void attend_part(const Batch<Input>& batch, const Plan& plan, const Cached* cache, int64_t part, int place,
                     TilesInUse& tiles) {
        Reads<Cached> reads{cache, plan.reads.data() + plan.first_read[part]};
        std::array<Sight, 2> sights;
        auto begin = [&](size_t i, int half, bool is_other_waiting) {
            Sight& sight = sights[half];
            auto [item, chunk] = plan.chunks[i];
            sight.item = &plan.items[item], sight.chunk = chunk;
            Attention& attention = sight.attention.emplace(look(batch, plan, *sight.item, cache, place));
            if constexpr (IN_AMX<Cached>) tiles.shape(attention_shapes(sight.item->num_rows));
            if (plan.is_split || chunk == sight.item->first_chunk())
                attention.take_queries(batch.at.qkv, batch.at.qkv_stride, 1.0f / std::sqrt(float(shape_.head_dim)));
            Weighing<Cached>* weighed = is_other_waiting ? &sights[1 - half].begun.weighing : nullptr;
            attention.begin_chunk(chunk, &reads, half, weighed, &sight.begun);
        };
        plan.each_chunk(part, can_wait_, begin, [&](int half) { end_chunk(batch, plan, sights[half], &reads, place); });
    }

    void end_chunk(const Batch<Input>& batch, const Plan& plan, Sight& sight, Reads<Cached>* reads, int place) {
        auto& [item, chunk, attention, begun] = sight;
        Scratch<Cached>* scratch = scratch_of(place);
        if (plan.is_split) {
            float* partial = partial_of(plan, *item, chunk);
            return attention->end_chunk(begun, reads, partial, partial + MAX_ROWS, partial + 2 * MAX_ROWS);
        }
        attention->end_chunk(begun, reads, scratch->chunk_largest, scratch->chunk_sum, scratch->chunk);
        attention->put_together(scratch->chunk_largest, scratch->chunk_sum, scratch->chunk, chunk == item->first_chunk());
        if (chunk + 1 == item->last_chunk()) attention->finish(batch.at.attended);
    }

    // What a chunk of a split plan leaves behind: largest scores, sums of weights, and sums of values.
    float* partial_of(const Plan& plan, const Item& item, int64_t chunk) const {
        return model_.partials.as<float>() + (item.partial + chunk - item.first_chunk()) * plan.partial_size;
    }

    // An item before it has its queries.
    Attention look(const Batch<Input>& batch, const Plan& plan, const Item& item, const Cached* cache, int place) {
        int64_t group = shape_.num_heads / shape_.num_kv_heads;
        return {layout_, batch.sequences(), item, cache, group, plan.window, scratch_of(place)};
    }

    Scratch<Cached>* scratch_of(int place) const { return model_.scratch.as<Scratch<Cached>>() + place; }

    Model& model_;
    const Shape& shape_;
    CacheLayout<Cached> layout_;
    bool can_wait_ = false;
};

}  // namespace millrace
