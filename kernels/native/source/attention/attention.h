// Attention of one item: query rows of one sequence and key/value head, over the paged cache.
//
// Keys are processed in chunks of 256, by absolute position. A chunk gives each row its largest score, the sum of
// weights and the weighted sum of values; chunks are merged in rising order (online softmax). NOTE: so a query gets the
// same bits in a prompt chunk, alone, in any batch, and on whichever thread computes which chunk. A masked key has
// weight 0, which changes no bit of a sum. Called by AttentionStep, on each compute thread.

#pragma once

#include <algorithm>
#include <cmath>

#include "attention/amx_attention.h"
#include "attention/scores.h"
#include "latents/latent_rows.h"
#include "machine/vector_math.h"

namespace millrace {

// Query rows of one sequence and key/value head that are computed together, and the keys [first_key, last_key) that any
// of them sees.
struct AttentionItem {
    int32_t sequence, head, first_row, num_rows;  // rows: tokens x heads of the group
    int64_t first_key, last_key;
    int64_t partial;  // index of its first partial result, if the plan is split

    int64_t first_chunk() const { return first_key / CHUNK; }
    int64_t last_chunk() const { return ceil_div(last_key, CHUNK); }
    int64_t num_chunks() const { return last_chunk() - first_chunk(); }

    struct Span {  // of a chunk: keys [first, last) that any row sees, in tiles [first_tile, last_tile)
        int64_t first, last, first_tile, last_tile;
        int64_t num_tiles() const { return last_tile - first_tile; }
    };
    Span span_of(int64_t chunk) const {
        int64_t first = std::max(first_key - chunk * CHUNK, int64_t(0)), last = std::min(last_key - chunk * CHUNK, CHUNK);
        return {first, last, first / KEY_TILE, ceil_div(last, KEY_TILE)};
    }
};

struct SequenceTables {  // the sequences of a step
    const int32_t *tables, *query_starts, *lengths;
    int64_t num_sequences, table_width;
};

// The buffers of a thread.
template <class T>
struct AttentionScratch {
    Operand<T> queries[MAX_QUERY_ROWS * MAX_HEAD_DIM], weights[MAX_QUERY_ROWS * CHUNK];
    float scores[2][MAX_QUERY_ROWS * CHUNK];  // of the current chunk and of the one before it
    float chunk[MAX_QUERY_ROWS * MAX_HEAD_DIM], total[MAX_QUERY_ROWS * MAX_HEAD_DIM];
    float largest[MAX_QUERY_ROWS], sum[MAX_QUERY_ROWS], chunk_largest[MAX_QUERY_ROWS], chunk_sum[MAX_QUERY_ROWS];
    T keys[CHUNK * MAX_HEAD_DIM], values[CHUNK * MAX_HEAD_DIM];  // tiles gathered from small blocks
    bf16 key_scales[CHUNK], value_scales[CHUNK];
    const T* rows[CHUNK];  // of latents
};

// The first key that a query at `position` sees.
inline int64_t first_visible_key(int64_t position, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

// numbers *= 1 / (1 + e ** -gates)
inline void multiply_by_sigmoids(float* numbers, const float* gates, int64_t count) {
    for (int64_t i = 0; i < count; i += W) {
        alignas(64) float some[W] = {};
        std::copy(gates + i, gates + std::min<int64_t>(count, i + W), some);
        F power = exp(min(splat(88.0f), sub(zero(), load(some))));
        store(numbers + i, div(load(numbers + i), add(splat(1.0f), power)));
    }
}

// Attention of one item, chunk by chunk.
template <class T>
class ItemAttention {
    using Span = AttentionItem::Span;

  public:
    // `cache`: the layer's.
    ItemAttention(const CacheLayout<T>& layout, const SequenceTables& sequences, const AttentionItem& item,
                  const Layer* layer, const T* cache, int64_t group, int64_t window, AttentionScratch<T>* scratch)
        : layout_(layout), item_(item), layer_(layer), cache_(cache), group_(group), window_(window), scratch_(scratch),
          table_(sequences.tables + item.sequence * sequences.table_width),
          num_rows_(!USES_AMX<T>           ? specialized_rows(item.num_rows)
                    : layout.has_latents() ? AMX_ROWS
                                           : item.num_rows),
          width_(layout.padded_dim()) {
        int64_t new_tokens = sequences.query_starts[item.sequence + 1] - sequences.query_starts[item.sequence];
        start_ = sequences.lengths[item.sequence] - new_tokens;
        first_token_ = sequences.query_starts[item.sequence];
    }

    const Layer* layer() const { return layer_; }

    // q: the step's queries, [T][stride], heads of head_dim; `scale` multiplies them.
    void load_queries(const float* q, int64_t stride, float scale) {
        if (layout_.has_latents()) return load_latent_queries(q, stride, scale);
        int64_t dim = layout_.head_dim, row_size = USES_AMX<T> ? width_ : dim;
        for (int r = 0; r < num_rows_; r++) {
            Operand<T>* to = scratch_->queries + r * row_size;
            if (r >= item_.num_rows) {
                std::fill(to, to + dim, Operand<T>());
                continue;
            }
            std::fill(to + dim, to + row_size, Operand<T>());
            const float* from = q + token(r) * stride + head(r) * dim;
            int64_t d = 0;
            for (; d + W <= dim; d += W) store(to + d, mul(load(from + d), splat(scale)));
            for (; d < dim; d++) convert(from[d] * scale, to + d);
        }
    }

    // Appends the tiles of a chunk's keys, or values, in reading order. Blocks smaller than a tile hold no tiles: any
    // offset will do.
    void list_keys(int64_t chunk, std::vector<int64_t>* tiles) const { list_reads(chunk, 0, tiles); }
    void list_values(int64_t chunk, std::vector<int64_t>* tiles) const { list_reads(chunk, layout_.value_offset(), tiles); }

    struct Tiles {  // of a chunk
        const T* numbers[CHUNK / KEY_TILE];
        const bf16* scales[CHUNK / KEY_TILE];  // [16] each, in int8
    };

    // A chunk whose keys are scored and whose values are not yet summed.
    struct PendingChunk {
        Span span;
        Tiles values;
        float largest[MAX_QUERY_ROWS];
        int64_t next_base;  // first key of the item's next chunk
        SoftmaxWeights<T> softmax;
    };

    // Computes the scores of a chunk into buffer `half`. Meanwhile computes the weights of the `deferred` chunk, if
    // any.
    void begin_chunk(int64_t chunk, TileReadOrder<T>* reads, int half, SoftmaxWeights<T>* deferred, PendingChunk* pending) {
        int64_t base = chunk * CHUNK;
        Span span = pending->span = item_.span_of(chunk);
        pending->next_base = base + CHUNK;
        Tiles keys;
        float* scores = scratch_->scores[half];
        locate_tiles(base, span, &keys, &pending->values);
        score(keys, *reads, span, scores, deferred);
        if (uses_prefetch(num_rows_)) reads->tiles += span.num_tiles();
        if constexpr (CacheLayout<T>::HAS_SCALES) scale(keys, scores, span);
        if (layer_->shape.soft_cap > 0.0f) cap(scores, span);
        for (int r = 0; r < item_.num_rows; r++) {
            int64_t low = first_visible_key(position(r), window_) - base,
                high = std::min(position(r) + 1 - base, span.last);
            pending->largest[r] = largest_of(scores + r * CHUNK, span.first_tile * KEY_TILE, span.last_tile * KEY_TILE,
                                             low, high);
        }
        pending->softmax.begin(scores, pending->largest, item_.num_rows, span.first_tile, span.last_tile,
                                scratch_->weights);
    }

    // The chunk's largest score, sum of weights and weighted sum of values for each row.
    void end_chunk(PendingChunk& pending, TileReadOrder<T>* reads, float* largest, float* sum, float* values) {
        std::copy(pending.largest, pending.largest + item_.num_rows, largest);
        pending.softmax.finish(sum);
        if constexpr (CacheLayout<T>::HAS_SCALES) scale(pending.values, scratch_->weights, pending.span);
        layout_.has_latents() ? sum_latent_values(pending.span, pending.next_base, values)
                              : sum_weighted_values(pending.values, *reads, pending.span, values);
        if (uses_prefetch(num_rows_)) reads->tiles += pending.span.num_tiles();
    }

    // Merges a chunk's results into those of the chunks before it.
    void merge_chunk(const float* largest, const float* sum, const float* values, bool is_first) {
        AttentionScratch<T>& s = *scratch_;
        for (int r = 0; r < item_.num_rows; r++) {
            float* total = s.total + r * width_;
            if (is_first) {
                s.largest[r] = largest[r], s.sum[r] = sum[r];
                std::copy(values + r * width_, values + (r + 1) * width_, total);
                continue;
            }
            float maximum = std::max(s.largest[r], largest[r]);
            float old_factor = rescale(s.largest[r], maximum), new_factor = rescale(largest[r], maximum);
            s.sum[r] = std::fma(sum[r], new_factor, s.sum[r] * old_factor);
            s.largest[r] = maximum;
            F old_f = splat(old_factor), new_f = splat(new_factor);
            for (int64_t d = 0; d < width_; d += W)
                store(total + d, fma(load(values + r * width_ + d), new_f, mul(load(total + d), old_f)));
        }
    }

    // For tiles in registers. With latents all have 16 rows, of which those past the item's are anything.
    const TileConfig& tile_config() const {
        return layout_.has_latents() ? latent_tile_config() : attention_tile_config(item_.num_rows);
    }

    // Writes the rows' attention to out [T, heads of value_dim], times the sigmoids of `gates`, [T][stride] likewise;
    // null: there are none.
    template <class Out>
    void finish(const Out& out, const float* gates, int64_t stride) {
        int64_t dim = layout_.value_dim;
        for (int r = 0; r < item_.num_rows; r++) {
            float *total = scratch_->total + r * width_, factor = 1.0f / scratch_->sum[r];
            if (!layer_->sinks.empty()) factor = factor_beside(layer_->sinks[head(r)], r);
            for (int64_t d = 0; d < width_; d += W) store(total + d, mul(load(total + d), splat(factor)));
            if (gates) multiply_by_sigmoids(total, gates + token(r) * stride + head(r) * dim, dim);
        }
        for (int r = 0; r < std::min<int64_t>(group_, item_.num_rows); r++) {  // rows of one head are consecutive tokens
            int64_t begin = head(r) * dim;
            int64_t num_tokens = ceil_div(item_.num_rows - r, group_);
            out.put_rows(token(r), num_tokens, begin, dim, scratch_->total + r * width_, group_ * width_);
        }
    }

  private:
    int64_t token(int r) const { return first_token_ + (item_.first_row + r) / group_; }
    int64_t head(int r) const { return item_.head * group_ + (item_.first_row + r) % group_; }
    int64_t position(int r) const { return start_ + (item_.first_row + r) / group_; }

    void list_reads(int64_t chunk, int64_t keys_or_values, std::vector<int64_t>* tiles) const {
        Span span = item_.span_of(chunk);
        if (!uses_prefetch(num_rows_)) return;
        if (!layout_.is_tiled()) return tiles->resize(tiles->size() + span.num_tiles());
        for_each_tile(chunk * CHUNK, span, [&](int64_t, int64_t block, int64_t offset) {
            tiles->push_back(keys_or_values + layout_.keys(int64_t(0), block, item_.head) + offset * width_);
        });
    }

    void load_latent_queries(const float* q, int64_t stride, float scale) {
        if constexpr (!CacheLayout<T>::HAS_SCALES) {
            const float* rows[MAX_QUERY_ROWS] = {};
            for (int r = 0; r < item_.num_rows; r++) rows[r] = q + token(r) * stride + head(r) * layout_.head_dim;
            put_latent_queries<T>(rows, num_rows_, layout_.head_dim, width_, scale, scratch_->queries);
        }
    }

    void score(const Tiles& keys, const TileReadOrder<T>& reads, const Span& span, float* scores,
               SoftmaxWeights<T>* deferred) {
        const Operand<T>* queries = scratch_->queries;
        if constexpr (!CacheLayout<T>::HAS_SCALES)
            if (layout_.has_latents())
                return score_latents<T>(queries, num_rows_, scratch_->rows, span.last_tile, width_, scores, scratch_->keys);
        if constexpr (USES_AMX<T>)
            score_tiles_amx(queries, keys.numbers, reads, uses_prefetch(num_rows_), span.first_tile, span.last_tile, width_,
                            scores);
        else
            dispatch_rows(num_rows_, [&](auto rows) {
                score_tiles<decltype(rows)::value, T>(queries, keys.numbers, reads, span.first_tile, span.last_tile,
                                                      layout_.head_dim, scores, deferred);
            });
    }

    void sum_weighted_values(Tiles& values, const TileReadOrder<T>& reads, const Span& span, float* sums) {
        const Operand<T>* weights = scratch_->weights;
        if constexpr (USES_AMX<T>) {
            for (int64_t tile : {span.first_tile, span.last_tile - 1}) {
                int64_t first = span.first - tile * KEY_TILE, last = span.last - tile * KEY_TILE;
                if (first <= 0 && last >= KEY_TILE) continue;
                T* masked = scratch_->values + tile * KEY_TILE * width_;
                mask_values(values.numbers[tile], first, last, width_, masked);
                values.numbers[tile] = masked;
            }
            sum_values_amx(weights, values.numbers, reads, uses_prefetch(num_rows_), span.first_tile, span.last_tile,
                           width_, sums);
        } else {
            dispatch_rows(num_rows_, [&](auto rows) {
                sum_values<decltype(rows)::value, T>(weights, values.numbers, reads, span.first, span.last, width_, sums);
            });
        }
    }

    static float rescale(float largest, float maximum) {
        if (largest == maximum) return 1.0f;
        float lanes[W];
        store(lanes, exp(splat(largest - maximum)));  // 0 where no key of the chunk is seen: the score is -inf
        return lanes[0];
    }

    // What a row's sum of values is multiplied by if the softmax has one more score, `sink`, without a value.
    float factor_beside(float sink, int r) const {
        float largest = scratch_->largest[r], maximum = std::max(largest, sink), factor = rescale(largest, maximum);
        return factor / std::fma(scratch_->sum[r], factor, rescale(sink, maximum));
    }

    // Caps the scores of a chunk's tiles.
    void cap(float* scores, const Span& span) const {
        for (int r = 0; r < item_.num_rows; r++)
            for (int64_t i = r * CHUNK + span.first_tile * KEY_TILE; i < r * CHUNK + span.last_tile * KEY_TILE; i += W)
                store(scores + i, soft_cap(load(scores + i), layer_->shape.soft_cap));
    }

    // The largest of the scores [begin, end) of a row; those outside [low, high) become NO_SCORE.
    static float largest_of(float* scores, int64_t begin, int64_t end, int64_t low, int64_t high) {
        const F least = splat(NO_SCORE);
        auto hide = [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i += W) {
                F key = add(iota(), splat(float(i)));
                F x = select_ge(key, splat(float(low)), load(scores + i), least);
                store(scores + i, select_ge(key, splat(float(high)), least, x));
            }
        };
        int64_t first_whole = std::min(std::max(begin, round_up(low, W)), end);
        hide(begin, first_whole);
        hide(std::max(first_whole, high / W * W), end);
        F maximum = least;
        for (int64_t i = begin; i < end; i += W) maximum = max(load(scores + i), maximum);
        return max_of(maximum);
    }

    // Multiplies the scores, or weights, of a chunk's tiles by the scales of their keys, or values. What lies past the
    // last key is undefined.
    void scale(const Tiles& tiles, float* numbers, const Span& span) {
        for (int64_t tile = span.first_tile; tile < span.last_tile; tile++) {
            for (int64_t lane = 0; lane < KEY_TILE; lane += W) {
                F scales = load(tiles.scales[tile] + lane);
                for (int r = 0; r < item_.num_rows; r++) {
                    float* place = numbers + r * CHUNK + tile * KEY_TILE + lane;
                    store(place, mul(load(place), scales));
                }
            }
        }
    }

    // Calls use(tile, block, offset) for the tiles of a chunk that begins with key `base`; blocks hold whole tiles.
    template <class Use>
    void for_each_tile(int64_t base, const Span& span, const Use& use) const {
        const int32_t* block = table_ + (base + span.first_tile * KEY_TILE) / layout_.block_size;
        int64_t offset = (base + span.first_tile * KEY_TILE) % layout_.block_size;
        for (int64_t tile = span.first_tile; tile < span.last_tile; tile++) {
            use(tile, int64_t(*block), offset);
            offset += KEY_TILE;
            if (offset == layout_.block_size) offset = 0, block++;
        }
    }

    void locate_tiles(int64_t base, const Span& span, Tiles* keys, Tiles* values) {
        if (layout_.has_latents()) return locate_latents(base, span);
        if (!layout_.is_tiled()) return gather_tiles(base, span, keys, values);
        for_each_tile(base, span, [&](int64_t tile, int64_t block, int64_t offset) {
            auto find = [&](const T* head, Tiles* tiles) {
                tiles->numbers[tile] = head + offset * width_;
                tiles->scales[tile] = layout_.scales(head) + offset;
            };
            find(layout_.keys(cache_, block, item_.head), keys);
            find(layout_.values(cache_, block, item_.head), values);
        });
    }

    // Calls use(i, row) for the rows of latents [first, last) of a chunk that begins with key `base`.
    template <class Use>
    void for_each_latent(int64_t base, int64_t first, int64_t last, const Use& use) const {
        int64_t size = layout_.block_size;
        for (int64_t i = first; i < last;) {
            const T* block = layout_.keys(cache_, table_[(base + i) / size], 0);
            for (int64_t offset = (base + i) % size; offset < size && i < last; offset++, i++) use(i, block + offset * width_);
        }
    }

    // The rows of a chunk's tiles, an even number; the last one again for those past the last key.
    void locate_latents(int64_t base, const Span& span) {
        const T** rows = scratch_->rows;
        for_each_latent(base, 0, span.last, [&](int64_t i, const T* row) { rows[i] = row; });
        std::fill(rows + span.last, rows + round_up(span.last_tile, 2) * KEY_TILE, rows[span.last - 1]);
    }

    // `next_base`: first key of the item's next chunk, if it has one.
    void sum_latent_values(const Span& span, int64_t next_base, float* sums) {
        int64_t columns = round_up(layout_.value_dim, 16);
        if constexpr (USES_AMX<T>) {
            const T* next[LATENT_TILES_AHEAD * KEY_TILE];
            int64_t num_next = std::clamp<int64_t>(item_.last_key - next_base, 0, LATENT_TILES_AHEAD * KEY_TILE);
            for_each_latent(next_base, 0, num_next, [&](int64_t i, const T* row) { next[i] = row; });
            sum_latents_amx(scratch_->weights, scratch_->rows, span.last_tile, width_, columns, next, num_next, sums);
        } else if constexpr (!CacheLayout<T>::HAS_SCALES) {
            const T* tiles[CHUNK / KEY_TILE];
            for (int64_t tile = 0; tile < span.last_tile; tile++)
                tiles[tile] = latent_values_of<T>(scratch_->rows + tile * KEY_TILE, width_,
                                                  scratch_->values + tile * KEY_TILE * width_);
            dispatch_rows(num_rows_, [&](auto rows) {
                sum_latents<decltype(rows)::value, T>(scratch_->weights, tiles, 0, span.last, width_, columns, sums);
            });
        }
    }

    // Gathers tiles from blocks that are smaller. Zeros before the first visible key, whose blocks may be gone.
    void gather_tiles(int64_t base, const Span& span, Tiles* keys, Tiles* values) {
        int64_t block_size = layout_.block_size, tile_size = KEY_TILE * width_;
        for (int64_t tile = span.first_tile; tile < span.last_tile; tile++) {
            T *key_tile = scratch_->keys + tile * tile_size, *value_tile = scratch_->values + tile * tile_size;
            bf16 *key_scales = scratch_->key_scales + tile * KEY_TILE,
                *value_scales = scratch_->value_scales + tile * KEY_TILE;
            int64_t first = std::max(span.first - tile * KEY_TILE, int64_t(0));
            if (first > 0) {
                std::fill(value_tile, value_tile + tile_size, T());
                std::fill(value_scales, value_scales + KEY_TILE, bf16());
            }
            for (int64_t i = first; i < std::min(KEY_TILE, span.last - tile * KEY_TILE); i++) {
                int64_t at = base + tile * KEY_TILE + i, block = table_[at / block_size], offset = at % block_size;
                const T* key_head = layout_.keys(cache_, block, item_.head);
                const T* value_head = layout_.values(cache_, block, item_.head);
                for (int64_t d = 0; d < layout_.head_dim; d++) {
                    key_tile[index_in_pairs<T>(d, KEY_TILE, i)] = key_head[offset * width_ + d];
                    value_tile[index_in_pairs<T>(i, width_, d)] = value_head[offset * width_ + d];
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
    const AttentionItem& item_;
    const Layer* layer_;
    const T* cache_;
    int64_t group_, window_;
    AttentionScratch<T>* scratch_;
    const int32_t* table_;
    int num_rows_;
    int64_t width_, start_, first_token_;
};

}  // namespace millrace
