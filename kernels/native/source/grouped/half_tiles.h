// Products of many rows with 4-bit and 5-bit codes in groups of 32, in AMX tiles of bf16: the same bits as with whole
// numbers.
//
// The high and low byte of q are two numbers of bf16, 256 * high and low, and so are the codes less their zero. The sums
// of a group are below 2 ** 24, so float32 holds them exactly, and both bytes are summed in one register. That saves
// half of the stores and three of four vector instructions of super_sums_amx.h. In 8 columns the order is 0 2 4 6 1 3 5
// 7, as the halves of 16-bit words come. Used by GroupedLinear, on each compute thread.

#pragma once

#include <algorithm>
#include <utility>

#include "grouped/split_rows.h"
#include "grouped/super_sums_amx.h"
#include "grouped/unpack.h"

namespace millrace {

// Codes of 5 bits must have their zero in the middle: 16 * 32 * (32512 + 128) is just below 2 ** 24.
inline bool takes_half_tiles(const GroupedFormat& format) {
    if (format.group != 32) return false;
    if (format.bits == 5) return format.table == AFFINE && (format.zero == 15 || format.zero == 16);
    return format.bits == 4 && (format.table == AFFINE || format.table == E2M1);
}

#if defined(__AVX512F__)

// The values of codes less their zero; of 4-bit codes twice, because bit 4 of an index belongs to another code.
struct HalfValues {
    alignas(64) bf16 of[32];
    bool has_high_bits;

    explicit HalfValues(const GroupedFormat& format) : has_high_bits(format.bits == 5) {
        constexpr int E2M1_HALVES[] = {0, 1, 2, 3, 4, 6, 8, 12};
        for (int i = 0; i < 32; i++) {
            int code = i % 16, number = code < 8 ? E2M1_HALVES[code] : -E2M1_HALVES[code - 8], zero = 2 * format.zero;
            if (format.table == AFFINE) number = has_high_bits ? i : code, zero = format.zero;
            of[i] = to_bf16(float(number - zero));
        }
    }
};

// The codes of a super less their zero, in bf16: [blocks][2 halves of the lanes][16 pairs of columns][16 lanes][2].
struct HalfCodes {
    alignas(64) bf16 of[BLOCKS_PER_SUPER][2][AMX_PAIRS][2 * AMX_COLUMNS];

    // Reads block `index` of codes.
    void read(const HalfValues& values, const uint8_t* block, int64_t index) {
        values.has_high_bits ? read<true>(values, block, index) : read<false>(values, block, index);
    }

  private:
    template <bool HAS_HIGH_BITS>
    void read(const HalfValues& values, const uint8_t* block, int64_t index) {
        __m512i table = _mm512_load_si512(values.of);
        for (int half = 0; half < 2; half++) {
            __m512i above = HAS_HIGH_BITS ? _mm512_loadu_si512(block + BLOCK * LANES / 2 + half * 64) : _mm512_setzero_si512();
            auto eight_columns = [&](auto eight) {
                constexpr int EIGHT = decltype(eight)::value;
                __m512i words = _mm512_loadu_si512(block + (2 * EIGHT + half) * 64);
                auto put = [&](auto pair) {
                    constexpr int PAIR = decltype(pair)::value, AT = PAIR / 2 * 8 + 2 * EIGHT + PAIR % 2;  // the high bit
                    __m512i codes = _mm512_srli_epi16(words, 4 * PAIR);
                    if constexpr (HAS_HIGH_BITS) {
                        __m512i high = AT < 4 ? _mm512_slli_epi16(above, 4 - AT) : _mm512_srli_epi16(above, AT - 4);
                        codes = _mm512_ternarylogic_epi32(codes, high, _mm512_set1_epi16(0x10), 0xd8);  // bit 4 is high's
                    }
                    _mm512_store_si512(of[index][half][4 * EIGHT + PAIR], _mm512_permutexvar_epi16(codes, table));
                };
                for_each_of(put, std::make_integer_sequence<int, 4>());
            };
            for_each_of(eight_columns, std::make_integer_sequence<int, 4>());
        }
    }

    template <class Use, int... I>
    [[gnu::always_inline]] static void for_each_of(const Use& use, std::integer_sequence<int, I...>) {
        (use(std::integral_constant<int, I>()), ...);
    }
};

// A super ready for products in half tiles.
struct HalfSuper {
    UnpackedSuper numbers;  // scales and offsets alone
    HalfCodes codes;
    int64_t num_groups;
};

// The sums of a group: [2 halves of the lanes][16 rows][16].
struct HalfSums {
    alignas(64) float of[2][AMX_ROWS * AMX_COLUMNS];
};

// Sums of a group that wait for their scales, d and m [32]; row_sums [rows][8].
template <bool HAS_OFFSETS>
struct UnscaledSums {
    const HalfSums* sums = nullptr;
    const float *d, *m, *row_sums;
    float* y;  // [rows][32]
    int num_rows = 0;

    // Adds rows [first, last) to y.
    [[gnu::always_inline]] void add_scaled(int first, int last) const {
        F d_left = load(d), d_right = load(d + W), m_left = zero(), m_right = zero();
        if (HAS_OFFSETS) m_left = load(m), m_right = load(m + W);
        for (int row = first; row < last; row++) {
            float* to = y + row * LANES;
            F left = fma(d_left, load(sums->of[0] + row * W), load(to));
            F right = fma(d_right, load(sums->of[1] + row * W), load(to + W));
            if (HAS_OFFSETS) {
                F of_row = splat(row_sums[row * HalfRows::GROUPS]);
                left = fma(m_left, of_row, left), right = fma(m_right, of_row, right);
            }
            store(to, left), store(to + W, right);
        }
    }
};

// y [num_rows][32] as `SumSuper`, of super `index`. While a group is summed, the sums of the one before are scaled, in
// two parts between its products: a core looks ahead over less than a group, so in one part behind them they take a
// tenth longer. After each group of the first rows `meanwhile(group)` is called.
template <bool HAS_OFFSETS, class Meanwhile>
void sum_half_super(const HalfSuper& super, int64_t index, const HalfRows& rows, int64_t num_rows, float* y,
                    const Meanwhile& meanwhile) {
    HalfSums sums[2];
    UnscaledSums<HAS_OFFSETS> unscaled;
    int turn = 0;
    for (int64_t row = 0; row < num_rows; row += AMX_ROWS) {
        const char* x = rows.tile(row / AMX_ROWS, index * HalfRows::GROUPS);
        const float* row_sums = rows.sums_of(row / AMX_ROWS, index);
        int count = int(std::min<int64_t>(AMX_ROWS, num_rows - row));
        for (int64_t group = 0; group < super.num_groups; group++, turn ^= 1, x += HalfRows::GROUP_BYTES) {
            const auto& codes = super.codes.of[group];
            clear_tile<0>(), clear_tile<1>();
            load_tile<4>(x, 64), load_tile<6>(codes[0], 64), tile_dot_bf16<0, 4, 6>();
            load_tile<7>(codes[1], 64), tile_dot_bf16<1, 4, 7>();
            int half = unscaled.num_rows / 2;
            if (unscaled.sums) unscaled.add_scaled(0, half);
            load_tile<5>(x + HalfRows::GROUP_BYTES / 2, 64), tile_dot_bf16<0, 5, 6>(), tile_dot_bf16<1, 5, 7>();
            if (unscaled.sums) unscaled.add_scaled(half, unscaled.num_rows);
            store_tile<0>(sums[turn].of[0], 64), store_tile<1>(sums[turn].of[1], 64);
            unscaled = {&sums[turn], super.numbers.d + group * LANES, super.numbers.m + group * LANES,
                        row_sums + group, y + row * LANES, count};
            if (row == 0) meanwhile(group);
        }
    }
    unscaled.add_scaled(0, unscaled.num_rows);
}

#endif

}  // namespace millrace
