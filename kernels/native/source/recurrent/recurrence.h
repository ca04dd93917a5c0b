// The recurrence of one head: a matrix that decays with each token, and gets what the token adds.
//
// Columns of the matrix do not depend on each other. So a piece of work is a block of columns, which stays in the cache
// while all new tokens of its sequence go through it, one after another. A head's matrix [K, V] lies in blocks of
// BLOCK_COLUMNS columns, each [K][columns], the last with fewer.
//
// NOTE: the sums over K have one order for any number of tokens. So a prompt gives the same bits however it is cut into
// steps. Called by RecurrentStep, on each compute thread.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "machine/simd.h"

namespace millrace {

constexpr int64_t BLOCK_COLUMNS = 32;
constexpr int BLOCK_VECTORS = int(BLOCK_COLUMNS) / W;
constexpr int NUM_CHAINS = W == 16 ? 4 : 2;  // sums over K side by side, as far as registers go

// Numbers of one token.
struct TokenNumbers {
    const float *query, *key;  // [K]
    float decay;               // multiplies the matrix
    float rate;                // multiplies what is added
    float skip;                // MAMBA2: the values times it are added to the result
};

// Sums of NUM_CHAINS chains, in one order.
[[gnu::always_inline]] inline F sum_of_chains(const F (&chains)[NUM_CHAINS][BLOCK_VECTORS], int v) {
    if constexpr (NUM_CHAINS == 4)
        return add(add(chains[0][v], chains[1][v]), add(chains[2][v], chains[3][v]));
    else
        return add(chains[0][v], chains[1][v]);
}

// Calls use(row, chain) for all rows; those behind the last whole turn are the first chain's.
template <class Use>
[[gnu::always_inline]] inline void for_each_chained_row(int64_t num_rows, const Use& use) {
    int64_t row = 0;
    for (; row + NUM_CHAINS <= num_rows; row += NUM_CHAINS)
        UNROLL for (int chain = 0; chain < NUM_CHAINS; chain++) use(row + chain, chain);
    for (; row < num_rows; row++) use(row, 0);
}

// A token in a block [num_rows][BLOCK_COLUMNS]: block = decay * block + outer(key, added), then values = query @ block.
// Added is rate * values, or for the delta rule rate * (values - key @ (decay * block)).
template <bool IS_DELTA>
void advance_block(float* block, int64_t num_rows, const TokenNumbers& token, float* values) {
    F added[BLOCK_VECTORS], results[BLOCK_VECTORS];
    F decay = splat(token.decay), rate = splat(token.rate);
    UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) {
        added[v] = load(values + v * W);
        results[v] = IS_DELTA ? zero() : mul(splat(token.skip), added[v]);
    }
    if constexpr (IS_DELTA) {
        F seen[NUM_CHAINS][BLOCK_VECTORS];
        UNROLL for (int c = 0; c < NUM_CHAINS; c++) UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) seen[c][v] = zero();
        for_each_chained_row(num_rows, [&](int64_t row, int chain) __attribute__((always_inline)) {
            F key = splat(token.key[row]);
            UNROLL for (int v = 0; v < BLOCK_VECTORS; v++)
                seen[chain][v] = fma(key, load(block + row * BLOCK_COLUMNS + v * W), seen[chain][v]);
        });
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) added[v] = sub(added[v], mul(decay, sum_of_chains(seen, v)));
    }
    F sums[NUM_CHAINS][BLOCK_VECTORS];
    UNROLL for (int c = 0; c < NUM_CHAINS; c++) UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) sums[c][v] = zero();
    UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) added[v] = mul(added[v], rate);
    for_each_chained_row(num_rows, [&](int64_t row, int chain) __attribute__((always_inline)) {
        F key = splat(token.key[row]), query = splat(token.query[row]);
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) {
            float* at = block + row * BLOCK_COLUMNS + v * W;
            F changed = fma(key, added[v], mul(decay, load(at)));
            store(at, changed);
            sums[chain][v] = fma(query, changed, sums[chain][v]);
        }
    });
    UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) store(values + v * W, add(results[v], sum_of_chains(sums, v)));
}

// A sequence's tokens in a block of `columns` columns. token(t): its numbers; values(t): [columns], replaced by results.
// `is_fresh`: the block is zero, whatever it holds.
template <bool IS_DELTA, class Token, class Values>
void advance_tokens(float* block, int64_t num_rows, int64_t columns, bool is_fresh, int64_t num_tokens, const Token& token,
                    const Values& values) {
    if (is_fresh) std::fill(block, block + num_rows * columns, 0.0f);
    if (columns == BLOCK_COLUMNS) {
        for (int64_t t = 0; t < num_tokens; t++) advance_block<IS_DELTA>(block, num_rows, token(t), values(t));
        return;
    }
    thread_local std::vector<float> wide;  // with columns of zeros behind
    wide.assign(num_rows * BLOCK_COLUMNS, 0.0f);
    for (int64_t row = 0; row < num_rows; row++)
        std::copy(block + row * columns, block + (row + 1) * columns, wide.data() + row * BLOCK_COLUMNS);
    for (int64_t t = 0; t < num_tokens; t++) {
        alignas(64) float padded[BLOCK_COLUMNS] = {};
        std::copy(values(t), values(t) + columns, padded);
        advance_block<IS_DELTA>(wide.data(), num_rows, token(t), padded);
        std::copy(padded, padded + columns, values(t));
    }
    for (int64_t row = 0; row < num_rows; row++)
        std::copy(wide.data() + row * BLOCK_COLUMNS, wide.data() + row * BLOCK_COLUMNS + columns, block + row * columns);
}

}  // namespace millrace
