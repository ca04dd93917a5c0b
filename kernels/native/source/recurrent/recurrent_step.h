// RecurrentStep: the phases of a recurrent layer between its two products.
//
//   convolve  what the convolution reads, by sequence and head; SiLU, keys and queries to unit length, steps and rates
//   recur     the matrices, by sequence, head and block of columns; not of SHORT_CONV
//   finish    norm and gates, to the rows that the second product reads
//
// All in place, in the rows of the first product (`RecurrentShape` says what lies where): results take the place of
// values. A sequence that begins with its first token reads zeros instead of the state in its slot.
//
// NOTE: a step changes states for good, so it must not be run twice. Called by Step, on all compute threads.

#pragma once

#include <cmath>

#include "linear/activations.h"
#include "recurrent/convolution.h"
#include "recurrent/recurrence.h"
#include "step/batch.h"
#include "step/norms.h"
#include "step/phase_times.h"

namespace millrace {

inline void silu_two_vectors(float* numbers) {
    F two[2] = {load(numbers), load(numbers + W)};
    Silu::apply(two, nullptr);
    store(numbers, two[0]), store(numbers + W, two[1]);
}

inline void silu_row(float* row, int64_t size) {
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W) silu_two_vectors(row + i);
    if (i == size) return;
    alignas(64) float rest[2 * W] = {};
    std::copy(row + i, row + size, rest);
    silu_two_vectors(rest);
    std::copy(rest, rest + (size - i), row + i);
}

inline void multiply_row(float* row, const float* by, int64_t size) {
    int64_t i = 0;
    for (; i + W <= size; i += W) store(row + i, mul(load(row + i), load(by + i)));
    for (; i < size; i++) row[i] *= by[i];
}

// Divides a row by its length, and multiplies it by `scale`.
inline void to_unit(float* row, int64_t size, float scale) {
    float squares = sum_row(
        row, size, [](F sums, F number) { return fma(number, number, sums); },
        [](float sum, float number) { return std::fma(number, number, sum); });
    scale_row<false>(row, size, 0.0f, scale / std::sqrt(squares + 1e-6f), nullptr, nullptr, row);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class Input>
class RecurrentStep {
    using Member = ThreadTeam::Member;
    static constexpr int64_t TOKENS_AT_ONCE = 64, CHANNELS_PER_PIECE = 64, ROWS_AT_ONCE = 4;

  public:
    explicit RecurrentStep(const Model& model) : model_(model) {}

    // Changes the states of a batch's sequences.
    void mix(const Batch<Input>& batch, const Layer& layer, PhaseTimes& times, Phases& phases) const {
        const RecurrentShape& shape = layer.shape.recurrent;
        int64_t num_sequences = batch.inputs.num_sequences;
        // Pieces of a few microseconds, also where each sequence has one token.
        int64_t at_once = batch.inputs.num_tokens < 4 * num_sequences ? 4 : 1;
        int64_t num_parts = num_parts_of(shape);
        times.run(phases, OTHER, [&](Member member) {
            for_each(member, num_sequences * num_parts, at_once, [&](int64_t item) {
                convolve_part(sequence_of(batch, item / num_parts), layer, item % num_parts);
            });
        });
        if (shape.kind == SHORT_CONV) return;
        int64_t num_blocks = ceil_div(shape.value_dim, BLOCK_COLUMNS), num_each = shape.num_value_heads * num_blocks;
        times.run(phases, OTHER, [&](Member member) {
            for_each(member, num_sequences * num_each, at_once, [&](int64_t item) {
                int64_t head = item % num_each / num_blocks, begin = item % num_blocks * BLOCK_COLUMNS;
                Sequence sequence = sequence_of(batch, item / num_each);
                shape.is_delta() ? recur<true>(sequence, layer, head, begin) : recur<false>(sequence, layer, head, begin);
            });
        });
    }

    // Puts the results of a batch's rows to `mixed`.
    void finish(const Batch<Input>& batch, const Layer& layer, const TiledRows<Input>& mixed, Member member) const {
        const RecurrentShape& shape = layer.shape.recurrent;
        int64_t size = shape.inner_size(), num_rows = batch.inputs.num_tokens;
        thread_local std::vector<float> some;
        some.resize(ROWS_AT_ONCE * size);
        member.parallel_for(num_rows, num_rows < 2 * ROWS_AT_ONCE ? 1 : ROWS_AT_ONCE, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t t = first; t < last; t++)
                finish_row(shape, layer.recurrent.norm, batch.buffers.qkv + t * batch.buffers.qkv_stride,
                           some.data() + (t - first) * size);
            mixed.put_whole_rows(first, last - first, some.data(), size);
        });
    }

  private:
    // The new tokens of a sequence, and its state.
    struct Sequence {
        float* rows;
        int64_t stride, num_tokens;
        char* state;
        bool is_fresh;
    };

    template <class Use>
    static void for_each(Member member, int64_t num, int64_t at_once, const Use& use) {
        member.parallel_for(num, at_once, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t item = first; item < last; item++) use(item);
        });
    }

    static Sequence sequence_of(const Batch<Input>& batch, int64_t s) {
        const StepInputs& in = batch.inputs;
        int64_t first = in.query_starts[s], count = in.query_starts[s + 1] - first;
        char* state = static_cast<char*>(in.cache->states) + in.slots[s] * in.cache->state_stride;
        return {batch.buffers.qkv + first * batch.buffers.qkv_stride, batch.buffers.qkv_stride, count, state,
                in.lengths[s] == count};
    }

    // Parts of the convolution: each head of queries, keys and values; some channels of SHORT_CONV.
    static int64_t num_parts_of(const RecurrentShape& shape) {
        if (shape.kind == SHORT_CONV) return ceil_div(shape.conv_channels(), CHANNELS_PER_PIECE);
        return 2 * shape.num_key_heads + shape.num_value_heads;
    }

    void convolve_part(const Sequence& sequence, const Layer& layer, int64_t part) const {
        const RecurrentShape& shape = layer.shape.recurrent;
        if (sequence.num_tokens <= 0) return;
        if (shape.kind == SHORT_CONV) {
            int64_t begin = part * CHANNELS_PER_PIECE, count = std::min(CHANNELS_PER_PIECE, shape.conv_channels() - begin);
            return convolve_channels(sequence, layer, shape.mixed_at() + begin, count, sequence.rows + begin);
        }
        int64_t groups = shape.num_key_heads, dim = shape.key_dim;
        if (part >= 2 * groups) {
            int64_t head = part - 2 * groups, at = shape.values_at() + head * shape.value_dim;
            convolve_channels(sequence, layer, at, shape.value_dim, nullptr);
            for_each_row(sequence, at, [&](float* values) { silu_row(values, shape.value_dim); });
            return set_steps(sequence, layer, head);
        }
        bool is_query = part < groups;
        int64_t at = is_query ? shape.queries_at() + part * dim : shape.keys_at() + (part - groups) * dim;
        convolve_channels(sequence, layer, at, dim, nullptr);
        float scale = is_query ? 1.0f / std::sqrt(float(dim)) : 1.0f;
        for_each_row(sequence, at, [&](float* numbers) {
            silu_row(numbers, dim);
            if (shape.is_delta()) to_unit(numbers, dim, scale);
        });
    }

    // Calls use(where it begins) for each token's numbers from column `at` on.
    template <class Use>
    static void for_each_row(const Sequence& sequence, int64_t at, const Use& use) {
        for (int64_t t = 0; t < sequence.num_tokens; t++) use(sequence.rows + t * sequence.stride + at);
    }

    // `count` channels from column `at` on. `gate`: null, or what multiplies them before.
    void convolve_channels(const Sequence& sequence, const Layer& layer, int64_t at, int64_t count, const float* gate) const {
        const RecurrentShape& shape = layer.shape.recurrent;
        const RecurrentWeights& weights = layer.recurrent;
        int64_t channel = at - shape.mixed_at();
        const float* bias = weights.conv_bias.empty() ? nullptr : weights.conv_bias.data() + channel;
        ConvolvedChannels channels{sequence.rows + at, gate, sequence.stride, sequence.num_tokens, count,
                                   weights.conv.data() + channel, bias, shape.conv_width, shape.conv_channels(),
                                   sequence.is_fresh};
        char* tail = sequence.state + weights.tail_at;
        model_.shape.dtype == BFLOAT16 ? convolve(channels, reinterpret_cast<bf16*>(tail) + channel)
                                       : convolve(channels, reinterpret_cast<float*>(tail) + channel);
    }

    // Replaces a head's steps by the logarithms of decays, and rates by what multiplies the values; of MAMBA2 steps alone,
    // which are both.
    void set_steps(const Sequence& sequence, const Layer& layer, int64_t head) const {
        const RecurrentShape& shape = layer.shape.recurrent;
        float offset = layer.recurrent.step_bias[head], decay = layer.recurrent.decay[head];
        for_each_row(sequence, head, [&](float* numbers) {
            float& step = numbers[shape.steps_at()];
            step = softplus(step + offset);
            if (!shape.is_delta()) {
                step = std::min(std::max(step, shape.step_min), shape.step_max);
                return;
            }
            step *= decay;
            float& rate = numbers[shape.rates_at()];
            rate = 1.0f / (1.0f + std::exp(-rate));
        });
    }

    template <bool IS_DELTA>
    void recur(const Sequence& sequence, const Layer& layer, int64_t head, int64_t begin) const {
        const RecurrentShape& shape = layer.shape.recurrent;
        if (sequence.num_tokens <= 0) return;
        int64_t columns = std::min(BLOCK_COLUMNS, shape.value_dim - begin), group = head * shape.num_key_heads / shape.num_value_heads;
        auto matrices = reinterpret_cast<float*>(sequence.state + layer.recurrent.matrices_at);
        float* block = matrices + head * shape.key_dim * shape.value_dim + begin * shape.key_dim;
        int64_t query = shape.queries_at() + group * shape.key_dim, key = shape.keys_at() + group * shape.key_dim;
        int64_t value = shape.values_at() + head * shape.value_dim + begin;
        float factor = IS_DELTA ? 1.0f : layer.recurrent.decay[head], skip = IS_DELTA ? 0.0f : layer.recurrent.skip[head];
        for (int64_t first = 0; first < sequence.num_tokens; first += TOKENS_AT_ONCE) {
            int64_t count = std::min(TOKENS_AT_ONCE, sequence.num_tokens - first);
            float* rows = sequence.rows + first * sequence.stride;
            alignas(64) float decays[TOKENS_AT_ONCE];
            for (int64_t t = 0; t < count; t++) decays[t] = factor * rows[t * sequence.stride + shape.steps_at() + head];
            for (int64_t t = count; t < round_up(count, W); t++) decays[t] = 0.0f;
            for (int64_t t = 0; t < count; t += W) store(decays + t, exp(load(decays + t)));
            int64_t rates = IS_DELTA ? shape.rates_at() : shape.steps_at();
            advance_tokens<IS_DELTA>(
                block, shape.key_dim, columns, sequence.is_fresh && first == 0, count,
                [&](int64_t t) -> TokenNumbers {
                    const float* row = rows + t * sequence.stride;
                    return {row + query, row + key, decays[t], row[rates + head], skip};
                },
                [&](int64_t t) { return rows + t * sequence.stride + value; });
        }
    }

    // A row's results from the numbers that `mix` left, to `out` [inner]. Overwrites the gates.
    static void finish_row(const RecurrentShape& shape, const Norm& norm, float* row, float* out) {
        int64_t size = shape.inner_size();
        const float* results = row + shape.values_at();
        if (shape.kind == SHORT_CONV) {  // its second gate lies behind the first
            std::copy(row + shape.mixed_at(), row + shape.mixed_at() + size, out);
            return multiply_row(out, row + size, size);
        }
        std::copy(results, results + size, out);
        silu_row(row, size);
        bool is_gated_first = !shape.is_delta() || norm.is_none();
        if (is_gated_first) multiply_row(out, row, size);
        int64_t part = shape.norm_group ? shape.norm_group : shape.value_dim;
        if (!norm.is_none())
            for (int64_t at = 0; at < size; at += part) norm_row(out + at, norm, part, out + at, shape.norm_group ? at : 0);
        if (!is_gated_first) multiply_row(out, row, size);
    }

    const Model& model_;
};

}  // namespace millrace
