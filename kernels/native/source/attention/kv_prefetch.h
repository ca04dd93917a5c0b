// KvPrefetcher: prefetches the next layer's keys and values beside the current layer's products.
//
// Attention of decoding rows waits for memory. Products of several tiles of rows wait for the multipliers while memory
// is idle. So each thread prefetches its part of the next layer's keys and values, a little beside each tile of a
// product. The shared cache keeps them until attention reads them, up to the size that machine/cache_probe.h measured.
// A step of 16 or 32 rows with 275 tokens each takes 6 and 12 % less, one with 64 prompt tokens beside 16 rows 4 %
// less, with 128 beside 12 rows 1 % less (SmolLM2-135M's shape; two cores of a Zen 4 class EPYC, memory at 34 GB/s).
//
// Started per layer by Step::begin_kv_prefetch, advanced by VectorLinear; one per compute thread.

#pragma once

#include <algorithm>
#include <cstdint>

namespace millrace {

// What to prefetch beside a tile of a product: two lines, `num_prefetches` times from `address` on, once per `interval`
// pairs of k.
struct KvPrefetch {
    const char* address = nullptr;
    int64_t num_prefetches = 0, interval = 1;
};

// What one thread has yet to prefetch of a layer. On cache lines of its own, because it changes with every tile.
class alignas(128) KvPrefetcher {
  public:
    static constexpr int64_t PREFETCH_BYTES = 128;  // per prefetch

    // Starts on the tiles at the offsets [first, end), in numbers of T from `layer`, of `tile_bytes` each, a multiple
    // of PREFETCH_BYTES; at most `max_bytes` of them. `num_pairs` pairs of k are multiplied before they are read.
    template <class T>
    void begin(const T* layer, const int64_t* first, const int64_t* end, int64_t tile_bytes, int64_t max_bytes,
               int64_t num_pairs) {
        layer_ = reinterpret_cast<const char*>(layer), element_bytes_ = sizeof(T), tile_bytes_ = tile_bytes;
        next_ = first, end_ = end, tile_offset_ = due_ = 0;
        num_left_ = std::min(max_bytes, (end - first) * tile_bytes) / PREFETCH_BYTES;
        pace_ = num_left_ * PACE_SCALE / std::max<int64_t>(1, num_pairs);
    }

    // The next bytes to prefetch, beside a tile of `num_pairs`. Fewer than are due where tiles are not adjacent; the
    // rest follows beside the next tile.
    KvPrefetch next(int64_t num_pairs) {
        if (next_ == end_ || num_left_ == 0) return {};
        due_ = std::min(due_ + num_pairs * pace_, 2 * num_pairs * ONE);
        int64_t num_prefetches = std::min({num_pairs, due_ / ONE, num_left_});
        if (num_prefetches == 0) return {};
        const char* address = address_of(next_) + tile_offset_;
        int64_t wanted = num_prefetches * PREFETCH_BYTES, bytes = tile_bytes_ - tile_offset_;
        for (next_++; bytes < wanted && next_ < end_ && is_adjacent(address + bytes, next_); next_++)
            bytes = address_of(next_) + tile_bytes_ - address;
        tile_offset_ = 0;
        if (bytes > wanted) next_--, tile_offset_ = tile_bytes_ - (bytes - wanted), bytes = wanted;
        num_prefetches = (bytes + PREFETCH_BYTES - 1) / PREFETCH_BYTES;
        due_ -= num_prefetches * ONE, num_left_ -= num_prefetches, num_bytes_ += bytes;
        return {address, num_prefetches, num_pairs / num_prefetches};
    }

    void stop() { next_ = end_; }

    int64_t num_bytes() const { return num_bytes_; }  // prefetched in all layers

  private:
    static constexpr int64_t ONE = 1 << 20;  // fixed-point 1 of `pace_` and `due_`
    static constexpr int64_t PACE_SCALE = ONE * 5 / 4;  // all is due after 4/5 of the products, so that it arrives in time
    // Gap between tiles that is prefetched with them: the scales of an int8 cache, in blocks of up to 32 tokens. The
    // gaps count, so the last tiles, one in 16 to 32, are left out there.
    static constexpr int64_t MAX_GAP_BYTES = 64;

    bool is_adjacent(const char* address, const int64_t* tile) const {
        int64_t gap = address_of(tile) - address;
        return gap >= 0 && gap <= MAX_GAP_BYTES;
    }
    const char* address_of(const int64_t* tile) const { return layer_ + *tile * element_bytes_; }

    const char* layer_ = nullptr;
    const int64_t *next_ = nullptr, *end_ = nullptr;
    int64_t element_bytes_ = 0, tile_bytes_ = 0;
    int64_t tile_offset_ = 0;  // bytes of the next tile that are prefetched; negative: part of the gap before it is not
    int64_t num_left_ = 0;  // prefetches
    int64_t pace_ = 0, due_ = 0;  // prefetches per pair, and prefetches that are due; fixed point
    int64_t num_bytes_ = 0;
};

}  // namespace millrace
