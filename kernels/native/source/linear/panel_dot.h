// Vector kernels of the products: a tile of rows by one panel of any storage type.
//
// The order of sums and the prefetches beside them; VectorLinear (linear.h) chooses tiles and panels. Called on each
// compute thread.

#pragma once

#include <algorithm>
#include <utility>

#include "linear/weight_prefetch.h"
#include "linear/row_tiles.h"

namespace millrace {

// Up to this many rows, sums with weights that are not quantized take less time than memory. The hardware prefetcher
// alone is then faster: one to four rows in bf16 by 12 % on a Zen 5 class EPYC, by 13 to 20 % where memory gives 76
// GB/s; one or two with float32 sums by 3 % there, and not at 47 GB/s (before panels had streams).
template <class Input>
constexpr int64_t FEW_ROWS = sizeof(Input) == 2 ? 4 : 2;

// Up to this many rows, weights are read non-temporally, if the shared cache retains anything. With quantized weights
// one row: it takes 18 % less in int8 and 15 % less in int4 where memory is slow, as long in int8 where it is fast; two
// rows take as long (AVX-512, Zen 4 class EPYC). With AVX2 one row takes 25 % more in int8.
template <class Input, class Stored>
constexpr int64_t STREAMING_ROWS = USES_AMX<Input> ? 0
                                 : std::is_same<Stored, int8_t>::value || std::is_same<Stored, Int4Pair>::value
                                     ? int64_t(STREAMS == 1)
                                     : FEW_ROWS<Input>;
template <class Weight>
int64_t streaming_rows(const Linear& linear) {
    int64_t rows = 0;
    if constexpr (!std::is_same<Weight, Grouped>::value)
        dispatch_panels<Weight>(linear, [&](auto* panels) {
            rows = STREAMING_ROWS<InputOf<Weight>, typename std::remove_pointer<decltype(panels)>::type>;
        });
    return rows;
}

// Pairs of k between prefetches. With one per pair lines were requested faster than memory delivers them, and the sums'
// own reads waited behind them. One per two pairs takes 4 to 11 % less with 8 and 10 rows and up to 5 % less with more;
// in int4 from 5 % less to 5 % more (AVX2 on a Zen 3 class EPYC). Not measured for panels of one stream (AVX-512, and
// short groups).
constexpr int prefetch_interval(int64_t num_streams) { return num_streams == 1 ? 1 : 2; }
constexpr int64_t num_prefetches_for(int64_t num_pairs) { return num_pairs / prefetch_interval(num_streams(num_pairs)); }

// Vectors of a panel's row that are summed at a time. Each sum waits for the one before it, so few rows take all
// vectors.
constexpr int vectors_for(int rows) { return rows <= 2 ? int(PANEL) / W : GEMM_VECTORS; }

// Sums of R rows by V vectors of a panel's columns, from `lane`, over `num_pairs` pairs of k in S streams. x: a tile of
// `TiledRows`; rows of out are PANEL apart. WIDENS: stores these columns, converted, to `wide`. NOTE: a function of its
// own. Inlined in the loop over columns, GCC ran out of registers (4 rows in int4 took 1.3 times as long).
template <int R, int V, int S, PrefetchMode MODE, bool WIDENS, class Input, class Stored>
[[gnu::noinline]] void sum_vectors(const Input* x, const Stored* panel, int64_t lane, int64_t num_pairs, float* out,
                                   const WeightPrefetch& prefetch, Input* wide) {
    const int64_t stream_size = num_pairs / S;
    Prefetcher<MODE> prefetcher(prefetch);
    F sums[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sums[r][v] = zero();
    for (int64_t turn = 0; turn < stream_size; turn++) {
        UNROLL for (int stream = 0; stream < S; stream++, x += 2 * R) {
            int64_t place = turn + stream * stream_size;
            if (MODE == PrefetchMode::STREAMING)
                prefetch_nontemporal<index_in_pairs<Stored>(2, PANEL, 0)>(
                    panel + index_in_pairs<Stored>(2 * place, PANEL, 0));
            if (stream % prefetch_interval(S) == 0) prefetcher.prefetch_weights();
            prefetcher.prefetch_kv();
            float* to = WIDENS ? reinterpret_cast<float*>(wide + 2 * place * PANEL) + lane : nullptr;  // 4 bytes per lane
            F weights[V];
            if constexpr (sizeof(Input) == 2) {
#ifdef MILLRACE_BF16_DOT
                UNROLL for (int v = 0; v < V; v++) weights[v] = pairs_of(panel, place, PANEL, lane + v * W);
                if (WIDENS) UNROLL for (int v = 0; v < V; v++) store(to + v * W, weights[v]);
                UNROLL for (int r = 0; r < R; r++) {
                    uint32_t both = pair_at(x + 2 * r);
                    UNROLL for (int v = 0; v < V; v++) sums[r][v] = dot2_add(sums[r][v], weights[v], both);
                }
#endif
            } else {
                UNROLL for (int v = 0; v < V; v++) weights[v] = even_of(panel, place, PANEL, lane + v * W);
                if (WIDENS) UNROLL for (int v = 0; v < V; v++) store(to + v * W, weights[v]);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(x[r]);
                    UNROLL for (int v = 0; v < V; v++) fma_to(sums[r][v], number, weights[v]);
                }
                UNROLL for (int v = 0; v < V; v++) weights[v] = odd_of(panel, place, PANEL, lane + v * W);
                if (WIDENS) UNROLL for (int v = 0; v < V; v++) store(to + PANEL + v * W, weights[v]);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(x[R + r]);
                    UNROLL for (int v = 0; v < V; v++) fma_to(sums[r][v], number, weights[v]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) store(out + r * PANEL + v * W, sums[r][v]);
}

#if defined(MILLRACE_BF16_DOT)
// The same for a 12-bit panel: all columns at once, never stored converted.
template <int R, int V, int S, PrefetchMode MODE, bool WIDENS>
[[gnu::noinline]] void sum_vectors(const bf16* x, const Bf16In12Bits* panel, int64_t, int64_t num_pairs, float* out,
                                   const WeightPrefetch& prefetch, bf16*) {
    static_assert(V * W == PANEL && S == 1 && !WIDENS);
    Bf16In12BitsReader blocks(panel);
    Prefetcher<MODE> prefetcher(prefetch);
    F sums[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sums[r][v] = zero();
    for (int64_t block = 0; block < num_pairs / 2; block++) {
        if (MODE == PrefetchMode::STREAMING) blocks.prefetch_next_nontemporal();
        F weights[2][V];
        blocks.read(weights);
        UNROLL for (int pair = 0; pair < 2; pair++, x += 2 * R) {
            prefetcher.prefetch_weights();
            prefetcher.prefetch_kv();
            UNROLL for (int r = 0; r < R; r++) {
                uint32_t both = pair_at(x + 2 * r);
                UNROLL for (int v = 0; v < V; v++) sums[r][v] = dot2_add(sums[r][v], weights[pair][v], both);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) store(out + r * PANEL + v * W, sums[r][v]);
}
#endif

// Fewest rows of a tile that is one of several.
constexpr int MIN_ROWS_OF_MANY_TILES = GEMM_ROWS / 2;

// Sums of R rows by a whole panel: out [R][32].
template <int R, int S, bool WIDENS, class Input, class Stored>
void sum_panel(const Input* x, const Stored* panel, int64_t num_pairs, float* out, const WeightPrefetch& prefetch,
               Input* wide) {
    constexpr int V = vectors_for(R);
    constexpr bool STREAMS = R <= STREAMING_ROWS<Input, Stored>;
    auto sum = [&](int64_t lane, const WeightPrefetch& pass_prefetch, bool prefetches) {
        if constexpr (WIDENS)  // one tile of several: it may check for prefetches in vain, which saves code
            sum_vectors<R, V, S, PrefetchMode::NEXT_PANEL, true>(
                x, panel, lane, num_pairs, out + lane, pass_prefetch, wide);
        else if (R >= MIN_ROWS_OF_MANY_TILES && pass_prefetch.kv.num_prefetches > 0)
            sum_vectors<R, V, S,
                        R >= MIN_ROWS_OF_MANY_TILES ? PrefetchMode::NEXT_PANEL_AND_KV : PrefetchMode::NEXT_PANEL, false>(
                x, panel, lane, num_pairs, out + lane, pass_prefetch, wide);
        else if (STREAMS && pass_prefetch.is_streaming)
            sum_vectors<R, V, S, STREAMS ? PrefetchMode::STREAMING : PrefetchMode::NONE, false>(
                x, panel, lane, num_pairs, out + lane, pass_prefetch, wide);
        else if (prefetches)
            sum_vectors<R, V, S, PrefetchMode::NEXT_PANEL, false>(
                x, panel, lane, num_pairs, out + lane, pass_prefetch, wide);
        else
            sum_vectors<R, V, S, PrefetchMode::NONE, false>(x, panel, lane, num_pairs, out + lane, pass_prefetch, wide);
    };
    sum(0, prefetch, prefetch.num_prefetches > 0);
    for (int64_t lane = V * W; lane < PANEL; lane += V * W) {
        bool prefetches = prefetch.num_prefetches > 0 && prefetch.pass_stride > 0;
        int64_t num_prefetches = prefetches ? prefetch.num_prefetches : 0;
        WeightPrefetch next{prefetch.address + lane / (V * W) * prefetch.pass_stride, prefetch.bytes_per_prefetch,
                            num_prefetches, prefetch.pass_stride, {}, prefetch.is_streaming};
        sum(lane, next, prefetches);
    }
}

// Dispatches on the number of streams.
template <int R, bool WIDENS, class Input, class Stored>
void sum_tile(const Input* x, const Stored* panel, int64_t num_pairs, float* out, const WeightPrefetch& prefetch,
              Input* wide) {
    if (num_streams(num_pairs) == 1)
        sum_panel<R, 1, WIDENS>(x, panel, num_pairs, out, prefetch, wide);
    else
        sum_panel<R, STREAMS, WIDENS>(x, panel, num_pairs, out, prefetch, wide);
}

// R rows by a panel: one sum, or one per group of k times its scales [groups][32].
template <int R, bool WIDENS, class Input, class Stored>
void multiply_tile(const Input* x, const Stored* panel, const bf16* scales, int64_t group_pairs, int64_t num_pairs,
                   float* out, WeightPrefetch prefetch, Input* wide) {
    if (!scales) return sum_tile<R, WIDENS>(x, panel, num_pairs, out, prefetch, wide);
    alignas(64) float sums[R * PANEL];
    int64_t pair_size = index_in_pairs<Stored>(2, PANEL, 0);
    for (int64_t begin = 0; begin < num_pairs; begin += group_pairs, scales += PANEL) {
        int64_t count = std::min(group_pairs, num_pairs - begin);
        sum_tile<R, WIDENS>(x + 2 * begin * R, panel + begin * pair_size, count, sums, prefetch, wide);
        if (WIDENS) wide += 2 * count * PANEL;
        prefetch.address += num_prefetches_for(count) * prefetch.bytes_per_prefetch,
            prefetch.num_prefetches -= num_prefetches_for(count);
        for (int64_t lane = 0; lane < PANEL; lane += W) {
            F scale = load(scales + lane);
            for (int64_t i = lane; i < R * PANEL; i += PANEL)
                store(out + i, begin ? fma(load(sums + i), scale, load(out + i)) : mul(load(sums + i), scale));
        }
    }
}

template <class Input, class Stored>
using MultiplyTile = void (*)(const Input*, const Stored*, const bf16*, int64_t, int64_t, float*, WeightPrefetch, Input*);

// Null for row counts that the first of several tiles never has.
template <int R, bool WIDENS, class Input, class Stored>
constexpr MultiplyTile<Input, Stored> multiply_tile_or_none() {
    if constexpr (WIDENS && R < MIN_ROWS_OF_MANY_TILES)
        return nullptr;
    else
        return multiply_tile<R, WIDENS, Input, Stored>;
}

// The function for each number of rows, from 1.
template <bool WIDENS, class Input, class Stored, int... R>
MultiplyTile<Input, Stored> tile_for(int rows, std::integer_sequence<int, R...>) {
    static constexpr MultiplyTile<Input, Stored> TILES[] = {multiply_tile_or_none<R + 1, WIDENS, Input, Stored>()...};
    return TILES[rows - 1];
}

// One row, [k], by one panel of a linear that is not quantized: tile [32]. Prefetches the panel `next` meanwhile, or as
// much of it as one sum may.
template <class Weight>
void multiply_row_vectors(const Linear& linear, const InputOf<Weight>* row, int64_t panel, int64_t next, float* tile) {
    auto place = [&](int64_t index) { return linear.weight.as<char>() + index * linear.panel_bytes(); };
    int64_t num_pairs = linear.k / 2, num_prefetches = num_prefetches_for(num_pairs);
    int64_t maximum = std::min(MAX_PREFETCH_BYTES, round_up(linear.panel_bytes() / num_prefetches, 64));
    WeightPrefetch prefetch{place(next), maximum, std::min(num_prefetches, ceil_div(linear.panel_bytes(), maximum)), 0, {}};
    auto sum = [&](auto* numbers) {
        sum_tile<1, false>(row, numbers, num_pairs, tile, prefetch, static_cast<InputOf<Weight>*>(nullptr));
    };
    if constexpr (HAS_BF16_12BIT && std::is_same<Weight, bf16>::value)
        if (linear.type == BF16_12BIT) return sum(reinterpret_cast<const Bf16In12Bits*>(place(panel)));
    sum(reinterpret_cast<const Weight*>(place(panel)));
}

}  // namespace millrace
