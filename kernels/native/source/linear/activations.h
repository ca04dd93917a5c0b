// Activations: the epilogue of a feed-forward network's first product, tile by tile.
//
// ActivatedOutput is an output of products as FloatOutput is (row_tiles.h). A layer's activation is called once per tile
// through a pointer, so that products are compiled once for all of them. Used on each compute thread.

#pragma once

#include "linear/row_tiles.h"
#include "machine/vector_math.h"

namespace millrace {

// Each activation replaces N vectors by its values. Several at a time, because the operations of an exponential depend
// on each other: 147 cycles for 6 rows of SiLU instead of 176 (AVX2 on a Zen 3 class EPYC).

struct Silu {  // x / (1 + e ** -x)
    template <int N>
    [[gnu::always_inline]] static void apply(F (&x)[N], const float*) {
        F powers[N];
        UNROLL for (int i = 0; i < N; i++) powers[i] = min(splat(88.0f), sub(zero(), x[i]));
        exp_all(powers);
        UNROLL for (int i = 0; i < N; i++) x[i] = div(x[i], add(splat(1.0f), powers[i]));
    }
};

struct Gelu {  // x times the share of the normal distribution below x
    template <int N>
    [[gnu::always_inline]] static void apply(F (&x)[N], const float*) {
        F tails[N];
        UNROLL for (int i = 0; i < N; i++) tails[i] = x[i];
        normal_tail_all(tails);
        UNROLL for (int i = 0; i < N; i++) {
            F cut = mul(x[i], tails[i]);
            x[i] = select_ge(x[i], zero(), sub(x[i], cut), cut);
        }
    }
};

struct GeluTanh {  // x / 2 * (1 + tanh(u)) = x / (1 + e ** -2u), u = sqrt(2 / pi) * (x + 0.044715 x ** 3)
    template <int N>
    [[gnu::always_inline]] static void apply(F (&x)[N], const float*) {
        F powers[N];
        UNROLL for (int i = 0; i < N; i++) {
            F slope = fma(mul(x[i], x[i]), splat(-2.0f * 0.7978845608f * 0.044715f), splat(-2.0f * 0.7978845608f));
            powers[i] = min(splat(88.0f), mul(x[i], slope));
        }
        exp_all(powers);
        UNROLL for (int i = 0; i < N; i++) x[i] = div(x[i], add(splat(1.0f), powers[i]));
    }
};

struct Relu {
    template <int N>
    [[gnu::always_inline]] static void apply(F (&x)[N], const float*) {
        UNROLL for (int i = 0; i < N; i++) x[i] = max(zero(), x[i]);  // in this order a NaN stays one
    }
};

struct ReluSquared {
    template <int N>
    [[gnu::always_inline]] static void apply(F (&x)[N], const float* params) {
        Relu::apply(x, params);
        UNROLL for (int i = 0; i < N; i++) x[i] = mul(x[i], x[i]);
    }
};

struct Xielu {  // p x ** 2 + x / 2 above 0, n (e ** min(x, -1e-6) - 1 - x) + x / 2 below; params: p, n
    template <int N>
    [[gnu::always_inline]] static void apply(F (&x)[N], const float* params) {
        F powers[N];
        UNROLL for (int i = 0; i < N; i++) powers[i] = min(splat(-1e-6f), x[i]);
        expm1_all(powers);
        UNROLL for (int i = 0; i < N; i++) {
            F above = mul(splat(params[0]), mul(x[i], x[i])), below = mul(splat(params[1]), sub(powers[i], x[i]));
            x[i] = fma(splat(0.5f), x[i], select_ge(zero(), x[i], below, above));
        }
    }
};

struct SwigluClamped {  // (up + 1) * x / (1 + e ** -ax), x at most l, up from -l to l; params: a, l
    template <int N>
    [[gnu::always_inline]] static void apply(F (&x)[N], const float* params) {
        F powers[N];
        UNROLL for (int i = 0; i < N; i++) {
            x[i] = min(splat(params[1]), x[i]);
            powers[i] = min(splat(88.0f), mul(splat(-params[0]), x[i]));
        }
        exp_all(powers);
        UNROLL for (int i = 0; i < N; i++) x[i] = div(x[i], add(splat(1.0f), powers[i]));
    }
    static F up(F x, const float* params) {
        return add(splat(1.0f), max(splat(-params[1]), min(splat(params[1]), x)));
    }
};

// What multiplies the activated gate.
template <class Activation>
F up_of(F up, const float* params) {
    if constexpr (std::is_same<Activation, SwigluClamped>::value)
        return SwigluClamped::up(up, params);
    else
        return up;
}

// Replaces the numbers of R rows of a tile. Gated: columns are 16 of gate, 16 of up; activation(gate) * up replaces the
// gates.
template <class Activation, bool IS_GATED, int R>
void activate_rows(float* rows, const float* params) {
    constexpr int V = int(PANEL) / (IS_GATED ? 2 : 1) / W;  // vectors of a row
    F numbers[R * V];
    UNROLL for (int i = 0; i < R * V; i++) numbers[i] = load(rows + i / V * PANEL + i % V * W);
    Activation::apply(numbers, params);
    UNROLL for (int i = 0; i < R * V; i++) {
        float* to = rows + i / V * PANEL + i % V * W;
        store(to, IS_GATED ? mul(numbers[i], up_of<Activation>(load(to + PANEL / 2), params)) : numbers[i]);
    }
}

// The same for a tile [rows][32].
using ActivateTile = void (*)(float* tile, int rows, const float* params);
template <class Activation, bool IS_GATED>
void activate_tile(float* tile, int rows, const float* params) {
    int r = 0;
    for (; r + 2 <= rows; r += 2) activate_rows<Activation, IS_GATED, 2>(tile + r * PANEL, params);
    if (r < rows) activate_rows<Activation, IS_GATED, 1>(tile + r * PANEL, params);
}

template <bool IS_GATED>
ActivateTile activation_of(ActivationKind kind) {
    static constexpr ActivateTile ALL[NUM_ACTIVATION_KINDS] = {
        activate_tile<Silu, IS_GATED>, activate_tile<Gelu, IS_GATED>,        activate_tile<GeluTanh, IS_GATED>,
        activate_tile<Relu, IS_GATED>, activate_tile<ReluSquared, IS_GATED>, activate_tile<Xielu, IS_GATED>,
        activate_tile<SwigluClamped, IS_GATED>};
    return ALL[kind];
}

// A network's activation of a product, written to the rows that the next product reads.
template <class T>
class ActivatedOutput {
  public:
    // `params`: of the activation. `update`: of the rows' adapters; null: none has one.
    ActivatedOutput(ActivationKind kind, bool is_gated, const std::vector<float>& params, const TiledRows<T>& rows_out,
                    const LoraUpdate* update)
        : rows_out_(rows_out), update_(update), activate_(is_gated ? activation_of<true>(kind) : activation_of<false>(kind)),
          params_(params.data()), columns_(is_gated ? PANEL / 2 : PANEL) {}

    void prefetch_output(int64_t first_row, int rows, int64_t panel) const {
        rows_out_.prefetch_for_put(first_row, rows, panel * columns_, columns_);
        if (update_) update_->prefetch(first_row, rows, panel);
    }

    void write(float* tile, int64_t first_row, int rows, int64_t panel, int64_t) const {
        if (update_) update_->add(tile, first_row, rows, panel);
        activate_(tile, rows, params_);
        int64_t begin = panel * columns_, count = std::min(columns_, rows_out_.size - begin);
        rows_out_.put_tile(first_row, rows, begin, count, tile, PANEL);  // the same tiles of rows as the input's
    }

  private:
    TiledRows<T> rows_out_;
    const LoraUpdate* update_;
    ActivateTile activate_;
    const float* params_;
    int64_t columns_;  // of the output per panel
};

}  // namespace millrace
