// Attention over the paged cache.
//
// The keys of a sequence are seen in chunks of 256, by their absolute positions; a chunk gives each query its largest
// score, the sum of weights and the weighted sum of values, and chunks are put together in rising order. So a query gets
// the same bits in a prompt's chunk, alone, among others, and whichever thread sees which chunk. A key that a query may
// not see has weight 0, which changes no bit of any sum.

#pragma once

#include <algorithm>
#include <cmath>

#include "attention/amx_attention.h"
#include "attention/scores.h"

namespace millrace {

// Queries of one sequence and kv head that are seen together, and the keys [first_key, last_key) that some of them see.
struct Item {
    int32_t sequence, head, first_row, num_rows;  // rows: tokens x heads of the group
    int64_t first_key, last_key;
    int64_t partial;  // where its partial results begin, if they are kept apart

    int64_t first_chunk() const { return first_key / CHUNK; }
    int64_t last_chunk() const { return ceil_div(last_key, CHUNK); }
    int64_t num_chunks() const { return last_chunk() - first_chunk(); }

    struct Span {  // of a chunk: keys [first, last) that some row sees, in tiles [first_tile, last_tile)
        int64_t first, last, first_tile, last_tile;
        int64_t num_tiles() const { return last_tile - first_tile; }
    };
    Span span_of(int64_t chunk) const {
        int64_t first = std::max(first_key - chunk * CHUNK, int64_t(0)), last = std::min(last_key - chunk * CHUNK, CHUNK);
        return {first, last, first / TILE, ceil_div(last, TILE)};
    }
};

struct Sequences {  // of a step
    const int32_t *tables, *query_starts, *lengths;
    int64_t num_sequences, table_width;
};

// What a thread computes attention in.
template <class T>
struct Scratch {
    Factor<T> queries[MAX_ROWS * MAX_HEAD_DIM], weights[MAX_ROWS * CHUNK];
    float scores[2][MAX_ROWS * CHUNK];  // of the chunk that is seen now, and of the one before it
    float chunk[MAX_ROWS * MAX_HEAD_DIM], total[MAX_ROWS * MAX_HEAD_DIM];
    float largest[MAX_ROWS], sum[MAX_ROWS], chunk_largest[MAX_ROWS], chunk_sum[MAX_ROWS];
    T keys[CHUNK * MAX_HEAD_DIM], values[CHUNK * MAX_HEAD_DIM];  // tiles put together from small blocks
    bf16 key_scales[CHUNK], value_scales[CHUNK];
};

// Keys [first, last) that a query at `position` sees.
inline int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

// Attention of one item, chunk by chunk.
template <class T>
class ItemAttention {
    using Span = Item::Span;

  public:
    ItemAttention(const CacheLayout<T>& layout, const Sequences& sequences, const Item& item, const T* layer,
                  int64_t group, int64_t window, Scratch<T>* scratch)
        : layout_(layout), item_(item), layer_(layer), group_(group), window_(window), scratch_(scratch),
          table_(sequences.tables + item.sequence * sequences.table_width),
          num_rows_(IN_AMX<T> ? item.num_rows : rows_with_code(item.num_rows)), width_(layout.padded_dim()) {
        int64_t new_tokens = sequences.query_starts[item.sequence + 1] - sequences.query_starts[item.sequence];
        start_ = sequences.lengths[item.sequence] - new_tokens;
        first_token_ = sequences.query_starts[item.sequence];
    }

    // q: the step's queries, [T][stride], heads of head_dim; `scale` multiplies them first.
    void take_queries(const float* q, int64_t stride, float scale) {
        int64_t dim = layout_.head_dim, apart = IN_AMX<T> ? width_ : dim;
        for (int r = 0; r < num_rows_; r++) {
            Factor<T>* to = scratch_->queries + r * apart;
            if (r >= item_.num_rows) {
                std::fill(to, to + dim, Factor<T>());
                continue;
            }
            std::fill(to + dim, to + apart, Factor<T>());
            const float* from = q + token(r) * stride + (item_.head * group_ + (item_.first_row + r) % group_) * dim;
            int64_t d = 0;
            for (; d + W <= dim; d += W) store(to + d, mul(load(from + d), splat(scale)));
            for (; d < dim; d++) narrow(from[d] * scale, to + d);
        }
    }

    // Adds the tiles of a chunk's keys to those that are read, or of its values. Small blocks hold no tiles, and any will do.
    void list_keys(int64_t chunk, std::vector<int64_t>* tiles) const { list_reads(chunk, 0, tiles); }
    void list_values(int64_t chunk, std::vector<int64_t>* tiles) const { list_reads(chunk, layout_.to_values(), tiles); }

    struct Tiles {  // of a chunk
        const T* numbers[CHUNK / TILE];
        const bf16* scales[CHUNK / TILE];  // [16] each, in int8
    };

    // A chunk whose keys have their scores, and whose values are yet to be summed.
    struct Begun {
        Span span;
        Tiles values;
        float largest[MAX_ROWS];
        Weighing<T> weighing;
    };

    // Scores of a chunk, into that half of the scratch's. Meanwhile what is `weighed` is, if anything.
    void begin_chunk(int64_t chunk, Reads<T>* reads, int half, Weighing<T>* weighed, Begun* begun) {
        int64_t base = chunk * CHUNK;
        Span span = begun->span = item_.span_of(chunk);
        Tiles keys;
        float* scores = scratch_->scores[half];
        find_tiles(base, span, &keys, &begun->values);
        score(keys, *reads, span, scores, weighed);
        if (is_fetched_ahead(num_rows_)) reads->tiles += span.num_tiles();
        if constexpr (CacheLayout<T>::HAS_SCALES) scale(keys, scores, span);
        for (int r = 0; r < item_.num_rows; r++) {
            int64_t low = first_seen(position(r), window_) - base, high = std::min(position(r) + 1 - base, span.last);
            begun->largest[r] = largest_of(scores + r * CHUNK, span.first_tile * TILE, span.last_tile * TILE, low, high);
        }
        begun->weighing.begin(scores, begun->largest, item_.num_rows, span.first_tile, span.last_tile, scratch_->weights);
    }

    // Largest score, sum of weights and weighted sum of values of that chunk for each row.
    void end_chunk(Begun& begun, Reads<T>* reads, float* largest, float* sum, float* values) {
        std::copy(begun.largest, begun.largest + item_.num_rows, largest);
        begun.weighing.weigh_rest(sum);
        if constexpr (CacheLayout<T>::HAS_SCALES) scale(begun.values, scratch_->weights, begun.span);
        sum_up(begun.values, *reads, begun.span, values);
        if (is_fetched_ahead(num_rows_)) reads->tiles += begun.span.num_tiles();
    }

    // Adds a chunk's results to those of the chunks before it.
    void put_together(const float* largest, const float* sum, const float* values, bool is_first) {
        Scratch<T>& s = *scratch_;
        for (int r = 0; r < item_.num_rows; r++) {
            float* total = s.total + r * width_;
            if (is_first) {
                s.largest[r] = largest[r], s.sum[r] = sum[r];
                std::copy(values + r * width_, values + (r + 1) * width_, total);
                continue;
            }
            float most = std::max(s.largest[r], largest[r]);
            float old_factor = factor(s.largest[r], most), new_factor = factor(largest[r], most);
            s.sum[r] = std::fma(sum[r], new_factor, s.sum[r] * old_factor);
            s.largest[r] = most;
            F old_f = splat(old_factor), new_f = splat(new_factor);
            for (int64_t d = 0; d < width_; d += W)
                store(total + d, fma(load(values + r * width_ + d), new_f, mul(load(total + d), old_f)));
        }
    }

    // What the rows see, to out [T, heads of head_dim].
    template <class Out>
    void finish(const TiledRows<Out>& out) {
        int64_t dim = layout_.head_dim;
        for (int r = 0; r < item_.num_rows; r++) {
            float *total = scratch_->total + r * width_, factor = 1.0f / scratch_->sum[r];
            for (int64_t d = 0; d < width_; d += W) store(total + d, mul(load(total + d), splat(factor)));
        }
        for (int r = 0; r < std::min<int64_t>(group_, item_.num_rows); r++) {  // a head's rows are tokens one after the other
            int64_t begin = (item_.head * group_ + (item_.first_row + r) % group_) * dim;
            int64_t num_tokens = ceil_div(item_.num_rows - r, group_);
            out.put_rows(token(r), num_tokens, begin, dim, scratch_->total + r * width_, group_ * width_);
        }
    }

  private:
    int64_t token(int r) const { return first_token_ + (item_.first_row + r) / group_; }
    int64_t position(int r) const { return start_ + (item_.first_row + r) / group_; }

    void list_reads(int64_t chunk, int64_t keys_or_values, std::vector<int64_t>* tiles) const {
        Span span = item_.span_of(chunk);
        if (!is_fetched_ahead(num_rows_)) return;
        if (!layout_.is_tiled()) return tiles->resize(tiles->size() + span.num_tiles());
        each_tile(chunk * CHUNK, span, [&](int64_t, int64_t block, int64_t offset) {
            tiles->push_back(keys_or_values + layout_.keys(int64_t(0), block, item_.head) + offset * width_);
        });
    }

    void score(const Tiles& keys, const Reads<T>& reads, const Span& span, float* scores, Weighing<T>* weighed) {
        const Factor<T>* queries = scratch_->queries;
        if constexpr (IN_AMX<T>)
            score_in_tiles(queries, keys.numbers, reads, is_fetched_ahead(num_rows_), span.first_tile, span.last_tile, width_,
                           scores);
        else
            with_rows(num_rows_, [&](auto rows) {
                score_tiles<decltype(rows)::value, T>(queries, keys.numbers, reads, span.first_tile, span.last_tile,
                                                      layout_.head_dim, scores, weighed);
            });
    }

    void sum_up(Tiles& values, const Reads<T>& reads, const Span& span, float* sums) {
        const Factor<T>* weights = scratch_->weights;
        if constexpr (IN_AMX<T>) {
            for (int64_t tile : {span.first_tile, span.last_tile - 1}) {
                int64_t first = span.first - tile * TILE, last = span.last - tile * TILE;
                if (first <= 0 && last >= TILE) continue;
                T* kept = scratch_->values + tile * TILE * width_;
                keep_values(values.numbers[tile], first, last, width_, kept);
                values.numbers[tile] = kept;
            }
            sum_in_tiles(weights, values.numbers, reads, is_fetched_ahead(num_rows_), span.first_tile, span.last_tile, width_,
                         sums);
        } else {
            with_rows(num_rows_, [&](auto rows) {
                sum_values<decltype(rows)::value, T>(weights, values.numbers, reads, span.first, span.last, width_, sums);
            });
        }
    }

    static float factor(float largest, float most) {
        if (largest == most) return 1.0f;
        float lanes[W];
        store(lanes, exp(splat(largest - most)));  // -inf where no key of the chunk is seen: 0
        return lanes[0];
    }

    // The largest of scores [begin, end) of a row; those outside [low, high) become NOTHING, whatever was there.
    static float largest_of(float* scores, int64_t begin, int64_t end, int64_t low, int64_t high) {
        const F least = splat(NOTHING);
        auto hide = [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i += W) {
                F key = add(iota(), splat(float(i)));
                F x = where_ge(key, splat(float(low)), load(scores + i), least);
                store(scores + i, where_ge(key, splat(float(high)), least, x));
            }
        };
        int64_t first_whole = std::min(std::max(begin, round_up(low, W)), end);
        hide(begin, first_whole);
        hide(std::max(first_whole, high / W * W), end);
        F most = least;
        for (int64_t i = begin; i < end; i += W) most = max(load(scores + i), most);
        return max_of(most);
    }

    // Multiplies the scores, or weights, of the keys in a chunk's tiles by their scales. What lies past the last key may
    // become anything.
    void scale(const Tiles& tiles, float* numbers, const Span& span) {
        for (int64_t tile = span.first_tile; tile < span.last_tile; tile++) {
            for (int64_t lane = 0; lane < TILE; lane += W) {
                F scales = load(tiles.scales[tile] + lane);
                for (int r = 0; r < item_.num_rows; r++) {
                    float* place = numbers + r * CHUNK + tile * TILE + lane;
                    store(place, mul(load(place), scales));
                }
            }
        }
    }

    // Calls `use(tile, block, offset)` for the tiles of a chunk that begins with key `base`, of whole tiles in blocks.
    template <class Use>
    void each_tile(int64_t base, const Span& span, const Use& use) const {
        const int32_t* block = table_ + (base + span.first_tile * TILE) / layout_.block_size;
        int64_t offset = (base + span.first_tile * TILE) % layout_.block_size;
        for (int64_t tile = span.first_tile; tile < span.last_tile; tile++) {
            use(tile, int64_t(*block), offset);
            offset += TILE;
            if (offset == layout_.block_size) offset = 0, block++;
        }
    }

    void find_tiles(int64_t base, const Span& span, Tiles* keys, Tiles* values) {
        if (!layout_.is_tiled()) return gather_tiles(base, span, keys, values);
        each_tile(base, span, [&](int64_t tile, int64_t block, int64_t offset) {
            auto find = [&](const T* head, Tiles* tiles) {
                tiles->numbers[tile] = head + offset * width_;
                tiles->scales[tile] = layout_.scales(head) + offset;
            };
            find(layout_.keys(layer_, block, item_.head), keys);
            find(layout_.values(layer_, block, item_.head), values);
        });
    }

    // Puts tiles together from blocks that are smaller.
    void gather_tiles(int64_t base, const Span& span, Tiles* keys, Tiles* values) {
        int64_t block_size = layout_.block_size, tile_size = TILE * width_;
        for (int64_t tile = span.first_tile; tile < span.last_tile; tile++) {
            T *key_tile = scratch_->keys + tile * tile_size, *value_tile = scratch_->values + tile * tile_size;
            bf16 *key_scales = scratch_->key_scales + tile * TILE, *value_scales = scratch_->value_scales + tile * TILE;
            for (int64_t i = 0; i < std::min(TILE, span.last - tile * TILE); i++) {
                int64_t at = base + tile * TILE + i, block = table_[at / block_size], offset = at % block_size;
                const T* key_head = layout_.keys(layer_, block, item_.head);
                const T* value_head = layout_.values(layer_, block, item_.head);
                for (int64_t d = 0; d < layout_.head_dim; d++) {
                    key_tile[place_in_pairs<T>(d, TILE, i)] = key_head[offset * width_ + d];
                    value_tile[place_in_pairs<T>(i, width_, d)] = value_head[offset * width_ + d];
                }
                if (!CacheLayout<T>::HAS_SCALES) continue;
                key_scales[i] = layout_.scales(key_head)[offset];
                value_scales[i] = layout_.scales(value_head)[offset];
            }
            keys->numbers[tile] = key_tile, values->numbers[tile] = value_tile;
            keys->scales[tile] = key_scales, values->scales[tile] = value_scales;
        }
    }

    const CacheLayout<T>& layout_;
    const Item& item_;
    const T* layer_;
    int64_t group_, window_;
    Scratch<T>* scratch_;
    const int32_t* table_;
    int num_rows_;
    int64_t width_, start_, first_token_;
};

}  // namespace millrace
