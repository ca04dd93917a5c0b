// Products of a step's rows with packed weights.
//
// Each number of a product is one chain of fused multiply-adds over k in rising order (in int4 a chain for each group,
// and one of these times their scales), whatever the number of rows, of threads, or the tile it falls in: so the same row
// gives the same bits in every batch.
//
// Weights of int8 and int4 become numbers of bf16 or float32, which hold them exactly, in registers where one tile holds
// all rows; else a panel is widened to the model's dtype once, for all its tiles.

#pragma once

#include <algorithm>

#include "panels.h"

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

// What is to be fetched while a tile is computed, so that memory is busy meanwhile: `share` bytes a pair from `next` on.
struct Ahead {
    const char* next;
    int64_t share;
};

// Sums of R rows by 32 columns over some pairs of k. x of a tile of `TiledRows`, panel as `Linear` has it, out [R][32].
template <int R, class Input, class Stored>
void sum_tile(const Input* x, const Stored* panel, int64_t num_pairs, float* out, const Ahead& ahead) {
    constexpr int V = GEMM_VECTORS;
    constexpr bool is_dot = sizeof(Input) == 2;
    const char* next = ahead.next;
    int64_t share = ahead.share;
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
            F weights[V];
            if constexpr (is_dot) {
#ifdef MILLRACE_BF16_DOT
                UNROLL for (int v = 0; v < V; v++) weights[v] = pairs_of(panel, pair, PANEL, lane + v * W);
                UNROLL for (int r = 0; r < R; r++) {
                    uint32_t both;
                    std::memcpy(&both, x + 2 * (pair * R + r), 4);
                    UNROLL for (int v = 0; v < V; v++) sums[r][v] = add_dots(sums[r][v], weights[v], both);
                }
#endif
            } else {
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

// Scales of a panel, [groups][32].
struct Scales {
    const bf16* data;  // none where numbers are what they are
    int64_t group_pairs;
};

// R rows by 32 columns of a product: one sum, or one for each group of k, times its scales.
template <int R, class Input, class Stored>
void multiply_tile(const Input* x, const Stored* panel, int64_t num_pairs, const Scales& scales, float* out,
                   Ahead ahead) {
    if (!scales.data) return sum_tile<R>(x, panel, num_pairs, out, ahead);
    alignas(64) float sums[R * PANEL];
    int64_t pair_size = place_in_pairs<Stored>(2, PANEL, 0);
    const bf16* factors = scales.data;
    for (int64_t begin = 0; begin < num_pairs; begin += scales.group_pairs, factors += PANEL) {
        int64_t count = std::min(scales.group_pairs, num_pairs - begin);
        sum_tile<R>(x + 2 * begin * R, panel + begin * pair_size, count, sums, ahead);
        ahead.next += count * ahead.share;
        for (int64_t lane = 0; lane < PANEL; lane += W) {
            F factor = load(factors + lane);
            for (int64_t i = lane; i < R * PANEL; i += PANEL)
                store(out + i, begin ? fma(load(sums + i), factor, load(out + i)) : mul(load(sums + i), factor));
        }
    }
}

template <class Input, class Stored>
using MultiplyTile = void (*)(const Input*, const Stored*, int64_t, const Scales&, float*, Ahead);

// The tile for each number of rows, from 1.
template <class Input, class Stored, int... R>
MultiplyTile<Input, Stored> tile_for(int rows, std::integer_sequence<int, R...>) {
    static const MultiplyTile<Input, Stored> tiles[] = {multiply_tile<R + 1, Input, Stored>...};
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

constexpr int64_t CACHED = 384 << 10;  // bytes of panels that stay in the second-level cache for all rows

// Memory of this thread for panels that are widened.
inline char* widened_memory(int64_t num_bytes) {
    thread_local Memory memory;
    ensure(&memory, num_bytes);
    return memory.as<char>();
}

// And how much of it a linear takes.
template <class Weight>
int64_t widened_bytes(const Linear& linear) {
    int64_t panel = linear.k * PANEL * int64_t(sizeof(Weight));
    return linear.is_quantized() ? std::max<int64_t>(1, CACHED / panel) * panel : 0;
}

// This thread's part of x @ weight.T + bias: whole panels, for all rows, each tile handed to `out`.
template <class Weight, class Out>
class Product {
    using Input = InputOf<Weight>;

  public:
    Product(const Linear& linear, const TiledRows<Input>& x, const Out& out, int thread, int num_threads)
        : linear_(linear), x_(x), out_(out), num_tiles_(x.num_tiles()),
          held_(num_tiles_ == 1 ? 1 : std::max<int64_t>(1, CACHED / (linear.k * PANEL * int64_t(sizeof(Weight))))),
          share_(num_tiles_ > 16 ? 0 : linear.panel_bytes() / (linear.k / 2) / num_tiles_) {
        share(linear.num_panels(), thread, num_threads, &first_, &last_);
    }

    template <class Stored>
    void run(const Stored* weights) const {
        int64_t size = linear_.panel_bytes() / int64_t(sizeof(Stored));
        if constexpr (std::is_same<Stored, Weight>::value) {
            for (int64_t begin = first_; begin < last_; begin += held_) multiply(begin, weights + begin * size, size);
        } else if (num_tiles_ == 1) {
            for (int64_t panel = first_; panel < last_; panel++) multiply(panel, weights + panel * size, size);
        } else {
            int64_t wide_size = linear_.k * PANEL;
            auto wide = reinterpret_cast<Weight*>(widened_memory(widened_bytes<Weight>(linear_)));
            for (int64_t begin = first_; begin < last_; begin += held_) {
                for (int64_t p = begin; p < std::min(begin + held_, last_); p++)
                    widen_panel(weights + p * size, linear_.k / 2, wide + (p - begin) * wide_size);
                multiply(begin, wide, wide_size);
            }
        }
    }

  private:
    // The panels from `begin` that are held, which lie at `panels`, `size` apart.
    template <class Read>
    void multiply(int64_t begin, const Read* panels, int64_t size) const {
        int64_t end = std::min(begin + held_, last_);
        alignas(64) float tile[GEMM_ROWS * PANEL];
        for (int64_t part = 0; part < num_tiles_; part++) {
            int64_t row = x_.first_row(part);
            int rows = int(x_.first_row(part + 1) - row);
            auto multiply_rows = tile_for<Input, Read>(rows, std::make_integer_sequence<int, GEMM_ROWS>());
            for (int64_t p = begin; p < end; p++) {
                multiply_rows(x_.tile(part), panels + (p - begin) * size, linear_.k / 2, scales_of(p), tile,
                              ahead_of(p, part));
                if (!linear_.bias.empty()) add_bias(tile, rows, linear_.bias.data() + p * PANEL);
                out_.take(tile, row, rows, p, std::min(PANEL, linear_.n - p * PANEL));
            }
        }
    }

    Scales scales_of(int64_t panel) const {
        if (!linear_.is_quantized()) return {nullptr, 0};
        return {linear_.scales.as<bf16>() + panel * linear_.num_groups() * PANEL, linear_.group_size / 2};
    }

    // Its share of the panel that is multiplied after those that are held.
    Ahead ahead_of(int64_t panel, int64_t part) const {
        int64_t next = panel + held_;
        if (next >= last_) return {nullptr, 0};
        return {linear_.weight.as<char>() + next * linear_.panel_bytes() + part * (linear_.k / 2) * share_, share_};
    }

    const Linear& linear_;
    const TiledRows<Input>& x_;
    const Out& out_;
    int64_t num_tiles_, held_, share_, first_, last_;
};

template <class Weight, class Out>
void multiply(const Linear& linear, const TiledRows<InputOf<Weight>>& x, const Out& out, int thread, int num_threads) {
    if (x.num_rows == 0) return;  // a step of which nobody samples
    Product<Weight, Out> product(linear, x, out, thread, num_threads);
    with_panels<Weight>(linear, [&](auto* panels) { product.run(panels); });
}

}  // namespace millrace
