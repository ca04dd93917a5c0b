// What attention of the next layer reads, fetched beside this layer's products.
//
// Attention of decoding rows waits for memory, products of several tiles of rows for the multiplier while memory is idle. So
// each thread fetches its part of the next layer's keys and values while it multiplies, a little beside each tile, and the
// cache behind the cores' own keeps them until attention reads them: as many as it was measured to keep (kept.h). A step of
// 16 or 32 rows with 275 tokens each takes 6 and 12 % less, one with 64 tokens of a prompt beside 16 rows 4, with 128 beside
// 12 rows 1 (SmolLM2-135M's shape; two cores of a Zen 4 class EPYC, memory at 34 GB/s).
//
// Knows what is fetched when. Refuses to know who reads it.

#pragma once

#include <algorithm>
#include <cstdint>

namespace millrace {

// Beside a tile of a product: `times` times two lines from `place` on, one time each `apart` pairs of k.
struct KvPrefetch {
    const char* address = nullptr;
    int64_t num_prefetches = 0, interval = 1;
};

// What one thread has yet to fetch of a layer. In lines of memory of its own, as it changes with every tile.
class alignas(128) KvPrefetcher {
  public:
    static constexpr int64_t PREFETCH_BYTES = 128;  // bytes at a time

    // From now on tiles of `tile_bytes`, whole times FETCHED: those that begin at the places [first, end), in numbers of T
    // from `layer` on; `most_bytes` of them at most. `num_pairs` of products come before they are read.
    template <class T>
    void begin(const T* layer, const int64_t* first, const int64_t* end, int64_t tile_bytes, int64_t most_bytes,
               int64_t num_pairs) {
        layer_ = reinterpret_cast<const char*>(layer), element_bytes_ = sizeof(T), tile_bytes_ = tile_bytes;
        next_ = first, end_ = end, tile_offset_ = due_ = 0;
        num_left_ = std::min(most_bytes, (end - first) * tile_bytes) / PREFETCH_BYTES;
        pace_ = num_left_ * PACE_SCALE / std::max<int64_t>(1, num_pairs);
    }

    // The next ones, beside a tile of `num_pairs`. Where they lie apart it is fewer than are due, and more with the next tile.
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

    int64_t num_bytes() const { return num_bytes_; }  // that were fetched of all layers

  private:
    static constexpr int64_t ONE = 1 << 20;        // parts of what is due
    static constexpr int64_t PACE_SCALE = ONE * 5 / 4;  // all is due after four fifths of the products, and so there in time
    // Bytes from one tile to the next that are fetched with them: an int8 cache's scales, in blocks of up to 32 tokens. They
    // count, so the last tiles, one of 16 to 32, are left out there.
    static constexpr int64_t MAX_GAP_BYTES = 64;

    bool is_adjacent(const char* address, const int64_t* tile) const {
        int64_t interval = address_of(tile) - address;
        return interval >= 0 && interval <= MAX_GAP_BYTES;
    }
    const char* address_of(const int64_t* tile) const { return layer_ + *tile * element_bytes_; }

    const char* layer_ = nullptr;
    const int64_t *next_ = nullptr, *end_ = nullptr;
    int64_t element_bytes_ = 0, tile_bytes_ = 0;
    int64_t tile_offset_ = 0;           // bytes of the next tile that were fetched; below 0: of what is before it some were not
    int64_t num_left_ = 0;            // times
    int64_t pace_ = 0, due_ = 0;  // times for each pair, and that are yet to come, in WHOLE parts
    int64_t num_bytes_ = 0;
};

}  // namespace millrace
