// Who sees which keys for whom: attention of a step in parts for threads, decided before it begins.

#pragma once

#include "attention/attention.h"
#include "step/step.h"

namespace millrace {

// Attention for the layers with one window, in parts that cost about as much as each other, more than there are threads:
// who is done with its own sees to those of others.
struct AttentionPlan {
    int64_t window = 0;
    std::vector<AttentionItem> items;
    bool is_split = false;                            // whether the chunks of an item may be seen by several threads
    std::vector<std::pair<int32_t, int64_t>> chunks;  // (item, chunk) in the order they are seen
    std::vector<int64_t> first_chunk;                 // [parts + 1] of `chunks`
    std::vector<int64_t> reads, first_read;           // of `Reads`, and [parts + 1] of these
    int64_t partial_size = 0;                         // floats a chunk of a split plan leaves behind, for MAX_ROWS rows

    int64_t num_parts() const { return int64_t(first_chunk.size()) - 1; }
    int64_t num_tiles(size_t i) const { return items[chunks[i].first].span_of(chunks[i].second).num_tiles(); }

    // What a chunk costs: its beginning and its end take as long as a tile, and reading a tile as long as three rows (in
    // vectors; in AMX nobody has looked).
    int64_t cost(size_t i) const { return (num_tiles(i) + 1) * (items[chunks[i].first].num_rows + 3); }

    // Whether it is worth it to sum a chunk's values after the next one's keys are scored. Its weights are computed beside these
    // then, while memory is busy. Otherwise it is idle meanwhile: a tenth of the time where it is fast. Attention of one row at
    // 8k tokens takes 6 % less so where memory gives 52 GB/s and 2 where it gives 33, of 12 rows with 500 tokens 4 and 1
    // (SmolLM2-135M's shape; two cores of a Zen 4 class EPYC). In one chunk there is little to gain, and 5 % to lose; and 3 to
    // 4 of 16 rows with 400 or 1,000 tokens, where keys and values are fetched a layer ahead: many are in a cache then.
    bool is_worth_deferring(size_t i) const {
        const AttentionItem& item = items[chunks[i].first];
        return uses_prefetch(item.num_rows) && item.num_chunks() > 1;
    }

    // What is done with a part's chunks, in the order in which they are read: begin(i, half, is_other_waiting) reads the keys
    // of one, to one half of two, and end(half) its values; the chunk in the other half may wait for its end meanwhile, where
    // one `can_wait`.
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

    // Chunks from `i` that one thread sees.
    size_t end_of_unit(size_t i) const {
        size_t end = i + 1;
        while (!is_split && end < chunks.size() && chunks[end].first == chunks[i].first) end++;
        return end;
    }
};

constexpr int64_t PARTS_PER_THREAD = 8;  // for each thread
constexpr int64_t MAX_PARTIAL_BYTES = 1 << 20;  // bytes of what chunks leave behind that cost less than another order saves

// Few sequences with long contexts are split, and so are few chunks of decoding rows: all heads then see a chunk before
// the next one, in the order in which it lies in memory.
inline void list_chunks(AttentionPlan* plan, int num_threads) {
    int64_t total = 0, largest = 0, most_rows = 0;
    for (const AttentionItem& item : plan->items) {
        total += item.num_chunks(), largest = std::max(largest, item.num_chunks());
        most_rows = std::max<int64_t>(most_rows, item.num_rows);
    }
    bool is_little = uses_prefetch(most_rows) && total * plan->partial_size * 4 <= MAX_PARTIAL_BYTES;
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

// `rows_together`: that an item has at most.
inline AttentionPlan make_attention_plan(const Model& model, const StepInputs& inputs, int64_t window, int num_threads,
                                         int rows_together) {
    AttentionPlan plan;
    plan.window = window;
    plan.partial_size = MAX_QUERY_ROWS * (round_up(model.shape.head_dim, 16) + 2);
    int64_t group = model.shape.num_heads / model.shape.num_kv_heads, num_chunks = 0;
    for (int32_t s = 0; s < inputs.num_sequences; s++) {
        int64_t count = inputs.query_starts[s + 1] - inputs.query_starts[s], start = inputs.lengths[s] - count;
        if (count <= 0) continue;
        for (int32_t head = 0; head < model.shape.num_kv_heads; head++) {
            for (int64_t row = 0; row < count * group; row += rows_together) {
                int64_t rows = std::min<int64_t>(rows_together, count * group - row);
                int64_t first = first_visible_key(start + row / group, window), last = start + (row + rows - 1) / group + 1;
                plan.items.push_back({s, head, int32_t(row), int32_t(rows), first, last, num_chunks});
                num_chunks += plan.items.back().num_chunks();
            }
        }
    }
    list_chunks(&plan, num_threads);
    int64_t total = 0, seen = 0, most_reads = MAX_TILES_AHEAD, num_parts = num_threads * PARTS_PER_THREAD;
    for (size_t i = 0; i < plan.chunks.size(); i++) total += plan.cost(i), most_reads += 2 * plan.num_tiles(i);
    for (size_t i = 0, end; i < plan.chunks.size(); i = end) {
        int64_t cost = 0;
        end = plan.end_of_unit(i);
        for (size_t chunk = i; chunk < end; chunk++) cost += plan.cost(chunk);
        int64_t part = (2 * seen + cost) * num_parts / (2 * total);  // that its middle is in
        while (int64_t(plan.first_chunk.size()) <= part) plan.first_chunk.push_back(int64_t(i));
        seen += cost;
    }
    plan.first_chunk.resize(num_parts + 1, int64_t(plan.chunks.size()));
    plan.reads.reserve(most_reads), plan.first_read.reserve(num_parts + 1);  // here, where a lack of memory can be told
    return plan;
}

}  // namespace millrace
