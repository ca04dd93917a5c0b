// Inputs and outputs of products: rows in tiles, and what is done with the tiles of a result.
//
// TiledRows is the layout that products read. FloatOutput is an output (ActivatedOutput in activations.h, LogitsOutput in
// step/output_head.h and RowArgmax in step/argmax.h are others): `prefetch_output` is called before a tile is summed,
// `write` with the result. Used on each compute thread.

#pragma once

#include <algorithm>
#include <limits>

#include "machine/amx.h"
#include "linear/panels.h"
#include "lora/update.h"

namespace millrace {

// Input type of a product: bf16 where the machine has bf16 dot products and the model is bf16, else float32.
template <class Weight>
struct InputTypeOf {
    using type = typename std::conditional<HAS_BF16_DOT, Weight, float>::type;
};
template <class Weight>
using InputOf = typename InputTypeOf<Weight>::type;

// Elements of a row that are stored together before those of the tile's next row: 4 bytes, a pair of bf16 or one
// float32; in AMX a register row.
template <class T>
constexpr int64_t INTERLEAVE = USES_AMX<T> ? AMX_K_STEP : 4 / sizeof(T);

// Most rows of a tile.
template <class T>
constexpr int MAX_TILE_ROWS = USES_AMX<T> ? AMX_TILE_ROWS : GEMM_ROWS;

// From this many tiles on, two threads split a product by rows, not by columns: see linear.h.
constexpr int64_t MIN_TILES_TO_SPLIT = 4;

// Fewest rows of a tile if their number is rounded up to even; else it stays odd.
template <class T>
constexpr int64_t MIN_ROWS_TO_SPLIT = 2 * MAX_TILE_ROWS<T> / 3;

// Numbers in a product's input type: float32 as they are, bf16 in `converted`.
inline const float* to_input(const float* numbers, int64_t, float*) { return numbers; }
inline const bf16* to_input(const float* numbers, int64_t count, bf16* converted) {
    convert_all(numbers, count, converted);
    return converted;
}

// Interleaves elements [begin, begin + count) of `num` rows, `stride` apart in `numbers`, with the `rows` rows of an
// AMX tile, from `row` on.
template <class T>
void interleave_rows_amx(const float* numbers, int64_t stride, int64_t begin, int64_t count, int64_t rows, int64_t row,
                         int num, T* to) {
    constexpr int64_t UNIT = INTERLEAVE<T>;
    for (int64_t i = begin, end = begin + count, next; i < end; i = next) {
        next = std::min(end, round_up(i + 1, UNIT));
        T* unit = to + (i - i % UNIT) * rows + row * UNIT + i % UNIT;
        for (int r = 0; r < num; r++, unit += UNIT) {
            const float* from = numbers + r * stride + i - begin;
            if (next - i < UNIT) {
                convert_all(from, next - i, unit);
            } else {
                UNROLL for (int64_t at = 0; at < UNIT; at += W) store(unit + at, load(from + at));
            }
        }
    }
}

// Interleaves elements [begin, begin + count) of R rows (1, 2 or 4), `stride` apart in `numbers`, with the `rows` rows
// of a tile, from `row` on. `begin` and `count` must be even.
template <int R, class T>
void interleave_rows(const float* numbers, int64_t stride, int64_t begin, int64_t count, int64_t rows, int64_t row, T* to) {
    constexpr int64_t UNIT = INTERLEAVE<T>, BATCH = 64;
    if constexpr (USES_AMX<T>) return interleave_rows_amx(numbers, stride, begin, count, rows, row, R, to);
    alignas(64) T converted[R][BATCH];
    to += begin * rows + row * UNIT;
    for (int64_t done = 0; done < count; done += BATCH) {
        int64_t count_now = std::min(BATCH, count - done), i = 0;
        const T* from[R];
        UNROLL for (int r = 0; r < R; r++) from[r] = to_input(numbers + r * stride + done, count_now, converted[r]);
        if constexpr (R > 1) {
            for (; i + 4 * UNIT <= count_now; i += 4 * UNIT, to += 4 * rows * UNIT) {
                const T* four[R];
                UNROLL for (int r = 0; r < R; r++) four[r] = from[r] + i;
                transpose_4(four, to, rows * UNIT);
            }
        }
        for (; i < count_now; i += UNIT, to += rows * UNIT)
            UNROLL for (int r = 0; r < R; r++) std::memcpy(to + r * UNIT, from[r] + i, 4);
    }
}

// The same for all rows of a tile.
template <class T>
void interleave_tile(const float* numbers, int64_t stride, int64_t begin, int64_t count, int64_t rows, T* to) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) interleave_rows<4>(numbers + r * stride, stride, begin, count, rows, r, to);
    if (r + 2 <= rows) interleave_rows<2>(numbers + r * stride, stride, begin, count, rows, r, to), r += 2;
    if (r < rows) interleave_rows<1>(numbers + r * stride, stride, begin, count, rows, r, to);
}

// Rows in the layout that products read: tiles of up to MAX_TILE_ROWS rows, the elements of a tile's rows interleaved,
// [size][rows] (bf16: [size / 2][rows][2]), so that one pointer walks through the tile. Tiles are of similar size. From
// four on their number is even, so that two threads can split them; three become four if each then has
// MIN_ROWS_TO_SPLIT. AMX: whole tiles except the last, [size / 32][rows][32] with zeros past the size.
template <class T>
struct TiledRows {
    T* data;
    int64_t num_rows, size;

    static int64_t num_tiles_of(int64_t num_rows) {
        int64_t num = ceil_div(num_rows, MAX_TILE_ROWS<T>), even = round_up(num, 2);
        return !USES_AMX<T> && even >= MIN_TILES_TO_SPLIT && num_rows >= even * MIN_ROWS_TO_SPLIT<T> ? even : num;
    }
    int64_t num_tiles() const { return num_tiles_of(num_rows); }
    int64_t first_row(int64_t tile) const {
        return USES_AMX<T> ? std::min(num_rows, tile * MAX_TILE_ROWS<T>) : num_rows * tile / num_tiles();
    }
    int64_t tile_of(int64_t row) const {
        return USES_AMX<T> ? row / MAX_TILE_ROWS<T> : ((row + 1) * num_tiles() - 1) / num_rows;
    }
    int64_t padded_size() const { return USES_AMX<T> ? round_up(size, INTERLEAVE<T>) : size; }
    // Bytes read past the last row; any contents.
    int64_t bytes_behind() const { return USES_AMX<T> ? (AMX_ROWS - 1) * 64 : 0; }
    T* tile(int64_t tile) const { return data + first_row(tile) * padded_size(); }

    // Writes `count` elements of a row, from element `begin`.
    void put(int64_t row, int64_t begin, int64_t count, const float* numbers) const {
        int64_t at = tile_of(row), first = first_row(at), rows = first_row(at + 1) - first;
        T* to = tile(at);
        if (rows == 1 && !USES_AMX<T>)
            convert_all(numbers, count, to + begin);
        else
            interleave_rows<1>(numbers, 0, begin, count, rows, row - first, to);
        pad(row, 1, begin + count);
    }

    // The same for `num` rows from `row` on, `stride` apart in `numbers`.
    void put_rows(int64_t row, int64_t num, int64_t begin, int64_t count, const float* numbers, int64_t stride) const {
        for (int64_t end = row + num, count_now; row < end; row += count_now, numbers += count_now * stride) {
            int64_t at = tile_of(row), first = first_row(at), rows = first_row(at + 1) - first;
            int64_t left = std::min(end, first + rows) - row;
            count_now = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (count_now == 4)
                interleave_rows<4>(numbers, stride, begin, count, rows, row - first, tile(at));
            else if (count_now == 2)
                interleave_rows<2>(numbers, stride, begin, count, rows, row - first, tile(at));
            else
                put(row, begin, count, numbers);
            if (count_now > 1) pad(row, count_now, begin + count);
        }
    }

    // The same for all rows of the tile that begins with row `first`.
    void put_tile(int64_t first, int64_t rows, int64_t begin, int64_t count, const float* numbers, int64_t stride) const {
        interleave_tile(numbers, stride, begin, count, rows, data + first * padded_size());
        pad(first, rows, begin + count);
    }

    // The same for whole rows.
    void put_whole_rows(int64_t row, int64_t num, const float* numbers, int64_t stride) const {
        put_rows(row, num, 0, size, numbers, stride);
    }

    // Prefetches what `put_tile` writes.
    void prefetch_for_put(int64_t first, int rows, int64_t begin, int64_t count) const {
        int64_t unit = INTERLEAVE<T>, padded = std::max(count, unit);
        auto out = data + first * padded_size() + (begin - begin % unit) * rows;
        for (int64_t i = 0; i < rows * padded * int64_t(sizeof(T)); i += 64)
            prefetch_for_write(reinterpret_cast<const char*>(out) + i);
    }

  private:
    // Zeros the padding of a tile's rows once their last elements, up to `end`, are written.
    void pad(int64_t row, int64_t num, int64_t end) const {
        if (end < size || padded_size() == size) return;
        int64_t at = tile_of(row), first = first_row(at), rows = first_row(at + 1) - first, unit = INTERLEAVE<T>;
        T* last = tile(at) + (size - size % unit) * rows + (row - first) * unit;
        for (int64_t i = 0; i < num; i++) std::fill(last + i * unit + size % unit, last + (i + 1) * unit, T());
    }
};

enum class StoreMode { STORE, ADD };  // out = scale * product, out += scale * product

inline void add_bias(float* tile, int rows, const float* bias) {
    for (int r = 0; r < rows; r++, tile += PANEL)
        for (int v = 0; v < PANEL; v += W) store(tile + v, add(load(tile + v), load(bias + v)));
}

inline void scale_tile(float* tile, int rows, float scale) {
    for (int i = 0; i < rows * PANEL; i += W) store(tile + i, mul(load(tile + i), splat(scale)));
}

// Outputs take a tile [rows][32] of a product, of which `columns` are valid. `prefetch_output`: the tile is about to be
// summed.
struct FloatOutput {  // rows of float32
    float* data;
    int64_t stride;
    StoreMode mode;
    float scale = 1.0f;
    const LoraUpdate* update = nullptr;  // of the rows' adapters, if any has one

    void prefetch_output(int64_t first_row, int rows, int64_t panel) const {
        const float* out = data + first_row * stride + panel * PANEL;
        for (int r = 0; r < rows; r++, out += stride) prefetch_for_write(out), prefetch_for_write(out + 16);
        if (update) update->prefetch(first_row, rows, panel);
    }

    void write(float* tile, int64_t first_row, int rows, int64_t panel, int64_t columns) const {
        if (update) update->add(tile, first_row, rows, panel);
        if (scale != 1.0f) scale_tile(tile, rows, scale);
        float* out = data + first_row * stride + panel * PANEL;
        for (int r = 0; r < rows; r++, tile += PANEL, out += stride) {
            int64_t c = 0;
            for (; c + W <= columns; c += W) {
                F numbers = load(tile + c);
                store(out + c, mode == StoreMode::ADD ? add(load(out + c), numbers) : numbers);
            }
            for (; c < columns; c++) out[c] = mode == StoreMode::ADD ? out[c] + tile[c] : tile[c];
        }
    }
};

// The largest of the first `columns` of a tile's row; +inf if one is a NaN. Overwrites what lies behind.
inline float max_of_columns(float* row, int64_t columns) {
    constexpr float INFINITE = std::numeric_limits<float>::infinity();
    std::fill(row + columns, row + PANEL, -INFINITE);
    F maximum = splat(-INFINITE);
    for (int v = 0; v < PANEL; v += W) {
        F numbers = load(row + v);
        maximum = max(maximum, select_ge(numbers, numbers, numbers, splat(INFINITE)));
    }
    return max_of(maximum);
}

// Adds the bias to a tile [rows][32] of a product and passes it to `out`.
template <class Out>
void emit_tile(const Linear& linear, const Out& out, float* tile, int64_t first_row, int rows, int64_t panel) {
    if (!linear.bias.empty()) add_bias(tile, rows, linear.bias.data() + panel * PANEL);
    out.write(tile, first_row, rows, panel, std::min(PANEL, linear.n - panel * PANEL));
}

}  // namespace millrace
