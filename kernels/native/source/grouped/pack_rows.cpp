#include "grouped/pack_rows.h"

#include <cmath>
#include <cstring>

#include "weights/model.h"

namespace millrace {

namespace {

// The codes of a row, one a byte, with zeros past k: [k rounded up to 32].
void unpack_codes(const GroupedRows& rows, int64_t index, int64_t k, uint8_t* to) {
    if (rows.packing == BYTES) {
        std::memcpy(to, rows.codes + index * k, k);
    } else {
        const uint8_t* from = rows.codes + index * (k / 2);
        int64_t half = rows.packing == PAIRS ? 1 : rows.packing == HALVES_OF_32 ? 16 : 32;
        for (int64_t i = 0; i < k; i += 2 * half, from += half)
            for (int64_t j = 0; j < half; j++) to[i + j] = from[j] & 15, to[i + half + j] = from[j] >> 4;
    }
    std::memset(to + k, 0, round_up(k, BLOCK) - k);
}

// Puts `bits` of each code, from bit `shift` on, into a block of a panel; the row is `lane`.
void put_bits(const uint8_t* codes, int64_t bits, int64_t shift, uint8_t* block, int64_t lane) {
    int64_t per_byte = 8 / bits;
    uint32_t mask = uint32_t((1 << bits) - 1) * 0x01010101;
    for (int64_t quad = 0; quad < BLOCK / 4; quad += per_byte, block += 4 * LANES) {
        uint32_t all = 0;
        for (int64_t i = 0; i < per_byte; i++) {
            uint32_t four;
            std::memcpy(&four, codes + 4 * (quad + i), 4);
            all |= (four >> shift & mask) << (i * bits);
        }
        std::memcpy(block + 4 * lane, &all, 4);
    }
}

// Copies numbers [begin, begin + count) of a row, `size` bytes each, to a row of [count][32].
void put_numbers(const uint8_t* from, int64_t begin, int64_t count, int64_t size, int64_t lane, uint8_t* to) {
    for (int64_t i = 0; i < count; i++) std::memcpy(to + (i * LANES + lane) * size, from + (begin + i) * size, size);
}

}  // namespace

void put_grouped_row(const Linear& linear, const GroupedRows& rows, int64_t index, int64_t column, uint8_t* scratch) {
    const GroupedPart& part = linear.part_of(column / PANEL);
    const GroupedFormat& format = part.format;
    const PanelLayout& layout = part.layout;
    uint8_t* panel = linear.grouped_panel(part, column / PANEL);
    int64_t lane = column % PANEL, k = linear.k, groups = layout.num_groups;
    int64_t scale_size = size_of(format.scale), offset_size = size_of(format.offset);
    unpack_codes(rows, index, k, scratch);
    // Scales, offsets and zeros of groups [begin, begin + count).
    auto put_header = [&](uint8_t* header, int64_t begin, int64_t count) {
        int64_t level_begin = format.is_two_level ? begin / layout.groups_per_super : begin;
        int64_t level_count = format.is_two_level ? 1 : count;
        int64_t level_groups = format.is_two_level ? layout.num_supers : groups;
        put_numbers(rows.scales + index * level_groups * scale_size, level_begin, level_count, scale_size, lane, header);
        header += level_count * scale_size * LANES;
        if (offset_size)
            put_numbers(rows.offsets + index * level_groups * offset_size, level_begin, level_count, offset_size, lane, header);
        header += level_count * offset_size * LANES;
        for (const uint8_t* bytes : {rows.sub_scales, rows.sub_offsets, rows.zeros})
            if (bytes) put_numbers(bytes + index * groups, begin, count, 1, lane, header), header += count * LANES;
    };
    int64_t per_super = layout.groups_per_super;
    if (per_super == 0) put_header(panel, 0, groups);
    for (int64_t super = 0; super < layout.num_supers; super++) {
        uint8_t* at = panel + layout.super_at(super);
        if (per_super > 0) put_header(at, super * per_super, layout.groups_of(super));
        at += layout.header_of(super);
        for (int64_t i = 0; i < layout.blocks_of(super); i++, at += layout.block_bytes) {
            const uint8_t* codes = scratch + super * SUPER + i * BLOCK;
            put_bits(codes, format.low_bits(), 0, at, lane);
            if (format.high_bits())
                put_bits(codes, format.high_bits(), format.low_bits(), at + format.low_bits() * BLOCK * LANES / 8, lane);
        }
    }
}

bool are_numbers_finite(const GroupedFormat& format, int64_t k, const GroupedRows& rows) {
    PanelLayout layout(format, k);
    int64_t count = rows.num_rows * (format.is_two_level ? layout.num_supers : layout.num_groups);
    bool are_finite = std::isfinite(rows.factor);
    auto look = [&](NumberKind kind, const uint8_t* numbers) {
        auto halves = reinterpret_cast<const uint16_t*>(numbers);
        auto singles = reinterpret_cast<const uint32_t*>(numbers);
        for (int64_t i = 0; i < count; i++) {
            bool is_broken = kind == HALF     ? (halves[i] & 0x7c00) == 0x7c00
                             : kind == BRAIN  ? (halves[i] & 0x7f80) == 0x7f80
                             : kind == SINGLE ? (singles[i] & 0x7f800000) == 0x7f800000
                                              : numbers[i] == 255;
            are_finite &= !is_broken;
        }
    };
    look(format.scale, rows.scales);
    if (format.offset != NO_NUMBER) look(format.offset, rows.offsets);
    return are_finite;
}

}  // namespace millrace
