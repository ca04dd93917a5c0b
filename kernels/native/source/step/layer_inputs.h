// Inputs of each layer: what a layer gets of a token besides the residual, and adds to it behind its feed.
//
//   before the layers   inputs = (norm(projection of the first residual) + scale * the token's row of a table) / sqrt(2)
//   in each layer       gate product of the residual; its activation times the layer's part of the inputs; up product;
//                       norm; added to the residual
//
// Called by Step, on each compute thread.

#pragma once

#include "linear/activations.h"
#include "step/norms.h"

namespace millrace {

constexpr float HALF_ROOT = 0.70710678f;  // of a half: of the sum of table and projection

// Normalizes each layer's part of a row of the projection.
inline void norm_layer_inputs(const LayerInputs& inputs, const Shape& shape, float* row) {
    int64_t width = shape.layer_inputs.width;
    for (int64_t layer = 0; layer < shape.num_layers; layer++)
        norm_row(row + layer * width, inputs.norm, width, row + layer * width);
}

inline void scale_numbers(float* numbers, int64_t count, float scale) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(numbers + i, mul(load(numbers + i), splat(scale)));
    for (; i < count; i++) numbers[i] *= scale;
}

// A layer's part of the inputs of a step's tokens.
struct LayerInputRows {
    const float* first;
    int64_t stride;
    const int64_t* rows;  // the token of each row of a batch; null: they are the same

    const float* row(int64_t index) const { return first + (rows ? rows[index] : index) * stride; }
};

// An output of the gate product: its activation times the layer's input, to the rows that the up product reads.
template <class T>
class LayerInputOutput {
  public:
    LayerInputOutput(ActivationKind activation, const TiledRows<T>& rows_out, const LayerInputRows& inputs)
        : rows_out_(rows_out), inputs_(inputs), activate_(activation_of<false>(activation)) {}

    void prefetch_output(int64_t first_row, int rows, int64_t panel) const {
        rows_out_.prefetch_for_put(first_row, rows, panel * PANEL, PANEL);
    }

    void write(float* tile, int64_t first_row, int rows, int64_t panel, int64_t columns) const {
        activate_(tile, rows, nullptr);
        for (int r = 0; r < rows; r++) {
            const float* input = inputs_.row(first_row + r) + panel * PANEL;
            for (int64_t c = 0; c < columns; c++) tile[r * PANEL + c] *= input[c];
        }
        rows_out_.put_tile(first_row, rows, panel * PANEL, columns, tile, PANEL);
    }

  private:
    TiledRows<T> rows_out_;
    LayerInputRows inputs_;
    ActivateTile activate_;
};

}  // namespace millrace
