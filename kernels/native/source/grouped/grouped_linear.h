// Products of split rows with weights in groups of codes: out = x @ weight.T + bias.
//
// A thread takes some panels at a time. Of each it unpacks a super, which then stays in the first cache, and multiplies
// all rows by it; then the same columns of the next panel, so that the rows' part stays there, too. The sums of all rows
// wait in the thread's workspace. NOTE: the order of sums of a row does not depend on other rows, and its integers are
// exact: see super_sums.h. Called by `multiply` (linear/linear.h), on each compute thread.

#pragma once

#include <algorithm>

#include "grouped/dense_product.h"
#include "grouped/half_tiles.h"
#include "grouped/split_rows.h"
#include "grouped/super_sums_amx.h"
#include "grouped/unpack.h"

namespace millrace {

// Up to this many rows each thread splits all of them for itself, instead of waiting for the others' part.
constexpr int64_t MAX_ROWS_SPLIT_PER_THREAD = 8;

constexpr int64_t PANELS_AT_ONCE = 4;  // most

// A thread's workspace: rows that it splits for itself, then the sums of all rows.
inline int64_t own_rows_bytes(const Model& model) {
    TiledRows<SplitRow> own{nullptr, MAX_ROWS_SPLIT_PER_THREAD, model.max_columns()};
    return round_up(own.num_rows * own.padded_size() + own.bytes_behind(), 64);
}
inline int64_t grouped_workspace_bytes(const Model& model, int64_t num_rows) {
    return own_rows_bytes(model) + PANELS_AT_ONCE * num_rows * PANEL * 4;
}

// The rows as a product reads them: what it does not read is not made.
template <class Input>
TiledRows<Input> rows_for([[maybe_unused]] const Linear& linear, TiledRows<Input> rows) {
    if constexpr (std::is_same<Input, SplitRow>::value) {
        rows.is_in_tiles = rows.has_halves() && linear.type == GROUPED;
        for (const GroupedPart& part : linear.parts) rows.is_in_tiles &= takes_half_tiles(part.format);
        if (!linear.columns.empty()) rows.columns = linear.columns.data();
    }
    return rows;
}

template <class Out>
class GroupedLinear {
  public:
    GroupedLinear(const Model& model, const Linear& linear, const TiledRows<SplitRow>& x, const Out& out,
                  ThreadTeam::Member member)
        : linear_(linear), x_(x), out_(out), member_(member), record_(x.size), kernels_(super_kernels()),
          halves_(x.halves()), y_(reinterpret_cast<float*>(model.workspace_of(member.scratch_index) + own_rows_bytes(model))) {}

    void run() const {
        TileScope tiles;
        int64_t at_once = x_.num_rows <= SUPER_ROWS ? 1 : PANELS_AT_ONCE;
        member_.parallel_for(linear_.num_panels(), at_once, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t panel = first, end; panel < last; panel = end) {
                const GroupedPart& part = linear_.part_of(panel);
                end = std::min({last, panel + at_once, part.end_panel});
                std::fill(y_, y_ + (end - panel) * x_.num_rows * PANEL, 0.0f);
                if (takes_half_tiles(part.format) && x_.has_halves())
                    multiply_in_half_tiles(part, panel, end, tiles);
                else
                    multiply(part, panel, end, tiles);
                for (int64_t i = panel; i < end; i++) emit(i, y_of(i - panel));
            }
        });
    }

  private:
    // The sums [rows][32] of one of the panels that are multiplied together.
    float* y_of(int64_t index) const { return y_ + index * x_.num_rows * PANEL; }

    // What is read after super `index` of a panel.
    static SuperPrefetch prefetch_after(const GroupedPart& part, const uint8_t* panel, int64_t index) {
        return {reinterpret_cast<const char*>(panel + part.layout.super_at(index + 1)), part.layout.super_bytes};
    }

    void multiply(const GroupedPart& part, int64_t first, int64_t last, TileScope& tiles) const {
        UnpackedSuper super;
        for (int64_t index = 0; index < part.layout.num_supers; index++)
            for (int64_t panel = first; panel < last; panel++) {
                const uint8_t* numbers = linear_.grouped_panel(part, panel);
                for (int turn = 0; turn < num_turns(part.format); turn++) {
                    SuperPrefetch prefetch = turn == 0 ? prefetch_after(part, numbers, index) : SuperPrefetch{};
                    unpack_super(part.format, part.layout, numbers, index, turn, part.factor, prefetch, &super);
                    add_super(super, index * SUPER, part.format.chunk(), tiles, y_of(panel - first));
                }
            }
    }

    // Panels [first, last), super by super; each is unpacked while the one before is multiplied.
    void multiply_in_half_tiles([[maybe_unused]] const GroupedPart& part, [[maybe_unused]] int64_t first,
                                [[maybe_unused]] int64_t last, [[maybe_unused]] TileScope& tiles) const {
#if defined(__AVX512F__)  // tiles are in no other build
        const PanelLayout& layout = part.layout;
        int64_t at_once = last - first, num_supers = layout.num_supers * at_once;
        HalfValues values(part.format);
        HalfSuper supers[2];
        struct Place {
            int64_t index, panel;
            const uint8_t *numbers, *codes;
        };
        auto place_of = [&](int64_t i) {
            int64_t index = i / at_once, panel = first + i % at_once;
            const uint8_t* numbers = linear_.grouped_panel(part, panel);
            return Place{index, panel, numbers, numbers + layout.super_at(index) + layout.header_of(index)};
        };
        auto read_numbers = [&](const Place& place, HalfSuper* super) {
            unpack_scales(part.format, layout, place.numbers, place.index, part.factor, &super->numbers);
            super->num_groups = layout.blocks_of(place.index);
        };
        tiles.configure(super_tile_config(int(std::min<int64_t>(x_.num_rows, AMX_ROWS)), 16));
        Place next = place_of(0);
        read_numbers(next, &supers[0]);
        for (int64_t i = 0; i < supers[0].num_groups; i++) supers[0].codes.read(values, next.codes + i * layout.block_bytes, i);
        for (int64_t i = 0; i < num_supers; i++) {
            Place place = next;
            HalfSuper &super = supers[i % 2], &after = supers[(i + 1) % 2];
            after.num_groups = 0;
            if (i + 1 < num_supers) next = place_of(i + 1), read_numbers(next, &after);
            SuperPrefetch prefetch = prefetch_after(part, place.numbers, place.index);
            int64_t lines = ceil_div(ceil_div(prefetch.num_bytes, 64), super.num_groups);
            auto meanwhile = [&](int64_t group) {
                for (int64_t line = 0; line < lines; line++, prefetch.address += 64)
                    _mm_prefetch(prefetch.address, _MM_HINT_T0);
                int64_t end = group + 1 < super.num_groups ? group + 1 : after.num_groups;
                for (int64_t block = group; block < std::min(end, after.num_groups); block++)
                    after.codes.read(values, next.codes + block * layout.block_bytes, block);
            };
            float* y = y_of(place.panel - first);
            super.numbers.has_offsets
                ? sum_half_super<true>(super, place.index, halves_, x_.num_rows, y, meanwhile)
                : sum_half_super<false>(super, place.index, halves_, x_.num_rows, y, meanwhile);
        }
#endif
    }

    // Adds the products of all rows with a super, which begins with column `begin`.
    void add_super(const UnpackedSuper& super, int64_t begin, int64_t chunk, [[maybe_unused]] TileScope& tiles,
                   float* y) const {
        int64_t sums = record_.sums_at[SplitRecord::size_index(chunk)] + begin / chunk * 4;
        int64_t width = kernels_.takes_bytes ? 1 : 2, num_rows = x_.num_rows;
        auto span_of = [&](int64_t row) {
            const char* record = x_.record(row);
            return SplitSpan{record + record_.numbers_at + begin * width,
                             reinterpret_cast<const int32_t*>(record + sums), record_.num_bytes, record_.padded};
        };
        if constexpr (HAS_AMX)
            if (are_in_tiles(num_rows, MIN_ROWS_IN_TILES))
                return sum_super_in_tiles(super, span_of(0), num_rows, tiles, y);
        for (int64_t row = 0; row < num_rows; row += SUPER_ROWS)
            kernels_.sum[std::min<int64_t>(SUPER_ROWS, num_rows - row) - 1](super, span_of(row), y + row * PANEL);
    }

    void emit(int64_t panel, float* sums) const {
        for (int64_t row = 0; row < x_.num_rows; row++) {
            F scale = splat(x_.scale(row));
            for (float *y = sums + row * PANEL, *end = y + PANEL; y < end; y += W) store(y, mul(load(y), scale));
        }
        emit_tile(linear_, out_, sums, 0, int(x_.num_rows), panel);
    }

    const Linear& linear_;
    const TiledRows<SplitRow>& x_;
    const Out& out_;
    ThreadTeam::Member member_;
    SplitRecord record_;
    const SuperKernels& kernels_;
    HalfRows halves_;
    float* y_;  // [PANELS_AT_ONCE][rows][32]
};

template <class Out>
void multiply_grouped(const Model& model, const Linear& linear, const TiledRows<SplitRow>& x, const Out& out,
                      ThreadTeam::Member member) {
    switch (linear.type) {
        case GROUPED: return GroupedLinear<Out>(model, linear, x, out, member).run();
        case BFLOAT16: return multiply_dense<bf16>(linear, x, out, member);
        default: return multiply_dense<float>(linear, x, out, member);
    }
}

// A row of a linear of such a model, [k], as products use it.
inline void read_any_row(const Linear& linear, int64_t row, float* to) {
    if (linear.type != GROUPED) return linear.type == BFLOAT16 ? read_row<bf16>(linear, row, to) : read_row<float>(linear, row, to);
    const GroupedPart& part = linear.part_of(row / PANEL);
    std::vector<float> ordered(linear.columns.size());
    float* numbers = ordered.empty() ? to : ordered.data();
    read_panel_row(part.format, linear.k, linear.grouped_panel(part, row / PANEL), row % PANEL, part.factor, numbers);
    for (size_t i = 0; i < ordered.size(); i++) to[linear.columns[i]] = ordered[i];
}

}  // namespace millrace
