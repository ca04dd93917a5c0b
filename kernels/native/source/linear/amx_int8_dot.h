// int8 dot products in AMX tile registers: up to 32 rows by a panel, 64 elements of k at a time.
//
// Layouts as in int8_dot.h, whose Int8Rows calls this on each compute thread. Linears of 8 / 32 rows take 4 / 8 % less
// than with vector int8 dot products, of 1 and 16 rows as long (Qwen3-0.6B's shape, two cores of a Granite Rapids class
// Xeon). For 32 rows the vector instructions took longer than memory.

#pragma once

#include "linear/amx_product.h"

namespace millrace {

static_assert(!HAS_AMX || QUADS_PER_STEP == AMX_ROWS);

// Sums of rows [steps][rows][16 quads] by a panel [steps][16 quads][32][4], read non-temporally: out [rows][32].
// ROW_REGISTERS: 2 for more than 16 rows.
template <int ROW_REGISTERS, class Int8x4>
void amx_int8_dot(const Int8x4* x, int rows, const uint8_t* panel, int64_t num_steps, StepPrefetch prefetch, int32_t* out) {
    static_assert(!HAS_AMX || sizeof(Int8x4) == 4, "bytes lie as registers have them");
    constexpr int64_t STRIDE = 4 * PANEL;  // bytes from one quad to the next, and from one row's sums to the next
    clear_sums();
    for (int64_t step = 0; step < num_steps; step++, x += AMX_PAIRS * rows, panel += AMX_ROWS * STRIDE) {
        prefetch.prefetch_next();
        load_tile<4>(x, 4 * AMX_PAIRS);
        stream_tile<6>(panel, STRIDE), stream_tile<7>(panel + STRIDE / 2, STRIDE);
        tile_dot_int8<0, 4, 6>(), tile_dot_int8<1, 4, 7>();
        if constexpr (ROW_REGISTERS == 2) {
            load_tile<5>(x + AMX_ROWS * AMX_PAIRS, 4 * AMX_PAIRS);
            tile_dot_int8<2, 5, 6>(), tile_dot_int8<3, 5, 7>();
        }
    }
    store_sums<ROW_REGISTERS, 1>(reinterpret_cast<float*>(out));  // stores the int32 bits unchanged
}

}  // namespace millrace
