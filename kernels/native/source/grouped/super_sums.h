// Products of rows with a super of a panel: 256 columns by 32 rows of weights, as unsigned bytes with scales in float32.
//
// y[row] += d[chunk] * (sum of code * q) + m[chunk] * (sum of q), chunk by chunk in rising order, where q are a row's
// 16-bit integers (split_rows.h). The sums of a chunk are exact integers, so every instruction set and every number of
// rows gives the same bits. The functions are compiled twice (super_sums.inc): with and without dot products of bytes.

#pragma once

#include <cstdint>

#include "grouped/format.h"

namespace millrace {

// A super ready for products: unpacked.
struct UnpackedSuper {
    alignas(64) float d[MAX_CHUNKS * LANES], m[MAX_CHUNKS * LANES];  // [chunks][32]
    alignas(64) uint8_t bytes[SUPER * LANES];                        // [quads][32][4]; unused with 8 bits
    const uint8_t* codes;                                            // `bytes`, or the panel's own
    int32_t zero;                                                    // to be subtracted from each code
    int32_t num_quads, quads_per_chunk;
    bool has_offsets;
};

// What a kernel reads of some rows, from the super's first column on.
struct SplitSpan {
    const char* numbers;  // of the first row
    const int32_t* sums;  // of its chunks
    int64_t stride;       // bytes from one row to the next
    int64_t low;          // bytes from the high bytes of a row to its low bytes
};

using SumSuper = void (*)(const UnpackedSuper& super, const SplitSpan& rows, float* y);  // y [rows][32]

constexpr int SUPER_ROWS = 4;  // most rows of a call: 16 of 32 registers hold integer sums, 8 the rest

// The kernels of one instruction set, for 1 to 4 rows.
struct SuperKernels {
    SumSuper sum[SUPER_ROWS];
    bool takes_bytes;  // rows in two planes of bytes; else in pairs of 16 bits
};

extern const SuperKernels PLAIN_KERNELS;
extern const SuperKernels BYTE_DOT_KERNELS;  // needs `has_byte_dot`

// The best kernels of this machine.
const SuperKernels& super_kernels();

// For tests: uses the plain kernels if `is_plain`, until the next call.
void use_plain_kernels(bool is_plain);

}  // namespace millrace
