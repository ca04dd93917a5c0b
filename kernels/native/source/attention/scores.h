// Vector kernels of attention: scores of keys, softmax weights, and weighted sums of values, for a constant number of
// rows.
//
// Operate on the tiles of kv_layout.h. Called by ItemAttention (attention.h), on each compute thread.

#pragma once

#include <algorithm>
#include <limits>

#include "attention/kv_layout.h"
#include "linear/row_tiles.h"

namespace millrace {

constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();  // the largest score if no key is visible

// Type of queries and weights: bf16 if the cache is and the machine has bf16 dot products, else float32.
template <class T>
using Operand = typename std::conditional<HAS_BF16_DOT && std::is_same<T, bf16>::value, bf16, float>::type;

// Most query rows (tokens x heads of a group) that share the reading of keys of type T; MAX_QUERY_ROWS: of any type.
template <class T>
constexpr int QUERY_ROWS = USES_AMX<T> ? AMX_ROWS : GEMM_ROWS;
constexpr int MAX_QUERY_ROWS = std::max(QUERY_ROWS<bf16>, QUERY_ROWS<float>);

// The softmax weights [R][CHUNK] of the scores in tiles [first, last) of a chunk, and their sums. Computed tile by
// tile, so that it can run beside code that waits for memory.
template <class T>
class SoftmaxWeights {
  public:
    // `largest`: per row; must stay valid until `finish`.
    void begin(const float* scores, const float* largest, int num_rows, int64_t first, int64_t last, Operand<T>* weights) {
        scores_ = scores, largest_ = largest, num_rows_ = num_rows, weights_ = weights;
        next_ = first * KEY_TILE, end_ = last * KEY_TILE;
        for (int r = 0; r < num_rows; r++) totals_[r] = zero();
    }

    void compute_tile() {
        if (next_ < end_) compute_until(next_ + KEY_TILE);
    }

    void finish(float* sums) {
        compute_until(end_);
        for (int r = 0; r < num_rows_; r++) sums[r] = sum_of(totals_[r]);
    }

  private:
    void compute_until(int64_t end) {
        for (int r = 0; r < num_rows_; r++) {
            F top = splat(largest_[r] == NO_SCORE ? 0.0f : largest_[r]), total = totals_[r];
            for (int64_t i = r * CHUNK + next_; i < r * CHUNK + end; i += W) {
                F weight = exp(sub(load(scores_ + i), top));
                store(weights_ + i, weight);
                total = add(total, weight);
            }
            totals_[r] = total;
        }
        next_ = end;
    }

    const float *scores_, *largest_;
    Operand<T>* weights_;
    int num_rows_;
    int64_t next_, end_;  // keys
    F totals_[MAX_QUERY_ROWS];
};

// Scores [R][CHUNK] of the keys in tiles [first, last), for queries [R][dim]. Tile by tile in memory order: several
// tiles at a time would keep the core busier and memory idle. Beside each tile computes a tile of the `deferred`
// weights, if any.
template <int R, class T>
void score_tiles(const Operand<T>* queries, const T* const* tiles, const TileReadOrder<T>& reads, int64_t first,
                 int64_t last, int64_t dim, float* scores, SoftmaxWeights<T>* deferred) {
    constexpr int C = KEY_TILE / W;  // vectors of keys
    for (int64_t tile = first; tile < last; tile++) {
        if (deferred) deferred->compute_tile();
        const T *at = tiles[tile], *next = uses_prefetch(R) ? reads.prefetch_address(tile - first) : nullptr;
        F sums[R][C];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
        for (int64_t pair = 0; pair < dim / 2; pair++) {
            if (uses_prefetch(R)) prefetch(next + 2 * KEY_TILE * pair, 2 * KEY_TILE * sizeof(T));
            F keys[C];
            if constexpr (sizeof(Operand<T>) == 2) {
#ifdef MILLRACE_BF16_DOT
                UNROLL for (int c = 0; c < C; c++) keys[c] = pairs_of(at, pair, KEY_TILE, c * W);
                UNROLL for (int r = 0; r < R; r++) {
                    uint32_t both = pair_at(queries + r * dim + 2 * pair);
                    UNROLL for (int c = 0; c < C; c++) sums[r][c] = dot2_add(sums[r][c], keys[c], both);
                }
#endif
            } else {
                UNROLL for (int c = 0; c < C; c++) keys[c] = even_of(at, pair, KEY_TILE, c * W);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(queries[r * dim + 2 * pair]);
                    UNROLL for (int c = 0; c < C; c++) fma_to(sums[r][c], number, keys[c]);
                }
                UNROLL for (int c = 0; c < C; c++) keys[c] = odd_of(at, pair, KEY_TILE, c * W);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(queries[r * dim + 2 * pair + 1]);
                    UNROLL for (int c = 0; c < C; c++) fma_to(sums[r][c], number, keys[c]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int c = 0; c < C; c++) store(scores + r * CHUNK + tile * KEY_TILE + c * W, sums[r][c]);
    }
}

// Adds the values of one key of a pair, C vectors from number `dim`, by weights [R][CHUNK]. Beside the sums, registers
// hold the weights or the values, whichever are fewer.
template <bool IS_ODD, int R, int C, class T>
[[gnu::always_inline]] inline void add_values(const T* tile, int64_t pair, int64_t width, int64_t dim,
                                              const float* weights, F (&totals)[R][C]) {
    if constexpr (R < C) {
        F all[R];
        UNROLL for (int r = 0; r < R; r++) all[r] = splat(weights[r * CHUNK + IS_ODD]);
        UNROLL for (int c = 0; c < C; c++) {
            F values = half_of<IS_ODD>(tile, pair, width, dim + c * W);
            UNROLL for (int r = 0; r < R; r++) fma_to(totals[r][c], all[r], values);
        }
    } else {
        F all[C];
        UNROLL for (int c = 0; c < C; c++) all[c] = half_of<IS_ODD>(tile, pair, width, dim + c * W);
        UNROLL for (int r = 0; r < R; r++) {
            F weight = splat(weights[r * CHUNK + IS_ODD]);
            UNROLL for (int c = 0; c < C; c++) fma_to(totals[r][c], weight, all[c]);
        }
    }
}

// Adds the values of a pair of keys, C vectors from number `dim`, by weights [R][CHUNK]. Of a half pair only the first
// key, because what lies past the last key may be anything. NOTE: a function of its own, always inline. In a lambda,
// compilers kept the totals in memory, and attention of prompts took twice as long (AVX2 on a Zen 3 class EPYC).
template <int R, int C, class T>
[[gnu::always_inline]] inline void add_pair(const T* tile, int64_t pair, int64_t width, int64_t dim,
                                            const Operand<T>* weights, bool is_whole, F (&totals)[R][C]) {
    if constexpr (sizeof(Operand<T>) == 2) {
#ifdef MILLRACE_BF16_DOT
        F values[C];
        UNROLL for (int c = 0; c < C; c++)
            values[c] = is_whole ? pairs_of(tile, pair, width, dim + c * W)
                                 : join(even_of(tile, pair, width, dim + c * W), zero());
        UNROLL for (int r = 0; r < R; r++) {
            uint32_t both = pair_at(weights + r * CHUNK);
            UNROLL for (int c = 0; c < C; c++) totals[r][c] = dot2_add(totals[r][c], values[c], both);
        }
#endif
    } else {
        add_values<false>(tile, pair, width, dim, weights, totals);
        if (is_whole) add_values<true>(tile, pair, width, dim, weights, totals);
    }
}

// C vectors, from number `dim`, of the result of `sum_values`. PREFETCHES: this pass reads ahead.
template <int R, int C, bool PREFETCHES, class T>
void sum_columns(const Operand<T>* weights, const T* const* tiles, const TileReadOrder<T>& reads, int64_t first,
                 int64_t last, int64_t width, int64_t dim, float* sums) {
    int64_t first_tile = first / KEY_TILE, end_tile = ceil_div(last, KEY_TILE),
        tile_bytes = KEY_TILE * width * int64_t(sizeof(T));
    F totals[R][C];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) totals[r][c] = zero();
    for (int64_t tile = first_tile; tile < end_tile; tile++) {
        const T* at = tiles[tile];
        const Operand<T>* weights_of_tile = weights + tile * KEY_TILE;
        int64_t begin = std::max(first - tile * KEY_TILE, int64_t(0)) / 2, num = std::min(last - tile * KEY_TILE, KEY_TILE);
        const char* next = nullptr;
        int64_t bytes_per_pair = 0;  // of the tile ahead, to prefetch beside each pair
        if (PREFETCHES) {
            next = reinterpret_cast<const char*>(reads.prefetch_address(tile - first_tile));
            bytes_per_pair = round_up(ceil_div(tile_bytes, ceil_div(num, 2) - begin), 64);
        }
        for (int64_t pair = begin; pair < num / 2; pair++, next += bytes_per_pair) {
            if (PREFETCHES) prefetch(next, bytes_per_pair);
            add_pair<R, C>(at, pair, width, dim, weights_of_tile + 2 * pair, true, totals);
        }
        if (num % 2 == 0) continue;
        if (PREFETCHES) prefetch(next, bytes_per_pair);
        add_pair<R, C>(at, num / 2, width, dim, weights_of_tile + num - 1, false, totals);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(sums + r * width + dim + c * W, totals[r][c]);
}

// The same for C vectors, or C / 2, C / 4 and so on where fewer are left. Returns how many numbers these are.
template <int R, int C, bool PREFETCHES, class T>
int64_t sum_next_columns(const Operand<T>* weights, const T* const* tiles, const TileReadOrder<T>& reads, int64_t first,
                         int64_t last, int64_t width, int64_t dim, float* sums) {
    if constexpr (C > 1) {
        if (width - dim < C * W)
            return sum_next_columns<R, C / 2, PREFETCHES>(weights, tiles, reads, first, last, width, dim, sums);
    }
    sum_columns<R, C, PREFETCHES>(weights, tiles, reads, first, last, width, dim, sums);
    return C * W;
}

// Weighted sums [R][width] of the values of keys [first, last) of a chunk. The weights [R][CHUNK] are 0 for the other
// keys of the tiles. Only the first pass over the keys prefetches. For two rows and heads of 128 numbers one pass takes
// 8 % less of attention than two (AVX-512, Zen 5 class EPYC; wider passes are not measured for three rows and more).
template <int R, class T>
void sum_values(const Operand<T>* weights, const T* const* tiles, const TileReadOrder<T>& reads, int64_t first,
                int64_t last, int64_t width, float* sums) {
    constexpr int C = W == 16 ? (R <= 2 ? 8 : R <= 4 ? 4 : 2) : R == 1 ? 8 : R <= 3 ? 4 : 2;
    int64_t dim = sum_next_columns<R, C, uses_prefetch(R)>(weights, tiles, reads, first, last, width, 0, sums);
    while (dim < width)
        dim += sum_next_columns<R, C, false>(weights, tiles, reads, first, last, width, dim, sums);
}

// Row counts with code of their own; rows of zeros fill up to the next one.
constexpr int SPECIALIZED_ROWS[] = {1, 2, 3, 4, 6, 8, 12};

inline int specialized_rows(int rows) {
    for (int size : SPECIALIZED_ROWS)
        if (size >= rows) return size;
    return rows;
}

// Calls `use` with the number of rows as a constant.
template <class Use>
void dispatch_rows(int rows, const Use& use) {
    switch (rows) {
        case 1: return use(std::integral_constant<int, 1>());
        case 2: return use(std::integral_constant<int, 2>());
        case 3: return use(std::integral_constant<int, 3>());
        case 4: return use(std::integral_constant<int, 4>());
        case 6: return use(std::integral_constant<int, 6>());
#if defined(__AVX512F__)
        case 8: return use(std::integral_constant<int, 8>());
        case 12: return use(std::integral_constant<int, 12>());
#endif
    }
}

}  // namespace millrace
