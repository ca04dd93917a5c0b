// Products of up to 32 rows of bf16 with a packed panel, in tile registers: 32 numbers of k at a time.
//
// Each sum is put together in the same way whatever the number of rows: the even and the odd products of 32 numbers of k,
// then these in rising order of k; in int4 by groups, times their scales. So the same row gives the same bits in every
// batch. Weights that are not kept in bf16 become that first, which holds their numbers exactly.

#pragma once

#include <algorithm>
#include <array>

#include "amx.h"
#include "panels.h"

namespace millrace {

constexpr int64_t AMX_STEP = 2 * AMX_PAIRS;      // numbers of k that are multiplied at a time
constexpr int64_t STEP_SIZE = AMX_STEP * PANEL;  // numbers of a panel in a step
constexpr int AMX_TILE_ROWS = 2 * AMX_ROWS;      // of a product: two registers

// Registers 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns.
inline const TileShapes& product_shapes(int num_rows) {
    static const auto all = [] {
        std::array<TileShapes, AMX_TILE_ROWS + 1> made;
        for (int rows = 1; rows <= AMX_TILE_ROWS; rows++) {
            int first = std::min(rows, AMX_ROWS), second = rows - first;
            for (int tile : {0, 1, 4}) made[rows].set(tile, first, AMX_PAIRS);
            for (int tile : {2, 3, 5}) made[rows].set(tile, second, AMX_PAIRS);
            for (int tile : {6, 7}) made[rows].set(tile, AMX_PAIRS, AMX_PAIRS);
        }
        return made;
    }();
    return all[num_rows];
}

// Adds a step: rows [rows][32] by columns [16 pairs][32][2]. REGISTERS of rows: 2 if there are more than 16.
template <int REGISTERS>
inline void add_step(const bf16* x, const bf16* columns) {
    stream_tile<6>(columns, 4 * PANEL);
    stream_tile<7>(columns + PANEL, 4 * PANEL);
    load_tile<4>(x, 2 * AMX_STEP);
    add_products<0, 4, 6>();
    add_products<1, 4, 7>();
    if (REGISTERS == 1) return;
    load_tile<5>(x + AMX_ROWS * AMX_STEP, 2 * AMX_STEP);
    add_products<2, 5, 6>();
    add_products<3, 5, 7>();
}

template <int REGISTERS>
inline void clear_sums() {
    clear_tile<0>(), clear_tile<1>();
    if (REGISTERS == 2) clear_tile<2>(), clear_tile<3>();
}

// To [rows][32].
template <int REGISTERS>
inline void store_sums(float* to) {
    constexpr int64_t APART = 4 * PANEL;
    store_tile<0>(to, APART), store_tile<1>(to + AMX_PAIRS, APART);
    if (REGISTERS == 1) return;
    to += AMX_ROWS * PANEL;
    store_tile<2>(to, APART), store_tile<3>(to + AMX_PAIRS, APART);
}

// A step's columns in bf16; those pairs that are not in [begin, end) are zeros.
template <class Stored>
void widen_step(const Stored* panel, int64_t step, int64_t begin, int64_t end, bf16* to) {
    for (int64_t pair = step * AMX_PAIRS; pair < (step + 1) * AMX_PAIRS; pair++, to += 2 * PANEL)
        for (int64_t lane = 0; lane < PANEL; lane += W)
            store(reinterpret_cast<float*>(to) + lane,
                  pair >= begin && pair < end ? pairs_of(panel, pair, PANEL, lane) : zero());
}

// Lines that are fetched while a panel is multiplied: `share` bytes from `place` on with each step.
struct StepsAhead {
    const char* place;
    int64_t share;

    void fetch_next() {
        for (const char* end = place + share; place < end; place += 64) _mm_prefetch(place, _MM_HINT_T1);
    }
};

// What is left of a panel as bf16 for other rows, and by whom.
struct WidePanel {
    bf16* place = nullptr;  // none: nothing is
    bool is_made = false;
};

// Whether a panel's steps lie in one group each, and so may be left behind.
inline bool has_whole_steps(const Linear& linear) {
    return linear.num_groups() <= 1 || linear.group_pairs() % AMX_PAIRS == 0;
}

// x [k / 32][rows][32] by a panel, to out [rows][32]. `scales` [groups][32] or none.
template <int REGISTERS, class Stored>
void multiply_in_tiles(const bf16* x, int rows, const Stored* panel, const Linear& linear, const bf16* scales,
                       StepsAhead ahead, WidePanel wide, float* out) {
    constexpr int64_t SOME = 4;  // steps whose columns are made before they are read
    alignas(64) bf16 made[SOME * STEP_SIZE];
    alignas(64) float sums[REGISTERS * AMX_ROWS * PANEL];
    int64_t num_pairs = linear.k / 2, size = linear.group_pairs();
    for (int64_t begin = 0; begin < num_pairs; begin += size, scales += PANEL) {
        int64_t end = std::min(begin + size, num_pairs), step = begin / AMX_PAIRS;
        clear_sums<REGISTERS>();
        auto add = [&](const bf16* columns) {
            ahead.fetch_next();
            add_step<REGISTERS>(x + step * AMX_STEP * rows, columns);
            step++;
        };
        if constexpr (std::is_same<Stored, bf16>::value)
            while ((step + 1) * AMX_PAIRS <= end) add(panel + step * STEP_SIZE);
        else if (wide.place && wide.is_made)
            while (step * AMX_PAIRS < end) add(wide.place + step * STEP_SIZE);
        while (step * AMX_PAIRS < end) {
            int64_t first = step, last = std::min(first + SOME, ceil_div(end, AMX_PAIRS));
            bf16* columns = wide.place ? wide.place + first * STEP_SIZE : made;
            for (int64_t i = first; i < last; i++) widen_step(panel, i, begin, end, columns + (i - first) * STEP_SIZE);
            for (int64_t i = first; i < last; i++) add(columns + (i - first) * STEP_SIZE);
        }
        store_sums<REGISTERS>(scales ? sums : out);
        if (!scales) return;
        for (int64_t lane = 0; lane < PANEL; lane += W) {
            F scale = load(scales + lane);
            for (int64_t i = lane; i < rows * PANEL; i += PANEL)
                store(out + i, begin ? fma(load(sums + i), scale, load(out + i)) : mul(load(sums + i), scale));
        }
    }
}

}  // namespace millrace
