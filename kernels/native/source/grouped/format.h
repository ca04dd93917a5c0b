// Weights in groups of codes: what the codes mean, and how a panel stores them.
//
// w = d * (T[code] - zero) + m, with d and m of a row and a group of columns (kernels/layout/grouped_codes.py). A panel
// holds 32 rows in supers of 256 columns, one after another: the header of a super, then its codes. So a product reads
// one stream, of as many bytes as the file has. From groups of 256 columns on the scales of all groups precede the
// first super. A header has, for each of 32 rows:
//   scales [groups], offsets [groups]                                                      one level
//   scale, offset, bytes of scales [groups], bytes of offsets [groups]                     two levels
//   zeros [groups]                                                                         if groups have zeros
// Codes come in blocks of 32 columns, in quads (four columns) of [32 rows][4]:
//   8 bits: [8 quads][32][4]
//   4 bits: [4][32][4], two quads a byte, the first in the lower half
//   2 bits: [2][32][4], four quads a byte, the first lowest
//   1 bit:  [32][4], eight quads a byte, the first lowest
// 3, 5 and 6 bits are a block of 2 or 4 bits, and one of the bits above.

#pragma once

#include <algorithm>
#include <cstdint>

namespace millrace {

struct Grouped {};  // stands for the weights' type where steps are compiled for such a model

constexpr int64_t SUPER = 256, BLOCK = 32;  // columns
constexpr int64_t LANES = 32;               // rows of a panel
constexpr int64_t BLOCKS_PER_SUPER = SUPER / BLOCK;
constexpr int64_t MAX_CHUNK = 128;  // columns whose products are summed as integers: 255 * 32512 * 128 is below 2 ** 31
constexpr int64_t MAX_CHUNKS = SUPER / 16;  // of a super

enum CodeTable : int32_t { AFFINE, IQ4, E2M1, NF4 };
enum NumberKind : int32_t { NO_NUMBER, HALF, BRAIN, SINGLE, POWER };  // f16, bf16, f32, e8m0

constexpr int64_t size_of(NumberKind kind) { return kind == SINGLE ? 4 : kind == NO_NUMBER ? 0 : kind == POWER ? 1 : 2; }

struct GroupedFormat {  // mirrored by `FormatStruct` in library.py
    int32_t bits, group;
    CodeTable table;
    NumberKind scale, offset;
    int32_t zero, has_zeros, is_two_level, has_signed_scales;

    bool operator==(const GroupedFormat& other) const {
        return bits == other.bits && group == other.group && table == other.table && scale == other.scale &&
               offset == other.offset && zero == other.zero && has_zeros == other.has_zeros &&
               is_two_level == other.is_two_level && has_signed_scales == other.has_signed_scales;
    }
    bool operator!=(const GroupedFormat& other) const { return !(*this == other); }

    // Bits of the first and the second block of codes.
    int64_t low_bits() const { return bits > 6 ? 8 : bits > 3 ? 4 : 2; }
    int64_t high_bits() const { return bits == 3 || bits == 5 ? 1 : bits == 6 ? 2 : 0; }
    bool has_offsets() const { return offset != NO_NUMBER || has_zeros; }
    // Columns that are summed as integers: a group, or a part of one.
    int64_t chunk() const { return std::min<int64_t>(group, MAX_CHUNK); }
};

// Sizes of a panel of `k` columns.
struct PanelLayout {
    int64_t num_blocks, num_supers, num_groups, groups_per_super;
    int64_t first_bytes, header_bytes, block_bytes, super_bytes, panel_bytes;

    PanelLayout(const GroupedFormat& format, int64_t k) {
        num_blocks = (k + BLOCK - 1) / BLOCK, num_supers = (k + SUPER - 1) / SUPER;
        num_groups = (k + format.group - 1) / format.group;
        bool is_wide = format.group >= SUPER;
        groups_per_super = is_wide ? 0 : SUPER / format.group;
        int64_t numbers = size_of(format.scale) + size_of(format.offset) + format.has_zeros;
        first_bytes = is_wide ? padded(num_groups * numbers * LANES) : 0;
        auto header = [&](int64_t groups) {
            if (format.is_two_level) return padded((numbers + groups * (1 + (format.offset != NO_NUMBER))) * LANES);
            return padded(groups * numbers * LANES);
        };
        header_bytes = header(groups_per_super);
        block_bytes = (format.low_bits() + format.high_bits()) * BLOCK * LANES / 8;
        super_bytes = header_bytes + BLOCKS_PER_SUPER * block_bytes;
        int64_t of_whole = (num_supers - 1) * header_bytes + header(groups_of(num_supers - 1));
        panel_bytes = first_bytes + of_whole + num_blocks * block_bytes;
    }

    int64_t super_at(int64_t index) const { return first_bytes + index * super_bytes; }
    // Of the last super fewer.
    int64_t groups_of(int64_t super) const { return std::min(groups_per_super, num_groups - super * groups_per_super); }
    int64_t header_of(int64_t super) const {
        return super + 1 < num_supers ? header_bytes : panel_bytes - super_at(super) - blocks_of(super) * block_bytes;
    }
    int64_t blocks_of(int64_t super) const { return std::min(BLOCKS_PER_SUPER, num_blocks - super * BLOCKS_PER_SUPER); }

  private:
    static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

}  // namespace millrace
