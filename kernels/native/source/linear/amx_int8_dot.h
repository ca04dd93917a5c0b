// Products of whole numbers of 8 bits in tile registers, 64 of k at a time: of up to 32 rows by a panel, see quads.h.
//
// Linears of 8 / 32 rows take 4 / 8 % less than with instructions that sum four products of bytes in vectors, of 1 and 16 as
// long (Qwen3-0.6B's shape, two cores of a Granite Rapids class Xeon); for 32 rows those took longer than memory.
//
// Knows registers. Refuses to know what the numbers stand for.

#pragma once

#include "linear/amx_product.h"

namespace millrace {

static_assert(!HAS_AMX || QUADS_TOGETHER == AMX_ROWS);

// Sums of rows [steps][rows][16 quads] by a panel [steps][16 quads][32][4], which few read after this: out [rows][32].
// HALVES: 2 if there are more than 16 rows.
template <int HALVES, class Quad>
void sum_quads_in_tiles(const Quad* x, int rows, const uint8_t* panel, int64_t num_steps, StepsAhead ahead, int32_t* out) {
    static_assert(!HAS_AMX || sizeof(Quad) == 4, "bytes lie as registers have them");
    constexpr int64_t APART = 4 * PANEL;  // bytes, from one quad to the next and from one row's sums to the next one's
    clear_sums();
    for (int64_t step = 0; step < num_steps; step++, x += AMX_PAIRS * rows, panel += AMX_ROWS * APART) {
        ahead.fetch_next();
        load_tile<4>(x, 4 * AMX_PAIRS);
        stream_tile<6>(panel, APART), stream_tile<7>(panel + APART / 2, APART);
        add_byte_products<0, 4, 6>(), add_byte_products<1, 4, 7>();
        if constexpr (HALVES == 2) {
            load_tile<5>(x + AMX_ROWS * AMX_PAIRS, 4 * AMX_PAIRS);
            add_byte_products<2, 5, 6>(), add_byte_products<3, 5, 7>();
        }
    }
    store_sums<HALVES, 1>(reinterpret_cast<float*>(out));  // bits, as they are
}

}  // namespace millrace
