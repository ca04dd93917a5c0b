// Latents as rows of the cache: how a token's is written, scores of rows, and rows as tiles of values.
//
// A row is a key, [latent, rotated part], and its first numbers are the value: one copy of each token serves both, and
// all heads. Scores are sums over a row's numbers, vector by vector, then over the lanes. NOTE: in one order for each
// query row and key, whichever are computed beside it, so that a row gives the same bits in every batch. Rows are padded
// to a multiple of 32 numbers with zeros. Called by ItemAttention, on each compute thread.

#pragma once

#include <algorithm>
#include <array>

#include "attention/scores.h"
#include "machine/amx.h"

namespace millrace {

// Writes a token's row of `count` numbers, and zeros up to `width`.
template <class T>
void write_latent(const float* numbers, int64_t count, int64_t width, T* row) {
    convert_all(numbers, count, row);
    std::fill(row + count, row + width, T());
}

// Puts queries, `scale` times [rows][count] floats, as `score_latents` reads them: [rows][width] with zeros behind, and
// in AMX [width / 2][16][2]. Null rows are zeros.
template <class T>
void put_latent_queries(const float* const* rows, int num_rows, int64_t count, int64_t width, float scale, Operand<T>* to) {
    auto put = [&](const float* from, Operand<T>* row) {
        int64_t d = 0;
        if (from) {
            for (; d + W <= count; d += W) store(row + d, mul(load(from + d), splat(scale)));
            for (; d < count; d++) convert(from[d] * scale, row + d);
        }
        std::fill(row + d, row + width, Operand<T>());
    };
    if constexpr (!USES_AMX<T>) {
        for (int r = 0; r < num_rows; r++) put(rows[r], to + r * width);
    } else {
        Operand<T> some[4][MAX_HEAD_DIM];
        for (int r = 0; r < AMX_ROWS; r += 4) {
            for (int i = 0; i < 4; i++) put(rows[r + i], some[i]);
            for (int64_t d = 0; d < width; d += 8) {
                const Operand<T>* const four[4] = {some[0] + d, some[1] + d, some[2] + d, some[3] + d};
                transpose_4(four, to + d * AMX_ROWS + 2 * r, 2 * AMX_ROWS);
            }
        }
    }
}

#if defined(MILLRACE_BF16_DOT)
// sums += dot products of the W pairs of bf16 at `a` with those at `b`.
inline F dot2_pairs(F sums, const bf16* a, const bf16* b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, __m512bh(_mm512_loadu_si512(a)), __m512bh(_mm512_loadu_si512(b)));
#else
    return fma(load_even(a), load_even(b), fma(load_odd(a), load_odd(b), sums));
#endif
}
#endif

#if defined(__AVX512F__)
// The sums of 16 vectors over their lanes: lane i of the result is that of x[i].
[[gnu::always_inline]] inline F sums_of_16(const F (&x)[16]) {
    F four[4];
    UNROLL for (int i = 0; i < 4; i++) {
        F a = add(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
        F b = add(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
        __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
        four[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    }
    F low = add(_mm512_shuffle_f32x4(four[0], four[1], 0x44), _mm512_shuffle_f32x4(four[0], four[1], 0xee));
    F high = add(_mm512_shuffle_f32x4(four[2], four[3], 0x44), _mm512_shuffle_f32x4(four[2], four[3], 0xee));
    return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
#endif

// Scores [R][CHUNK] of four keys for queries [R][width].
template <int R, class T>
void score_four_latents(const Operand<T>* queries, const T* const* keys, int64_t width, float* scores) {
    constexpr int K = W == 16 ? 4 : 2;  // keys at a time: as many as there are registers for
    for (int k = 0; k < 4; k += K) {
        F sums[16];
        UNROLL for (int i = 0; i < 16; i++) sums[i] = zero();
        if constexpr (sizeof(Operand<T>) == 2) {
#if defined(MILLRACE_BF16_DOT)
            for (int64_t d = 0; d < width; d += 2 * W)
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int i = 0; i < K; i++)
                        sums[4 * r + i] = dot2_pairs(sums[4 * r + i], keys[k + i] + d, queries + r * width + d);
#endif
        } else {
            for (int64_t d = 0; d < width; d += W) {
                F row[K];
                UNROLL for (int i = 0; i < K; i++) row[i] = load(keys[k + i] + d);
                UNROLL for (int r = 0; r < R; r++) {
                    F query = load(queries + r * width + d);
                    UNROLL for (int i = 0; i < K; i++) fma_to(sums[4 * r + i], query, row[i]);
                }
            }
        }
#if defined(__AVX512F__)
        alignas(64) float all[16];
        store(all, sums_of_16(sums));
        UNROLL for (int r = 0; r < R; r++) std::copy(all + 4 * r, all + 4 * r + 4, scores + r * CHUNK);
#else
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int i = 0; i < K; i++) scores[r * CHUNK + k + i] = sum_of(sums[4 * r + i]);
#endif
    }
}

// Prefetches rows: to the L2 cache, ahead of products in registers, whose loads the processor does not foresee.
template <class T>
[[gnu::always_inline]] inline void prefetch_rows(const T* const* rows, int64_t num, int64_t width) {
    for (int64_t i = 0; i < num; i++)
        for (int64_t byte = 0; byte < width * int64_t(sizeof(T)); byte += 64)
            _mm_prefetch(reinterpret_cast<const char*>(rows[i]) + byte, _MM_HINT_T1);
}

// Of AMX: all registers whole. 0 to 3 hold sums.
inline const TileConfig& latent_tile_config() {
    static const TileConfig config = [] {
        TileConfig whole;
        for (int tile = 0; tile < 8; tile++) whole.set(tile, AMX_ROWS, AMX_PAIRS);
        return whole;
    }();
    return config;
}

// The transpose of a tile of scores [16 keys][16 rows], to [num_rows][CHUNK].
inline void put_transposed_scores(const float* tile, int num_rows, float* scores) {
    float columns[4][4];
    for (int64_t key = 0; key < KEY_TILE; key += 4)
        for (int r = 0; r < num_rows; r += 4) {
            const float* first = tile + key * AMX_ROWS + r;
            const float* const four[4] = {first, first + AMX_ROWS, first + 2 * AMX_ROWS, first + 3 * AMX_ROWS};
            transpose_4(four, &columns[0][0], 4);
            for (int i = 0; i < std::min(4, num_rows - r); i++)
                std::copy(columns[i], columns[i] + 4, scores + (r + i) * CHUNK + key);
        }
}

constexpr int LATENT_TILES = 4;  // of keys at a time in AMX, as the sums of one depend on each other

// Tiles of a chunk that are prefetched beside the sums of the one before; the others beside scores.
constexpr int64_t LATENT_TILES_AHEAD = 2 * LATENT_TILES;

// Scores of up to four tiles, whose rows are adjacent. Prefetches the rows of `num_next` tiles at `next`.
template <int N>
void score_latent_tiles_amx(const bf16* queries, int num_rows, const bf16* const* tiles, const bf16* const* next,
                            int64_t num_next, int64_t width, float* scores) {
    alignas(64) float sums[KEY_TILE * AMX_ROWS];
    int64_t num_steps = width / AMX_K_STEP, step = 0;
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    for (int64_t d = 0; d < width; d += AMX_K_STEP, step++) {
        int64_t first = KEY_TILE * num_next * step / num_steps, end = KEY_TILE * num_next * (step + 1) / num_steps;
        prefetch_rows(next + first, end - first, width);
        load_tile<5>(queries + d * AMX_ROWS, 4 * AMX_ROWS);
        load_tile<4>(tiles[0] + d, 2 * width), tile_dot_bf16<0, 4, 5>();
        if (N > 1) load_tile<6>(tiles[1] + d, 2 * width), tile_dot_bf16<1, 6, 5>();
        if (N > 2) load_tile<7>(tiles[2] + d, 2 * width), tile_dot_bf16<2, 7, 5>();
        if (N > 3) load_tile<4>(tiles[3] + d, 2 * width), tile_dot_bf16<3, 4, 5>();
    }
    auto put = [&](int tile) { put_transposed_scores(sums, num_rows, scores + tile * KEY_TILE); };
    store_tile<0>(sums, 4 * AMX_ROWS), put(0);
    if (N > 1) store_tile<1>(sums, 4 * AMX_ROWS), put(1);
    if (N > 2) store_tile<2>(sums, 4 * AMX_ROWS), put(2);
    if (N > 3) store_tile<3>(sums, 4 * AMX_ROWS), put(3);
}

// The rows of a tile: where they are if they are adjacent, else in `scratch` [16][width].
template <class T>
const T* adjacent_rows(const T* const* rows, int64_t width, T* scratch) {
    bool are_adjacent = true;
    for (int64_t i = 1; i < KEY_TILE; i++) are_adjacent &= rows[i] == rows[0] + i * width;
    if (are_adjacent) return rows[0];
    for (int64_t i = 0; i < KEY_TILE; i++) std::copy(rows[i], rows[i] + width, scratch + i * width);
    return scratch;
}

// Scores [rows][CHUNK] of the latents in `num_tiles` tiles, for queries as `put_latent_queries` leaves them. `scratch`:
// a tile [16][width] for each whose rows are not adjacent.
template <class T>
void score_latents(const Operand<T>* queries, int num_rows, const T* const* rows, int64_t num_tiles, int64_t width,
                   float* scores, [[maybe_unused]] T* scratch) {
    if constexpr (USES_AMX<T>) {
        for (int64_t tile = 0; tile < num_tiles; tile += LATENT_TILES) {
            int64_t num = std::min<int64_t>(LATENT_TILES, num_tiles - tile);
            const T *tiles[LATENT_TILES], *const* next = rows + (tile + LATENT_TILES_AHEAD) * KEY_TILE;
            for (int64_t i = 0; i < num; i++)
                tiles[i] = adjacent_rows(rows + (tile + i) * KEY_TILE, width, scratch + (tile + i) * KEY_TILE * width);
            int64_t num_next = std::clamp<int64_t>(num_tiles - tile - LATENT_TILES_AHEAD, 0, LATENT_TILES);
            auto score = [&](auto count) {
                score_latent_tiles_amx<decltype(count)::value>(queries, num_rows, tiles, next, num_next, width,
                                                               scores + tile * KEY_TILE);
            };
            switch (num) {
                case 1: score(std::integral_constant<int, 1>()); break;
                case 2: score(std::integral_constant<int, 2>()); break;
                case 3: score(std::integral_constant<int, 3>()); break;
                default: score(std::integral_constant<int, 4>());
            }
        }
    } else {
        for (int64_t key = 0; key < num_tiles * KEY_TILE; key += 4) {
            int r = 0;
            for (; r + 4 <= num_rows; r += 4)
                score_four_latents<4, T>(queries + r * width, rows + key, width, scores + r * CHUNK + key);
            if (r + 2 <= num_rows)
                score_four_latents<2, T>(queries + r * width, rows + key, width, scores + r * CHUNK + key), r += 2;
            if (r < num_rows) score_four_latents<1, T>(queries + r * width, rows + key, width, scores + r * CHUNK + key);
        }
    }
}

// Interleaves two rows of bf16 to pairs.
inline void join_rows(const bf16* even, const bf16* odd, int64_t count, bf16* pairs) {
    int64_t d = 0;
#if defined(__AVX512BW__)
    alignas(64) static constexpr auto PLACES = [] {
        std::array<uint16_t, 64> places{};
        for (uint16_t i = 0; i < 64; i++) places[i] = uint16_t(i / 2 + i % 2 * 32);
        return places;
    }();
    __m512i low = _mm512_load_si512(PLACES.data()), high = _mm512_load_si512(PLACES.data() + 32);
    for (; d + 32 <= count; d += 32) {
        __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
        _mm512_storeu_si512(pairs + 2 * d, _mm512_permutex2var_epi16(a, low, b));
        _mm512_storeu_si512(pairs + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
    }
#endif
    for (; d < count; d += W) store(reinterpret_cast<float*>(pairs + 2 * d), join(load(even + d), load(odd + d)));
}

// The 16 rows of a tile as values: in place if they are adjacent and float32, else in `scratch` [16][width], as
// kv_layout.h has them.
template <class T>
const T* latent_values_of(const T* const* rows, int64_t width, T* scratch) {
    if constexpr (!std::is_same<T, bf16>::value) return adjacent_rows(rows, width, scratch);
    if constexpr (std::is_same<T, bf16>::value)
        for (int64_t i = 0; i < KEY_TILE; i += 2) join_rows(rows[i], rows[i + 1], width, scratch + i * width);
    return scratch;
}

// Weighted sums [16][width] of the values of rows, in AMX: weights [16][CHUNK] of the keys in `num_tiles` tiles. Meanwhile
// prefetches the `num_next` rows at `next`. Two tiles at a time, whose rows are interleaved for 64 columns in the L1 cache:
// to interleave all columns of a chunk first took twice as long (Sapphire Rapids class Xeon, rows of 576 numbers).
// NOTE: of an odd number of tiles the weights behind the last one are set to 0, and its rows are there.
inline void sum_latents_amx(bf16* weights, const bf16* const* rows, int64_t num_tiles, int64_t width, int64_t columns,
                            const bf16* const* next, int64_t num_next, float* sums) {
    constexpr int64_t COLUMNS = 4 * AMX_COLUMNS;
    alignas(64) bf16 pairs[2][AMX_PAIRS][2 * COLUMNS];
    if (num_tiles % 2)
        for (int r = 0; r < AMX_ROWS; r++)
            std::fill_n(weights + r * CHUNK + num_tiles * KEY_TILE, KEY_TILE, bf16());
    int64_t num_steps = ceil_div(columns, COLUMNS) * ceil_div(num_tiles, 2), step = 0;
    for (int64_t dim = 0; dim < columns; dim += COLUMNS) {
        int64_t count = std::min(COLUMNS, width - dim);  // 32 or 64
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
        for (int64_t tile = 0; tile < num_tiles; tile += 2, step++) {
            auto& at = pairs[step % 2];
            const bf16* const* own = rows + tile * KEY_TILE;
            for (int pair = 0; pair < AMX_PAIRS; pair++) join_rows(own[2 * pair] + dim, own[2 * pair + 1] + dim, count, at[pair]);
            int64_t first = num_next * step / num_steps, end = num_next * (step + 1) / num_steps;
            prefetch_rows(next + first, end - first, width);
            load_tile<4>(weights + tile * KEY_TILE, 2 * CHUNK);
            load_tile<5>(at[0], 4 * COLUMNS), tile_dot_bf16<0, 4, 5>();
            load_tile<6>(at[0] + 2 * AMX_COLUMNS, 4 * COLUMNS), tile_dot_bf16<1, 4, 6>();
            if (count < COLUMNS) continue;
            load_tile<7>(at[0] + 4 * AMX_COLUMNS, 4 * COLUMNS), tile_dot_bf16<2, 4, 7>();
            load_tile<5>(at[0] + 6 * AMX_COLUMNS, 4 * COLUMNS), tile_dot_bf16<3, 4, 5>();
        }
        store_tile<0>(sums + dim, 4 * width), store_tile<1>(sums + dim + AMX_COLUMNS, 4 * width);
        if (count < COLUMNS) continue;
        store_tile<2>(sums + dim + 2 * AMX_COLUMNS, 4 * width), store_tile<3>(sums + dim + 3 * AMX_COLUMNS, 4 * width);
    }
}

// The same in vectors, of R rows and the keys [first, last).
template <int R, class T>
void sum_latents(const Operand<T>* weights, const T* const* tiles, int64_t first, int64_t last, int64_t width,
                 int64_t columns, float* sums) {
    constexpr int C = W == 16 ? (R <= 2 ? 8 : R <= 4 ? 4 : 2) : R == 1 ? 8 : R <= 3 ? 4 : 2;
    for (int64_t dim = 0; dim < columns;)
        dim += sum_next_columns<R, C, false>(weights, tiles, TileReadOrder<T>{}, first, last, width, dim, sums);
}

// Where attention over latents is written: each head over its query, as it is read no more.
struct SeenLatents {
    float* data;
    int64_t stride, head_stride, rank;

    // As `TiledRows::put_rows`, for one head, of `rank` numbers.
    void put_rows(int64_t row, int64_t num, int64_t begin, int64_t count, const float* numbers, int64_t from_stride) const {
        for (int64_t i = 0; i < num; i++)
            std::copy(numbers + i * from_stride, numbers + i * from_stride + count,
                      data + (row + i) * stride + begin / rank * head_stride);
    }
};

}  // namespace millrace
