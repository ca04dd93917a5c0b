// Prefetches beside the sums of a tile: the tile's share of the next panel, and keys and values of the next layer.
//
// Used by panel_dot.h, on each compute thread.

#pragma once

#include "machine/prefetch.h"
#include "attention/kv_prefetch.h"

namespace millrace {

constexpr int64_t MAX_PREFETCH_BYTES = 256;  // four cache lines, the most of one prefetch

// `num_prefetches` times the next `bytes_per_prefetch` bytes from `address`, whole lines. If a tile is summed in
// several passes over its columns, each pass prefetches as many, `pass_stride` further on; 0: the first pass prefetches
// all. `kv` is prefetched in the first pass. `is_streaming`: prefetches the panel itself, non-temporally, and nothing
// ahead.
struct WeightPrefetch {
    const char* address;
    int64_t bytes_per_prefetch, num_prefetches, pass_stride;
    KvPrefetch kv;
    bool is_streaming = false;
};

// Issues the prefetches as sums go on. MODE removes the code of what is not prefetched: where two threads share a core,
// as those of virtual machines do, instructions beside the sums cost as much as the sums.
template <PrefetchMode MODE>
class Prefetcher {
  public:
    explicit Prefetcher(const WeightPrefetch& plan)
        : address_(plan.address), bytes_per_prefetch_(plan.bytes_per_prefetch), num_prefetches_(plan.num_prefetches),
          kv_address_(plan.kv.address), num_kv_prefetches_(plan.kv.num_prefetches), kv_interval_(plan.kv.interval) {}

    // One prefetch of weights.
    [[gnu::always_inline]] void prefetch_weights() {
        if (MODE == PrefetchMode::NONE || MODE == PrefetchMode::STREAMING || num_prefetches_-- <= 0) return;
        _mm_prefetch(address_, _MM_HINT_T1);
        if (bytes_per_prefetch_ > 64) _mm_prefetch(address_ + 64, _MM_HINT_T1);
        if (bytes_per_prefetch_ > 128) {
            _mm_prefetch(address_ + 128, _MM_HINT_T1);
            _mm_prefetch(address_ + 192, _MM_HINT_T1);
        }
        address_ += bytes_per_prefetch_;
    }

    // One prefetch of keys and values, if due at this pair of k.
    [[gnu::always_inline]] void prefetch_kv() {
        if (MODE != PrefetchMode::NEXT_PANEL_AND_KV || --until_kv_ > 0) return;
        if (num_kv_prefetches_-- > 0) _mm_prefetch(kv_address_, _MM_HINT_T1), _mm_prefetch(kv_address_ + 64, _MM_HINT_T1);
        kv_address_ += KvPrefetcher::PREFETCH_BYTES, until_kv_ = kv_interval_;
    }

  private:
    const char* address_;
    int64_t bytes_per_prefetch_, num_prefetches_;
    const char* kv_address_;
    int64_t num_kv_prefetches_, kv_interval_, until_kv_ = 1;
};

}  // namespace millrace
