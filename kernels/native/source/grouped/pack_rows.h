// Packing of rows of groups of codes, as a file has them, into panels.
//
// Called by pack.cpp, on any thread.

#pragma once

#include "grouped/format.h"

namespace millrace {

struct Linear;

enum CodePacking : int32_t { BYTES, PAIRS, HALVES_OF_32, HALVES_OF_64 };

// Rows of a matrix: see `GroupedCodes` in kernels/layout/grouped_codes.py. Mirrored by `RowsStruct` in library.py.
struct GroupedRows {
    int64_t layer, expert;
    int32_t kind;  // TensorKind
    CodePacking packing;
    int64_t first_row, num_rows;
    const uint8_t *codes, *scales, *offsets, *sub_scales, *sub_offsets, *zeros;  // null: there are none
    float factor;
};

// Writes one row, the `index`th of `rows`, to a column of the linear. `scratch` [k rounded up to 32].
void put_grouped_row(const Linear& linear, const GroupedRows& rows, int64_t index, int64_t column, uint8_t* scratch);

// Whether all scales and offsets are finite.
bool are_numbers_finite(const GroupedFormat& format, int64_t k, const GroupedRows& rows);

}  // namespace millrace
