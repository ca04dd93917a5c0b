// Layout of keys and values in the paged cache, how a token is written, and how tiles are read and prefetched.
//
// A block's keys are stored in tiles of 16 tokens, [dim / 2][16][2], so that a vector holds the scores of 16 keys, and
// its values in tiles of [8][dim][2] (float32 and int8: [dim][16] and [16][dim]). Blocks smaller than a tile store
// rows, [token][dim], from which tiles are gathered on reading. In int8 each key and each value has a bf16 scale; a
// key's multiplies its score, a value's its weight.
//
// Latents are keys and values at once: the value is the first part of the key. They are stored as rows, padded to 32
// numbers with zeros, whatever the size of blocks; see latents/latent_rows.h.
//
// A slab is a piece of the cache that holds blocks of one kind: as many as fit, at least the 256 tokens of a chunk that
// attention processes at a time. In a slab the keys that a layer and head have in all its blocks are contiguous, then
// the values. So a sequence in consecutive blocks is read from end to end. The hardware prefetcher follows such a
// stream; at each jump it starts again, and what it had prefetched is wasted. Attention of 8,000 tokens takes 19 % less
// than with 128 tokens side by side, of 8 to 32 sequences 7 to 14 % less (two cores of a Zen 4 class EPYC, memory at 50
// GB/s; at 34 GB/s 11 and 6 to 11 %; not measured with AMX).
//
// Written in the cache-write phase, read in the attention phase, on each compute thread. cache.py computes the same
// layout for copies.

#pragma once

#include <algorithm>
#include <cstring>

#include "weights/model.h"
#include "weights/quantize.h"

namespace millrace {

constexpr int64_t KEY_TILE = 16;        // keys
constexpr int64_t CHUNK = 256;          // keys
constexpr int64_t MAX_TILES_AHEAD = 8;  // tiles
constexpr int64_t MAX_HEAD_DIM = 1024;

// The blocks of one kind: slabs of [layers of the kind][kv heads][keys, values][blocks of the slab] heads of T, each
// [block_size * padded dim] numbers and in int8 [block_size] scales. What is left of a slab is not used.
template <class T>
struct CacheLayout {
    static constexpr bool HAS_SCALES = std::is_same<T, int8_t>::value;
    int64_t slab_size;  // numbers, or bytes in int8
    int64_t blocks_per_slab, block_size, num_kv_heads, head_dim;
    int64_t value_dim;
    int slab_bits = 0;  // a slab has 1 << slab_bits blocks; negative: another number of them

    CacheLayout(int64_t slab_bytes, int64_t blocks_per_slab, int64_t block_size, int64_t num_kv_heads, int64_t head_dim,
                int64_t value_dim)
        : slab_size(slab_bytes / int64_t(sizeof(T))), blocks_per_slab(blocks_per_slab), block_size(block_size),
          num_kv_heads(num_kv_heads), head_dim(head_dim), value_dim(value_dim) {
        while (int64_t(1) << slab_bits < blocks_per_slab) slab_bits++;
        if (int64_t(1) << slab_bits != blocks_per_slab) slab_bits = -1;
    }

    bool has_latents() const { return value_dim < head_dim; }
    int64_t padded_dim() const { return round_up(head_dim, has_latents() ? 32 : 16); }
    int64_t head_elements() const { return block_size * padded_dim(); }
    int64_t head_size() const { return head_elements() + (HAS_SCALES ? block_size * 2 : 0); }
    int64_t layer_size() const { return blocks_per_slab * (has_latents() ? 1 : 2) * num_kv_heads * head_size(); }  // in a slab
    bool is_tiled() const { return block_size % KEY_TILE == 0 && !has_latents(); }

    int64_t value_offset() const { return has_latents() ? 0 : head_size() * blocks_per_slab; }  // from the keys of the same block and head

    int64_t slab_of(int64_t block) const {
        return slab_bits >= 0 ? block >> slab_bits : int64_t(uint32_t(block) / uint32_t(blocks_per_slab));
    }

    // `layer`: its place in the first slab.
    template <class P>  // T* or const T*
    P keys(P layer, int64_t block, int64_t head) const {
        int64_t slab = slab_of(block);
        return layer + slab * slab_size + ((2 * head - slab) * blocks_per_slab + block) * head_size();
    }
    template <class P>
    P values(P layer, int64_t block, int64_t head) const { return keys(layer, block, head) + value_offset(); }
    const bf16* scales(const T* head) const { return reinterpret_cast<const bf16*>(head + head_elements()); }
};

// Converts a token's numbers to the cache's type, with their scale if it has one.
template <class T>
void convert_for_cache(const float* x, int64_t count, T* to, bf16*) {
    convert_all(x, count, to);
}
inline void convert_for_cache(const float* x, int64_t count, int8_t* to, bf16* scale) { *scale = to_int8(x, count, to); }

// Writes a token's key into its tile.
template <class T>
void write_key(const T* key, int64_t dim, T* tile, int64_t token) {
    for (int64_t d = 0; d < dim; d++) tile[d * KEY_TILE + token] = key[d];
}
inline void write_key(const bf16* key, int64_t dim, bf16* tile, int64_t token) {
    for (int64_t d = 0; d < dim; d += 2) std::memcpy(tile + d * KEY_TILE + 2 * token, key + d, 4);
}

// Writes a token's value into its tile. NOTE: must not touch the neighbouring elements, which another thread may be
// writing.
template <class T>
void write_value(const T* value, int64_t dim, int64_t width, T* tile, int64_t token) {
    std::copy(value, value + dim, tile + token * width);
}
inline void write_value(const bf16* value, int64_t dim, int64_t width, bf16* tile, int64_t token) {
    tile += token / 2 * 2 * width;
    int64_t d = 0;
#if defined(__AVX512F__)
    for (; d + W <= dim; d += W) store_in_pairs(tile + 2 * d, value + d, token % 2);
#endif
    for (; d < dim; d++) tile[2 * d + token % 2] = value[d];
}

// Writes a token's key and value, [head_dim] each, at `offset` of a block's keys and values of one head.
template <class T>
void write_token(const CacheLayout<T>& layout, T* keys, T* values, int64_t offset, const float* key,
                 const float* value) {
    int64_t dim = layout.head_dim, width = layout.padded_dim();
    T k[MAX_HEAD_DIM], v[MAX_HEAD_DIM];
    auto scale_of = [&](T* head) { return const_cast<bf16*>(layout.scales(head)) + offset; };
    convert_for_cache(key, dim, k, scale_of(keys));
    convert_for_cache(value, dim, v, scale_of(values));
    if (!layout.is_tiled()) {
        std::copy(k, k + dim, keys + offset * width);
        std::copy(v, v + dim, values + offset * width);
        return;
    }
    keys += offset / KEY_TILE * KEY_TILE * width, values += offset / KEY_TILE * KEY_TILE * width, offset %= KEY_TILE;
    if (USES_AMX<T>) std::fill(k + dim, k + width, T());  // AMX multiplies the padding of a tile, so it must be 0
    write_key(k, USES_AMX<T> ? width : dim, keys, offset);
    write_value(v, dim, width, values, offset);
}

// The tiles of a layer in the order in which a thread reads them, from the next one. While it computes with a tile it
// prefetches the one that is DISTANCE further, so that memory is always busy. Where many rows share a tile this is not
// needed.
// With AMX the next tile is soon enough and saves 10 % of attention of 32 sequences: Intel's cores read faster what
// they prefetch shortly before (two cores of a Granite Rapids class Xeon). Prefetching it in quarters, one before each
// product, saves 3 % more (heads of 128 numbers). With AVX-512 distances of one to five tiles are alike, and up to 6 %
// faster than eight (heads of 128 numbers; Zen 5 class EPYC).
template <class T>
struct TileReadOrder {
    static constexpr int64_t DISTANCE = USES_AMX<T> ? 1 : W == 16 ? 4 : MAX_TILES_AHEAD;
    const T* layer;
    const int64_t* tiles;  // offsets in the layer, with DISTANCE more after the last that is read

    const T* prefetch_address(int64_t tile) const { return layer + tiles[DISTANCE + tile]; }
};
constexpr bool uses_prefetch(int64_t rows) { return rows <= 6; }

// Where keys and values are prefetched to: the L2 cache. A prefetch to L1 occupies one of its few line fill buffers, so
// that the hardware prefetcher does less: attention took 5 to 17 % more (8,000 tokens, 8 and 16 sequences; two cores of
// a Zen 4 class EPYC, memory at 54 GB/s; on the Zen 5 class they were alike). With AMX L1 takes 4 % less, where the
// values are prefetched in quarters. `auto`, because each compiler has its own type for the hint.
constexpr auto PREFETCH_HINT = USES_AMX<bf16> ? _MM_HINT_T0 : _MM_HINT_T1;

// NOTE: always inline, because a compiler may take a call that only prefetches for one without effect and drop it.
[[gnu::always_inline]] inline void prefetch(const void* from, int64_t num_bytes) {
    for (int64_t i = 0; i < num_bytes; i += 64) _mm_prefetch(static_cast<const char*>(from) + i, PREFETCH_HINT);
}

}  // namespace millrace
