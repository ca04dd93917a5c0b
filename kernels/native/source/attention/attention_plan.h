// The plan of a step's attention: its items and chunks, divided into parts of similar cost for the threads.
//
// Made once per step, kind of blocks and window, on the calling thread, before the compute threads start.

#pragma once

#include "attention/attention.h"
#include "step/step.h"

namespace millrace {

// Attention of all layers with one kind of blocks and one window, in several parts per thread, so that a thread that is done takes parts of
// others.
struct AttentionPlan {
    int64_t kind = 0, window = 0, group = 1;  // group: query heads of a key/value head
    std::vector<AttentionItem> items;
    bool is_split = false;                            // whether different threads may compute the chunks of an item
    std::vector<std::pair<int32_t, int64_t>> chunks;  // (item, chunk) in computing order
    std::vector<int64_t> first_chunk;                 // [parts + 1] indices into `chunks`
    // Tile offsets in reading order (`TileReadOrder`), and [parts + 1] indices into them.
    std::vector<int64_t> reads, first_read;
    int64_t partial_size = 0;  // floats of a chunk's partial result, for MAX_QUERY_ROWS rows

    int64_t num_parts() const { return int64_t(first_chunk.size()) - 1; }
    int64_t num_tiles(size_t i) const { return items[chunks[i].first].span_of(chunks[i].second).num_tiles(); }

    // The cost of a chunk: its start and end take as long as a tile, and reading a tile as long as three rows. Not
    // measured with AMX.
    int64_t cost(size_t i) const { return (num_tiles(i) + 1) * (items[chunks[i].first].num_rows + 3); }

    // Whether to sum a chunk's values only after the next chunk's keys are scored. Its weights are then computed beside
    // those scores, while memory is busy. Otherwise memory is idle meanwhile, a tenth of the time where it is fast.
    // Attention of one row at 8k tokens takes 6 % less where memory gives 52 GB/s and 2 % less at 33 GB/s, of 12 rows
    // with 500 tokens 4 and 1 % less (SmolLM2-135M's shape; two cores of a Zen 4 class EPYC). With one chunk there is
    // little to gain and 5 % to lose. With keys prefetched a layer ahead, 16 rows with 400 or 1,000 tokens lose 3 to 4
    // %: many keys are in a cache then.
    bool is_worth_deferring(size_t i) const {
        const AttentionItem& item = items[chunks[i].first];
        return uses_prefetch(item.num_rows) && item.num_chunks() > 1;
    }

    // Goes through a part's chunks in reading order. begin(i, half, is_other_pending) reads the keys of a chunk into
    // one of two buffers, end(half) its values. If `can_defer`, end is deferred until the next chunk has begun in the
    // other buffer.
    template <class Begin, class End>
    void for_each_chunk(int64_t part, bool can_defer, const Begin& begin, const End& end) const {
        int half = 0;
        bool is_other_pending = false;
        for (int64_t i = first_chunk[part]; i < first_chunk[part + 1]; i++) {
            begin(size_t(i), half, is_other_pending);
            if (is_other_pending) end(1 - half);
            is_other_pending = can_defer && is_worth_deferring(i);
            if (is_other_pending)
                half = 1 - half;
            else
                end(half);
        }
        if (is_other_pending) end(1 - half);
    }

    // The end of the chunks from `i` that one thread must compute.
    size_t end_of_unit(size_t i) const {
        size_t end = i + 1;
        while (!is_split && end < chunks.size() && chunks[end].first == chunks[i].first) end++;
        return end;
    }
};

constexpr int64_t PARTS_PER_THREAD = 8;
constexpr int64_t MAX_PARTIAL_BYTES = 1 << 20;  // of partial results: their cost is below what reading in memory order saves

// Lists the chunks. The plan is split for few sequences with long contexts, and for few chunks of decoding rows. Then
// all heads read a chunk before the next one, in memory order.
inline void list_chunks(AttentionPlan* plan, int num_threads) {
    int64_t total = 0, largest = 0, max_rows = 0;
    for (const AttentionItem& item : plan->items) {
        total += item.num_chunks(), largest = std::max(largest, item.num_chunks());
        max_rows = std::max<int64_t>(max_rows, item.num_rows);
    }
    bool is_little = uses_prefetch(max_rows) && total * plan->partial_size * 4 <= MAX_PARTIAL_BYTES;
    plan->is_split = num_threads > 1 && largest > 1 && (is_little || largest * num_threads * 2 > total);
    for (size_t first = 0, end; first < plan->items.size(); first = end) {
        auto is_same = [&](size_t i) { return plan->items[i].sequence == plan->items[first].sequence; };
        for (end = first + 1; plan->is_split && end < plan->items.size() && is_same(end);) end++;
        int64_t first_chunk = plan->items[first].first_chunk(), last_chunk = plan->items[end - 1].last_chunk();
        for (int64_t chunk = first_chunk; chunk < last_chunk; chunk++)
            for (size_t i = first; i < end; i++)
                if (chunk >= plan->items[i].first_chunk() && chunk < plan->items[i].last_chunk())
                    plan->chunks.emplace_back(int32_t(i), chunk);
    }
}

// Of a layer, and of all that have its window, its heads and blocks of its kind. `rows_together`: most rows of an item.
inline AttentionPlan make_attention_plan(const LayerShape& layer, const StepInputs& inputs, int64_t kind, int num_threads,
                                         int rows_together) {
    AttentionPlan plan;
    int64_t group = layer.num_heads / layer.num_kv_heads, window = layer.window, num_chunks = 0;
    plan.kind = kind, plan.window = window, plan.group = group;
    plan.partial_size = MAX_QUERY_ROWS * (round_up(layer.head_dim, layer.has_latents() ? 32 : 16) + 2);
    for (int32_t s = 0; s < inputs.num_sequences; s++) {
        int64_t count = inputs.query_starts[s + 1] - inputs.query_starts[s], start = inputs.lengths[s] - count;
        if (count <= 0) continue;
        for (int32_t head = 0; head < layer.num_kv_heads; head++) {
            for (int64_t row = 0; row < count * group; row += rows_together) {
                int64_t rows = std::min<int64_t>(rows_together, count * group - row);
                int64_t first = first_visible_key(start + row / group, window), last = start + (row + rows - 1) / group + 1;
                plan.items.push_back({s, head, int32_t(row), int32_t(rows), first, last, num_chunks});
                num_chunks += plan.items.back().num_chunks();
            }
        }
    }
    list_chunks(&plan, num_threads);
    int64_t total = 0, seen = 0, max_reads = MAX_TILES_AHEAD, num_parts = num_threads * PARTS_PER_THREAD;
    for (size_t i = 0; i < plan.chunks.size(); i++) total += plan.cost(i), max_reads += 2 * plan.num_tiles(i);
    for (size_t i = 0, end; i < plan.chunks.size(); i = end) {
        int64_t cost = 0;
        end = plan.end_of_unit(i);
        for (size_t chunk = i; chunk < end; chunk++) cost += plan.cost(chunk);
        int64_t part = (2 * seen + cost) * num_parts / (2 * total);  // the part that its middle falls into
        while (int64_t(plan.first_chunk.size()) <= part) plan.first_chunk.push_back(int64_t(i));
        seen += cost;
    }
    plan.first_chunk.resize(num_parts + 1, int64_t(plan.chunks.size()));
    plan.reads.reserve(max_reads), plan.first_read.reserve(num_parts + 1);  // here, where bad_alloc can be reported
    return plan;
}

}  // namespace millrace
