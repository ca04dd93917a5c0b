// RoPE of queries and keys, and the write of keys and values into the paged cache: the phase between qkv and attention.
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
    RopeAndCacheWrite(const Model& model, const CacheLayout<Cached>& layout, const StepInputs& inputs)
        : model_(model), shape_(model.shape), layout_(layout), inputs_(inputs) {}

    // Rotates a token's queries and keys, and writes keys and values into the layer's cache. `heads`: query, key and
    // value heads of the token, as the product left them.
    void run(const Layer& layer, Cached* cache, int64_t t, float* heads) const {
        int64_t dim = shape_.head_dim, slot = inputs_.slot_mapping[t];
        float *keys = heads + shape_.num_heads * dim, *values = keys + shape_.num_kv_heads * dim;
        for (float* head = heads; head < keys; head += dim) rotate(head, layer.q_norm, t);
        for (float* head = keys; head < values; head += dim) rotate(head, layer.k_norm, t);
        if (slot < 0) return;
        int64_t block = slot / layout_.block_size, offset = slot % layout_.block_size;
        for (int64_t head = 0; head < shape_.num_kv_heads; head++)
            write_token(layout_, layout_.keys(cache, block, head), layout_.values(cache, block, head), offset,
                        keys + head * dim, values + head * dim);
    }

  private:
    // Normalizes a head of token `t`, if the model does, and rotates it to its position. Element i is paired with
    // element i + half.
    void rotate(float* head, const std::vector<float>& norm, int64_t t) const {
        if (!norm.empty()) norm_row(head, norm.data(), shape_.head_dim, shape_.rms_norm_eps, head);
        int64_t half = shape_.rotary_dim / 2, position = inputs_.positions[t];
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

    const Model& model_;
    const Shape& shape_;
    CacheLayout<Cached> layout_;
    StepInputs inputs_;
};

}  // namespace millrace
