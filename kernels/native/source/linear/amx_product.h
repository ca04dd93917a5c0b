// Products of up to 32 rows of bf16 with packed panels, in tile registers: 32 numbers of k at a time.
//
// Each sum is put together in the same way whatever the number of rows: the even and the odd products of 32 numbers of k,
// then these in rising order of k; in int4 by groups, times their scales. So the same row gives the same bits in every
// batch. Weights that are not kept in bf16 become that first, which holds their numbers exactly: a step of k ahead of what is
// multiplied, so that a core does both at a time. Four steps at a time and then their products took coded ones a third longer,
// a step of 1 / 8 rows with int8 weights 10 to 35 / 16 to 22 % longer, of 32 rows 4 % less, with int4 of one row 7 % longer
// (the two shapes, two cores of a Granite Rapids class Xeon). Of what is in the caches 1,024 numbers take a core 42 ns to widen
// and to multiply by a row, whether they are coded, int8 or int4, and with half the instructions as well; memory gives a core
// those of int8 in 54 to 60 ns.
//
// Knows panels and registers; refuses to know whose rows these are, which thread is where, and what becomes of sums.

#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "machine/amx.h"
#include "weights/bf16_12bit.h"
#include "linear/panels.h"

namespace millrace {

constexpr int64_t STEP_SIZE = AMX_STEP * PANEL;  // numbers of a panel in a step
constexpr int64_t OUT_SIZE = AMX_ROWS * PANEL;   // of the sums of 16 rows

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

// Lines that are fetched while steps are multiplied: `share` of them with each step from each of `streams` places, which
// are `apart` bytes from each other, the first one from `place` to `end`; and after these from `next_place` to `next_end`.
struct StepsAhead {
    const char *place, *end;
    int64_t share, streams, apart;
    const char *next_place = nullptr, *next_end = nullptr;

    void fetch_next() {
        for (int64_t line = 0; line < share; line++, place += 64) {
            if (place >= end) {
                if (next_place >= next_end) return;
                place = next_place, end = next_place = next_end;
            }
            for (int64_t i = 0; i < streams; i++) _mm_prefetch(place + i * apart, _MM_HINT_T1);
        }
    }
};

// Adds steps: rows [steps][rows][32] by the columns [steps][16 pairs][32][2] of each panel. HALVES: 2 if there are more than
// 16 rows. IS_ONCE: nobody else reads these columns soon.
template <int HALVES, int PANELS, bool IS_ONCE>
inline void add_steps(const bf16* x, int rows, const bf16* const (&columns)[PANELS], int64_t num_steps,
                      StepsAhead (&ahead)[PANELS]) {
    static_assert(HALVES * PANELS <= 2, "there are four registers of sums");
    constexpr auto load_columns = [](auto tile, const bf16* from) {
        if constexpr (IS_ONCE)
            stream_tile<decltype(tile)::value>(from, 4 * PANEL);
        else
            load_tile<decltype(tile)::value>(from, 4 * PANEL);
    };
    constexpr std::integral_constant<int, 6> LEFT;
    constexpr std::integral_constant<int, 7> RIGHT;
    const bf16* at[PANELS];
    UNROLL for (int i = 0; i < PANELS; i++) at[i] = columns[i];
    for (int64_t step = 0; step < num_steps; step++, x += AMX_STEP * rows) {
        UNROLL for (int i = 0; i < PANELS; i++) ahead[i].fetch_next();
        load_tile<4>(x, 2 * AMX_STEP);
        load_columns(LEFT, at[0]), load_columns(RIGHT, at[0] + PANEL);
        add_products<0, 4, 6>(), add_products<1, 4, 7>();
        if constexpr (HALVES == 2) {
            load_tile<5>(x + AMX_ROWS * AMX_STEP, 2 * AMX_STEP);
            add_products<2, 5, 6>(), add_products<3, 5, 7>();
        }
        if constexpr (PANELS == 2) {
            load_columns(LEFT, at[1]), load_columns(RIGHT, at[1] + PANEL);
            add_products<2, 4, 6>(), add_products<3, 4, 7>();
        }
        UNROLL for (int i = 0; i < PANELS; i++) at[i] += STEP_SIZE;
    }
}

inline void clear_sums() { clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>(); }

// Of [rows][32], of two panels one after the other.
template <int HALVES, int PANELS>
inline void load_sums(const float* from) {
    constexpr int64_t APART = 4 * PANEL;
    load_tile<0>(from, APART), load_tile<1>(from + AMX_COLUMNS, APART);
    if (HALVES * PANELS == 1) return;
    load_tile<2>(from + OUT_SIZE, APART), load_tile<3>(from + OUT_SIZE + AMX_COLUMNS, APART);
}
template <int HALVES, int PANELS>
inline void store_sums(float* to) {
    constexpr int64_t APART = 4 * PANEL;
    store_tile<0>(to, APART), store_tile<1>(to + AMX_COLUMNS, APART);
    if (HALVES * PANELS == 1) return;
    store_tile<2>(to + OUT_SIZE, APART), store_tile<3>(to + OUT_SIZE + AMX_COLUMNS, APART);
}

// Sums [rows][32] times a panel's scales [32], on top of those `before`, if there are any. All may be the same place.
inline void scale_sums(const float* sums, const bf16* scales, int rows, const float* before, float* to) {
    for (int64_t lane = 0; lane < PANEL; lane += W) {
        F scale = load(scales + lane);
        for (int64_t i = lane; i < rows * PANEL; i += PANEL)
            store(to + i, before ? fma(load(sums + i), scale, load(before + i)) : mul(load(sums + i), scale));
    }
}

// Pairs [begin, end) of k, by which all tiles of rows are multiplied before the next ones. `part` of them are summed one after
// the other: all, or a group.
struct Block {
    int64_t begin, end, part;
    bool is_grouped;

    // use(first, last, step, end_step) for the parts' pairs [first, last), and the steps that these are in.
    template <class Use>
    void each_part(const Use& use) const {
        for (int64_t first = begin; first < end; first += part) {
            int64_t last = std::min(first + part, end);
            use(first, last, first / AMX_PAIRS, ceil_div(last, AMX_PAIRS));
        }
    }
    int64_t num_steps() const {
        int64_t num = 0;
        each_part([&](int64_t, int64_t, int64_t step, int64_t end_step) { num += end_step - step; });
        return num;
    }
};

// A panel's columns in bf16, made one step after the other.
template <class Stored>
class Columns {
  public:
    Columns(const Stored* panel, int64_t) : panel_(panel) {}  // and the step that is made first

    // Those pairs that are not in [begin, end) are zeros. A step that two groups share is made for both.
    void make(int64_t step, int64_t begin, int64_t end, bf16* to) const {
        for (int64_t pair = step * AMX_PAIRS; pair < (step + 1) * AMX_PAIRS; pair++, to += 2 * PANEL)
            for (int64_t lane = 0; lane < PANEL; lane += W)
                store(reinterpret_cast<float*>(to) + lane,
                      pair >= begin && pair < end ? pairs_of(panel_, pair, PANEL, lane) : zero());
    }

  private:
    const Stored* panel_;
};

#if defined(MILLRACE_BF16_DOT)
template <>
class Columns<Coded> {
  public:
    Columns(const Coded* panel, int64_t step) : blocks_(panel, step * AMX_PAIRS / 2) {}

    void make(int64_t step, int64_t, int64_t end, bf16* to) {
        auto out = reinterpret_cast<float*>(to);
        for (int64_t pair = step * AMX_PAIRS; pair < (step + 1) * AMX_PAIRS; pair += 2) {
            F pairs[2][2] = {{zero(), zero()}, {zero(), zero()}};
            if (pair < end) blocks_.read(pairs);
            UNROLL for (int i = 0; i < 4; i++, out += W) store(out, pairs[i / 2][i % 2]);
        }
    }

  private:
    CodedBlocks blocks_;
};
#endif

// A block's columns as they are multiplied, part by part: in `made`, or where they lie if all of them lie like that.
template <class Stored>
const bf16* columns_of(const Stored* panel, const Block& block, bf16* made) {
    if constexpr (std::is_same<Stored, bf16>::value)
        if (block.end % AMX_PAIRS == 0) return panel + block.begin / AMX_PAIRS * STEP_SIZE;
    const bf16* all = made;
    Columns<Stored> columns(panel, block.begin / AMX_PAIRS);
    block.each_part([&](int64_t first, int64_t last, int64_t step, int64_t end_step) {
        for (; step < end_step; step++, made += STEP_SIZE) columns.make(step, first, last, made);
    });
    return all;
}

// Rows x [k / 32][rows][32] by a block's columns, on top of the sums [rows][32] `before`, if any pair comes before it: to
// `to`, which may be the same place. Without groups sums are not scaled yet.
template <int HALVES>
void multiply_block(const bf16* x, int rows, const Block& block, const bf16* columns, const bf16* scales,
                    StepsAhead (&ahead)[1], const float* before, float* to) {
    alignas(64) float sums[HALVES * OUT_SIZE];
    block.each_part([&](int64_t first, int64_t, int64_t step, int64_t end_step) {
        bool is_continued = first > 0 && !block.is_grouped;
        if (is_continued)
            load_sums<HALVES, 1>(before);
        else
            clear_sums();
        add_steps<HALVES, 1, false>(x + step * AMX_STEP * rows, rows, {columns}, end_step - step, ahead);
        columns += (end_step - step) * STEP_SIZE;
        store_sums<HALVES, 1>(block.is_grouped ? sums : to);
        if (!block.is_grouped) return;
        scale_sums(sums, scales + first / block.part * PANEL, rows, first > 0 ? before : nullptr, to);
        before = to;
    });
}

// One of the panels that are multiplied together.
template <class Stored>
struct PanelInTiles {
    const Stored* numbers;
    const bf16* scales;  // [groups][32] or none
    StepsAhead ahead;
};

// Rows by whole panels, which nobody reads after this, all scaled: out [rows][32], OUT_SIZE from one panel to the next one.
template <int HALVES, int PANELS, class Stored>
void multiply_once(const bf16* x, int rows, const Linear& linear, PanelInTiles<Stored> (&panels)[PANELS], float* out) {
    alignas(64) bf16 made[2][PANELS][STEP_SIZE];  // the columns of a step, and of the next one
    alignas(64) float sums[std::max(HALVES, PANELS) * OUT_SIZE];
    StepsAhead ahead[PANELS], none[PANELS] = {};
    std::optional<Columns<Stored>> makers[PANELS];
    for (int i = 0; i < PANELS; i++) ahead[i] = panels[i].ahead, makers[i].emplace(panels[i].numbers, 0);
    int64_t num_pairs = linear.k / 2, size = linear.group_pairs();
    for (int64_t begin = 0; begin < num_pairs; begin += size) {
        int64_t end = std::min(begin + size, num_pairs), step = begin / AMX_PAIRS, end_step = ceil_div(end, AMX_PAIRS);
        auto add = [&](const bf16* const (&columns)[PANELS], int64_t num_steps, StepsAhead (&fetched)[PANELS]) {
            add_steps<HALVES, PANELS, true>(x + step * AMX_STEP * rows, rows, columns, num_steps, fetched);
            step += num_steps;
        };
        auto make = [&](int64_t step) {
            UNROLL for (int i = 0; i < PANELS; i++) {
                makers[i]->make(step, begin, end, made[step % 2][i]);
                ahead[i].fetch_next();
            }
        };
        clear_sums();
        if constexpr (std::is_same<Stored, bf16>::value) {
            const bf16* columns[PANELS];
            UNROLL for (int i = 0; i < PANELS; i++) columns[i] = panels[i].numbers;
            add(columns, end / AMX_PAIRS, ahead);
        }
        if (step < end_step) make(step);
        while (step < end_step) {
            if (step + 1 < end_step) make(step + 1);
            const bf16* columns[PANELS];
            UNROLL for (int i = 0; i < PANELS; i++) columns[i] = made[step % 2][i];
            add(columns, 1, none);
        }
        bool is_scaled = panels[0].scales != nullptr;
        store_sums<HALVES, PANELS>(is_scaled ? sums : out);
        if (!is_scaled) return;
        for (int i = 0; i < PANELS; i++) {
            float* to = out + i * OUT_SIZE;
            scale_sums(sums + i * OUT_SIZE, panels[i].scales + begin / size * PANEL, rows, begin ? to : nullptr, to);
        }
    }
}

}  // namespace millrace
