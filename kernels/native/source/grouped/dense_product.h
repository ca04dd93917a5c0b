// Products of float32 rows with the matrices that a quantized file leaves in bf16 or float32: most often the head.
//
// Rows are those of `TiledRows<SplitRow>` before they are split. Each sum is one chain of fused multiply-adds over k in
// rising order. Called by `multiply_grouped`, on each compute thread.

#pragma once

#include "grouped/split_rows.h"
#include "linear/panels.h"

namespace millrace {

constexpr int DENSE_ROWS = 4;  // most rows of a tile

// R rows, `stride` floats apart, by a panel: tile [R][32].
template <int R, class Stored>
[[gnu::noinline]] void dense_tile(const float* x, int64_t stride, const Stored* panel, int64_t num_pairs, float* tile) {
    constexpr int V = GEMM_VECTORS;
    int64_t streams = num_streams(num_pairs), stream_size = num_pairs / streams;
    for (int64_t lane = 0; lane < PANEL; lane += V * W) {
        F sums[R][V];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sums[r][v] = zero();
        for (int64_t pair = 0; pair < num_pairs; pair++) {
            int64_t place = pair % streams * stream_size + pair / streams;
            UNROLL for (int v = 0; v < V; v++) {
                F even = even_of(panel, place, PANEL, lane + v * W), odd = odd_of(panel, place, PANEL, lane + v * W);
                UNROLL for (int r = 0; r < R; r++) {
                    const float* both = x + r * stride + 2 * pair;
                    sums[r][v] = fma(splat(both[1]), odd, fma(splat(both[0]), even, sums[r][v]));
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) store(tile + r * PANEL + lane + v * W, sums[r][v]);
    }
}

template <class Stored>
using DenseTile = void (*)(const float*, int64_t, const Stored*, int64_t, float*);

// The function for each number of rows, from 1.
template <class Stored>
DenseTile<Stored> dense_tile_for(int rows) {
    static constexpr DenseTile<Stored> TILES[DENSE_ROWS] = {dense_tile<1, Stored>, dense_tile<2, Stored>,
                                                            dense_tile<3, Stored>, dense_tile<4, Stored>};
    return TILES[rows - 1];
}

template <class Stored, class Out>
void multiply_dense(const Linear& linear, const TiledRows<SplitRow>& x, const Out& out, ThreadTeam::Member member) {
    int64_t stride = x.padded_size() / int64_t(sizeof(float)), size = linear.panel_bytes() / int64_t(sizeof(Stored));
    member.parallel_for(linear.num_panels(), 1, [&](int64_t first, int64_t last, int64_t) {
        for (int64_t panel = first; panel < last; panel++)
            for (int64_t row = 0; row < x.num_rows; row += DENSE_ROWS) {
                alignas(64) float tile[DENSE_ROWS * PANEL];
                int rows = int(std::min<int64_t>(DENSE_ROWS, x.num_rows - row));
                dense_tile_for<Stored>(rows)(x.floats(row), stride, linear.weight.as<Stored>() + panel * size, linear.k / 2,
                                             tile);
                emit_tile(linear, out, tile, row, rows, panel);
            }
    });
}

}  // namespace millrace
