// The step itself, for one dtype and one type of the cache's numbers: phases that threads go through together.

#pragma once

#include <chrono>
#include <map>

#include "attention.h"
#include "linear.h"
#include "step.h"

namespace millrace {

// Attention for the layers with one window, in as many parts as threads may compute it; who is there does those of the
// others, too.
struct Plan {
    int64_t window = 0;
    std::vector<Item> items;
    bool is_split = false;                            // whether the chunks of an item may be seen by several threads
    std::vector<std::pair<int32_t, int64_t>> chunks;  // (item, chunk) in the order they are seen
    std::vector<int64_t> first_chunk;                 // [parts + 1] of `chunks`
    std::vector<std::vector<int64_t>> reads;          // [parts] of `Reads`
    int64_t partial_size = 0;                         // floats a chunk of a split plan leaves behind, for MAX_ROWS rows

    // What a chunk costs, in tiles: those that it has, and what its beginning and its end take.
    int64_t cost(size_t i) const { return items[chunks[i].first].span_of(chunks[i].second).num_tiles() + 1; }

    // Chunks from `i` that one thread sees.
    size_t end_of_share(size_t i) const {
        size_t end = i + 1;
        while (!is_split && end < chunks.size() && chunks[end].first == chunks[i].first) end++;
        return end;
    }
};

constexpr int64_t PARTIALS = 1 << 20;  // bytes of what chunks leave behind that cost less than another order saves

// Few sequences with long contexts are split, and so are few chunks of decoding rows: all heads then see a chunk before
// the next one, in the order in which it lies in memory.
inline void list_chunks(Plan* plan, int num_threads) {
    int64_t total = 0, largest = 0, most_rows = 0;
    for (const Item& item : plan->items) {
        total += item.num_chunks(), largest = std::max(largest, item.num_chunks());
        most_rows = std::max<int64_t>(most_rows, item.num_rows);
    }
    bool is_little = is_fetched_ahead(int(most_rows)) && total * plan->partial_size * 4 <= PARTIALS;
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

inline Plan make_plan(const Model& model, const StepInputs& inputs, int64_t window, int num_threads) {
    Plan plan;
    plan.window = window;
    plan.partial_size = MAX_ROWS * (round_up(model.shape.head_dim, 16) + 2);
    int64_t group = model.shape.num_heads / model.shape.num_kv_heads, num_chunks = 0;
    for (int32_t s = 0; s < inputs.num_sequences; s++) {
        int64_t count = inputs.query_starts[s + 1] - inputs.query_starts[s], start = inputs.lengths[s] - count;
        if (count <= 0) continue;
        for (int32_t head = 0; head < model.shape.num_kv_heads; head++) {
            for (int64_t row = 0; row < count * group; row += MAX_ROWS) {
                int64_t rows = std::min<int64_t>(MAX_ROWS, count * group - row);
                int64_t first = first_seen(start + row / group, window), last = start + (row + rows - 1) / group + 1;
                plan.items.push_back({s, head, int32_t(row), int32_t(rows), first, last, num_chunks});
                num_chunks += plan.items.back().num_chunks();
            }
        }
    }
    list_chunks(&plan, num_threads);
    int64_t total = 0, seen = 0;
    for (size_t i = 0; i < plan.chunks.size(); i++) total += plan.cost(i);
    for (size_t i = 0, end; i < plan.chunks.size(); i = end) {
        int64_t cost = 0;
        end = plan.end_of_share(i);
        for (size_t chunk = i; chunk < end; chunk++) cost += plan.cost(chunk);
        int64_t thread = (2 * seen + cost) * num_threads / (2 * total);  // in whose share its middle is
        while (int64_t(plan.first_chunk.size()) <= thread) plan.first_chunk.push_back(int64_t(i));
        seen += cost;
    }
    plan.first_chunk.resize(num_threads + 1, int64_t(plan.chunks.size()));
    plan.reads.resize(num_threads);
    for (int thread = 0; thread < num_threads; thread++) {  // memory is taken here, where a lack of it can be told
        int64_t most = AHEAD;
        for (int64_t i = plan.first_chunk[thread]; i < plan.first_chunk[thread + 1]; i++) most += 2 * plan.cost(i);
        plan.reads[thread].reserve(most);
    }
    return plan;
}

// Where a step's activations are.
template <class Input>
struct Activations {
    float *residual, *qkv;
    TiledRows<Input> normed, attended, inner;
    int64_t hidden_stride, qkv_stride;
    char* end;

    Activations(const Model& model, char* memory, int64_t num_rows)
        : hidden_stride(row_stride(model.shape.hidden_size)), qkv_stride(row_stride(model.qkv_size())) {
        auto take = [&](auto** place, int64_t size) {
            *place = reinterpret_cast<std::remove_reference_t<decltype(*place)>>(memory);
            memory += round_up(num_rows * size * int64_t(sizeof(**place)), 64);
        };
        auto take_tiled = [&](TiledRows<Input>* rows, int64_t size) {
            rows->num_rows = num_rows, rows->size = size;
            take(&rows->data, size);
        };
        take(&residual, hidden_stride);
        take(&qkv, qkv_stride);
        take_tiled(&normed, model.shape.hidden_size);
        take_tiled(&attended, model.attended_size());
        take_tiled(&inner, model.shape.intermediate_size);
        end = memory;
    }
};

template <class Input>
int64_t activation_bytes(const Model& model, int64_t num_rows) {
    return Activations<Input>(model, nullptr, num_rows).end - static_cast<char*>(nullptr);
}

// Scales a row to unit mean square, then by `weight`. Sums run over whole vectors, then over the rest.
inline void norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
    F squares = zero();
    int64_t whole = size / W * W;
    for (int64_t i = 0; i < whole; i += W) squares = fma(load(x + i), load(x + i), squares);
    float sum = sum_of(squares);
    for (int64_t i = whole; i < size; i++) sum = std::fma(x[i], x[i], sum);
    float scale = 1.0f / std::sqrt(sum / float(size) + eps);
    F scales = splat(scale);
    for (int64_t i = 0; i < whole; i += W) store(out + i, mul(mul(load(x + i), scales), load(weight + i)));
    for (int64_t i = whole; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// The same of rows [first, last), to those of what a product reads; `row(i)` is where the i-th begins.
template <class T, class Row>
void norm_to(const TiledRows<T>& rows, int64_t first, int64_t last, const Row& row, const float* weight, float eps) {
    constexpr int64_t SOME = 4;
    thread_local std::vector<float> normed;
    normed.resize(SOME * rows.size);
    for (int64_t begin = first; begin < last; begin += SOME) {
        int64_t count = std::min(SOME, last - begin);
        for (int64_t i = 0; i < count; i++) norm_row(row(begin + i), weight, rows.size, eps, normed.data() + i * rows.size);
        rows.put_rows(begin, count, 0, rows.size, normed.data(), rows.size);
    }
}

template <class Weight, class Cached>
class Step {
    using Input = InputOf<Weight>;
    using Seat = Party::Seat;

  public:
    Step(Model& model, const StepInputs& inputs, int num_threads)
        : model_(model), shape_(model.shape), inputs_(inputs), num_threads_(num_threads),
          layout_{inputs.num_blocks, inputs.block_size, shape_.num_kv_heads, shape_.head_dim},
          sequences_{inputs.block_tables, inputs.query_starts, inputs.lengths, inputs.num_sequences, inputs.table_width},
          at_(model, reserve(model, inputs, num_threads), inputs.num_tokens), since_ns_(now_ns()) {
        for (const Layer& layer : model.layers)
            if (!plans_.count(layer.window))
                plans_[layer.window] = make_plan(model, inputs, layer.window, num_threads);
        int64_t num_floats = 0;
        for (auto& [window, plan] : plans_)
            if (plan.is_split) num_floats = std::max(num_floats, plan.partial_size * int64_t(plan.chunks.size()));
        ensure(&model.partials, num_floats * 4);
    }

    void run(int thread) {
        Phases phases(model_.pool.get(), thread);
        pass(phases, REST, [&](Seat) {  // of the caller alone, while the others come
            for (auto& [window, plan] : plans_)
                for (int part = 0; part < num_threads_; part++) list_reads(&plan, part);
        });
        pass(phases, REST, [&](Seat seat) { embed(seat); });
        for (size_t i = 0; i < model_.layers.size(); i++) pass_layer(int(i), phases);
        finish(phases);
    }

  private:
    static char* reserve(Model& model, const StepInputs& inputs, int num_threads) {
        int64_t rows = std::max(inputs.num_tokens, inputs.num_logits);
        ensure(&model.activations, activation_bytes<Input>(model, rows));
        ensure(&model.scratch, int64_t(sizeof(Scratch<Cached>)) * num_threads);
        return model.activations.as<char>();
    }

    // A phase, whose time is that of a part of the step.
    template <class Work>
    void pass(Phases& phases, Part part, const Work& work) {
        if (!phases.run(work) || !model_.part_ns || phases.seat().rank > 0) return;
        int64_t now = now_ns();
        model_.part_ns[part] += now - since_ns_;
        since_ns_ = now;
    }

    static int64_t now_ns() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    void embed(Seat seat) {
        int64_t first, last, hidden = shape_.hidden_size;
        share(inputs_.num_tokens, seat.rank, seat.count, &first, &last);
        for (int64_t t = first; t < last; t++) {
            int64_t id = inputs_.input_ids[t];
            float* to = at_.residual + t * at_.hidden_stride;
            if (!shape_.is_tied) {
                const Weight* row = model_.embedding.as<Weight>() + id * hidden;
                for (int64_t i = 0; i < hidden; i++) to[i] = widen(row[i]);
                continue;
            }
            read_row<Weight>(model_.head, id, to);
        }
    }

    void pass_layer(int index, Phases& phases) {
        const Layer& layer = model_.layers[index];
        const Plan& plan = plans_.at(layer.window);
        Cached* cache = static_cast<Cached*>(inputs_.cache) + index * layout_.layer_stride();
        Rows qkv{at_.qkv, at_.qkv_stride, Into::STORE}, residual{at_.residual, at_.hidden_stride, Into::ADD};
        auto pass_product = [&](const Linear& linear, const TiledRows<Input>& x, const auto& out) {
            pass(phases, LINEARS, [&](Seat seat) { multiply<Weight>(linear, x, out, seat.rank, seat.count); });
        };
        pass(phases, REST, [&](Seat seat) { norm(layer.input_norm, seat); });
        pass_product(layer.qkv, at_.normed, qkv);
        pass(phases, REST, [&](Seat seat) { place_tokens(layer, cache, seat); });
        pass(phases, ATTENTION, [&](Seat seat) { attend(plan, cache, seat); });
        if (plan.is_split) pass(phases, ATTENTION, [&](Seat seat) { put_chunks_together(plan, cache, seat); });
        pass_product(layer.output, at_.attended, residual);
        pass(phases, REST, [&](Seat seat) { norm(layer.post_norm, seat); });
        pass_product(layer.gate_up, at_.normed, SiluMul<Input>{at_.inner});
        pass_product(layer.down, at_.inner, residual);
    }

    void norm(const std::vector<float>& weight, Seat seat) {
        int64_t first, last;
        share(inputs_.num_tokens, seat.rank, seat.count, &first, &last);
        auto row = [&](int64_t t) { return at_.residual + t * at_.hidden_stride; };
        norm_to(at_.normed, first, last, row, weight.data(), shape_.rms_norm_eps);
    }

    // Norms and rotates queries and keys, and writes keys and values into the cache.
    void place_tokens(const Layer& layer, Cached* cache, Seat seat) {
        int64_t first, last, dim = shape_.head_dim, heads = shape_.num_heads, kv_heads = shape_.num_kv_heads;
        share(inputs_.num_tokens, seat.rank, seat.count, &first, &last);
        for (int64_t t = first; t < last; t++) {
            float *q = at_.qkv + t * at_.qkv_stride, *k = q + heads * dim, *v = k + kv_heads * dim;
            for (int64_t head = 0; head < heads; head++) turn(q + head * dim, layer.q_norm, inputs_.positions[t]);
            for (int64_t head = 0; head < kv_heads; head++) turn(k + head * dim, layer.k_norm, inputs_.positions[t]);
            int64_t slot = inputs_.slot_mapping[t];
            if (slot < 0) continue;
            int64_t block = slot / layout_.block_size, offset = slot % layout_.block_size;
            for (int64_t head = 0; head < kv_heads; head++)
                write_token(layout_, layout_.keys(cache, block, head), layout_.values(cache, block, head), offset,
                            k + head * dim, v + head * dim);
        }
    }

    // Norms a head, if the model does, and rotates it to its position; the halves are the pairs.
    void turn(float* head, const std::vector<float>& norm, int64_t position) const {
        if (!norm.empty()) norm_row(head, norm.data(), shape_.head_dim, shape_.rms_norm_eps, head);
        int64_t half = shape_.rotary_dim / 2;
        const float *cos = model_.cos.data() + position * half, *sin = model_.sin.data() + position * half;
        int64_t i = 0;
        for (; i + W <= half; i += W) {
            F a = load(head + i), b = load(head + i + half), c = load(cos + i), s = load(sin + i);
            store(head + i, sub(mul(a, c), mul(b, s)));
            store(head + i + half, add(mul(b, c), mul(a, s)));
        }
        for (; i < half; i++) {
            float a = head[i], b = head[i + half];
            head[i] = a * cos[i] - b * sin[i];
            head[i + half] = b * cos[i] + a * sin[i];
        }
    }

    void attend(const Plan& plan, const Cached* cache, Seat seat) {
        int64_t first, last;
        share(num_threads_, seat.rank, seat.count, &first, &last);
        for (int64_t part = first; part < last; part++) attend_part(plan, cache, int(part), seat.rank);
    }

    void attend_part(const Plan& plan, const Cached* cache, int part, int rank) {
        Reads<Cached> reads{cache, plan.reads[part].data()};
        Scratch<Cached>* scratch = scratch_of(rank);
        for (int64_t i = plan.first_chunk[part]; i < plan.first_chunk[part + 1]; i++) {
            const Item& item = plan.items[plan.chunks[i].first];
            int64_t chunk = plan.chunks[i].second;
            ItemAttention<Cached> attention = look(plan, item, cache, rank);
            if (plan.is_split || chunk == item.first_chunk())
                attention.take_queries(at_.qkv, at_.qkv_stride, 1.0f / std::sqrt(float(shape_.head_dim)));
            if (plan.is_split) {
                float* partial = partial_of(plan, item, chunk);
                attention.see_chunk(chunk, &reads, partial, partial + MAX_ROWS, partial + 2 * MAX_ROWS);
                continue;
            }
            attention.see_chunk(chunk, &reads, scratch->chunk_largest, scratch->chunk_sum, scratch->chunk);
            attention.put_together(scratch->chunk_largest, scratch->chunk_sum, scratch->chunk,
                                   chunk == item.first_chunk());
            if (chunk + 1 == item.last_chunk()) attention.finish(at_.attended);
        }
    }

    void put_chunks_together(const Plan& plan, const Cached* cache, Seat seat) {
        int64_t first, last;
        share(int64_t(plan.items.size()), seat.rank, seat.count, &first, &last);
        for (int64_t i = first; i < last; i++) {
            const Item& item = plan.items[i];
            ItemAttention<Cached> attention = look(plan, item, cache, seat.rank);
            for (int64_t chunk = item.first_chunk(); chunk < item.last_chunk(); chunk++) {
                const float* partial = partial_of(plan, item, chunk);
                attention.put_together(partial, partial + MAX_ROWS, partial + 2 * MAX_ROWS,
                                       chunk == item.first_chunk());
            }
            attention.finish(at_.attended);
        }
    }

    // What a chunk of a split plan leaves behind: largest scores, sums of weights, and sums of values.
    float* partial_of(const Plan& plan, const Item& item, int64_t chunk) const {
        return model_.partials.as<float>() + (item.partial + chunk - item.first_chunk()) * plan.partial_size;
    }

    void list_reads(Plan* plan, int part) {
        std::vector<int64_t>* tiles = &plan->reads[part];
        for (int64_t i = plan->first_chunk[part]; i < plan->first_chunk[part + 1]; i++) {
            auto [item, chunk] = plan->chunks[i];
            look(*plan, plan->items[item], nullptr, 0).list_reads(chunk, tiles);
        }
        tiles->resize(tiles->size() + AHEAD);
    }

    // An item before it has its queries.
    ItemAttention<Cached> look(const Plan& plan, const Item& item, const Cached* cache, int rank) {
        int64_t group = shape_.num_heads / shape_.num_kv_heads;
        return {layout_, sequences_, item, cache, group, plan.window, scratch_of(rank)};
    }

    Scratch<Cached>* scratch_of(int rank) const { return model_.scratch.as<Scratch<Cached>>() + rank; }

    // Hidden states and logits, to whoever asked for them.
    void finish(Phases& phases) {
        int64_t hidden = shape_.hidden_size;
        TiledRows<Input> normed{at_.normed.data, inputs_.num_logits, hidden};
        Rows logits{inputs_.logits, shape_.vocab_size, Into::STORE};
        pass(phases, REST, [&](Seat seat) {
            int64_t first, last;
            share(inputs_.hidden ? inputs_.num_tokens : 0, seat.rank, seat.count, &first, &last);
            for (int64_t t = first; t < last; t++)
                std::memcpy(inputs_.hidden + t * hidden, at_.residual + t * at_.hidden_stride, hidden * 4);
            share(inputs_.logits ? inputs_.num_logits : 0, seat.rank, seat.count, &first, &last);
            auto row = [&](int64_t i) { return at_.residual + inputs_.logits_rows[i] * at_.hidden_stride; };
            norm_to(normed, first, last, row, model_.final_norm.data(), shape_.rms_norm_eps);
        });
        if (!inputs_.logits) return;
        pass(phases, LINEARS, [&](Seat seat) { multiply<Weight>(model_.head, normed, logits, seat.rank, seat.count); });
    }

    Model& model_;
    const Shape& shape_;
    const StepInputs& inputs_;
    int num_threads_;
    CacheLayout<Cached> layout_;
    Sequences sequences_;
    Activations<Input> at_;
    std::map<int64_t, Plan> plans_;
    int64_t since_ns_;  // end of the last phase, if somebody wants to know
};

template <class Weight>
void run_typed(Model& model, const StepInputs& inputs, int num_threads) {
    auto run = [&](auto step) {
        model.pool->run(num_threads, [&](int thread) { step.run(thread); });
        if (model.part_ns) model.part_ns[NUM_PARTS]++;
    };
    if (model.shape.cache == INT8)
        run(Step<Weight, int8_t>(model, inputs, num_threads));
    else
        run(Step<Weight, Weight>(model, inputs, num_threads));
}

template <class Weight>
void run_head_typed(Model& model, const float* hidden, int64_t count, float* logits, int num_threads) {
    using Input = InputOf<Weight>;
    const Shape& shape = model.shape;
    ensure(&model.activations, activation_bytes<Input>(model, count));
    TiledRows<Input> normed{model.activations.as<Input>(), count, shape.hidden_size};
    Rows out{logits, shape.vocab_size, Into::STORE};
    model.pool->run(num_threads, [&](int thread) {
        Phases phases(model.pool.get(), thread);
        phases.run([&](Party::Seat seat) {
            int64_t first, last;
            share(count, seat.rank, seat.count, &first, &last);
            auto row = [&](int64_t i) { return hidden + i * shape.hidden_size; };
            norm_to(normed, first, last, row, model.final_norm.data(), shape.rms_norm_eps);
        });
        phases.run([&](Party::Seat seat) { multiply<Weight>(model.head, normed, out, seat.rank, seat.count); });
    });
}

inline void norm_rows(const Model& model, const float* hidden, int64_t count, float* normed) {
    int64_t size = model.shape.hidden_size;
    for (int64_t i = 0; i < count; i++)
        norm_row(hidden + i * size, model.final_norm.data(), size, model.shape.rms_norm_eps, normed + i * size);
}

template <class Weight>
int64_t step_bytes_typed(const Model& model, int64_t num_rows) {
    int64_t widened = widened_bytes<Weight>(model.head);
    for (const Layer& layer : model.layers)
        for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
            widened = std::max(widened, widened_bytes<Weight>(*linear));
    int64_t scratch = model.shape.cache == INT8 ? sizeof(Scratch<int8_t>) : sizeof(Scratch<Weight>);
    return activation_bytes<InputOf<Weight>>(model, num_rows) + (scratch + widened) * model.pool->size();
}

}  // namespace millrace
