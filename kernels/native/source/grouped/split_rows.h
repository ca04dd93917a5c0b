// Rows as products with groups of codes read them: 16-bit integers times a scale.
//
// q = round(x / s) with s = max |x| / 32512, so |q| <= 127 * 256: the high byte (q + 128) >> 8 and the low byte
// q - 256 * high are signed. A row is a record: its scale, q, the sums of q by chunks of 16, 32, 64 and 128 columns, and
// the numbers x themselves. Outputs write x (`put`); `split` makes the rest once a row is complete. On AMX the bytes of
// q are behind the records once more, as tiles of bf16. Made by the layers' phases, on each compute thread for its rows.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "grouped/super_sums.h"
#include "linear/row_tiles.h"

namespace millrace {

struct SplitRow {  // the input type of products with groups of codes
    char byte;
};
template <>
struct InputTypeOf<Grouped> {
    using type = SplitRow;
};

constexpr float MAX_SPLIT = 32512.0f;  // 127 * 256
constexpr int NUM_CHUNK_SIZES = 4;     // 16, 32, 64, 128 columns

// Where the parts of a record begin, for rows of `size` numbers.
struct SplitRecord {
    int64_t padded, numbers_at, sums_at[NUM_CHUNK_SIZES], floats_at, num_bytes;

    explicit SplitRecord(int64_t size) : padded(round_up(size, BLOCK)) {
        numbers_at = 64;
        int64_t end = numbers_at + 2 * padded;
        for (int i = 0; i < NUM_CHUNK_SIZES; i++) sums_at[i] = end, end += 4 * ceil_div(padded, 16 << i);
        floats_at = round_up(end + 64, 64);  // sums may be read past their end
        num_bytes = floats_at + round_up(size * 4, 64);
        if (num_bytes % 4096 == 0) num_bytes += 64;  // else all rows would be in one set of a cache
    }

    static int size_index(int64_t chunk) { return chunk >= 128 ? 3 : chunk >= 64 ? 2 : chunk >= 32 ? 1 : 0; }
};

// The tiles of bf16 of some rows, as half_tiles.h reads them: of each 16 rows and 32 columns 256 * high and low,
// [rows / 16][columns / 32][2][16][32], and the sums of q by 32 columns in float32, [rows / 16][supers][16][8].
struct HalfRows {
    static constexpr int64_t ROWS = 16, GROUP_BYTES = 2 * ROWS * BLOCK * 2, GROUPS = SUPER / BLOCK;
    int64_t num_groups, num_supers;  // of a row
    char* tiles;
    float* sums;

    HalfRows(char* memory, int64_t num_rows, int64_t size)
        : num_groups(ceil_div(size, BLOCK)), num_supers(ceil_div(size, SUPER)), tiles(memory),
          sums(reinterpret_cast<float*>(memory + ceil_div(num_rows, ROWS) * num_groups * GROUP_BYTES)) {}

    static int64_t num_bytes(int64_t num_rows, int64_t size) {
        HalfRows all(nullptr, num_rows, size);
        return reinterpret_cast<char*>(all.sums_of(ceil_div(num_rows, ROWS), 0)) - static_cast<char*>(nullptr);
    }
    char* tile(int64_t index, int64_t group) const { return tiles + (index * num_groups + group) * GROUP_BYTES; }
    float* sums_of(int64_t index, int64_t super) const { return sums + (index * num_supers + super) * ROWS * GROUPS; }
};

// Splits a row of `size` numbers into its record. `takes_bytes`: in planes of bytes; else in pairs of 16 bits, of each
// four numbers the first and third, and the others. `halves`: into row `row` of these, too, or instead if `is_in_tiles`;
// null: there are none.
void split_row(const float* x, int64_t size, bool takes_bytes, char* record, const HalfRows* halves, bool is_in_tiles,
               int64_t row);

// From so many rows on AMX tiles take less time than vectors: of bf16, and of bytes.
constexpr int64_t MIN_ROWS_IN_HALF_TILES = 6, MIN_ROWS_IN_TILES = 12;

inline bool are_in_tiles(int64_t num_rows, int64_t minimum) {
    return HAS_AMX && num_rows >= minimum && super_kernels().takes_bytes;
}

template <>
struct TiledRows<SplitRow> {
    SplitRow* data;
    int64_t num_rows, size;
    bool is_in_tiles = false;  // the product reads the tiles of bf16 alone: see `rows_for` (grouped_linear.h)
    const int32_t* columns = nullptr;  // [size] the order in which the product reads numbers; null: as they are

    int64_t num_tiles() const { return 1; }
    bool has_halves() const { return are_in_tiles(num_rows, MIN_ROWS_IN_HALF_TILES); }
    HalfRows halves() const { return {record(num_rows) + 64, num_rows, size}; }
    int64_t padded_size() const { return SplitRecord(size).num_bytes; }
    // Bytes behind the records: read past the last, and tiles of bf16.
    int64_t bytes_behind() const { return 64 + (has_halves() ? HalfRows::num_bytes(num_rows, size) : 0); }
    char* record(int64_t row) const { return reinterpret_cast<char*>(data) + row * padded_size(); }
    float* floats(int64_t row) const { return reinterpret_cast<float*>(record(row) + SplitRecord(size).floats_at); }
    float scale(int64_t row) const { return *reinterpret_cast<const float*>(record(row)); }

    // Writes `count` numbers of `num` rows from `row` on, from element `begin`, `stride` apart in `numbers`.
    void put_rows(int64_t row, int64_t num, int64_t begin, int64_t count, const float* numbers, int64_t stride) const {
        int64_t bytes = padded_size(), at = SplitRecord(size).floats_at + begin * 4;
        char* to = reinterpret_cast<char*>(data) + row * bytes + at;
        for (int64_t r = 0; r < num; r++, to += bytes) std::memcpy(to, numbers + r * stride, count * 4);
    }
    void put(int64_t row, int64_t begin, int64_t count, const float* numbers) const {
        put_rows(row, 1, begin, count, numbers, 0);
    }
    void put_tile(int64_t first, int64_t rows, int64_t begin, int64_t count, const float* numbers, int64_t stride) const {
        put_rows(first, rows, begin, count, numbers, stride);
    }
    void prefetch_for_put(int64_t first_row, int rows, int64_t begin, int64_t count) const {
        for (int r = 0; r < rows; r++)
            for (int64_t i = begin; i < begin + count; i += 16) prefetch_for_write(floats(first_row + r) + i);
    }

    // Puts and splits `num` whole rows, `stride` apart in `numbers`, into the records from `row` on.
    void put_whole_rows(int64_t row, int64_t num, const float* numbers, int64_t stride) const {
        put_rows(row, num, 0, size, numbers, stride);
        split(row, row + num, *this);
    }
    // The numbers of a row in the order of `columns`; valid until the thread's next call.
    const float* in_order(const float* numbers) const {
        if (!columns) return numbers;
        thread_local std::vector<float> ordered;
        ordered.resize(size);
        for (int64_t i = 0; i < size; i++) ordered[i] = numbers[columns[i]];
        return ordered.data();
    }
    // Splits rows [first, last) that were put, into the records of `to`, which get the numbers, too: products with
    // matrices in bf16 or float32 read these.
    void split(int64_t first, int64_t last, const TiledRows& to) const {
        HalfRows halves = to.halves();
        for (int64_t row = first; row < last; row++) {
            if (to.data != data) std::memcpy(to.floats(row), floats(row), size * 4);
            split_row(in_order(floats(row)), size, super_kernels().takes_bytes, to.record(row), has_halves() ? &halves : nullptr,
                      is_in_tiles, row);
        }
    }
};

}  // namespace millrace
