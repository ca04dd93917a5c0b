// Attention in AMX tile registers: scores of 16 keys at a time, and weighted sums of their values.
//
// Reads tiles of keys, [dim / 2][16][2], and of values, [8][dim][2], as they lie in the cache. Up to 16 query rows
// share a tile; each gets the bits that it would get alone. The head dimension is padded to a multiple of 16 with
// zeros. Called by ItemAttention, on each compute thread.

#pragma once

#include <algorithm>
#include <array>

#include "machine/amx.h"
#include "attention/kv_layout.h"

namespace millrace {

// Registers 0 to 3 hold sums. 4 and 5 hold rows and columns of 16 pairs, 6 and 7 of 8 pairs.
inline const TileConfig& attention_tile_config(int num_rows) {
    static const auto all = [] {
        std::array<TileConfig, AMX_ROWS + 1> configs;
        for (int rows = 1; rows <= AMX_ROWS; rows++) {
            for (int tile : {0, 1, 2, 3}) configs[rows].set(tile, rows, AMX_PAIRS);
            configs[rows].set(4, rows, AMX_PAIRS), configs[rows].set(5, AMX_PAIRS, AMX_PAIRS);
            configs[rows].set(6, rows, AMX_PAIRS / 2), configs[rows].set(7, AMX_PAIRS / 2, AMX_PAIRS);
        }
        return configs;
    }();
    return all[num_rows];
}

// Scores [rows][CHUNK] of the keys in tiles [first, last), for queries [rows][width].
inline void score_tiles_amx(const bf16* queries, const bf16* const* tiles, const TileReadOrder<bf16>& reads,
                            bool prefetches, int64_t first, int64_t last, int64_t width, float* scores) {
    for (int64_t tile = first; tile < last; tile++) {
        const bf16* at = tiles[tile];
        const bf16* prefetch_address = prefetches ? reads.prefetch_address(tile - first) : nullptr;
        clear_tile<0>();
        int64_t dim = 0;
        for (; dim + 2 * AMX_PAIRS <= width; dim += 2 * AMX_PAIRS) {
            if (prefetches) prefetch(prefetch_address + dim * KEY_TILE, 2 * AMX_PAIRS * KEY_TILE * 2);
            load_tile<4>(queries + dim, 2 * width);
            load_tile<5>(at + dim * KEY_TILE, 4 * KEY_TILE);
            tile_dot_bf16<0, 4, 5>();
        }
        if (dim < width) {
            if (prefetches) prefetch(prefetch_address + dim * KEY_TILE, AMX_PAIRS * KEY_TILE * 2);
            load_tile<6>(queries + dim, 2 * width);
            load_tile<7>(at + dim * KEY_TILE, 4 * KEY_TILE);
            tile_dot_bf16<0, 6, 7>();
        }
        store_tile<0>(scores + tile * KEY_TILE, 4 * CHUNK);
    }
}

// C times 16 columns, from column `dim`, of the weighted value sums of tiles [first, last): weights [rows][CHUNK], sums
// [rows][width].
template <int C>
void sum_columns_amx(const bf16* weights, const bf16* const* tiles, const TileReadOrder<bf16>& reads, bool prefetches,
                     int64_t first, int64_t last, int64_t width, float* sums, int64_t dim) {
    clear_tile<0>();
    if (C > 1) clear_tile<1>();
    if (C > 2) clear_tile<2>();
    if (C > 3) clear_tile<3>();
    for (int64_t tile = first; tile < last; tile++) {
        const bf16* at = tiles[tile] + 2 * dim;
        const bf16* prefetch_address = prefetches ? reads.prefetch_address(tile - first) : nullptr;
        load_tile<6>(weights + tile * KEY_TILE, 2 * CHUNK);
        auto add = [&](auto column) {
            constexpr int i = decltype(column)::value;
            if (prefetches) prefetch(prefetch_address + i * (KEY_TILE * width / C), KEY_TILE * width / C * 2);
            load_tile<7>(at + 2 * AMX_COLUMNS * i, 4 * width);
            tile_dot_bf16<i, 6, 7>();
        };
        add(std::integral_constant<int, 0>());
        if constexpr (C > 1) add(std::integral_constant<int, 1>());
        if constexpr (C > 2) add(std::integral_constant<int, 2>());
        if constexpr (C > 3) add(std::integral_constant<int, 3>());
    }
    store_tile<0>(sums + dim, 4 * width);
    if (C > 1) store_tile<1>(sums + dim + AMX_COLUMNS, 4 * width);
    if (C > 2) store_tile<2>(sums + dim + 2 * AMX_COLUMNS, 4 * width);
    if (C > 3) store_tile<3>(sums + dim + 3 * AMX_COLUMNS, 4 * width);
}

// Weighted sums [rows][width] of the values in tiles [first, last), with weights [rows][CHUNK].
inline void sum_values_amx(const bf16* weights, const bf16* const* tiles, const TileReadOrder<bf16>& reads, bool prefetches,
                           int64_t first, int64_t last, int64_t width, float* sums) {
    for (int64_t dim = 0; dim < width; dim += 4 * AMX_COLUMNS) {
        bool prefetches_pass = prefetches && dim == 0;  // the first pass prefetches for all
        auto sum = [&](auto columns) {
            sum_columns_amx<decltype(columns)::value>(weights, tiles, reads, prefetches_pass, first, last, width, sums,
                                                      dim);
        };
        switch (std::min<int64_t>(4, (width - dim) / AMX_COLUMNS)) {
            case 1: sum(std::integral_constant<int, 1>()); break;
            case 2: sum(std::integral_constant<int, 2>()); break;
            case 3: sum(std::integral_constant<int, 3>()); break;
            default: sum(std::integral_constant<int, 4>());
        }
    }
}

// Copies a tile of values, [8][width][2], with zeros for the keys outside [first, last). NOTE: what lies there may be
// anything, NaN included, and is multiplied by 0. `to` may be `from`.
inline void mask_values(const bf16* from, int64_t first, int64_t last, int64_t width, bf16* to) {
    for (int64_t pair = 0; pair < KEY_TILE / 2; pair++, from += 2 * width, to += 2 * width) {
        bool has_even = first <= 2 * pair && 2 * pair < last, has_odd = first <= 2 * pair + 1 && 2 * pair + 1 < last;
        if (!has_even || !has_odd) {
            for (int64_t i = 0; i < 2 * width; i++) to[i] = (i % 2 ? has_odd : has_even) ? from[i] : bf16();
        } else if (to != from) {
            std::memcpy(to, from, 4 * width);
        }
    }
}

}  // namespace millrace
