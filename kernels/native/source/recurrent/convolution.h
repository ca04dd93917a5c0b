// The causal convolution of a recurrent layer: each channel over the last tokens of its sequence.
//
// NOTE: the inputs are rounded to the model's dtype, in which the state keeps the last of them. So a token's sum has the
// same bits wherever its prompt is cut into steps. Called by RecurrentStep, on each compute thread.

#pragma once

#include <algorithm>
#include <vector>

#include "machine/simd.h"
#include "weights/recurrent.h"

namespace millrace {

// Some channels of a sequence's new tokens, all at their first channel.
struct ConvolvedChannels {
    float* x;             // [T][stride] what is convolved, replaced by the sums
    const float* gate;    // [T][stride] multiplies it before; null: nothing does
    int64_t stride, num_tokens, num_channels;
    const float* taps;    // [width][num_all_channels], the newest token's last
    const float* bias;    // null: none
    int64_t width, num_all_channels;
    bool is_fresh;        // the sequence has no earlier tokens, whatever the state holds
};

// `tail` [width - 1][num_all_channels]: the tokens before, oldest first; replaced by those before the next step.
template <class Stored>
void convolve(const ConvolvedChannels& its, Stored* tail) {
    int64_t count = its.num_channels, width = its.width, num_before = width - 1;
    thread_local std::vector<Stored> recent;  // a ring of `width` tokens
    recent.resize(width * count);
    for (int64_t i = 0; i < num_before; i++) {
        Stored* to = recent.data() + i * count;
        if (its.is_fresh)
            std::fill(to, to + count, Stored());
        else
            std::copy(tail + i * its.num_all_channels, tail + i * its.num_all_channels + count, to);
    }
    int64_t newest = num_before;  // where the next token goes, in place of the oldest
    for (int64_t t = 0; t < its.num_tokens; t++) {
        float* row = its.x + t * its.stride;
        if (its.gate)
            for (int64_t c = 0; c < count; c++) row[c] *= its.gate[t * its.stride + c];
        convert_all(row, count, recent.data() + newest * count);
        const Stored* tokens[MAX_CONV_WIDTH];
        for (int64_t tap = 0; tap < width; tap++) tokens[tap] = recent.data() + (newest + 1 + tap) % width * count;
        int64_t c = 0;
        for (; c + W <= count; c += W) {
            F sum = its.bias ? load(its.bias + c) : zero();
            for (int64_t tap = 0; tap < width; tap++)
                sum = fma(load(tokens[tap] + c), load(its.taps + tap * its.num_all_channels + c), sum);
            store(row + c, sum);
        }
        for (; c < count; c++) {
            float sum = its.bias ? its.bias[c] : 0.0f;
            for (int64_t tap = 0; tap < width; tap++)
                sum = std::fma(widen(tokens[tap][c]), its.taps[tap * its.num_all_channels + c], sum);
            row[c] = sum;
        }
        newest = (newest + 1) % width;
    }
    for (int64_t i = 0; i < num_before; i++) {
        const Stored* from = recent.data() + (newest + 1 + i) % width * count;
        std::copy(from, from + count, tail + i * its.num_all_channels);
    }
}

}  // namespace millrace
