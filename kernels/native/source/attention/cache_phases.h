// CachePhases: what a step does with its cache, for a step that need not know the cache's type.
//
// A step is compiled for each type of its rows, and this for each type of the cache, in units of its own
// (attention_float32.cpp, attention_bfloat16.cpp, attention_int8.cpp): together they are half of the code and compile at
// the same time. A call is a phase or most of one. Called by Step, on each compute thread.

#pragma once

#include <memory>

#include "attention/kv_prefetch.h"
#include "step/batch.h"

namespace millrace {

template <class Input>
class CachePhases {
  public:
    using Member = ThreadTeam::Member;
    virtual ~CachePhases() = default;

    // Before the phases: plans the attention of a batch's layer, if it has any.
    virtual void plan(int layer, Batch<Input>* batch, int num_threads) const = 0;
    // Whether keys and values, which are to be read a layer ahead, lie in tiles.
    virtual bool is_tiled() const = 0;
    // See `AttentionStep`; the next one, too.
    virtual void decide_deferral(bool prefetches_kv) = 0;
    virtual void list_reads(const Batch<Input>& batch, AttentionPlan* plan) = 0;

    // Normalizes and rotates queries and keys of all rows, and writes keys and values into the cache.
    virtual void write_keys_and_values(int layer, const Batch<Input>& all, Member member) const = 0;
    // See `LatentStep`; the same for a layer with latents, and what follows attention there.
    virtual void write_and_absorb(int layer, const Batch<Input>& all, Member member) const = 0;
    virtual void expand(int layer, const Batch<Input>& batch, Member member) const = 0;

    virtual void attend(int layer, const Batch<Input>& batch, const AttentionPlan& plan, Member member) = 0;
    // The phase after `attend`, if the plan is split.
    virtual void merge_chunks(int layer, const Batch<Input>& batch, const AttentionPlan& plan, Member member) = 0;

    // Begins to prefetch what parts [first, end) of the plan read of a layer; `max_bytes` and `num_pairs` as in
    // `KvPrefetcher`.
    virtual void begin_prefetch(int layer, const AttentionPlan& plan, int64_t first, int64_t end, int64_t max_bytes,
                                int64_t num_pairs, KvPrefetcher* prefetcher) const = 0;
};

// For the cache of `inputs`, whose numbers are of type Cached.
template <class Input, class Cached>
std::unique_ptr<CachePhases<Input>> make_cache_phases(Model& model, const StepInputs& inputs);

}  // namespace millrace
