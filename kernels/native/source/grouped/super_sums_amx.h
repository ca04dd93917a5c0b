// The same products as in super_sums.h in AMX tiles, for more than a few rows: the same bits.
//
// 16 rows by 32 rows of weights: the tiles sum a chunk of the high and of the low bytes, and vectors scale these sums.
// Storing the tiles takes as long as summing 32 columns, and scaling as long as both: with groups of 32, 16 rows take 0.8
// of the time that vectors alone take, with groups of 128 half of it (Sapphire Rapids class Xeon). Storing one half of
// the lanes while the other is summed, and scaling some rows in between, took longer. Used by GroupedLinear, on each
// compute thread.

#pragma once

#include <algorithm>
#include <array>

#include "grouped/split_rows.h"
#include "machine/amx.h"

namespace millrace {

#if defined(__AVX512F__)

// Registers 0 to 3 hold sums: high and low bytes of the first 16 lanes, then of the others. 4 and 5 hold rows, 6 and 7
// codes. `quads`: that are summed by one instruction: 4, 8 or 16.
inline const TileConfig& super_tile_config(int num_rows, int64_t quads) {
    static const auto all = [] {
        std::array<std::array<TileConfig, AMX_ROWS + 1>, 3> configs;
        for (int i = 0; i < 3; i++)
            for (int rows = 1; rows <= AMX_ROWS; rows++) {
                TileConfig& config = configs[i][rows];
                for (int tile : {0, 1, 2, 3}) config.set(tile, rows, AMX_COLUMNS);
                for (int tile : {4, 5}) config.set(tile, rows, 4 << i);
                for (int tile : {6, 7}) config.set(tile, 4 << i, AMX_COLUMNS);
            }
        return configs;
    }();
    return all[quads / 8][num_rows];
}

// The integer sums of a chunk: high and low bytes of each half of the lanes, [16 rows][16].
struct TileSums {
    alignas(64) int32_t of[4][AMX_ROWS * AMX_COLUMNS];
};

// The sums of q of 16 rows by chunk, times the zero of the codes, and in float32.
struct RowSums {
    alignas(64) int32_t of_zeros[AMX_ROWS][MAX_CHUNKS];
    alignas(64) float floats[AMX_ROWS][MAX_CHUNKS];

    RowSums(const UnpackedSuper& super, const SplitSpan& rows, int num_rows) {
        for (int row = 0; row < num_rows; row++) {
            __m512i sums = _mm512_loadu_si512(reinterpret_cast<const char*>(rows.sums) + row * rows.stride);
            _mm512_store_si512(of_zeros[row], _mm512_mullo_epi32(sums, _mm512_set1_epi32(super.zero)));
            store(floats[row], _mm512_cvtepi32_ps(sums));
        }
    }
};

inline void sum_chunk_in_tiles(const UnpackedSuper& super, const SplitSpan& rows, int64_t quad, int64_t count, int64_t at_once,
                               TileSums* sums) {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    for (int64_t last = quad + count; quad < last; quad += at_once) {
        const char* x = rows.numbers + 4 * quad;
        const uint8_t* codes = super.codes + quad * 4 * LANES;
        load_tile<4>(x, rows.stride), load_tile<6>(codes, 4 * LANES);
        load_tile<5>(x + rows.low, rows.stride), load_tile<7>(codes + 2 * LANES, 4 * LANES);
        tile_dot_int8<0, 4, 6>(), tile_dot_int8<1, 5, 6>(), tile_dot_int8<2, 4, 7>(), tile_dot_int8<3, 5, 7>();
    }
    store_tile<0>(sums->of[0], 64), store_tile<1>(sums->of[1], 64), store_tile<2>(sums->of[2], 64),
        store_tile<3>(sums->of[3], 64);
}

// Adds the sums of a chunk to y [16 rows][32], for rows [first, last).
template <bool HAS_OFFSETS>
void scale_tile_sums(const UnpackedSuper& super, const RowSums& row_sums, const TileSums& sums, int64_t chunk, int first,
                     int last, float* y) {
    UNROLL for (int half = 0; half < 2; half++) {
        F d = load(super.d + chunk * LANES + half * W), m = HAS_OFFSETS ? load(super.m + chunk * LANES + half * W) : zero();
        for (int row = first; row < last; row++) {
            const int32_t *high = sums.of[2 * half] + row * W, *low = sums.of[2 * half + 1] + row * W;
            __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(low));
            whole = _mm512_sub_epi32(whole, _mm512_set1_epi32(row_sums.of_zeros[row][chunk]));
            float* to = y + row * LANES + half * W;
            F total = fma(d, _mm512_cvtepi32_ps(whole), load(to));
            if (HAS_OFFSETS) total = fma(m, splat(row_sums.floats[row][chunk]), total);
            store(to, total);
        }
    }
}

// y [num_rows][32] as `SumSuper`, for any number of rows.
inline void sum_super_in_tiles(const UnpackedSuper& super, const SplitSpan& span, int64_t num_rows, TileScope& tiles, float* y) {
    int64_t chunk_quads = super.quads_per_chunk, num_chunks = (super.num_quads + chunk_quads - 1) / chunk_quads;
    int64_t at_once = std::min<int64_t>(chunk_quads, super.num_quads % 16 == 0 ? 16 : 8);
    int rows = int(std::min<int64_t>(num_rows, AMX_ROWS));
    tiles.configure(super_tile_config(rows, at_once));
    auto scale = super.has_offsets ? scale_tile_sums<true> : scale_tile_sums<false>;
    TileSums sums[2];
    for (int64_t row = 0; row < num_rows; row += AMX_ROWS) {
        int64_t begin = std::min(row, num_rows - rows);  // the last tile begins with rows that are done
        SplitSpan part{span.numbers + begin * span.stride,
                       reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(span.sums) + begin * span.stride),
                       span.stride, span.low};
        RowSums row_sums(super, part, rows);
        auto sum = [&](int64_t chunk) {
            int64_t quad = chunk * chunk_quads;
            if (quad < super.num_quads)
                sum_chunk_in_tiles(super, part, quad, std::min(chunk_quads, super.num_quads - quad), at_once,
                                   &sums[chunk % 2]);
        };
        sum(0);
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
            sum(chunk + 1);
            scale(super, row_sums, sums[chunk % 2], chunk, int(row - begin), rows, y + begin * LANES);
        }
    }
}

#endif

}  // namespace millrace
