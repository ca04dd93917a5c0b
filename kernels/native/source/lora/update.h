// LoraUpdate: what the adapters of a batch's rows add to one product, tile by tile.
//
// Outputs of products (linear/row_tiles.h) call `add` for each tile before anything else is done with it. NOTE: in
// vectors a number is one chain of fused multiply-adds in the order of the ranks, from the product with its bias on. In
// AMX products of bf16 it is a sum in the order of `expand_in_tiles` that is added to the product. Neither depends on
// the rows beside it. So a row gives the same bits in every batch. Used on each compute thread.
//
// In AMX the sums of A are kept as pairs of bf16 numbers, of which the second is what the first one leaves: 16 bits, in
// steps of 32 ranks with zeros at the end. Up to 16 rows of one adapter take two instructions a block then; in vectors
// they take three times as long.

#pragma once

#include <utility>

#include "lora/adapter.h"
#include "machine/amx.h"

namespace millrace {

// Most rows of a call: 16 or 8 registers hold numbers of the tile.
constexpr int MAX_EXPANDED_ROWS = W == 16 ? 8 : 4;
// Blocks of a panel that are added together, if one slice has them.
constexpr int EXPANDED_BLOCKS = W == 16 ? int(LORA_BLOCKS) : 1;

// Adds the products of R rows' sums with B blocks of a slice, one behind the other: to[r] [B * 16].
template <int R, int B, class Stored>
[[gnu::noinline]] void expand_blocks(const char* block, int64_t block_bytes, int64_t num_pairs,
                                     const float* const* sums, float* const* to) {
    constexpr int V = B * int(LORA_LANES) / W;
    F totals[R][V];
    const Stored* from[B];
    UNROLL for (int b = 0; b < B; b++) from[b] = reinterpret_cast<const Stored*>(block + b * block_bytes);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) totals[r][v] = load(to[r] + v * W);
    auto add_half = [&](auto is_odd, int64_t pair) {
        F numbers[V];
        UNROLL for (int v = 0; v < V; v++) {
            int64_t lane = v * W % LORA_LANES;
            numbers[v] = half_of<decltype(is_odd)::value>(from[v * W / LORA_LANES], pair, LORA_LANES, lane);
        }
        UNROLL for (int r = 0; r < R; r++) {
            F sum = splat(sums[r][2 * pair + decltype(is_odd)::value]);
            UNROLL for (int v = 0; v < V; v++) fma_to(totals[r][v], sum, numbers[v]);
        }
    };
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        add_half(std::false_type(), pair);
        add_half(std::true_type(), pair);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) store(to[r] + v * W, totals[r][v]);
}

using ExpandBlocks = void (*)(const char*, int64_t, int64_t, const float* const*, float* const*);

// The function for each number of rows, from 1.
template <int B, class Stored, int... R>
ExpandBlocks expand_for(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr ExpandBlocks ALL[] = {expand_blocks<R + 1, B, Stored>...};
    return ALL[rows - 1];
}

// The products of 16 rows' sums with a block: products [16][16]. high, low: where the first row's sums begin, of rows
// `stride` bytes apart. Needs a configuration of registers 0, 4 and 6 as in `product_tile_config`, of as many rows as
// are used, or more. A block is read as if its last step were whole, and zeros of the sums meet what lies behind.
inline void expand_in_tiles(const bf16* high, const bf16* low, int64_t stride, const char* block, int64_t num_steps,
                            float* products) {
    clear_tile<0>();
    for (int64_t step = 0; step < num_steps; step++, block += LORA_TILE_SUMS * LORA_LANES * 2) {
        load_tile<6>(block, 4 * LORA_LANES);
        load_tile<4>(high + step * LORA_TILE_SUMS, stride);
        tile_dot_bf16<0, 4, 6>();
        load_tile<4>(low + step * LORA_TILE_SUMS, stride);
        tile_dot_bf16<0, 4, 6>();
    }
    store_tile<0>(products, 4 * LORA_LANES);
}

class LoraUpdate {
  public:
    // sums [rows][stride]: of this product, as `LoraShrink` leaves them; by row, or in tiles by place in `rows`.
    // `is_in_tiles`: the product is one of bf16 in AMX.
    LoraUpdate(const LoraRows& rows, float* sums, int64_t stride, int layer, LoraTarget target, bool is_in_tiles)
        : rows_(rows), sums_(sums), stride_(stride), layer_(layer), target_(target), is_in_tiles_(is_in_tiles) {}

    bool is_empty() const { return rows_.is_empty(); }
    const LoraUpdate* if_any() const { return is_empty() ? nullptr : this; }

    const LoraRows& rows() const { return rows_; }
    const LoraProduct& product_of(const LoraAdapter& adapter) const { return adapter.product(layer_, target_); }
    float* sums_of(int64_t row) const { return sums_ + row * stride_; }

    // In tiles: the first of the two numbers of the sums, and the second, of the row at a place in `rows`.
    bf16* high_of(int64_t place) const { return reinterpret_cast<bf16*>(sums_ + place * stride_); }
    bf16* low_of(int64_t place) const { return high_of(place) + stride_; }

    // Prefetches what `add` reads of the adapters.
    void prefetch(int64_t first_row, int64_t num, int64_t panel) const {
        rows_.for_each_within(first_row, num, [&](const LoraAdapter& adapter, int64_t, int64_t) {
            for (const LoraSlice& slice : product_of(adapter).slices)
                for (int64_t block = panel * LORA_BLOCKS; block < (panel + 1) * LORA_BLOCKS; block++) {
                    int64_t index = slice.index_of(block);
                    if (index < 0) continue;
                    const char* from = adapter.at(slice.offset + index * slice.block_bytes);
                    for (int64_t byte = 0; byte < slice.block_bytes; byte += 64) _mm_prefetch(from + byte, _MM_HINT_T1);
                }
        });
    }

    // Adds the updates to a tile [num][32] of the product, of the rows from `first_row` on.
    void add(float* tile, int64_t first_row, int64_t num, int64_t panel) const {
        rows_.for_each_within(first_row, num, [&](const LoraAdapter& adapter, int64_t first, int64_t end) {
            for (const LoraSlice& slice : product_of(adapter).slices)
                for (int64_t i = 0; i < LORA_BLOCKS; i++) {
                    int64_t index = slice.index_of(panel * LORA_BLOCKS + i);
                    if (index < 0) continue;
                    if (is_in_tiles_) {
                        const char* block = adapter.at(slice.offset + index * slice.block_bytes);
                        add_in_tiles(slice, block, first, end, tile + i * LORA_LANES - first_row * PANEL);
                        continue;
                    }
                    bool takes_all = i == 0 && EXPANDED_BLOCKS > 1 && slice.step == 1 &&
                                     index + LORA_BLOCKS <= slice.num_blocks;
                    add_blocks(adapter, slice, index, takes_all, first, end, tile + i * LORA_LANES - first_row * PANEL);
                    if (takes_all) break;
                }
        });
    }

  private:
    // Adds a block to the rows at places [first, end); row 0 begins at `tile`.
    void add_in_tiles(const LoraSlice& slice, const char* block, int64_t first, int64_t end, float* tile) const {
        for (int64_t at = first; at < end; at += AMX_ROWS) {
            alignas(64) float products[AMX_ROWS * LORA_LANES];
            expand_in_tiles(high_of(at) + slice.first_tile_sum, low_of(at) + slice.first_tile_sum, 4 * stride_, block,
                            ceil_div(2 * slice.num_pairs, LORA_TILE_SUMS), products);
            int64_t num = std::min<int64_t>(AMX_ROWS, end - at);
            for (int64_t r = 0; r < num; r++) {
                float* to = tile + rows_.row(at + r) * PANEL;
                for (int64_t lane = 0; lane < LORA_LANES; lane += W)
                    store(to + lane, millrace::add(load(to + lane), load(products + r * LORA_LANES + lane)));
            }
        }
    }

    // The same in vectors for block `index` of a slice, or all of a panel.
    void add_blocks(const LoraAdapter& adapter, const LoraSlice& slice, int64_t index, bool takes_all, int64_t first,
                    int64_t end, float* tile) const {
        const char* block = adapter.at(slice.offset + index * slice.block_bytes);
        for (; first < end; first += MAX_EXPANDED_ROWS) {
            const float* sums[MAX_EXPANDED_ROWS];
            float* to[MAX_EXPANDED_ROWS];
            int64_t num = std::min<int64_t>(MAX_EXPANDED_ROWS, end - first);
            for (int64_t r = 0; r < num; r++) {
                int64_t row = rows_.row(first + r);
                sums[r] = sums_of(row) + slice.first_sum, to[r] = tile + row * PANEL;
            }
            function_for(adapter.type, takes_all, num)(block, slice.block_bytes, slice.num_pairs, sums, to);
        }
    }

    static ExpandBlocks function_for(DataType type, bool takes_all, int64_t num) {
        std::make_integer_sequence<int, MAX_EXPANDED_ROWS> rows;
        if (type == BFLOAT16)
            return takes_all ? expand_for<EXPANDED_BLOCKS, bf16>(num, rows) : expand_for<1, bf16>(num, rows);
        return takes_all ? expand_for<EXPANDED_BLOCKS, float>(num, rows) : expand_for<1, float>(num, rows);
    }

    const LoraRows& rows_;
    float* sums_;
    int64_t stride_;
    int layer_;
    LoraTarget target_;
    bool is_in_tiles_;
};

}  // namespace millrace
