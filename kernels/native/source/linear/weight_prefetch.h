// What is fetched while a tile of a product is summed, so that memory is busy meanwhile.
//
// Knows how much comes with each pair of k. Refuses to know what is summed.

#pragma once

#include "machine/prefetch.h"
#include "attention/kv_prefetch.h"

namespace millrace {

constexpr int64_t MAX_PREFETCH_BYTES = 256;  // bytes: the four lines of the cache that are fetched at most at a time

// So many `times` the next `share` bytes from `place` on, whole lines. Where not all of the tile's columns are summed at a
// time, as many are fetched with the next ones, `apart` further on; 0: all are fetched with the first ones. And what else, with
// the first ones. `is_passing`: the panel itself is asked for, as what passes, and nothing ahead.
struct WeightPrefetch {
    const char* address;
    int64_t bytes_per_prefetch, num_prefetches, pass_stride;
    KvPrefetch kv;
    bool is_streaming = false;
};

// Fetches that, as sums go on. Who fetches nothing does not look for that either: where two threads share a core, as those of
// virtual machines do, instructions beside the sums cost as much as these.
template <PrefetchMode MODE>
class Prefetcher {
  public:
    explicit Prefetcher(const WeightPrefetch& ahead)
        : address_(ahead.address), bytes_per_prefetch_(ahead.bytes_per_prefetch), num_prefetches_(ahead.num_prefetches),
          kv_address_(ahead.kv.address), num_kv_prefetches_(ahead.kv.num_prefetches), kv_interval_(ahead.kv.interval) {}

    // What is ahead, one time.
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

    // And what else is, with a pair of k.
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
