// Latents as rows of the cache: how a token's is written, scores of rows, and rows as tiles of values.
//
// A row is a key, [latent, rotated part], and its first numbers are the value: one copy of each token serves both, and
// all heads. Scores are sums over a row's numbers, vector by vector, then over the lanes. NOTE: in one order for each
// query row and key, whichever are computed beside it, so that a row gives the same bits in every batch. Rows are padded
// to a multiple of 32 numbers with zeros. Called by ItemAttention, on each compute thread.

#pragma once

#include <algorithm>

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
    for (int r = 0; r < num_rows; r++) {
        Operand<T> row[MAX_HEAD_DIM];
        std::fill(row, row + width, Operand<T>());
        int64_t d = 0;
        if (rows[r]) {
            for (; d + W <= count; d += W) store(row + d, mul(load(rows[r] + d), splat(scale)));
            for (; d < count; d++) convert(rows[r][d] * scale, row + d);
        }
        if constexpr (USES_AMX<T>)
            for (int64_t pair = 0; pair < width / 2; pair++) std::memcpy(to + 2 * (pair * AMX_ROWS + r), row + 2 * pair, 4);
        else
            std::copy(row, row + width, to + r * width);
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

// The transpose of a tile of scores [16 keys][16 rows], to [num_rows][CHUNK].
inline void put_transposed_scores(const float* tile, int num_rows, float* scores) {
    const float* rows[4];
    float columns[KEY_TILE][4];
    for (int64_t key = 0; key < KEY_TILE; key += 4)
        for (int r = 0; r < num_rows; r += 4) {
            for (int i = 0; i < 4; i++) rows[i] = tile + (key + i) * AMX_ROWS + r;
            const float* const four[4] = {rows[0], rows[1], rows[2], rows[3]};
            transpose_4(four, &columns[0][0], 4);
            for (int i = 0; i < std::min(4, num_rows - r); i++)
                std::copy(columns[i], columns[i] + 4, scores + (r + i) * CHUNK + key);
        }
}

// Scores [rows][CHUNK] of the latents in `num_tiles` tiles, for queries as `put_latent_queries` leaves them. `scratch`
// [16][width]: for tiles whose rows are not adjacent.
template <class T>
void score_latents(const Operand<T>* queries, int num_rows, const T* const* rows, int64_t num_tiles, int64_t width,
                   float* scores, [[maybe_unused]] T* scratch) {
    for (int64_t tile = 0; tile < num_tiles; tile++, rows += KEY_TILE, scores += KEY_TILE) {
        if constexpr (USES_AMX<T>) {
            const T* first = rows[0];
            for (int64_t i = 1; i < KEY_TILE && first != scratch; i++)
                if (rows[i] != rows[0] + i * width) first = scratch;
            if (first == scratch)
                for (int64_t i = 0; i < KEY_TILE; i++) std::copy(rows[i], rows[i] + width, scratch + i * width);
            alignas(64) float sums[KEY_TILE * AMX_ROWS];
            clear_tile<0>();
            for (int64_t d = 0; d < width; d += AMX_K_STEP) {
                load_tile<4>(first + d, 2 * width);
                load_tile<5>(queries + d * AMX_ROWS, 4 * AMX_ROWS);
                tile_dot_bf16<0, 4, 5>();
            }
            store_tile<0>(sums, 4 * AMX_ROWS);
            put_transposed_scores(sums, num_rows, scores);
        } else {
            for (int64_t key = 0; key < KEY_TILE; key += 4) {
                int r = 0;
                for (; r + 4 <= num_rows; r += 4)
                    score_four_latents<4, T>(queries + r * width, rows + key, width, scores + r * CHUNK + key);
                if (r + 2 <= num_rows)
                    score_four_latents<2, T>(queries + r * width, rows + key, width, scores + r * CHUNK + key), r += 2;
                if (r < num_rows) score_four_latents<1, T>(queries + r * width, rows + key, width, scores + r * CHUNK + key);
            }
        }
    }
}

// The 16 rows of a tile as values: in place if they are adjacent and float32, else in `scratch` [16][width], as
// kv_layout.h has them.
template <class T>
const T* latent_values_of(const T* const* rows, int64_t width, T* scratch) {
    if constexpr (std::is_same<T, bf16>::value) {
        for (int64_t i = 0; i < KEY_TILE; i += 2)
            for (int64_t d = 0; d < width; d += W)
                store(reinterpret_cast<float*>(scratch + i * width + 2 * d), join(load(rows[i] + d), load(rows[i + 1] + d)));
    } else {
        bool are_adjacent = true;
        for (int64_t i = 1; i < KEY_TILE; i++) are_adjacent &= rows[i] == rows[0] + i * width;
        if (are_adjacent) return rows[0];
        for (int64_t i = 0; i < KEY_TILE; i++) std::copy(rows[i], rows[i] + width, scratch + i * width);
    }
    return scratch;
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
