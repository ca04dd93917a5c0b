// Products of a step's rows with packed weights.
//
// Each number of a product is one chain of fused multiply-adds over k in rising order, whatever the number of rows, of
// threads, or the tile it falls in: so the same row gives the same bits in every batch.

#pragma once

#include <algorithm>

#include "model.h"
#include "simd.h"

namespace millrace {

// What a product reads: float32, or bf16 where the machine multiplies pairs of it.
#ifdef MILLRACE_BF16_DOT
template <class Weight>
using InputOf = Weight;
#else
template <class Weight>
using InputOf = float;
#endif

// Rows of numbers as products read them: in tiles of up to GEMM_ROWS rows, as equal as may be, each with the numbers of
// all its rows side by side, [size][rows] (in bf16 [size / 2][rows][2]). One pointer then walks through a whole tile.
template <class T>
struct TiledRows {
    T* data;
    int64_t num_rows, size;

    int64_t num_tiles() const { return ceil_div(num_rows, GEMM_ROWS); }
    int64_t first_row(int64_t tile) const { return num_rows * tile / num_tiles(); }
    int64_t tile_of(int64_t row) const { return ((row + 1) * num_tiles() - 1) / num_rows; }
    T* tile(int64_t tile) const { return data + first_row(tile) * size; }

    // Puts `count` numbers of a row in their place, from number `begin`.
    void put(int64_t row, int64_t begin, int64_t count, const float* numbers) const {
        int64_t at = tile_of(row), first = first_row(at), rows = first_row(at + 1) - first;
        T* to = data + first * size;
        if (rows == 1 && count % W == 0) {
            for (int64_t i = 0; i < count; i += W) store(to + begin + i, load(numbers + i));
            return;
        }
        for (int64_t i = 0; i < count; i++) narrow(numbers[i], to + place_in_pairs<T>(begin + i, rows, row - first));
    }
};

enum class Into { STORE, ADD };  // out = product, out += product

// R rows by 32 columns. x a tile of `TiledRows`, panel as `Linear` has it, out [R][32]. While it runs it fetches `share` bytes a
// pair of the panel that comes next, so that memory is busy while this one is multiplied.
template <int R, class Input, class Weight>
void multiply_tile(const Input* x, const Weight* panel, int64_t num_pairs, float* out,
                   const char* next, int64_t share) {
    constexpr int V = GEMM_VECTORS;
    constexpr bool is_dot = sizeof(Input) == 2;
    for (int64_t lane = 0; lane < PANEL; lane += V * W) {
        F sums[R][V];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sums[r][v] = zero();
        for (int64_t pair = 0; pair < num_pairs; pair++) {
            if (lane == 0 && share) {
                _mm_prefetch(next + pair * share, _MM_HINT_T1);
                if (share > 64) _mm_prefetch(next + pair * share + 64, _MM_HINT_T1);
                if (share > 128) {
                    _mm_prefetch(next + pair * share + 128, _MM_HINT_T1);
                    _mm_prefetch(next + pair * share + 192, _MM_HINT_T1);
                }
            }
            if constexpr (is_dot) {
#ifdef MILLRACE_BF16_DOT
                const bf16* weights = panel + 2 * (pair * PANEL + lane);
                UNROLL for (int r = 0; r < R; r++) {
                    uint32_t both;
                    std::memcpy(&both, x + 2 * (pair * R + r), 4);
                    UNROLL for (int v = 0; v < V; v++) sums[r][v] = add_dots(sums[r][v], weights + 2 * v * W, both);
                }
#endif
            } else {
                F weights[V];
                UNROLL for (int v = 0; v < V; v++) weights[v] = even_of(panel, pair, PANEL, lane + v * W);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(x[2 * pair * R + r]);
                    UNROLL for (int v = 0; v < V; v++) fma_to(sums[r][v], number, weights[v]);
                }
                UNROLL for (int v = 0; v < V; v++) weights[v] = odd_of(panel, pair, PANEL, lane + v * W);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(x[(2 * pair + 1) * R + r]);
                    UNROLL for (int v = 0; v < V; v++) fma_to(sums[r][v], number, weights[v]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) store(out + r * PANEL + lane + v * W, sums[r][v]);
    }
}

template <class Input, class Weight>
using MultiplyTile = void (*)(const Input*, const Weight*, int64_t, float*, const char*, int64_t);

// The tile for each number of rows, from 1.
template <class Input, class Weight, int... R>
MultiplyTile<Input, Weight> tile_for(int rows, std::integer_sequence<int, R...>) {
    static const MultiplyTile<Input, Weight> tiles[] = {multiply_tile<R + 1, Input, Weight>...};
    return tiles[rows - 1];
}

inline void add_bias(float* tile, int rows, const float* bias) {
    for (int r = 0; r < rows; r++, tile += PANEL)
        for (int v = 0; v < PANEL; v += W) store(tile + v, add(load(tile + v), load(bias + v)));
}

// What becomes of a tile [rows][32] of a product, of which `columns` are there.
struct Rows {  // rows of float32, one after the other
    float* data;
    int64_t stride;
    Into into;

    void take(const float* tile, int64_t first_row, int rows, int64_t panel, int64_t columns) const {
        float* out = data + first_row * stride + panel * PANEL;
        for (int r = 0; r < rows; r++, tile += PANEL, out += stride) {
            if (into == Into::ADD)
                for (int c = 0; c < columns; c++) out[c] += tile[c];
            else
                std::memcpy(out, tile, columns * 4);
        }
    }
};

template <class T>
struct SiluMul {  // silu(gate) * up, of a product whose columns are 16 gates and 16 ups in turn
    TiledRows<T> rows_out;

    void take(float* tile, int64_t first_row, int rows, int64_t panel, int64_t) const {
        for (int r = 0; r < rows; r++) {
            for (int v = 0; v < PANEL / 2; v += W) {
                F gate = load(tile + r * PANEL + v);
                F silu = div(gate, add(splat(1.0f), exp(sub(zero(), gate))));
                store(tile + r * PANEL + v, mul(silu, load(tile + r * PANEL + PANEL / 2 + v)));
            }
        }
        int64_t begin = panel * PANEL / 2, count = std::min(PANEL / 2, rows_out.size - begin);
        T* out = rows_out.data + first_row * rows_out.size;  // the same tiles of rows as the input's
        for (int64_t c = 0; c < count; c++)
            for (int r = 0; r < rows; r++) narrow(tile[r * PANEL + c], out + place_in_pairs<T>(begin + c, rows, r));
    }
};

// This thread's part of x @ weight.T + bias: whole panels, for all rows, each tile handed to `out`.
template <class Weight, class Out>
void multiply(const Linear& linear, const TiledRows<InputOf<Weight>>& x, const Out& out, int thread, int num_threads) {
    using Input = InputOf<Weight>;
    constexpr int64_t CACHED = 384 << 10;  // bytes of panels that stay in the second-level cache for all rows
    if (x.num_rows == 0) return;  // a step of which nobody samples
    int64_t first, last, panel_size = linear.k * PANEL, pairs = linear.k / 2;
    share(linear.num_panels(), thread, num_threads, &first, &last);
    int64_t panel_bytes = panel_size * int64_t(sizeof(Weight));
    int64_t num_tiles = x.num_tiles();
    int64_t group = num_tiles == 1 ? 1 : std::max<int64_t>(1, CACHED / panel_bytes);
    int64_t share_bytes = num_tiles > 16 ? 0 : panel_bytes / pairs / num_tiles;
    const Weight* weights = linear.weight.as<Weight>();
    alignas(64) float tile[GEMM_ROWS * PANEL];
    for (int64_t begin = first; begin < last; begin += group) {
        int64_t end = std::min(begin + group, last);
        for (int64_t part = 0; part < num_tiles; part++) {
            int64_t row = x.first_row(part);
            int rows = int(x.first_row(part + 1) - row);
            auto multiply_rows = tile_for<Input, Weight>(rows, std::make_integer_sequence<int, GEMM_ROWS>());
            for (int64_t p = begin; p < end; p++) {
                const Weight* panel = weights + p * panel_size;
                auto next = reinterpret_cast<const char*>(panel) + group * panel_bytes + part * pairs * share_bytes;
                multiply_rows(x.tile(part), panel, pairs, tile, next, p + group < last ? share_bytes : 0);
                if (!linear.bias.empty()) add_bias(tile, rows, linear.bias.data() + p * PANEL);
                out.take(tile, row, rows, p, std::min(PANEL, linear.n - p * PANEL));
            }
        }
    }
}

}  // namespace millrace
