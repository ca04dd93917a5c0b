// A super of a panel, ready for products: codes as unsigned bytes, scales and offsets in float32.
//
// `unpack_super` writes about 10 KiB, which stay in the first cache while all rows are multiplied by it. With 8 bits
// codes are read where they are. NF4 values have 16 bits: they take two turns, one for each byte, with scales in
// proportion. Used on each compute thread, and by pack.cpp to read rows back.

#pragma once

#include "grouped/super_sums.h"

namespace millrace {

// Turns in which a super is multiplied.
constexpr int num_turns(const GroupedFormat& format) { return format.table == NF4 ? 2 : 1; }

// Prefetches this many bytes, from `address` on, meanwhile.
struct SuperPrefetch {
    const char* address = nullptr;
    int64_t num_bytes = 0;
};

// Unpacks super `index` of a panel; `factor` multiplies its scales.
void unpack_super(const GroupedFormat& format, const PanelLayout& layout, const uint8_t* panel, int64_t index, int turn,
                  float factor, SuperPrefetch prefetch, UnpackedSuper* super);

// The scales, offsets and sizes alone, as in the first turn.
void unpack_scales(const GroupedFormat& format, const PanelLayout& layout, const uint8_t* panel, int64_t index,
                   float factor, UnpackedSuper* super);

// The zero that is to be subtracted from unpacked codes, by turn.
int32_t zero_of(const GroupedFormat& format, int turn);

// One row of a panel, [k], as products use it.
void read_panel_row(const GroupedFormat& format, int64_t k, const uint8_t* panel, int64_t lane, float factor, float* to);

}  // namespace millrace
