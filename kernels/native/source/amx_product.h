// Products of up to 32 rows of bf16 with a packed panel, in tile registers: 32 numbers of k at a time.
//
// Each sum is put together in the same way whatever the number of rows: the even and the odd products of 32 numbers of k,
// then these in rising order of k; in int4 by groups, times their scales. So the same row gives the same bits in every
// batch. Weights that are not kept in bf16 become that first, which holds their numbers exactly.
//
// Knows panels and registers; refuses to know whose rows these are, which thread is where, and what becomes of sums.

#pragma once

#include <algorithm>
#include <array>

#include "amx.h"
#include "panels.h"

namespace millrace {

constexpr int64_t AMX_STEP = 2 * AMX_PAIRS;      // numbers of k that are multiplied at a time
constexpr int64_t STEP_SIZE = AMX_STEP * PANEL;  // numbers of a panel in a step
constexpr int AMX_TILE_ROWS = 2 * AMX_ROWS;      // of a product: two registers

// Registers 0 to 3 are sums: of up to 16 rows with one panel or two, of more with one. 4 and 5 are rows, 6 and 7 columns.
inline const TileShapes& product_shapes(int num_rows) {
    static const auto all = [] {
        std::array<TileShapes, AMX_TILE_ROWS + 1> made;
        for (int rows = 1; rows <= AMX_TILE_ROWS; rows++) {
            int first = std::min(rows, AMX_ROWS), second = rows > AMX_ROWS ? rows - AMX_ROWS : rows;
            for (int tile : {0, 1, 4}) made[rows].set(tile, first, AMX_PAIRS);
            for (int tile : {2, 3, 5}) made[rows].set(tile, second, AMX_PAIRS);
            for (int tile : {6, 7}) made[rows].set(tile, AMX_PAIRS, AMX_PAIRS);
        }
        return made;
    }();
    return all[num_rows];
}

// Adds a step: rows [rows][32] by the columns [16 pairs][32][2] of each panel. HALVES: 2 if there are more than 16 rows.
template <int HALVES, int PANELS>
inline void add_step(const bf16* x, const bf16* const (&columns)[PANELS]) {
    load_tile<4>(x, 2 * AMX_STEP);
    stream_tile<6>(columns[0], 4 * PANEL);
    stream_tile<7>(columns[0] + PANEL, 4 * PANEL);
    add_products<0, 4, 6>();
    add_products<1, 4, 7>();
    if constexpr (HALVES == 2) {
        load_tile<5>(x + AMX_ROWS * AMX_STEP, 2 * AMX_STEP);
        add_products<2, 5, 6>();
        add_products<3, 5, 7>();
    }
    if constexpr (PANELS == 2) {
        stream_tile<6>(columns[1], 4 * PANEL);
        stream_tile<7>(columns[1] + PANEL, 4 * PANEL);
        add_products<2, 4, 6>();
        add_products<3, 4, 7>();
    }
}

constexpr int64_t OUT_SIZE = AMX_ROWS * PANEL;  // of the sums of 16 rows

inline void clear_sums() { clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>(); }

// To [rows][32], of two panels one after the other.
template <int HALVES, int PANELS>
inline void store_sums(float* to) {
    constexpr int64_t APART = 4 * PANEL;
    store_tile<0>(to, APART), store_tile<1>(to + AMX_COLUMNS, APART);
    if (HALVES * PANELS == 1) return;
    store_tile<2>(to + OUT_SIZE, APART), store_tile<3>(to + OUT_SIZE + AMX_COLUMNS, APART);
}

// A step's columns in bf16; those pairs that are not in [begin, end) are zeros.
template <class Stored>
void widen_step(const Stored* panel, int64_t step, int64_t begin, int64_t end, bf16* to) {
    for (int64_t pair = step * AMX_PAIRS; pair < (step + 1) * AMX_PAIRS; pair++, to += 2 * PANEL)
        for (int64_t lane = 0; lane < PANEL; lane += W)
            store(reinterpret_cast<float*>(to) + lane,
                  pair >= begin && pair < end ? pairs_of(panel, pair, PANEL, lane) : zero());
}

// Lines that are fetched while a panel is multiplied: `share` bytes from `place` on with each step, until `end`.
struct StepsAhead {
    const char *place, *end;
    int64_t share;

    void fetch_next() {
        for (const char* last = std::min(end, place + share); place < last; place += 64) _mm_prefetch(place, _MM_HINT_T1);
    }
};

// A panel as bf16, which the first tile of rows leaves for the others; whether it is there yet.
struct WidePanel {
    bf16* place = nullptr;  // none: nothing is
    bool is_made = false;
};

// Whether a panel's steps lie in one group each, and so may be left behind.
inline bool has_whole_steps(const Linear& linear) {
    return linear.num_groups() <= 1 || linear.group_pairs() % AMX_PAIRS == 0;
}

// One of the panels that are multiplied together.
template <class Stored>
struct PanelInTiles {
    const Stored* numbers;
    const bf16* scales;  // [groups][32] or none
    StepsAhead ahead;
    WidePanel wide;
};

// x [k / 32][rows][32] by some panels, to out [rows][32], OUT_SIZE from one panel to the next one.
template <int HALVES, int PANELS, class Stored>
void multiply_in_tiles(const bf16* x, int rows, const Linear& linear, PanelInTiles<Stored> (&panels)[PANELS], float* out) {
    constexpr int64_t SOME = 4;  // steps whose columns are made before they are read
    constexpr bool IS_READ = std::is_same<Stored, bf16>::value;  // as it is stored, where a step is whole
    alignas(64) bf16 made[PANELS][SOME * STEP_SIZE];
    alignas(64) float sums[std::max(HALVES, PANELS) * OUT_SIZE];
    int64_t num_pairs = linear.k / 2, size = linear.group_pairs();
    for (int64_t begin = 0; begin < num_pairs; begin += size) {
        int64_t end = std::min(begin + size, num_pairs), step = begin / AMX_PAIRS;
        const bf16* columns[PANELS];
        auto add = [&] { add_step<HALVES, PANELS>(x + step++ * AMX_STEP * rows, columns); };
        clear_sums();
        if constexpr (IS_READ) {
            for (; (step + 1) * AMX_PAIRS <= end; add()) {
                UNROLL for (int i = 0; i < PANELS; i++) panels[i].ahead.fetch_next();
                UNROLL for (int i = 0; i < PANELS; i++) columns[i] = panels[i].numbers + step * STEP_SIZE;
            }
        } else if (panels[0].wide.is_made) {
            for (; step * AMX_PAIRS < end; add()) {
                UNROLL for (int i = 0; i < PANELS; i++) panels[i].ahead.fetch_next();
                UNROLL for (int i = 0; i < PANELS; i++) columns[i] = panels[i].wide.place + step * STEP_SIZE;
            }
        }
        while (step * AMX_PAIRS < end) {
            int64_t first = step, last = std::min(first + SOME, ceil_div(end, AMX_PAIRS));
            bf16* to[PANELS];
            for (int i = 0; i < PANELS; i++) {
                to[i] = panels[i].wide.place ? panels[i].wide.place + first * STEP_SIZE : made[i];
                for (int64_t some = first; some < last; some++) {
                    panels[i].ahead.fetch_next();
                    widen_step(panels[i].numbers, some, begin, end, to[i] + (some - first) * STEP_SIZE);
                }
            }
            for (; step < last; add())
                UNROLL for (int i = 0; i < PANELS; i++) columns[i] = to[i] + (step - first) * STEP_SIZE;
        }
        bool is_scaled = panels[0].scales != nullptr;
        store_sums<HALVES, PANELS>(is_scaled ? sums : out);
        if (!is_scaled) return;
        for (int panel = 0; panel < PANELS; panel++) {
            const float* from = sums + panel * OUT_SIZE;
            float* to = out + panel * OUT_SIZE;
            for (int64_t lane = 0; lane < PANEL; lane += W) {
                F scale = load(panels[panel].scales + begin / size * PANEL + lane);
                for (int64_t i = lane; i < rows * PANEL; i += PANEL)
                    store(to + i, begin ? fma(load(from + i), scale, load(to + i)) : mul(load(from + i), scale));
            }
        }
    }
}

}  // namespace millrace
