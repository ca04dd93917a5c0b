// Norms, and what a recurrent layer has beside its products.
//
// Filled by pack.cpp; `recurrent/recurrent_step.h` computes with it.

#pragma once

#include <cstdint>
#include <vector>

#include "weights/shape.h"

namespace millrace {

constexpr int64_t MAX_CONV_WIDTH = 16;  // as in shape.py

// A norm with its weight and bias, which may be empty.
struct Norm {
    NormShape shape{};
    std::vector<float> weight, bias;

    bool is_none() const { return shape.kind == NO_NORM; }
    int64_t num_bytes() const { return 4 * int64_t(weight.size() + bias.size()); }
};

// Vectors of a recurrent layer, and where its parts of a sequence's state begin, in bytes. H heads of values.
struct RecurrentWeights {
    std::vector<float> conv;       // [width][channels], the newest token's last
    std::vector<float> conv_bias;  // [channels]; empty: none
    std::vector<float> decay;      // [H], negative
    std::vector<float> step_bias;  // [H]
    std::vector<float> skip;       // [H], of MAMBA2
    Norm norm;                     // of the output
    int64_t matrices_at = 0;       // float32, each head's in blocks of columns: see recurrent/recurrence.h
    int64_t tail_at = 0;           // [width - 1][channels] in the model's dtype: what the convolution read last, oldest first

    int64_t num_bytes() const {
        size_t numbers = conv.size() + conv_bias.size() + decay.size() + step_bias.size() + skip.size();
        return 4 * int64_t(numbers) + norm.num_bytes();
    }

    // [channels][width], as stored, to `conv`.
    void set_conv(const std::vector<float>& stored, int64_t width) {
        int64_t channels = int64_t(stored.size()) / width;
        conv.resize(stored.size());
        for (int64_t c = 0; c < channels; c++)
            for (int64_t tap = 0; tap < width; tap++) conv[tap * channels + c] = stored[c * width + tap];
    }
};

}  // namespace millrace
