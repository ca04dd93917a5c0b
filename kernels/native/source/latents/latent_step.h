// LatentStep: the phases of a layer whose cache keeps latents instead of keys and values, in the absorbed form.
//
// A token's latent c stands for the keys and values of all heads: head h has the key (K_h c, r), where r is rotated and
// all heads share it, and the value V_h c. Its query (a, b) scores a . K_h c + b . r = (K_h' a, b) . (c, r), and what it
// sees is V_h times a sum of latents. So queries take K_h in, and outputs V_h: keys and values are never made.
//
//   qkv          one product: queries, or what they are made of, and latents
//   query up     with compressed queries: their norm, and a product
//   write        latents normed, their rotated parts rotated, both into the cache; queries rotated; and beside that
//     + absorb   the products with K_h, to `Activations::absorbed`
//   attention    of one key/value head (c, r) for all heads (attention/attention_step.h), over `absorbed`
//   expand       the products with V_h, to `Activations::attended`
//
// Prompts take the same form as single tokens. With expanded keys and values they would take up to three times fewer
// operations, but a row's bits would then depend on how its prompt is cut, and all tokens before would be expanded again
// for each part.
//
// The products with K_h and V_h sum in float32, one chain over k in rising order. Called by Step, on each compute thread.

#pragma once

#include "grouped/dense_product.h"
#include "step/batch.h"
#include "step/phase_times.h"
#include "step/rope_and_cache_write.h"

namespace millrace {

// Panels of each head in `Layer::key_up` or `Layer::value_up`, for so many columns of a head.
constexpr int64_t latent_panels(int64_t columns) { return ceil_div(columns, PANEL); }

template <class Input, class Cached>
class LatentStep {
    using Member = ThreadTeam::Member;

  public:
    // `layouts`: of each kind of blocks.
    LatentStep(const Model& model, const std::vector<CacheLayout<Cached>>& layouts) : model_(model), layouts_(layouts) {}

    // Behind the products: see above.
    void write_and_absorb(const Layer& layer, const Batch<Input>& batch, int64_t kind, Cached* cache, Member member) const {
        const LayerShape& its = layer.shape;
        const Activations<Input>& at = batch.buffers;
        int64_t num_rows = batch.inputs.num_tokens, num_pieces = ceil_div(num_rows, ROWS_PER_PIECE);
        int64_t panels = latent_panels(its.latents.kv_rank);
        Rows from{queries_of(layer, at, 0), layer.query_up.n > 0 ? at.queries_stride : at.qkv_stride, its.query_dim()};
        member.parallel_for(num_pieces + its.num_heads * panels, 1, [&](int64_t item, int64_t, int64_t) {
            if (item < num_pieces) {
                for (int64_t t = item * ROWS_PER_PIECE; t < std::min(num_rows, (item + 1) * ROWS_PER_PIECE); t++)
                    write(layer, batch, kind, cache, t);
                return;
            }
            int64_t head = (item - num_pieces) / panels, panel = (item - num_pieces) % panels;
            float* to = at.absorbed + head * its.head_dim + panel * PANEL;
            int64_t count = std::min(PANEL, its.latents.kv_rank - panel * PANEL);
            multiply(layer.key_up, head * panels + panel, from.of(head), from.stride, num_rows,
                     [&](int64_t row, int rows, const float* tile) {
                         for (int r = 0; r < rows; r++)
                             std::copy(tile + r * PANEL, tile + r * PANEL + count, to + (row + r) * at.absorbed_stride);
                     });
        });
    }

    // Behind attention: see above.
    void expand(const Layer& layer, const Batch<Input>& batch, Member member) const {
        const LayerShape& its = layer.shape;
        const Activations<Input>& at = batch.buffers;
        TiledRows<Input> attended = batch.attended_of(layer);
        int64_t size = its.latents.value_dim, panels = latent_panels(size);
        Rows from{at.absorbed, at.absorbed_stride, its.head_dim};
        member.parallel_for(its.num_heads * panels, 1, [&](int64_t item, int64_t, int64_t) {
            int64_t head = item / panels, panel = item % panels, count = std::min(PANEL, size - panel * PANEL);
            multiply(layer.value_up, item, from.of(head), from.stride, batch.inputs.num_tokens,
                     [&](int64_t row, int rows, const float* tile) {
                         attended.put_rows(row, rows, head * size + panel * PANEL, count, tile, PANEL);
                     });
        });
    }

  private:
    struct Rows {  // of a step, with a part for each head
        const float* first;
        int64_t stride, head_stride;
        const float* of(int64_t head) const { return first + head * head_stride; }
    };

    static const float* queries_of(const Layer& layer, const Activations<Input>& at, int64_t t) {
        return layer.query_up.n > 0 ? at.queries + t * at.queries_stride : at.qkv + t * at.qkv_stride;
    }

    // A token's latent into the cache, and the rotated parts of its queries to their places.
    void write(const Layer& layer, const Batch<Input>& batch, int64_t kind, Cached* cache, int64_t t) const {
        const LayerShape& its = layer.shape;
        const LatentShape& sizes = its.latents;
        const Activations<Input>& at = batch.buffers;
        const CacheLayout<Cached>& layout = layouts_[kind];
        int64_t slot = batch.inputs.slot_mapping[kind][t], position = batch.inputs.positions[t];
        const RopeTable& rope = model_.ropes[its.rope];
        float *absorbed = at.absorbed + t * at.absorbed_stride, *latent = at.qkv + t * at.qkv_stride + its.q_columns();
        const float* queries = queries_of(layer, at, t);
        for (int64_t head = 0; head < its.num_heads; head++) {
            const float* from = queries + head * its.query_dim() + sizes.nope_dim;
            std::copy(from, from + sizes.rope_dim, absorbed + head * its.head_dim + sizes.kv_rank);
        }
        float* rotated = absorbed + sizes.kv_rank;
        RopeAndCacheWrite<Cached>::rotate(rope, its.head_dim, position, rotated, absorbed + its.num_heads * its.head_dim);
        norm_row(latent, layer.k_norm, sizes.kv_rank, latent);
        rotated = latent + sizes.kv_rank;
        RopeAndCacheWrite<Cached>::rotate(rope, sizes.rope_dim, position, rotated, rotated + sizes.rope_dim);
        if (slot < 0) return;
        Cached* row = layout.keys(cache, slot / layout.block_size, 0) + slot % layout.block_size * layout.padded_dim();
        write_latent(latent, its.head_dim, layout.padded_dim(), row);
    }

    // Rows x, `stride` apart, by one panel of a linear: use(first row, rows, tile [rows][32]).
    template <class Use>
    static void multiply(const Linear& linear, int64_t panel, const float* x, int64_t stride, int64_t num_rows, const Use& use) {
        linear.type == BFLOAT16 ? multiply_by<bf16>(linear, panel, x, stride, num_rows, use)
                                : multiply_by<float>(linear, panel, x, stride, num_rows, use);
    }
    template <class Stored, class Use>
    static void multiply_by(const Linear& linear, int64_t panel, const float* x, int64_t stride, int64_t num_rows,
                            const Use& use) {
        const Stored* weights = linear.weight.as<Stored>() + panel * linear.k * PANEL;
        for (int64_t row = 0; row < num_rows; row += DENSE_ROWS) {
            alignas(64) float tile[DENSE_ROWS * PANEL];
            int rows = int(std::min<int64_t>(DENSE_ROWS, num_rows - row));
            dense_tile_for<Stored>(rows)(x + row * stride, stride, weights, linear.k / 2, tile);
            use(row, rows, tile);
        }
    }

    const Model& model_;
    const std::vector<CacheLayout<Cached>>& layouts_;
};

}  // namespace millrace
