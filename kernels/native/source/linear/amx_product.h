// AMX kernels of the products: up to 32 rows of bf16 by packed panels, 32 elements of k at a time.
//
// NOTE: each sum is computed in the same order whatever the number of rows: the even and the odd products of 32
// elements of k, then these in rising order of k; in int4 by groups, times their scales. So a row gives the same bits
// in every batch.
//
// Weights that are not stored in bf16 are converted, exactly, one step of k ahead of the products, so that a core does
// both at a time. Converting four steps first and multiplying them then took a third longer with 12-bit weights; with
// int8 weights steps of 1 / 8 rows took 10 to 35 / 16 to 22 % longer and of 32 rows 4 % less; with int4 and one row 7 %
// longer (the two shapes, two cores of a Granite Rapids class Xeon). From the caches a core converts 1,024 numbers and
// multiplies them by a row in 42 ns, whether 12-bit, int8 or int4, and also with half the instructions; memory delivers
// 1,024 int8 numbers to a core in 54 to 60 ns.
//
// Called by AmxLinear, on each compute thread.

#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "machine/amx.h"
#include "weights/bf16_12bit.h"
#include "linear/panels.h"

namespace millrace {

constexpr int64_t STEP_SIZE = AMX_K_STEP * PANEL;  // numbers of a panel in a step
constexpr int64_t OUT_SIZE = AMX_ROWS * PANEL;     // sums of 16 rows

// Registers 0 to 3 hold sums: of up to 16 rows by one or two panels, of more rows by one. 4 and 5 hold rows, 6 and 7
// columns.
inline const TileConfig& product_tile_config(int num_rows) {
    static const auto all = [] {
        std::array<TileConfig, AMX_TILE_ROWS + 1> configs;
        for (int rows = 1; rows <= AMX_TILE_ROWS; rows++) {
            int first = std::min(rows, AMX_ROWS), second = rows > AMX_ROWS ? rows - AMX_ROWS : rows;
            for (int tile : {0, 1, 4}) configs[rows].set(tile, first, AMX_PAIRS);
            for (int tile : {2, 3, 5}) configs[rows].set(tile, second, AMX_PAIRS);
            for (int tile : {6, 7}) configs[rows].set(tile, AMX_PAIRS, AMX_PAIRS);
        }
        return configs;
    }();
    return all[num_rows];
}

// Lines to prefetch while steps are multiplied: with each step `lines_per_step` from each of `streams` addresses,
// `stride` bytes apart, the first from `address` to `end`; then from `next_address` to `next_end`.
struct StepPrefetch {
    const char *address, *end;
    int64_t lines_per_step, streams, stride;
    const char *next_address = nullptr, *next_end = nullptr;

    void prefetch_next() {
        for (int64_t line = 0; line < lines_per_step; line++, address += 64) {
            if (address >= end) {
                if (next_address >= next_end) return;
                address = next_address, end = next_address = next_end;
            }
            for (int64_t i = 0; i < streams; i++) _mm_prefetch(address + i * stride, _MM_HINT_T1);
        }
    }
};

// Adds steps: rows [steps][rows][32] by the columns [steps][16 pairs][32][2] of each panel. ROW_REGISTERS: 2 for more
// than 16 rows. STREAMS: the columns are read non-temporally.
template <int ROW_REGISTERS, int PANELS, bool STREAMS>
inline void add_steps(const bf16* x, int rows, const bf16* const (&columns)[PANELS], int64_t num_steps,
                      StepPrefetch (&prefetch)[PANELS]) {
    static_assert(ROW_REGISTERS * PANELS <= 2, "there are four registers of sums");
    constexpr auto load_columns = [](auto tile, const bf16* from) {
        if constexpr (STREAMS)
            stream_tile<decltype(tile)::value>(from, 4 * PANEL);
        else
            load_tile<decltype(tile)::value>(from, 4 * PANEL);
    };
    constexpr std::integral_constant<int, 6> LEFT;
    constexpr std::integral_constant<int, 7> RIGHT;
    const bf16* at[PANELS];
    UNROLL for (int i = 0; i < PANELS; i++) at[i] = columns[i];
    for (int64_t step = 0; step < num_steps; step++, x += AMX_K_STEP * rows) {
        UNROLL for (int i = 0; i < PANELS; i++) prefetch[i].prefetch_next();
        load_tile<4>(x, 2 * AMX_K_STEP);
        load_columns(LEFT, at[0]), load_columns(RIGHT, at[0] + PANEL);
        tile_dot_bf16<0, 4, 6>(), tile_dot_bf16<1, 4, 7>();
        if constexpr (ROW_REGISTERS == 2) {
            load_tile<5>(x + AMX_ROWS * AMX_K_STEP, 2 * AMX_K_STEP);
            tile_dot_bf16<2, 5, 6>(), tile_dot_bf16<3, 5, 7>();
        }
        if constexpr (PANELS == 2) {
            load_columns(LEFT, at[1]), load_columns(RIGHT, at[1] + PANEL);
            tile_dot_bf16<2, 4, 6>(), tile_dot_bf16<3, 4, 7>();
        }
        UNROLL for (int i = 0; i < PANELS; i++) at[i] += STEP_SIZE;
    }
}

inline void clear_sums() { clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>(); }

// Loads and stores sums [rows][32], of two panels one after the other.
template <int ROW_REGISTERS, int PANELS>
inline void load_sums(const float* from) {
    constexpr int64_t STRIDE = 4 * PANEL;
    load_tile<0>(from, STRIDE), load_tile<1>(from + AMX_COLUMNS, STRIDE);
    if (ROW_REGISTERS * PANELS == 1) return;
    load_tile<2>(from + OUT_SIZE, STRIDE), load_tile<3>(from + OUT_SIZE + AMX_COLUMNS, STRIDE);
}
template <int ROW_REGISTERS, int PANELS>
inline void store_sums(float* to) {
    constexpr int64_t STRIDE = 4 * PANEL;
    store_tile<0>(to, STRIDE), store_tile<1>(to + AMX_COLUMNS, STRIDE);
    if (ROW_REGISTERS * PANELS == 1) return;
    store_tile<2>(to + OUT_SIZE, STRIDE), store_tile<3>(to + OUT_SIZE + AMX_COLUMNS, STRIDE);
}

// to = sums [rows][32] * scales [32] (+ before, unless null). All may be the same memory.
inline void scale_sums(const float* sums, const bf16* scales, int rows, const float* before, float* to) {
    for (int64_t lane = 0; lane < PANEL; lane += W) {
        F scale = load(scales + lane);
        for (int64_t i = lane; i < rows * PANEL; i += PANEL)
            store(to + i, before ? fma(load(sums + i), scale, load(before + i)) : mul(load(sums + i), scale));
    }
}

// Pairs [begin, end) of k, by which all tiles of rows are multiplied before the next block. `part` pairs are summed in
// one chain: all, or a group.
struct KBlock {
    int64_t begin, end, part;
    bool is_grouped;

    // Calls use(first, last, step, end_step) for the pairs [first, last) of each part and the steps that contain them.
    template <class Use>
    void for_each_part(const Use& use) const {
        for (int64_t first = begin; first < end; first += part) {
            int64_t last = std::min(first + part, end);
            use(first, last, first / AMX_PAIRS, ceil_div(last, AMX_PAIRS));
        }
    }
    int64_t num_steps() const {
        int64_t num = 0;
        for_each_part([&](int64_t, int64_t, int64_t step, int64_t end_step) { num += end_step - step; });
        return num;
    }
};

// Converts a panel's columns to bf16, step by step.
template <class Stored>
class ColumnConverter {
  public:
    ColumnConverter(const Stored* panel, int64_t) : panel_(panel) {}  // `step`, the first step, is not needed

    // Converts a step; pairs outside [begin, end) become zeros. A step that two groups share is converted for each.
    void convert(int64_t step, int64_t begin, int64_t end, bf16* to) const {
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
class ColumnConverter<Bf16In12Bits> {
  public:
    ColumnConverter(const Bf16In12Bits* panel, int64_t step) : blocks_(panel, step * AMX_PAIRS / 2) {}

    void convert(int64_t step, int64_t, int64_t end, bf16* to) {
        auto out = reinterpret_cast<float*>(to);
        for (int64_t pair = step * AMX_PAIRS; pair < (step + 1) * AMX_PAIRS; pair += 2) {
            F pairs[2][2] = {{zero(), zero()}, {zero(), zero()}};
            if (pair < end) blocks_.read(pairs);
            UNROLL for (int i = 0; i < 4; i++, out += W) store(out, pairs[i / 2][i % 2]);
        }
    }

  private:
    Bf16In12BitsReader blocks_;
};
#endif

// A block's columns as they are multiplied, part by part: converted, or the stored ones if these have that layout.
template <class Stored>
const bf16* converted_columns(const Stored* panel, const KBlock& block, bf16* converted) {
    if constexpr (std::is_same<Stored, bf16>::value)
        if (block.end % AMX_PAIRS == 0) return panel + block.begin / AMX_PAIRS * STEP_SIZE;
    const bf16* all = converted;
    ColumnConverter<Stored> columns(panel, block.begin / AMX_PAIRS);
    block.for_each_part([&](int64_t first, int64_t last, int64_t step, int64_t end_step) {
        for (; step < end_step; step++, converted += STEP_SIZE) columns.convert(step, first, last, converted);
    });
    return all;
}

// Rows x [k / 32][rows][32] by a block's columns, added to the sums `before` [rows][32] of the blocks before it, to
// `to`, which may be `before`. Without groups the sums are not scaled yet.
template <int ROW_REGISTERS>
void multiply_block(const bf16* x, int rows, const KBlock& block, const bf16* columns, const bf16* scales,
                    StepPrefetch (&prefetch)[1], const float* before, float* to) {
    alignas(64) float sums[ROW_REGISTERS * OUT_SIZE];
    block.for_each_part([&](int64_t first, int64_t, int64_t step, int64_t end_step) {
        bool is_continued = first > 0 && !block.is_grouped;
        if (is_continued)
            load_sums<ROW_REGISTERS, 1>(before);
        else
            clear_sums();
        add_steps<ROW_REGISTERS, 1, false>(x + step * AMX_K_STEP * rows, rows, {columns}, end_step - step, prefetch);
        columns += (end_step - step) * STEP_SIZE;
        store_sums<ROW_REGISTERS, 1>(block.is_grouped ? sums : to);
        if (!block.is_grouped) return;
        scale_sums(sums, scales + first / block.part * PANEL, rows, first > 0 ? before : nullptr, to);
        before = to;
    });
}

// One of the panels that are multiplied together.
template <class Stored>
struct AmxPanel {
    const Stored* numbers;
    const bf16* scales;  // [groups][32] or null
    StepPrefetch prefetch;
};

// Rows by whole panels, read non-temporally, with scales applied: out [rows][32], panels OUT_SIZE apart.
template <int ROW_REGISTERS, int PANELS, class Stored>
void multiply_once(const bf16* x, int rows, const Linear& linear, AmxPanel<Stored> (&panels)[PANELS], float* out) {
    alignas(64) bf16 converted[2][PANELS][STEP_SIZE];  // the columns of a step and of the next one
    alignas(64) float sums[std::max(ROW_REGISTERS, PANELS) * OUT_SIZE];
    StepPrefetch prefetch[PANELS], none[PANELS] = {};
    std::optional<ColumnConverter<Stored>> converters[PANELS];
    for (int i = 0; i < PANELS; i++) prefetch[i] = panels[i].prefetch, converters[i].emplace(panels[i].numbers, 0);
    int64_t num_pairs = linear.k / 2, size = linear.group_pairs();
    for (int64_t begin = 0; begin < num_pairs; begin += size) {
        int64_t end = std::min(begin + size, num_pairs), step = begin / AMX_PAIRS, end_step = ceil_div(end, AMX_PAIRS);
        auto add = [&](const bf16* const (&columns)[PANELS], int64_t num_steps, StepPrefetch (&prefetch)[PANELS]) {
            add_steps<ROW_REGISTERS, PANELS, true>(x + step * AMX_K_STEP * rows, rows, columns, num_steps, prefetch);
            step += num_steps;
        };
        auto convert = [&](int64_t step) {
            UNROLL for (int i = 0; i < PANELS; i++) {
                converters[i]->convert(step, begin, end, converted[step % 2][i]);
                prefetch[i].prefetch_next();
            }
        };
        clear_sums();
        if constexpr (std::is_same<Stored, bf16>::value) {
            const bf16* columns[PANELS];
            UNROLL for (int i = 0; i < PANELS; i++) columns[i] = panels[i].numbers;
            add(columns, end / AMX_PAIRS, prefetch);
        }
        if (step < end_step) convert(step);
        while (step < end_step) {
            if (step + 1 < end_step) convert(step + 1);
            const bf16* columns[PANELS];
            UNROLL for (int i = 0; i < PANELS; i++) columns[i] = converted[step % 2][i];
            add(columns, 1, none);
        }
        bool is_scaled = panels[0].scales != nullptr;
        store_sums<ROW_REGISTERS, PANELS>(is_scaled ? sums : out);
        if (!is_scaled) return;
        for (int i = 0; i < PANELS; i++) {
            float* to = out + i * OUT_SIZE;
            scale_sums(sums + i * OUT_SIZE, panels[i].scales + begin / size * PANEL, rows, begin ? to : nullptr, to);
        }
    }
}

}  // namespace millrace
