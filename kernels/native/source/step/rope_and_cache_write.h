// Norms and RoPE of queries and keys, and the write of keys and values into the paged cache: the phase between qkv and attention.
//
// Operates on the float32 output of the qkv product, token by token. attention/kv_layout.h defines the cache's layout.
// Called on each compute thread for its tokens.

#pragma once

#include <vector>

#include "attention/kv_layout.h"
#include "step/norms.h"
#include "step/step.h"

namespace millrace {

template <class Cached>
class RopeAndCacheWrite {
  public:
    // `layouts`: of each kind of blocks.
    RopeAndCacheWrite(const Model& model, const std::vector<CacheLayout<Cached>>& layouts, const StepInputs& inputs)
        : model_(model), layouts_(layouts), inputs_(inputs) {}

    // Normalizes and rotates a token's queries and keys, and writes keys and values into the layer's cache, in blocks
    // of its `kind`. `heads`: query, key and value heads of the token, as the product left them.
    void run(const Layer& layer, int64_t kind, Cached* cache, int64_t t, float* heads) const {
        const LayerShape& its = layer.shape;
        const CacheLayout<Cached>& layout = layouts_[kind];
        int64_t dim = its.head_dim, slot = inputs_.slot_mapping[kind][t], position = inputs_.positions[t];
        float *keys = heads + its.attended_size(), *values = keys + its.kv_size();
        float* rotated_end = its.is_reader ? keys : values;
        if (!its.is_reader) {
            if (its.is_k_v) std::copy(keys, values, values);
            if (its.v_norm.kind != NO_NORM) norm_values(layer, values);
        }
        auto norm = [&] {
            if (its.qk_norm.kind == NO_NORM) return;
            norm_heads(its, layer.q_norm, heads, keys);
            norm_heads(its, layer.k_norm, keys, rotated_end);
        };
        if (!its.is_qk_norm_after_rope) norm();
        if (its.rope >= 0) rotate(model_.ropes[its.rope], dim, position, heads, rotated_end);
        if (its.is_qk_norm_after_rope) norm();
        if (its.temper_length > 0) temper(its, position, heads, keys);
        if (slot < 0 || its.is_reader) return;
        int64_t block = slot / layout.block_size, offset = slot % layout.block_size;
        for (int64_t head = 0; head < its.num_kv_heads; head++)
            write_token(layout, layout.keys(cache, block, head), layout.values(cache, block, head), offset,
                        keys + head * dim, values + head * dim);
    }

    // Rotates heads [first, last) to a position. Element i of a head is paired with element i + half.
    static void rotate(const RopeTable& table, int64_t head_dim, int64_t position, float* first, float* last) {
        int64_t half = table.half;
        const float *cos = table.cos + position * half, *sin = table.sin + position * half;
        for (float* head = first; head < last; head += head_dim) {
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
    }

  private:
    // Normalizes heads [first, last), each alone or all together.
    void norm_heads(const LayerShape& its, const Norm& norm, float* first, float* last) const {
        int64_t size = its.is_qk_norm_over_row ? last - first : its.head_dim;
        for (float* head = first; head < last; head += size)
            norm_row(head, norm, size, head, its.has_weight_per_head ? head - first : 0);
    }

    void norm_values(const Layer& layer, float* values) const {
        const LayerShape& its = layer.shape;
        for (float* head = values; head < values + its.kv_size(); head += its.head_dim)
            norm_row(head, layer.v_norm, its.head_dim, head);
    }

    // Multiplies queries by a factor that grows with the logarithm of the position.
    static void temper(const LayerShape& its, int64_t position, float* first, float* last) {
        float factor = 1.0f + its.temper * std::log(1.0f + float(position / its.temper_length));
        for (float* number = first; number < last; number++) *number *= factor;
    }

    const Model& model_;
    std::vector<CacheLayout<Cached>> layouts_;
    StepInputs inputs_;
};

}  // namespace millrace
