// Sums of a tile of rows by one panel of a weight, whatever that holds.
//
// Knows the order of sums and what is fetched beside them. Refuses to know which tiles and panels there are: see linear.h.

#pragma once

#include <algorithm>
#include <utility>

#include "linear/weight_prefetch.h"
#include "linear/row_tiles.h"

namespace millrace {

// Rows up to which, with weights that are not quantized, sums take less time than memory. A core then reads ahead by itself,
// and faster: one to four rows in bf16 by 12 % on a Zen 5 class EPYC, by 13 to 20 where memory gives 76 GB/s; one or two
// with float32 sums by 3 % there, and by nothing at 47 (before panels lay in streams).
template <class Input>
constexpr int64_t FEW_ROWS = sizeof(Input) == 2 ? 4 : 2;

// Rows up to which weights pass by the caches, where these keep anything. Of quantized ones one: it takes 18 % less in int8
// and 15 in int4 where memory is slow, as long in int8 where it is fast, and two take as long (AVX-512, Zen 4 class EPYC);
// with AVX2 one takes 25 % more in int8.
template <class Input, class Stored>
constexpr int64_t PASSING_ROWS = IN_AMX<Input> ? 0
                                 : std::is_same<Stored, int8_t>::value || std::is_same<Stored, Nibbles>::value
                                     ? int64_t(STREAMS == 1)
                                     : FEW_ROWS<Input>;
template <class Weight>
int64_t passing_rows(const Linear& linear) {
    int64_t rows = 0;
    with_panels<Weight>(linear, [&](auto* panels) {
        rows = PASSING_ROWS<InputOf<Weight>, typename std::remove_pointer<decltype(panels)>::type>;
    });
    return rows;
}

// Pairs of k from one time to the next. With each pair lines came faster than memory has them, and what the sums
// themselves read waited behind them: every second one takes 4 to 11 % less with 8 and 10 rows and up to 5 with more, and
// in int4 from 5 % less to 5 more (AVX2 on a Zen 3 class EPYC). Where panels are one stream (AVX-512, and short groups)
// nobody has measured it yet.
constexpr int pairs_apart(int64_t num_streams) { return num_streams == 1 ? 1 : 2; }
constexpr int64_t num_times(int64_t num_pairs) { return num_pairs / pairs_apart(num_streams(num_pairs)); }

// Vectors of a panel that are summed at a time. Each sum waits for the one before it, so few rows take all of them.
constexpr int vectors_for(int rows) { return rows <= 2 ? int(PANEL) / W : GEMM_VECTORS; }

// Sums of R rows by V vectors of a panel's columns, from `lane` on, over some pairs of k, which lie in S streams. x of a
// tile of `TiledRows`; a row of out begins PANEL after the one before. WIDENS: these columns of `wide` become the panel's, as
// numbers of what is multiplied. A function of its own: within the loop over columns GCC had too few registers for it (4 rows
// in int4 took 1.3 times as long).
template <int R, int V, int S, Fetched FETCHED, bool WIDENS, class Input, class Stored>
[[gnu::noinline]] void sum_vectors(const Input* x, const Stored* panel, int64_t lane, int64_t num_pairs, float* out,
                                   const Ahead& ahead, Input* wide) {
    const int64_t stream_size = num_pairs / S;
    Fetching<FETCHED> fetching(ahead);
    F sums[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sums[r][v] = zero();
    for (int64_t turn = 0; turn < stream_size; turn++) {
        UNROLL for (int stream = 0; stream < S; stream++, x += 2 * R) {
            int64_t place = turn + stream * stream_size;
            if (FETCHED == Fetched::PASSING)
                let_pass<place_in_pairs<Stored>(2, PANEL, 0)>(panel + place_in_pairs<Stored>(2 * place, PANEL, 0));
            if (stream % pairs_apart(S) == 0) fetching.once();
            fetching.beside();
            float* to = WIDENS ? reinterpret_cast<float*>(wide + 2 * place * PANEL) + lane : nullptr;  // 4 bytes a lane
            F weights[V];
            if constexpr (sizeof(Input) == 2) {
#ifdef MILLRACE_BF16_DOT
                UNROLL for (int v = 0; v < V; v++) weights[v] = pairs_of(panel, place, PANEL, lane + v * W);
                if (WIDENS) UNROLL for (int v = 0; v < V; v++) store(to + v * W, weights[v]);
                UNROLL for (int r = 0; r < R; r++) {
                    uint32_t both = pair_at(x + 2 * r);
                    UNROLL for (int v = 0; v < V; v++) sums[r][v] = add_dots(sums[r][v], weights[v], both);
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
// The same of a panel that is coded: by all of its columns, and nobody widens it.
template <int R, int V, int S, Fetched FETCHED, bool WIDENS>
[[gnu::noinline]] void sum_vectors(const bf16* x, const Coded* panel, int64_t, int64_t num_pairs, float* out,
                                   const Ahead& ahead, bf16*) {
    static_assert(V * W == PANEL && S == 1 && !WIDENS);
    CodedBlocks blocks(panel);
    Fetching<FETCHED> fetching(ahead);
    F sums[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sums[r][v] = zero();
    for (int64_t block = 0; block < num_pairs / 2; block++) {
        if (FETCHED == Fetched::PASSING) blocks.let_next_pass();
        F weights[2][V];
        blocks.read(weights);
        UNROLL for (int pair = 0; pair < 2; pair++, x += 2 * R) {
            fetching.once();
            fetching.beside();
            UNROLL for (int r = 0; r < R; r++) {
                uint32_t both = pair_at(x + 2 * r);
                UNROLL for (int v = 0; v < V; v++) sums[r][v] = add_dots(sums[r][v], weights[pair][v], both);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) store(out + r * PANEL + v * W, sums[r][v]);
}
#endif

// Rows of a tile that is one of several, at least.
constexpr int LEAST_OF_SEVERAL = GEMM_ROWS / 2;

// The same by a whole panel of 32 columns: out [R][32].
template <int R, int S, bool WIDENS, class Input, class Stored>
void sum_panel(const Input* x, const Stored* panel, int64_t num_pairs, float* out, const Ahead& ahead, Input* wide) {
    constexpr int V = vectors_for(R);
    constexpr bool PASSES = R <= PASSING_ROWS<Input, Stored>;
    auto sum = [&](int64_t lane, const Ahead& fetched, bool fetches) {
        if constexpr (WIDENS)  // one tile of several: it may look for what to fetch in vain, for the sake of less code
            sum_vectors<R, V, S, Fetched::AHEAD, true>(x, panel, lane, num_pairs, out + lane, fetched, wide);
        else if (R >= LEAST_OF_SEVERAL && fetched.beside.times > 0)
            sum_vectors<R, V, S, R >= LEAST_OF_SEVERAL ? Fetched::BOTH : Fetched::AHEAD, false>(
                x, panel, lane, num_pairs, out + lane, fetched, wide);
        else if (PASSES && fetched.is_passing)
            sum_vectors<R, V, S, PASSES ? Fetched::PASSING : Fetched::NONE, false>(x, panel, lane, num_pairs, out + lane,
                                                                                   fetched, wide);
        else if (fetches)
            sum_vectors<R, V, S, Fetched::AHEAD, false>(x, panel, lane, num_pairs, out + lane, fetched, wide);
        else
            sum_vectors<R, V, S, Fetched::NONE, false>(x, panel, lane, num_pairs, out + lane, fetched, wide);
    };
    sum(0, ahead, ahead.times > 0);
    for (int64_t lane = V * W; lane < PANEL; lane += V * W) {
        bool fetches = ahead.times > 0 && ahead.apart > 0;
        int64_t times = fetches ? ahead.times : 0;
        Ahead next{ahead.place + lane / (V * W) * ahead.apart, ahead.share, times, ahead.apart, {}, ahead.is_passing};
        sum(lane, next, fetches);
    }
}

// And in as many streams as there are.
template <int R, bool WIDENS, class Input, class Stored>
void sum_tile(const Input* x, const Stored* panel, int64_t num_pairs, float* out, const Ahead& ahead, Input* wide) {
    if (num_streams(num_pairs) == 1)
        sum_panel<R, 1, WIDENS>(x, panel, num_pairs, out, ahead, wide);
    else
        sum_panel<R, STREAMS, WIDENS>(x, panel, num_pairs, out, ahead, wide);
}

// R rows by a panel of a product: one sum, or one for each group of k, times its scales [groups][32].
template <int R, bool WIDENS, class Input, class Stored>
void multiply_tile(const Input* x, const Stored* panel, const bf16* scales, int64_t group_pairs, int64_t num_pairs,
                   float* out, Ahead ahead, Input* wide) {
    if (!scales) return sum_tile<R, WIDENS>(x, panel, num_pairs, out, ahead, wide);
    alignas(64) float sums[R * PANEL];
    int64_t pair_size = place_in_pairs<Stored>(2, PANEL, 0);
    for (int64_t begin = 0; begin < num_pairs; begin += group_pairs, scales += PANEL) {
        int64_t count = std::min(group_pairs, num_pairs - begin);
        sum_tile<R, WIDENS>(x + 2 * begin * R, panel + begin * pair_size, count, sums, ahead, wide);
        if (WIDENS) wide += 2 * count * PANEL;
        ahead.place += num_times(count) * ahead.share, ahead.times -= num_times(count);
        for (int64_t lane = 0; lane < PANEL; lane += W) {
            F scale = load(scales + lane);
            for (int64_t i = lane; i < R * PANEL; i += PANEL)
                store(out + i, begin ? fma(load(sums + i), scale, load(out + i)) : mul(load(sums + i), scale));
        }
    }
}

template <class Input, class Stored>
using MultiplyTile = void (*)(const Input*, const Stored*, const bf16*, int64_t, int64_t, float*, Ahead, Input*);

// None for rows of which the first of several tiles has more.
template <int R, bool WIDENS, class Input, class Stored>
constexpr MultiplyTile<Input, Stored> multiply_tile_or_none() {
    if constexpr (WIDENS && R < LEAST_OF_SEVERAL)
        return nullptr;
    else
        return multiply_tile<R, WIDENS, Input, Stored>;
}

// The tile for each number of rows, from 1.
template <bool WIDENS, class Input, class Stored, int... R>
MultiplyTile<Input, Stored> tile_for(int rows, std::integer_sequence<int, R...>) {
    static constexpr MultiplyTile<Input, Stored> TILES[] = {multiply_tile_or_none<R + 1, WIDENS, Input, Stored>()...};
    return TILES[rows - 1];
}

// One row, [k], by one panel of a linear that is not quantized: tile [32]. Meanwhile the panel `next` is fetched, or as much
// of it as one sum may.
template <class Weight>
void multiply_row_in_vectors(const Linear& linear, const InputOf<Weight>* row, int64_t panel, int64_t next, float* tile) {
    auto place = [&](int64_t index) { return linear.weight.as<char>() + index * linear.panel_bytes(); };
    int64_t num_pairs = linear.k / 2, times = num_times(num_pairs);
    int64_t most = std::min(MOST_SHARE, round_up(linear.panel_bytes() / times, 64));
    Ahead ahead{place(next), most, std::min(times, ceil_div(linear.panel_bytes(), most)), 0, {}};
    auto sum = [&](auto* numbers) {
        sum_tile<1, false>(row, numbers, num_pairs, tile, ahead, static_cast<InputOf<Weight>*>(nullptr));
    };
    if constexpr (HAS_CODED && std::is_same<Weight, bf16>::value)
        if (linear.type == CODED) return sum(reinterpret_cast<const Coded*>(place(panel)));
    sum(reinterpret_cast<const Weight*>(place(panel)));
}

}  // namespace millrace
