// AmxLinear: products of a step's rows with packed weights in AMX tile registers, x @ weight.T + bias.
//
// One tile of up to 32 rows reads each weight once, at memory speed. For more rows k is cut into blocks: a panel's
// block stays in L1 while all tiles of rows are multiplied by it, and their sums wait in L2 for the next block. A step
// of two registers of rows by two of columns takes about 20 ns if one operand comes from L1, 35 ns if neither does (in
// a separate loop, on a Granite Rapids class Xeon). Linears of 64 / 128 / 256 / 512 rows of Qwen3-0.6B's shape took 55
// / 75 / 114 / 224 ms there when tiles went through whole panels, and 50 / 57 / 94 / 172 ms in the first version with
// blocks.
//
// With several tiles the output is not prefetched for writing: 256 and 512 rows take 2 to 5 % less without; one tile of
// 32 rows takes 2 % more without. Called by `multiply` (linear.h), on each compute thread.

#pragma once

#include <algorithm>

#include "linear/amx_product.h"
#include "linear/row_tiles.h"

namespace millrace {

constexpr int64_t BLOCK_STEPS = 8;  // at most, without groups of k: 16 KiB of rows and as much of columns
constexpr int64_t HELD_PANELS = 8;  // most panels whose sums wait at a time
constexpr int64_t HELD_TILES = 20;  // most tiles of rows whose sums wait at a time: 640 KiB with 8 panels

// The blocks of a linear's pairs of k: of equal size, or whole groups of any size.
struct KBlocks {
    int64_t num_pairs, size, part;
    bool is_grouped;

    explicit KBlocks(const Linear& linear) : num_pairs(linear.k / 2), is_grouped(linear.num_groups() > 1) {
        int64_t steps = ceil_div(num_pairs, AMX_PAIRS);
        size = AMX_PAIRS * ceil_div(steps, ceil_div(steps, BLOCK_STEPS));
        if (is_grouped) size = std::max<int64_t>(1, AMX_PAIRS * BLOCK_STEPS / linear.group_pairs()) * linear.group_pairs();
        part = is_grouped ? linear.group_pairs() : size;
    }

    int64_t count() const { return ceil_div(num_pairs, size); }
    KBlock at(int64_t i) const { return {i * size, std::min((i + 1) * size, num_pairs), part, is_grouped}; }

    // Whether columns must be converted to bf16 tiles: see `converted_columns`.
    bool need_conversion(const Linear& linear) const { return linear.type != BFLOAT16 || num_pairs % AMX_PAIRS; }
    int64_t max_steps() const {
        int64_t maximum = 0;
        for (int64_t i = 0; i < count(); i++) maximum = std::max(maximum, at(i).num_steps());
        return maximum;
    }
};

// A thread's workspace in a product: waiting sums, and a block's converted columns.
struct AmxWorkspace {
    int64_t sums_bytes = 0, columns_bytes = 0;

    AmxWorkspace(const Linear& linear, int64_t num_rows) {
        int64_t num_tiles = ceil_div(num_rows, AMX_TILE_ROWS);
        if (num_tiles <= 1) return;
        KBlocks blocks(linear);
        if (blocks.count() > 1) sums_bytes = HELD_PANELS * std::min(num_tiles, HELD_TILES) * 2 * OUT_SIZE * 4;
        if (blocks.need_conversion(linear)) columns_bytes = blocks.max_steps() * STEP_SIZE * 2;
    }
    int64_t num_bytes() const { return sums_bytes + columns_bytes; }
};

// One row, [k / 32][32], by one panel of a linear that is not quantized: tile [32]. Prefetches the panel `next`
// meanwhile.
inline void multiply_row_amx(const Linear& linear, const bf16* row, int64_t panel, int64_t next, float* tile) {
    TileScope tiles;
    tiles.configure(product_tile_config(1));
    dispatch_panels<bf16>(linear, [&](auto* weights) {
        using Stored = std::remove_pointer_t<decltype(weights)>;
        auto address = [&](int64_t index) { return linear.weight.as<char>() + index * linear.panel_bytes(); };
        int64_t lines_per_step = ceil_div(ceil_div(linear.panel_bytes(), 64), ceil_div(linear.k, AMX_K_STEP));
        StepPrefetch prefetch{address(next), address(next + 1), lines_per_step, 1, 0};
        AmxPanel<Stored> panels[] = {{reinterpret_cast<const Stored*>(address(panel)), nullptr, prefetch}};
        multiply_once<1, 1>(row, 1, linear, panels, tile);
    });
}

// This thread's part of the product: whole panels for all rows; each tile is passed to `out`.
template <class Out>
class AmxLinear {
    // Prefetch distance with one tile of rows, bytes; at a panel's end as much of the panel that follows. bf16, two
    // panels at a time: 34 to 37 GB/s with this distance, 29 GB/s when prefetching two panels ahead, 29 without (up to
    // 16 rows, two cores of a Granite Rapids class Xeon, where plain reading gives 37 in the same order, and 31 from 8
    // KiB on).
    // 12-bit panels are prefetched further: 33 to 36 GB/s (1 to 16 rows) and 30 (32 rows), of three quarters of the
    // bytes. int8 and int4, with steps of 1 KiB or less, further still: steps of 1 / 8 rows take 9 to 25 / 5 to 13 %
    // less with int8 and 9 to 14 / 5 to 9 % less with int4 than with 1 KiB, when the prefetch runs on past a panel's
    // end into its neighbour (the two shapes; for 12-bit panels that makes no difference).
    template <class Stored>
    static constexpr int64_t PREFETCH_DISTANCE = std::is_same<Stored, bf16>::value    ? 1024
                                          : std::is_same<Stored, Bf16In12Bits>::value ? 2048
                                                                               : 3072;

    // Streams in which a block is prefetched. The hardware prefetcher follows each within a page of 4 KiB: two to four
    // tiles of rows take 15 to 30 % less than with one stream, eight tiles 6 % less (4 is the best of 2, 4 and 8; in
    // bf16, whose blocks are four pages long).
    static constexpr int64_t PREFETCH_STREAMS = 4;

  public:
    AmxLinear(const Model& model, const Linear& linear, const TiledRows<bf16>& x, const Out& out, ThreadTeam::Member member)
        : linear_(linear), x_(x), out_(out), member_(member), blocks_(linear),
          next_linear_(first_address_of_next(linear, member)) {
        char* workspace = model.workspace_of(member.scratch_index);
        sums_ = reinterpret_cast<float*>(workspace);
        converted_ = reinterpret_cast<bf16*>(workspace + AmxWorkspace(linear, x.num_rows).sums_bytes);
    }

    template <class Stored>
    void run(const Stored* weights) const {
        TileScope tiles;
        int rows = int(std::min<int64_t>(x_.num_rows, AMX_TILE_ROWS));
        tiles.configure(product_tile_config(rows));
        if (x_.num_tiles() == 1)
            run_once(weights, rows);
        else
            run_in_blocks(weights);
    }

  private:
    template <class Stored>
    void run_once(const Stored* weights, int rows) const {
        member_.parallel_for(linear_.num_panels(), 2, [&](int64_t first, int64_t last, int64_t end) {
            if (rows <= AMX_ROWS && last - first == 2) return multiply_panels<1, 2>(weights, first, end);
            for (int64_t panel = first; panel < last; panel++)
                rows <= AMX_ROWS ? multiply_panels<1, 1>(weights, panel, end) : multiply_panels<2, 1>(weights, panel, end);
        });
    }

    // All rows, one tile, by PANELS panels from `first`; panels until `end` follow.
    template <int ROW_REGISTERS, int PANELS, class Stored>
    void multiply_panels(const Stored* weights, int64_t first, int64_t end) const {
        alignas(64) float out[std::max(ROW_REGISTERS, PANELS) * OUT_SIZE];
        AmxPanel<Stored> panels[PANELS];
        int64_t size = linear_.panel_bytes(),
            lines_per_step = ceil_div(ceil_div(size, 64), ceil_div(linear_.k, AMX_K_STEP));
        constexpr int64_t DISTANCE = PREFETCH_DISTANCE<Stored>;
        int rows = int(x_.num_rows);
        for (int i = 0; i < PANELS; i++) {
            auto numbers = weights + (first + i) * size / int64_t(sizeof(Stored));
            auto address = reinterpret_cast<const char*>(numbers);
            const char* next = first + i + PANELS < end ? address + PANELS * size
                : next_linear_ + i * linear_.next->panel_bytes();
            StepPrefetch prefetch{address + std::min(DISTANCE, size), address + size, lines_per_step, 1, 0, next,
                                  next + DISTANCE};
            panels[i] = {numbers, scales_of(linear_, first + i), prefetch};
            out_.prefetch_output(0, rows, first + i);
        }
        multiply_once<ROW_REGISTERS, PANELS>(x_.tile(0), rows, linear_, panels, out);
        for (int i = 0; i < PANELS; i++) emit_tile(linear_, out_, out + i * OUT_SIZE, 0, rows, first + i);
    }

    // All tiles use the same register configuration, because to change it takes as long as a block of a tile. A partial
    // tile is multiplied with up to 15 rows that do not belong to it; their results are ignored.
    template <class Stored>
    void run_in_blocks(const Stored* weights) const {
        int64_t each = ceil_div(linear_.num_panels(), member_.count), num_tiles = x_.num_tiles();
        // At least two, so that another thread can take one over.
        int64_t num_pieces = std::max<int64_t>(2, ceil_div(each, HELD_PANELS));
        int64_t held = ceil_div(each, num_pieces), times = ceil_div(num_tiles, HELD_TILES);
        member_.parallel_for(linear_.num_panels(), held, [&](int64_t first, int64_t last, int64_t end) {
            for (int64_t time = 0; time < times; time++)
                for (int64_t block = 0; block < blocks_.count(); block++)
                    for (int64_t panel = first; panel < last; panel++)
                        multiply_tiles(weights, num_tiles * time / times, num_tiles * (time + 1) / times, block, panel,
                                       first, last, end);
        });
    }

    // Tiles [tile, end_tile) of rows by a block of `panel`, one of [first, last), whose sums wait together; panels
    // until `end` follow.
    template <class Stored>
    void multiply_tiles(const Stored* weights, int64_t tile, int64_t end_tile, int64_t index, int64_t panel, int64_t first,
                        int64_t last, int64_t end) const {
        KBlock block = blocks_.at(index);
        auto numbers = [&](int64_t panel) { return weights + panel * linear_.panel_bytes() / int64_t(sizeof(Stored)); };
        auto from = [&](int64_t panel, int64_t block) {
            return reinterpret_cast<const char*>(numbers(panel)) + offset_of_pair<Stored>(blocks_.at(block).begin);
        };
        const char* next = panel + 1 < last              ? from(panel + 1, index)
                           : index + 1 < blocks_.count() ? from(first, index + 1)
                           : end_tile < x_.num_tiles()   ? from(first, 0)
                           : last < end                  ? from(last, 0)
                                                         : next_linear_;
        int64_t num_bytes = offset_of_pair<Stored>(block.end) - offset_of_pair<Stored>(block.begin);
        int64_t times = (end_tile - tile) * block.num_steps(), num_lines = ceil_div(num_bytes, 64 * PREFETCH_STREAMS);
        int64_t stride = 64 * num_lines;
        StepPrefetch prefetch[] = {{next, next + stride, ceil_div(num_lines, times), PREFETCH_STREAMS, stride}};
        const bf16* columns = converted_columns(numbers(panel), block, converted_);
        bool is_last = block.end == blocks_.num_pairs;
        float* sums = sums_ + (panel - first) * (end_tile - tile) * 2 * OUT_SIZE;
        for (; tile < end_tile; tile++, sums += 2 * OUT_SIZE) {
            alignas(64) float out[2 * OUT_SIZE];
            int64_t row = x_.first_row(tile);
            int rows = int(x_.first_row(tile + 1) - row);
            auto multiply = rows > AMX_ROWS ? multiply_block<2> : multiply_block<1>;
            multiply(x_.tile(tile), rows, block, columns, scales_of(linear_, panel), prefetch, sums, is_last ? out : sums);
            if (!is_last) continue;
            if (linear_.is_quantized() && !block.is_grouped) scale_sums(out, scales_of(linear_, panel), rows, nullptr, out);
            emit_tile(linear_, out_, out, row, rows, panel);
        }
    }

    const Linear& linear_;
    const TiledRows<bf16>& x_;
    const Out& out_;
    ThreadTeam::Member member_;
    KBlocks blocks_;
    const char* next_linear_;  // what this thread reads first of the next linear
    float* sums_;              // [panels][tiles][32 rows][32]
    bf16* converted_;
};

}  // namespace millrace
