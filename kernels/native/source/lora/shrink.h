// The sums A x of the rows that have adapters, for one product.
//
// A piece of work is a panel of 16 sums for the rows of one adapter within 32. NOTE: the order of a row's sums depends
// on the row's size only: in vectors chains of fused multiply-adds or dot products over every SHRINK_CHAINS-th pair of
// k, added up at the end; in AMX two chains over every other step. So a row gives the same bits in every batch. Called
// on each compute thread, in a phase before the product's.

#pragma once

#include "linear/amx_product.h"
#include "linear/row_tiles.h"
#include "lora/update.h"

namespace millrace {

constexpr int SHRINK_CHAINS = W == 16 ? 4 : 2;
constexpr int MAX_SHRUNK_ROWS = W == 16 ? 6 : 3;  // of a call: 24 of 32 registers hold sums, or 12 of 16

// Where a row's numbers are: pair i of bf16, or number i of float32, at data + i * stride.
template <class Number>
struct StridedRow {
    const Number* data;
    int64_t stride;
};
template <class Input>
StridedRow<Input> strided_row(const TiledRows<Input>& x, int64_t row) {
    int64_t tile = x.tile_of(row), first = x.first_row(tile), rows = x.first_row(tile + 1) - first;
    return {x.tile(tile) + (row - first) * INTERLEAVE<Input>, rows * INTERLEAVE<Input>};
}
template <class Split>
StridedRow<float> strided_row_of_split(const TiledRows<Split>& x, int64_t row) {
    return {x.floats(row), 1};
}

// R rows by a panel of A: to[r] [16].
template <int R, class Number, class Stored>
[[gnu::noinline]] void shrink_rows(const Number* const* x, int64_t stride, const Stored* panel, int64_t num_pairs,
                                   float* const* to) {
    constexpr int V = int(LORA_LANES) / W, C = SHRINK_CHAINS;
    F sums[C][R][V];
    UNROLL for (int c = 0; c < C; c++)
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sums[c][r][v] = zero();
    auto add_chain = [&](auto chain, int64_t pair) {
        constexpr int c = decltype(chain)::value;
        if constexpr (sizeof(Number) == 2) {
#ifdef MILLRACE_BF16_DOT
            F pairs[V];
            UNROLL for (int v = 0; v < V; v++) pairs[v] = pairs_of(panel, pair, LORA_LANES, v * W);
            UNROLL for (int r = 0; r < R; r++) {
                uint32_t both = pair_at(x[r] + pair * stride);
                UNROLL for (int v = 0; v < V; v++) sums[c][r][v] = dot2_add(sums[c][r][v], pairs[v], both);
            }
#endif
        } else {
            F numbers[V];
            UNROLL for (int v = 0; v < V; v++) numbers[v] = even_of(panel, pair, LORA_LANES, v * W);
            UNROLL for (int r = 0; r < R; r++) {
                F number = splat(x[r][2 * pair * stride]);
                UNROLL for (int v = 0; v < V; v++) fma_to(sums[c][r][v], number, numbers[v]);
            }
            UNROLL for (int v = 0; v < V; v++) numbers[v] = odd_of(panel, pair, LORA_LANES, v * W);
            UNROLL for (int r = 0; r < R; r++) {
                F number = splat(x[r][(2 * pair + 1) * stride]);
                UNROLL for (int v = 0; v < V; v++) fma_to(sums[c][r][v], number, numbers[v]);
            }
        }
    };
    auto add_chains = [&](int64_t pair, int64_t end) {
        add_chain(std::integral_constant<int, 0>(), pair);
        if (pair + 1 < end) add_chain(std::integral_constant<int, 1>(), pair + 1);
        if constexpr (C == 4) {
            if (pair + 2 < end) add_chain(std::integral_constant<int, 2>(), pair + 2);
            if (pair + 3 < end) add_chain(std::integral_constant<int, 3>(), pair + 3);
        }
    };
    int64_t pair = 0;
    for (; pair + C <= num_pairs; pair += C) add_chains(pair, pair + C);
    if (pair < num_pairs) add_chains(pair, num_pairs);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) {
            F sum = add(sums[0][r][v], sums[1][r][v]);
            if constexpr (C == 4) sum = add(sum, add(sums[2][r][v], sums[3][r][v]));
            store(to[r] + v * W, sum);
        }
}

template <class Number, class Stored>
using ShrinkRows = void (*)(const Number* const*, int64_t, const Stored*, int64_t, float* const*);

// The function for each number of rows, from 1.
template <class Number, class Stored, int... R>
ShrinkRows<Number, Stored> shrink_for(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr ShrinkRows<Number, Stored> ALL[] = {shrink_rows<R + 1, Number, Stored>...};
    return ALL[rows - 1];
}

// Up to 16 rows [k / 32][rows][32] of an AMX tile of `tile_rows` rows by a panel of A: sums [rows][16].
inline void shrink_in_tiles(const bf16* x, int64_t tile_rows, int rows, const bf16* panel, int64_t num_steps,
                            TileScope& tiles, float* sums) {
    if constexpr (HAS_AMX) {
        tiles.configure(product_tile_config(rows));
        constexpr int64_t STEP = AMX_PAIRS * LORA_LANES * 2;
        clear_tile<0>(), clear_tile<1>();
        for (int64_t step = 0; step < num_steps; step += 2, x += 2 * tile_rows * AMX_K_STEP, panel += 2 * STEP) {
            for (int64_t line = 0; line < 2 * AMX_PAIRS; line++)  // four steps ahead, also of the panel that follows
                _mm_prefetch(reinterpret_cast<const char*>(panel + 4 * STEP) + 64 * line, _MM_HINT_T1);
            load_tile<4>(x, 2 * AMX_K_STEP), load_tile<6>(panel, 4 * LORA_LANES);
            tile_dot_bf16<0, 4, 6>();
            if (step + 1 == num_steps) break;
            load_tile<5>(x + tile_rows * AMX_K_STEP, 2 * AMX_K_STEP), load_tile<7>(panel + STEP, 4 * LORA_LANES);
            tile_dot_bf16<1, 5, 7>();
        }
        alignas(64) float odd[AMX_ROWS * LORA_LANES];
        store_tile<0>(sums, 4 * LORA_LANES), store_tile<1>(odd, 4 * LORA_LANES);
        for (int64_t i = 0; i < rows * LORA_LANES; i += W) store(sums + i, add(load(sums + i), load(odd + i)));
    }
}

// This thread's part of the sums of `update` for rows x.
template <class Input>
class LoraShrink {
  public:
    LoraShrink(const LoraUpdate& update, const TiledRows<Input>& x) : update_(update), x_(x) {}

    void run(ThreadTeam::Member member) const {
        const LoraRows& rows = update_.rows();
        int64_t num_panels = 0;
        for (int64_t i = 0; i < rows.num_chunks(); i++)
            num_panels = std::max(num_panels, update_.product_of(*rows.chunk(i).adapter).num_panels);
        TileScope tiles;
        member.parallel_for(rows.num_chunks() * num_panels, 1, [&](int64_t piece, int64_t, int64_t) {
            const LoraChunk& chunk = rows.chunk(piece / num_panels);
            const LoraProduct& product = update_.product_of(*chunk.adapter);
            int64_t panel = piece % num_panels;
            if (panel < product.num_panels)
                run_panel(chunk, chunk.adapter->at(product.offset + panel * product.panel_bytes), panel, tiles);
        });
    }

  private:
    void run_panel(const LoraChunk& chunk, const char* panel, int64_t index, [[maybe_unused]] TileScope& tiles) const {
        if constexpr (USES_AMX<Input>)
            run_in_tiles(chunk, reinterpret_cast<const bf16*>(panel), index, tiles);
        else if constexpr (sizeof(Input) == 2)
            run_in_vectors<bf16, bf16>(chunk, panel, index);
        else if (chunk.adapter->type == BFLOAT16)
            run_in_vectors<float, bf16>(chunk, panel, index);
        else
            run_in_vectors<float, float>(chunk, panel, index);
    }

    auto row_of(int64_t row) const {
        if constexpr (sizeof(Input) == 1)
            return strided_row_of_split(x_, row);
        else
            return strided_row(x_, row);
    }

    // Rows that are as far apart as each other, so of one tile, go together.
    template <class Number, class Stored>
    void run_in_vectors(const LoraChunk& chunk, const char* panel, int64_t index) const {
        const LoraRows& rows = update_.rows();
        for (int64_t at = chunk.first; at < chunk.end;) {
            const Number* x[MAX_SHRUNK_ROWS];
            float* to[MAX_SHRUNK_ROWS];
            int64_t num = 0, stride = row_of(rows.row(at)).stride;
            for (; num < MAX_SHRUNK_ROWS && at < chunk.end; num++, at++) {
                StridedRow<Number> row = row_of(rows.row(at));
                if (row.stride != stride) break;
                x[num] = row.data, to[num] = update_.sums_of(rows.row(at)) + index * LORA_LANES;
            }
            auto shrink = shrink_for<Number, Stored>(num, std::make_integer_sequence<int, MAX_SHRUNK_ROWS>());
            shrink(x, stride, reinterpret_cast<const Stored*>(panel), x_.size / 2, to);
        }
    }

    // The rows between the first and the last of the chunk go through the tiles as well; their sums are not used.
    void run_in_tiles(const LoraChunk& chunk, const bf16* panel, int64_t index, TileScope& tiles) const {
        const LoraRows& rows = update_.rows();
        for (int64_t at = chunk.first; at < chunk.end;) {
            int64_t first = rows.row(at), end = at;
            while (end < chunk.end && rows.row(end) < first + AMX_ROWS) end++;
            int64_t tile = x_.tile_of(first), first_of_tile = x_.first_row(tile);
            alignas(64) float sums[AMX_ROWS * LORA_LANES];
            const bf16* x = x_.tile(tile) + (first - first_of_tile) * AMX_K_STEP;
            int num = int(rows.row(end - 1) - first + 1);
            shrink_in_tiles(x, x_.first_row(tile + 1) - first_of_tile, num, panel, x_.padded_size() / AMX_K_STEP, tiles,
                            sums);
            for (; at < end; at++)
                store_for_tiles(*chunk.adapter, at, sums + (rows.row(at) - first) * LORA_LANES, index);
        }
    }

    // Keeps the sums of panel `index` of the row at place `at` as pairs of bf16 numbers: see LoraUpdate.
    void store_for_tiles(const LoraAdapter& adapter, int64_t at, const float* sums, int64_t index) const {
        for (const LoraSlice& slice : update_.product_of(adapter).slices) {
            int64_t begin = slice.first_sum, end = begin + 2 * slice.num_pairs, base = index * LORA_LANES;
            int64_t first = std::max(begin, base), last = std::min(end, base + LORA_LANES);
            if (first >= last) continue;
            int64_t offset = slice.first_tile_sum - begin;
            bf16 *high = update_.high_of(at) + offset, *low = update_.low_of(at) + offset;
            int64_t i = first;
            for (; i + W <= last; i += W) {
                F numbers = load(sums + i - base);
                store(high + i, numbers);
                store(low + i, sub(numbers, load(high + i)));
            }
            for (; i < last; i++) {
                high[i] = to_bf16(sums[i - base]);
                low[i] = to_bf16(sums[i - base] - widen(high[i]));
            }
            if (last < end) continue;
            for (end = begin + round_up(end - begin, LORA_TILE_SUMS); i < end; i++) high[i] = low[i] = 0;
        }
    }

    const LoraUpdate& update_;
    const TiledRows<Input>& x_;
};

}  // namespace millrace
