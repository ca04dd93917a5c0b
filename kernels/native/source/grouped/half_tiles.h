// Products of many rows with 4-bit codes in groups of 32, in AMX tiles of bf16: the same bits as with whole numbers.
//
// The high and low byte of q are two numbers of bf16, 256 * high and low, and so are the codes less their zero. The sums
// of a group are below 2 ** 24, so float32 holds them exactly, and both bytes are summed in one register. That saves
// half of the stores and three of four vector instructions of super_sums_amx.h. In 8 columns the order is 0 2 4 6 1 3 5
// 7, as the halves of 16-bit words come. Used by GroupedLinear, on each compute thread.

#pragma once

#include <algorithm>

#include "grouped/split_rows.h"
#include "grouped/super_sums_amx.h"
#include "grouped/unpack.h"

namespace millrace {

inline bool takes_half_tiles(const GroupedFormat& format) {
    return format.bits == 4 && format.group == 32 && (format.table == AFFINE || format.table == E2M1);
}

#if defined(__AVX512F__)

// The values of 4-bit codes less their zero, twice, because bit 4 of an index belongs to another code.
struct HalfValues {
    alignas(64) bf16 of[32];

    explicit HalfValues(const GroupedFormat& format) {
        constexpr int E2M1_HALVES[] = {0, 1, 2, 3, 4, 6, 8, 12};
        for (int i = 0; i < 32; i++) {
            int code = i % 16, number = code < 8 ? E2M1_HALVES[code] : -E2M1_HALVES[code - 8], zero = 2 * format.zero;
            if (format.table == AFFINE) number = code, zero = format.zero;
            of[i] = to_bf16(float(number - zero));
        }
    }
};

// The codes of a super less their zero, in bf16: [blocks][2 halves of the lanes][16 pairs of columns][16 lanes][2].
struct HalfCodes {
    alignas(64) bf16 of[BLOCKS_PER_SUPER][2][AMX_PAIRS][2 * AMX_COLUMNS];

    // From `blocks` of 4-bit codes; prefetches meanwhile.
    void read(const HalfValues& values, const uint8_t* blocks, int64_t count, SuperPrefetch prefetch) {
        __m512i table = _mm512_load_si512(values.of);
        int64_t lines = (prefetch.num_bytes + 63) / 64, per_block = ceil_div(lines, count);
        for (int64_t i = 0; i < count; i++) {
            for (int64_t line = 0; line < per_block && lines > 0; line++, lines--, prefetch.address += 64)
                _mm_prefetch(prefetch.address, _MM_HINT_T0);
            for (int half = 0; half < 2; half++)
                for (int eight = 0; eight < 4; eight++) {  // 8 columns
                    __m512i words = _mm512_loadu_si512(blocks + i * BLOCK * LANES / 2 + (2 * eight + half) * 64);
                    auto put = [&](int pair, __m512i codes) {
                        _mm512_store_si512(of[i][half][4 * eight + pair], _mm512_permutexvar_epi16(codes, table));
                    };
                    put(0, words), put(1, _mm512_srli_epi16(words, 4));
                    put(2, _mm512_srli_epi16(words, 8)), put(3, _mm512_srli_epi16(words, 12));
                }
        }
    }
};

// The sums of some groups: [groups][2 halves of the lanes][16 rows][16].
struct HalfSums {
    static constexpr int GROUPS = 4;
    alignas(64) float of[GROUPS][2][AMX_ROWS * AMX_COLUMNS];
};

// Sums a group by two registers, from FIRST on, of which other groups use the other two.
template <int FIRST>
void sum_group(const HalfCodes& codes, const char* x, int64_t stride, int64_t low, int64_t group) {
    clear_tile<FIRST>(), clear_tile<FIRST + 1>();
    load_tile<4>(x + group * 64, stride), load_tile<6>(codes.of[group][0], 64);
    load_tile<5>(x + low + group * 64, stride), load_tile<7>(codes.of[group][1], 64);
    tile_dot_bf16<FIRST, 4, 6>(), tile_dot_bf16<FIRST + 1, 4, 7>();
    tile_dot_bf16<FIRST, 5, 6>(), tile_dot_bf16<FIRST + 1, 5, 7>();
}

template <int FIRST>
void store_group(float (*sums)[AMX_ROWS * AMX_COLUMNS]) {
    store_tile<FIRST>(sums[0], 64), store_tile<FIRST + 1>(sums[1], 64);
}

// Adds the scaled sums of `count` groups from `group` on to y [rows][32], for rows [first, last).
template <bool HAS_OFFSETS>
void scale_half_sums(const UnpackedSuper& super, const float (*row_sums)[MAX_CHUNKS], const HalfSums& sums, int64_t group,
                     int count, int first, int last, float* y) {
    for (int row = first; row < last; row++)
        UNROLL for (int half = 0; half < 2; half++) {
            float* to = y + row * LANES + half * W;
            F total = load(to);
            for (int i = 0; i < count; i++) {
                int64_t at = (group + i) * LANES + half * W;
                total = fma(load(super.d + at), load(sums.of[i][half] + row * W), total);
                if (HAS_OFFSETS) total = fma(load(super.m + at), splat(row_sums[row][group + i]), total);
            }
            store(to, total);
        }
}

// y [num_rows][32] as `SumSuper`. x: the rows in bf16 (`SplitRecord::halves_at`), from the super's first column on;
// `low`: bytes from high to low numbers; `sums`: of the first row, by group.
inline void sum_super_in_half_tiles(const UnpackedSuper& super, const HalfCodes& codes, const char* x, int64_t stride,
                                    int64_t low, const int32_t* sums, int64_t num_rows, TileScope& tiles, float* y) {
    int64_t num_groups = super.num_quads / 8;
    int rows = int(std::min<int64_t>(num_rows, AMX_ROWS));
    tiles.configure(super_tile_config(rows, 16));
    auto scale = super.has_offsets ? scale_half_sums<true> : scale_half_sums<false>;
    HalfSums group_sums;
    alignas(64) float row_sums[AMX_ROWS][MAX_CHUNKS];
    for (int64_t row = 0; row < num_rows; row += AMX_ROWS) {
        int64_t begin = std::min(row, num_rows - rows);  // the last tile begins with rows that are done
        const char *tile = x + begin * stride, *tile_sums = reinterpret_cast<const char*>(sums) + begin * stride;
        if (super.has_offsets)
            for (int r = 0; r < rows; r++)
                store(row_sums[r], _mm512_cvtepi32_ps(_mm512_loadu_si512(tile_sums + r * stride)));
        for (int64_t group = 0; group < num_groups; group += HalfSums::GROUPS) {
            int count = int(std::min<int64_t>(HalfSums::GROUPS, num_groups - group));
            sum_group<0>(codes, tile, stride, low, group);
            for (int i = 0; i < count; i += 2) {
                if (i + 1 < count) sum_group<2>(codes, tile, stride, low, group + i + 1);
                store_group<0>(group_sums.of[i]);
                if (i + 2 < count) sum_group<0>(codes, tile, stride, low, group + i + 2);
                if (i + 1 < count) store_group<2>(group_sums.of[i + 1]);
            }
            scale(super, row_sums, group_sums, group, count, int(row - begin), rows, y + begin * LANES);
        }
    }
}

#endif

}  // namespace millrace
