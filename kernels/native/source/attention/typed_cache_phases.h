// TypedCachePhases: `CachePhases` for one type of the cache.
//
// Cache writes are in step/rope_and_cache_write.h and latents/latent_step.h, attention in attention/attention_step.h.

#pragma once

#include "attention/attention_step.h"
#include "attention/cache_phases.h"
#include "latents/latent_step.h"
#include "step/rope_and_cache_write.h"

namespace millrace {

template <class Input, class Cached>
class TypedCachePhases final : public CachePhases<Input> {
    using Member = ThreadTeam::Member;

  public:
    TypedCachePhases(Model& model, const StepInputs& inputs)
        : model_(model), cache_(*inputs.cache), layouts_(layouts_of(cache_)), rope_(model, layouts_, inputs),
          latents_(model, layouts_), attention_(model, layouts_) {}

    void plan(int layer, Batch<Input>* batch, int num_threads) const override {
        batch->plan(model_, layer, num_threads, QUERY_ROWS<Cached>);
    }
    bool is_tiled() const override { return layouts_[0].is_tiled(); }
    void decide_deferral(bool prefetches_kv) override { attention_.decide_deferral(prefetches_kv); }
    void list_reads(const Batch<Input>& batch, AttentionPlan* plan) override { attention_.list_reads(batch, plan); }

    void write_keys_and_values(int layer, const Batch<Input>& all, Member member) const override {
        const Layer& its = model_.layers[layer];
        int64_t kind = kind_of(layer);
        Cached* cache = cache_of(layer);
        parallel_for_rows(member, all.inputs.num_tokens, [&](int64_t t) {
            rope_.run(its, kind, cache, t, all.buffers.qkv + t * all.buffers.qkv_stride);
        });
    }
    void write_and_absorb(int layer, const Batch<Input>& all, Member member) const override {
        if constexpr (!CacheLayout<Cached>::HAS_SCALES)
            latents_.write_and_absorb(model_.layers[layer], all, kind_of(layer), cache_of(layer), member);
    }
    void expand(int layer, const Batch<Input>& batch, Member member) const override {
        latents_.expand(model_.layers[layer], batch, member);
    }

    void attend(int layer, const Batch<Input>& batch, const AttentionPlan& plan, Member member) override {
        attention_.attend(batch, plan, model_.layers[layer], cache_of(layer), member);
    }
    void merge_chunks(int layer, const Batch<Input>& batch, const AttentionPlan& plan, Member member) override {
        attention_.merge_chunks(batch, plan, model_.layers[layer], cache_of(layer), member);
    }

    void begin_prefetch(int layer, const AttentionPlan& plan, int64_t first, int64_t end, int64_t max_bytes,
                        int64_t num_pairs, KvPrefetcher* prefetcher) const override {
        int64_t tile_bytes = KEY_TILE * layouts_[plan.kind].padded_dim() * int64_t(sizeof(Cached));
        const int64_t* reads = plan.reads.data();
        prefetcher->begin(cache_of(layer), reads + plan.first_read[first], reads + plan.first_read[end], tile_bytes,
                          max_bytes, num_pairs);
    }

  private:
    static std::vector<CacheLayout<Cached>> layouts_of(const CacheSlabs& cache) {
        std::vector<CacheLayout<Cached>> layouts;
        for (int64_t kind = 0; kind < cache.num_kinds; kind++)
            layouts.emplace_back(cache.slab_bytes, cache.kinds[kind].blocks_per_slab, cache.block_size,
                                 cache.kinds[kind].num_kv_heads, cache.kinds[kind].head_dim,
                                 cache.kinds[kind].value_dim);
        return layouts;
    }

    int64_t kind_of(int layer) const { return cache_.layer_kinds[layer]; }

    // The layer's place in the first slab.
    Cached* cache_of(int layer) const {
        return static_cast<Cached*>(cache_.memory) + cache_.places[layer] * layouts_[kind_of(layer)].layer_size();
    }

    Model& model_;
    const CacheSlabs& cache_;
    std::vector<CacheLayout<Cached>> layouts_;  // by kind
    RopeAndCacheWrite<Cached> rope_;
    LatentStep<Input, Cached> latents_;
    AttentionStep<Input, Cached> attention_;
};

template <class Input, class Cached>
std::unique_ptr<CachePhases<Input>> make_cache_phases(Model& model, const StepInputs& inputs) {
    return std::make_unique<TypedCachePhases<Input, Cached>>(model, inputs);
}

}  // namespace millrace
