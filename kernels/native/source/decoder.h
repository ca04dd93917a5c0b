// The step itself, for one dtype and one type of the cache's numbers: phases that threads go through together, or from some
// layer on each alone with half of the rows.

#pragma once

#include <array>
#include <optional>

#include "batch.h"
#include "likeliest.h"
#include "norms.h"
#include "screen.h"

namespace millrace {

// Rows that each thread norms for itself, at most: a tile of them, whose products need no room for anything else. In AMX nobody
// has measured it.
template <class Input>
constexpr int64_t NORMED_BY_ALL = IN_AMX<Input> ? 0 : GEMM_ROWS;

// Bytes of room for each thread in any of the products of `num_rows` rows, and in what comes before one.
template <class Weight>
int64_t most_room_bytes(const Model& model, int64_t num_rows) {
    using Input = InputOf<Weight>;
    int64_t most = room_bytes<Weight>(model.head, num_rows);
    most = std::max(most, NORMED_BY_ALL<Input> * model.shape.hidden_size * int64_t(sizeof(Input)));
    for (const Layer& layer : model.layers)
        for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
            most = std::max(most, room_bytes<Weight>(*linear, num_rows));
    return round_up(most, 64);
}

template <class Weight>
void reserve_room(Model* model, int64_t num_rows, int num_threads) {
    model->room_apart = most_room_bytes<Weight>(*model, num_rows);
    ensure(&model->room, model->room_apart * num_threads);
}

constexpr int64_t ROWS = 16;  // a piece of the work between products

// Rows of a step that may be taken apart, at least: each half is more than a tile. A half of one waits for memory, and fetches
// no keys a layer ahead: 14 to 24 rows took 3 to 30 % more apart, wherever the cores were (AVX-512; with AVX2 nobody has
// measured any of it).
constexpr int64_t APART_ROWS = 2 * (GEMM_ROWS + 1);

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
        : model_(model), shape_(model.shape), crew_(crew),
          layout_{inputs.blocks_apart, inputs.block_size, shape_.num_kv_heads, shape_.head_dim}, asked_rows_(inputs),
          all_(model, memory, inputs), asked_(model, all_.at.end, asked_rows_.of(inputs)), is_screened_(is_screened),
          since_ns_(now_ns()) {
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
        if (inputs.likeliest) found_.resize(num_threads * found_apart());
        if (is_screened_) screening_.resize(model.head, inputs.num_logits, num_threads);
    }

    // Memory of a step of so many threads: for its activations, and what each thread has. Here a lack of it can be told.
    static char* reserve(Model& model, int64_t num_tokens, int64_t num_logits, int num_threads, int64_t activation_bytes) {
        ensure(&model.activations, activation_bytes);
        ensure(&model.scratch, int64_t(sizeof(Scratch<Cached>)) * num_threads);
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
        since_ns_ = now_ns();
        list_all_reads(phases);
        run_layers(layer, phases);
    }

    // Once all have gone through it: what was found, and what becomes known of the model.
    void tell() {
        if (all_.inputs.likeliest) tell_likeliest();
        for (const Upcoming& upcoming : upcoming_) model_.num_bytes_beside += upcoming.num_bytes();
    }

    // Adds the times of its parts.
    void tell_times(int64_t* part_ns) const {
        for (int part = 0; part < NUM_PARTS; part++) part_ns[part] += spent_ns_[part];
    }

  private:
    // Who goes through what comes after the last layer's keys and values.
    Batch<Input>& last_batch() { return asked_rows_.is_cut ? asked_ : all_; }

    template <class Use>
    void each_plan(const Use& use) {
        for (Batch<Input>* batch : {&all_, &asked_})
            for (auto& [window, plan] : batch->plans) use(*batch, plan);
    }

    // A phase, whose time is that of a part of the step.
    template <class Work>
    void pass(Phases& phases, Part part, const Work& work) {
        if (!phases.run(work) || !model_.part_ns || phases.seat().rank > 0) return;
        int64_t now = now_ns();
        spent_ns_[part] += now - since_ns_;
        since_ns_ = now;
    }

    template <class Use>
    static void each_row(Seat seat, int64_t num, const Use& use) {
        seat.each_piece(num, ROWS, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t row = first; row < last; row++) use(row);
        });
    }

    int last_layer() const { return int(model_.layers.size()) - 1; }

    void begin(Phases& phases) {
        list_all_reads(phases);
        pass(phases, REST, [&](Seat seat) { embed(seat); });
    }

    // By who comes first alone, while the others come.
    void list_all_reads(Phases& phases) {
        pass(phases, REST, [&](Seat) {
            each_plan([&](const Batch<Input>& batch, Plan& plan) { list_reads(batch, &plan); });
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
        if (asked_rows_.is_cut) pass(phases, REST, [&](Seat seat) { keep_asked(seat); });
        end_layer(last, last_batch(), phases);
        finish(last_batch(), phases);
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
            pass(phases, REST, [&](Seat seat) { norm(batch, norm_weight, seat); });
            return pass_product(phases, linear, normed, out);
        }
        pass(phases, LINEARS, [&](Seat seat) {
            TiledRows<Input> own{reinterpret_cast<Input*>(model_.room_of(seat.place)), normed.num_rows, normed.size};
            norm_to(own, 0, own.num_rows, residual_of(batch), norm_weight.data(), shape_.rms_norm_eps);
            multiply<Weight>(model_, linear, own, out, seat);
        });
    }

    // A product of a layer's.
    template <class Out>
    void pass_product(Phases& phases, const Linear& linear, const TiledRows<Input>& x, const Out& out) {
        pass(phases, LINEARS, [&](Seat seat) { multiply<Weight>(model_, linear, x, out, seat, upcoming_of(seat)); });
    }

    // By the cache behind the cores' own, which is measured if nobody knows.
    bool is_any_kept() {
        return model_.kept.measured(model_.weights.as<char>(), model_.weights.num_bytes(), since_ns_) > 0;
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
        pass(phases, REST, [&](Seat seat) { place_tokens(layer, cache_of(index), seat); });
    }

    void end_layer(int index, const Batch<Input>& batch, Phases& phases) {
        const Layer& layer = model_.layers[index];
        const Plan& plan = batch.plans.at(layer.window);
        const Cached* cache = cache_of(index);
        const Activations<Input>& at = batch.at;
        Rows residual{at.residual, at.hidden_stride, Into::ADD};
        pass(phases, ATTENTION, [&](Seat seat) { attend(batch, plan, cache, seat); });
        if (plan.is_split) pass(phases, ATTENTION, [&](Seat seat) { put_chunks_together(batch, plan, cache, seat); });
        pass(phases, LINEARS, [&](Seat seat) {
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
        int64_t dim = shape_.head_dim, heads = shape_.num_heads, kv_heads = shape_.num_kv_heads;
        each_row(seat, all_.inputs.num_tokens, [&](int64_t t) {
            float *q = all_.at.qkv + t * all_.at.qkv_stride, *k = q + heads * dim, *v = k + kv_heads * dim;
            for (int64_t head = 0; head < heads; head++) turn(q + head * dim, layer.q_norm, all_.inputs.positions[t]);
            for (int64_t head = 0; head < kv_heads; head++) turn(k + head * dim, layer.k_norm, all_.inputs.positions[t]);
            int64_t slot = all_.inputs.slot_mapping[t];
            if (slot < 0) return;
            int64_t block = slot / layout_.block_size, offset = slot % layout_.block_size;
            for (int64_t head = 0; head < kv_heads; head++)
                write_token(layout_, layout_.keys(cache, block, head), layout_.values(cache, block, head), offset,
                            k + head * dim, v + head * dim);
        });
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

    void attend(const Batch<Input>& batch, const Plan& plan, const Cached* cache, Seat seat) {
        TilesInUse tiles;
        seat.each_piece(plan.num_parts(), 1, [&](int64_t part, int64_t, int64_t) {
            attend_part(batch, plan, cache, part, seat.place, tiles);
        });
    }

    // A chunk that was begun, and who sees it.
    struct Sight {
        const Item* item;
        int64_t chunk;
        std::optional<ItemAttention<Cached>> attention;
        typename ItemAttention<Cached>::Begun begun;
    };

    void attend_part(const Batch<Input>& batch, const Plan& plan, const Cached* cache, int64_t part, int place,
                     TilesInUse& tiles) {
        Reads<Cached> reads{cache, plan.reads.data() + plan.first_read[part]};
        std::array<Sight, 2> sights;
        Sight *sight = &sights[0], *other = &sights[1], *waiting = nullptr;
        for (int64_t i = plan.first_chunk[part]; i < plan.first_chunk[part + 1]; i++) {
            const Item& item = plan.items[plan.chunks[i].first];
            int64_t chunk = plan.chunks[i].second;
            sight->item = &item, sight->chunk = chunk;
            ItemAttention<Cached>& attention = sight->attention.emplace(look(batch, plan, item, cache, place));
            if constexpr (IN_AMX<Cached>) tiles.shape(attention_shapes(item.num_rows));
            if (plan.is_split || chunk == item.first_chunk())
                attention.take_queries(batch.at.qkv, batch.at.qkv_stride, 1.0f / std::sqrt(float(shape_.head_dim)));
            attention.begin_chunk(chunk, &reads, sight == &sights[1], waiting ? &waiting->begun.weighing : nullptr,
                                  &sight->begun);
            if (waiting) end_chunk(batch, plan, *waiting, &reads, place);
            waiting = nullptr;
            if (is_waiting(attention))
                waiting = sight, std::swap(sight, other);
            else
                end_chunk(batch, plan, *sight, &reads, place);
        }
        if (waiting) end_chunk(batch, plan, *waiting, &reads, place);
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

    void put_chunks_together(const Batch<Input>& batch, const Plan& plan, const Cached* cache, Seat seat) {
        each_row(seat, int64_t(plan.items.size()), [&](int64_t i) {
            const Item& item = plan.items[i];
            ItemAttention<Cached> attention = look(batch, plan, item, cache, seat.place);
            for (int64_t chunk = item.first_chunk(); chunk < item.last_chunk(); chunk++) {
                const float* partial = partial_of(plan, item, chunk);
                attention.put_together(partial, partial + MAX_ROWS, partial + 2 * MAX_ROWS,
                                       chunk == item.first_chunk());
            }
            attention.finish(batch.at.attended);
        });
    }

    // What a chunk of a split plan leaves behind: largest scores, sums of weights, and sums of values.
    float* partial_of(const Plan& plan, const Item& item, int64_t chunk) const {
        return model_.partials.as<float>() + (item.partial + chunk - item.first_chunk()) * plan.partial_size;
    }

    // Whether a chunk's values wait until the next one's keys are scored: not where keys and values are fetched a layer ahead,
    // as many are in a cache then, and attention of 16 rows with 400 or 1,000 tokens takes 3 to 4 % more so.
    bool is_waiting(const ItemAttention<Cached>& attention) const { return upcoming_.empty() && attention.can_wait(); }

    // In the order of `attend_part`.
    void list_reads(const Batch<Input>& batch, Plan* plan) {
        plan->first_read.push_back(0);
        for (int64_t part = 0; part < plan->num_parts(); part++) {
            std::optional<std::pair<ItemAttention<Cached>, int64_t>> waiting;
            auto list_values = [&] {
                if (waiting) waiting->first.list_values(waiting->second, &plan->reads);
                waiting.reset();
            };
            for (int64_t i = plan->first_chunk[part]; i < plan->first_chunk[part + 1]; i++) {
                auto [item, chunk] = plan->chunks[i];
                ItemAttention<Cached> attention = look(batch, *plan, plan->items[item], nullptr, 0);
                attention.list_keys(chunk, &plan->reads);
                list_values();
                waiting.emplace(attention, chunk);
                if (!is_waiting(attention)) list_values();
            }
            list_values();
            plan->first_read.push_back(int64_t(plan->reads.size()));
        }
        static_assert(Reads<Cached>::AHEAD <= MOST_AHEAD, "what is read ahead of the last tile is in the list");
        plan->reads.resize(plan->reads.size() + MOST_AHEAD);
    }

    // An item before it has its queries.
    ItemAttention<Cached> look(const Batch<Input>& batch, const Plan& plan, const Item& item, const Cached* cache,
                               int place) {
        int64_t group = shape_.num_heads / shape_.num_kv_heads;
        return {layout_, batch.sequences(), item, cache, group, plan.window, scratch_of(place)};
    }

    Scratch<Cached>* scratch_of(int place) const { return model_.scratch.as<Scratch<Cached>>() + place; }

    // Hidden states, and logits or the likeliest of them, to whoever asked for these.
    void finish(const Batch<Input>& batch, Phases& phases) {
        const StepInputs& inputs = batch.inputs;
        const Activations<Input>& at = batch.at;
        int64_t hidden = shape_.hidden_size;
        TiledRows<Input> normed{at.normed.data, inputs.num_logits, hidden};
        if (inputs.hidden) {
            pass(phases, REST, [&](Seat seat) {
                each_row(seat, inputs.num_tokens, [&](int64_t t) {
                    std::memcpy(inputs.hidden + t * hidden, at.residual + t * at.hidden_stride, hidden * 4);
                });
            });
        }
        if (!inputs.logits && !inputs.likeliest) return;
        auto row = [&](int64_t i) { return at.residual + inputs.logits_rows[i] * at.hidden_stride; };
        if constexpr (SCREENED_ROWS<Weight> > 0) {
            if (is_screened_) return find_screened(normed, row, phases);
        }
        pass(phases, REST, [&](Seat seat) {
            seat.each_piece(inputs.num_logits, ROWS, [&](int64_t first, int64_t last, int64_t) {
                norm_to(normed, first, last, row, model_.final_norm.data(), shape_.rms_norm_eps);
            });
        });
        Rows logits{inputs.logits, shape_.vocab_size, Into::STORE};
        if (inputs.logits)
            return pass(phases, LINEARS, [&](Seat seat) { multiply<Weight>(model_, model_.head, normed, logits, seat); });
        pass(phases, LINEARS, [&](Seat seat) {
            LikeliestOfRows likeliest{found_.data() + seat.rank * found_apart()};
            multiply<Weight>(model_, model_.head, normed, likeliest, seat);
        });
    }

    // The likeliest of rows; `row(i)` is where the i-th begins before its norm. Where the screen tells little, all of the
    // head is multiplied after it.
    template <class Row>
    void find_screened(const TiledRows<Input>& normed, const Row& row, Phases& phases) {
        const Screen& screen = model_.screen;
        const Linear& head = model_.head;
        pass(phases, REST, [&](Seat seat) {
            int64_t k = head.k;
            thread_local std::vector<float> numbers;
            numbers.resize(k);
            seat.each_piece(normed.num_rows, 1, [&](int64_t i, int64_t, int64_t) {
                norm_row(row(i), model_.final_norm.data(), k, shape_.rms_norm_eps, numbers.data());
                normed.put(i, 0, k, numbers.data());
                screening_.put(screen, i, numbers.data());
            });
        });
        pass(phases, LINEARS, [&](Seat seat) { screening_.look(screen, seat, model_.is_passing); });
        auto find = [&](Seat seat, int64_t panel, int64_t i, int64_t next) {
            LikeliestOfRows likeliest{found_.data() + seat.rank * found_apart()};
            alignas(64) float tile[PANEL];
            multiply_row<Weight>(head, screening_.row(i), panel, next, tile);
            hand_over(head, likeliest, tile, i, 1, panel);
            return likeliest.found[i].logit;
        };
        pass(phases, LINEARS, [&](Seat seat) {
            seat.each_piece(normed.num_rows, ROWS, [&](int64_t first, int64_t last, int64_t) {
                for (int64_t i = first; i < last; i++) {
                    int64_t panel = screening_.first_panel(i), next = screening_.first_panel(std::min(i + 1, last - 1));
                    screening_.know(i, panel, find(seat, panel, i, next));
                }
            });
        });
        pass(phases, REST, [&](Seat seat) { screening_.mark(seat); });
        pass(phases, LINEARS, [&](Seat seat) {
            LikeliestOfRows likeliest{found_.data() + seat.rank * found_apart()};
            if (screening_.tells_little()) return multiply<Weight>(model_, head, normed, likeliest, seat);
            screening_.each_left(seat, [&](int64_t panel, int64_t i, int64_t next) { find(seat, panel, i, next); });
        });
    }

    // Of what each thread has found, where that was asked for.
    void tell_likeliest() {
        const StepInputs& inputs = all_.inputs;
        for (int64_t row = 0; row < inputs.num_logits; row++) {
            Likeliest most = found_[row];
            for (int thread = 1; thread < crew_.num_threads; thread++) {
                const Likeliest& other = found_[thread * found_apart() + row];
                if (most.is_behind(other.logit, other.id)) most = other;
            }
            inputs.is_broken[row] = most.is_broken();
            inputs.likeliest[row] = most.is_broken() ? 0 : most.id;
            if (is_screened_ && !most.is_broken()) model_.screen.expected.note(most.logit / screening_.length(row));
        }
        if (!is_screened_) return;
        Screen& screen = model_.screen;
        screen.num_left = std::max<int64_t>(0, screen.num_left) + screening_.num_left();
        screen.num_closer += screening_.num_closer();
        if (screening_.tells_little()) screen.num_steps_off = STEPS_OFF;
    }

    // From what one thread has found to what the next one has: no two write to the same line.
    int64_t found_apart() const { return all_.inputs.num_logits + 64 / int64_t(sizeof(Likeliest)); }

    Model& model_;
    const Shape& shape_;
    Crew crew_;
    CacheLayout<Cached> layout_;
    AskedRows asked_rows_;
    Batch<Input> all_, asked_;
    std::vector<Upcoming> upcoming_;  // of each thread, where anything is fetched a layer ahead
    std::vector<Likeliest> found_;    // of each thread, where that is asked for
    bool is_screened_;                // by what follows
    Screening<Input> screening_;
    int64_t since_ns_;  // end of the last phase, if somebody wants to know
    std::array<int64_t, NUM_PARTS> spent_ns_{};
};

// Whether a screen is asked for the step's likeliest tokens: not for some steps after one that it told little. Counts these.
template <class Weight>
bool ask_screen(Screen* screen, const StepInputs& inputs) {
    bool are_few = 0 < inputs.num_logits && inputs.num_logits <= SCREENED_ROWS<Weight>;
    if (!inputs.likeliest || !are_few || !screen->is_made()) return false;
    if (screen->num_steps_off == 0) return true;
    screen->num_steps_off--;
    return false;
}

// Whether the rows of a step can be taken apart: those of sequences that decode, in vectors, by two threads. Sequences share
// blocks of earlier steps only, so that none reads what another one's row writes.
template <class Weight>
bool can_be_apart(const StepInputs& inputs, int num_threads) {
    bool do_decode = inputs.num_tokens == inputs.num_sequences && inputs.num_tokens == inputs.num_logits;
    if (IN_AMX<InputOf<Weight>> || num_threads != 2 || !do_decode || inputs.hidden) return false;
    if (inputs.num_tokens < APART_ROWS || inputs.query_starts[inputs.num_tokens] != inputs.num_tokens) return false;
    for (int64_t i = 0; i < inputs.num_tokens; i++)
        if (inputs.query_starts[i] != i || inputs.logits_rows[i] != i) return false;
    return true;
}

// Those from sequence `first` on, of a step whose rows can be taken apart.
inline StepInputs part_of(const StepInputs& inputs, int64_t first, int64_t num, int64_t vocab_size) {
    StepInputs part = inputs;  // rows begin with 0 again, in `query_starts` and `logits_rows`, too
    part.num_tokens = part.num_sequences = part.num_logits = num;
    part.input_ids += first, part.positions += first, part.slot_mapping += first, part.lengths += first;
    part.block_tables += first * inputs.table_width;
    if (inputs.logits) part.logits += first * vocab_size;
    if (inputs.likeliest) part.likeliest += first, part.is_broken += first;
    return part;
}

// Bytes of activations of each half of so many rows. They begin on lines of their own.
template <class Weight>
int64_t half_bytes(const Model& model, int64_t num_rows) {
    return round_up(activation_bytes<InputOf<Weight>>(model, ceil_div(num_rows, 2)), 128);
}

// And of both halves, and of all of them before they are taken apart.
template <class Weight>
int64_t apart_bytes(const Model& model, int64_t num_rows) {
    return 2 * half_bytes<Weight>(model, num_rows) + activation_bytes<InputOf<Weight>>(model, num_rows);
}

// Returns how long that took, ns; so do the next two.
inline int64_t run_by(Model& model, int num_threads, const std::function<void(int)>& job) {
    int64_t began_ns = now_ns();
    model.pool->run(num_threads, job);
    return now_ns() - began_ns;
}

// Two threads go through layers together until both are there, as one may have its core later, then each with half of the
// rows. One that stays alone takes both halves of the last layer.
template <class Weight, class Cached>
int64_t run_apart(Model& model, const StepInputs& inputs, bool is_screened) {
    using OfRows = Step<Weight, Cached>;
    int64_t num = inputs.num_tokens, bytes = half_bytes<Weight>(model, num), vocab_size = model.shape.vocab_size;
    char* memory = OfRows::reserve(model, num, num, 2, apart_bytes<Weight>(model, num));
    std::array<int64_t, 3> begins{0, num / 2, num};
    auto half = [&](int place) {
        StepInputs part = part_of(inputs, begins[place], begins[place + 1] - begins[place], vocab_size);
        return OfRows(model, part, {1, place, 2}, memory + place * bytes, is_screened);
    };
    std::array<OfRows, 2> halves{half(0), half(1)};
    StepInputs unasked = inputs;
    unasked.logits = nullptr, unasked.likeliest = nullptr, unasked.is_broken = nullptr;
    OfRows whole(model, unasked, {2}, memory + 2 * bytes, false);  // after them, as what it shares is the model's
    int64_t took_ns = run_by(model, 2, [&](int thread) {
        Phases phases(model.pool.get(), thread);
        std::optional<int> layer = whole.run_until_all_are_there(phases);
        if (!layer) return;
        Party::Seat seat = phases.seat();
        if (seat.rank == 0) model.num_together = seat.count == 1 ? -1 : *layer;
        for (int place = seat.rank; place < 2; place += seat.count) halves[place].go_on(whole, begins[place], *layer);
        phases.run([](const Party::Seat&) {});  // who is counted as there and has yet to see it is waited for
    });
    for (OfRows* each : {&whole, &halves[0], &halves[1]}) each->tell();
    if (model.part_ns) {
        whole.tell_times(model.part_ns), halves[0].tell_times(model.part_ns);
        if (model.num_together < 0) halves[1].tell_times(model.part_ns);  // otherwise it went beside the other
    }
    return took_ns;
}

template <class Weight, class Cached>
int64_t run_together(Model& model, const StepInputs& inputs, int num_threads, bool is_screened) {
    using Whole = Step<Weight, Cached>;
    int64_t bytes = step_activation_bytes<InputOf<Weight>>(model, inputs.num_tokens, inputs.num_logits);
    char* memory = Whole::reserve(model, inputs.num_tokens, inputs.num_logits, num_threads, bytes);
    Whole step(model, inputs, {num_threads}, memory, is_screened);
    int64_t took_ns = run_by(model, num_threads, [&](int thread) { step.run(thread); });
    step.tell();
    if (model.part_ns) step.tell_times(model.part_ns);
    return took_ns;
}

template <class Weight, class Cached>
void run_cached(Model& model, const StepInputs& inputs, int num_threads) {
    bool is_screened = ask_screen<Weight>(&model.screen, inputs), can_be = can_be_apart<Weight>(inputs, num_threads);
    Apart::Kind kind{inputs.num_tokens, is_screened ? 2 : inputs.likeliest ? 1 : 0};
    model.screen.num_left = -1, model.screen.num_closer = model.num_bytes_beside = 0;
    model.is_apart = can_be && model.apart.is_next(kind);
    int64_t took_ns = model.is_apart ? run_apart<Weight, Cached>(model, inputs, is_screened)
                                     : run_together<Weight, Cached>(model, inputs, num_threads, is_screened);
    if (model.part_ns) model.part_ns[NUM_PARTS]++;
    can_be ? model.apart.note(kind, model.is_apart, took_ns) : model.apart.pass();
}

template <class Weight>
void run_typed(Model& model, const StepInputs& inputs, int num_threads) {
    if (model.shape.cache == INT8)
        run_cached<Weight, int8_t>(model, inputs, num_threads);
    else
        run_cached<Weight, Weight>(model, inputs, num_threads);
}

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

template <class Weight>
int64_t step_bytes_typed(const Model& model, int64_t num_tokens, int64_t num_logits) {
    int64_t room = most_room_bytes<Weight>(model, std::max(num_tokens, num_logits));
    int64_t scratch = model.shape.cache == INT8 ? sizeof(Scratch<int8_t>) : sizeof(Scratch<Weight>);
    int64_t activations = step_activation_bytes<InputOf<Weight>>(model, num_tokens, num_logits);
    int num_threads = model.pool->size();
    int64_t halved = IN_AMX<InputOf<Weight>> || num_threads == 1 ? 0 : std::min(num_tokens, num_logits);  // may be taken apart
    if (halved >= APART_ROWS) activations = std::max(activations, apart_bytes<Weight>(model, halved));
    int64_t screened = model.screen.is_made() ? std::min(num_logits, SCREENED_ROWS<Weight>) : 0;
    int64_t screening = 0;
    if (screened > 0) screening = Screening<InputOf<Weight>>::num_bytes(model.head, screened, num_threads);
    int64_t half = ceil_div(std::min(halved, SCREENED_ROWS<Weight>), 2);
    if (screened > 0 && half > 0)
        screening = std::max(screening, 2 * Screening<InputOf<Weight>>::num_bytes(model.head, half, 1));
    return activations + screening + (scratch + room) * num_threads;
}

}  // namespace millrace
