#include "grouped/unpack.h"

#include <cmath>
#include <cstring>

#include "machine/simd.h"

namespace millrace {

namespace {

#if defined(__AVX512F__)
using Bytes = __m512i;
inline Bytes load_bytes_at(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes_at(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
inline Bytes mask_bytes(Bytes a, int bits) { return _mm512_and_si512(a, _mm512_set1_epi8(char(bits))); }
inline Bytes or_bytes(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
template <int N>
inline Bytes shift_right(Bytes a) {
    return N == 0 ? a : _mm512_srli_epi16(a, N);
}
template <int N>
inline Bytes shift_left(Bytes a) {
    return N == 0 ? a : _mm512_slli_epi16(a, N);
}
inline Bytes look_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }
inline Bytes table_of(const uint8_t* entries) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
}
inline F load_half(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F load_unsigned(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F load_power(const uint8_t* p) {  // the byte is a float's exponent; 0: the smallest power of two of e8m0
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    F power = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 23)), least = splat(std::ldexp(1.0f, -127));
    return _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(wide, _mm512_setzero_si512()), power, least);
}
#else
using Bytes = __m256i;
inline Bytes load_bytes_at(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_bytes_at(uint8_t* p, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline Bytes mask_bytes(Bytes a, int bits) { return _mm256_and_si256(a, _mm256_set1_epi8(char(bits))); }
inline Bytes or_bytes(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
template <int N>
inline Bytes shift_right(Bytes a) {
    return N == 0 ? a : _mm256_srli_epi16(a, N);
}
template <int N>
inline Bytes shift_left(Bytes a) {
    return N == 0 ? a : _mm256_slli_epi16(a, N);
}
inline Bytes look_up(Bytes table, Bytes codes) { return _mm256_shuffle_epi8(table, codes); }
inline Bytes table_of(const uint8_t* entries) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
}
inline F load_half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline F load_unsigned(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline F load_power(const uint8_t* p) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    __m256i is_zero = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
    return _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 23)), splat(std::ldexp(1.0f, -127)),
                            _mm256_castsi256_ps(is_zero));
}
#endif

constexpr int64_t QUAD = 4 * LANES;                   // bytes of a quad
constexpr int64_t BYTES_AT_ONCE = sizeof(Bytes);
constexpr float NF4_UNIT = 32512.0f;                  // of the value 1

// -- codes

struct Tables {
    uint8_t iq4[16], e2m1[16], nf4[2][16];

    Tables() {
        constexpr int IQ4_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        constexpr int E2M1_HALVES[] = {0, 1, 2, 3, 4, 6, 8, 12};
        constexpr float NF4_VALUES[] = {
            -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
            -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
            0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
            1.0f};
        for (int i = 0; i < 16; i++) {
            iq4[i] = uint8_t(IQ4_VALUES[i] + 128);
            e2m1[i] = uint8_t(12 + (i < 8 ? E2M1_HALVES[i] : -E2M1_HALVES[i - 8]));
            int whole = int(std::lrintf(NF4_VALUES[i] * NF4_UNIT)) + 32768;
            nf4[0][i] = uint8_t(whole >> 8), nf4[1][i] = uint8_t(whole & 255);
        }
    }
};

const uint8_t* entries_of(const GroupedFormat& format, int turn) {
    static const Tables TABLES;
    switch (format.table) {
        case IQ4: return TABLES.iq4;
        case E2M1: return TABLES.e2m1;
        case NF4: return TABLES.nf4[turn];
        default: return nullptr;
    }
}

template <class Use, int... I>
[[gnu::always_inline]] inline void for_each_quad(const Use& use, std::integer_sequence<int, I...>) {
    (use(std::integral_constant<int, I>()), ...);
}

// The bits of quad I of a block of N bits a code, as numbers times 2 ** PLACE; `part` is the vector of its bytes.
template <int N, int I, int PLACE>
[[gnu::always_inline]] inline Bytes bits_of(Bytes part) {
    constexpr int SHIFT = I % (8 / N) * N - PLACE;
    Bytes moved = part;
    if constexpr (SHIFT > 0) moved = shift_right<SHIFT>(part);
    if constexpr (SHIFT < 0) moved = shift_left<-SHIFT>(part);
    return mask_bytes(moved, ((1 << N) - 1) << PLACE);
}

// A block of LOW bits, with HIGH bits above from a second block; `table` maps 4 bits.
template <int LOW, int HIGH, bool HAS_TABLE>
[[gnu::always_inline]] inline void unpack_block(const uint8_t* block, Bytes table, uint8_t* to) {
    const uint8_t* above = block + LOW * BLOCK * LANES / 8;
    for (int64_t lane = 0; lane < QUAD; lane += BYTES_AT_ONCE) {
        auto one = [&](auto i) {
            constexpr int I = decltype(i)::value;
            Bytes codes = bits_of<LOW, I, 0>(load_bytes_at(block + I / (8 / LOW) * QUAD + lane));
            if constexpr (HIGH > 0)
                codes = or_bytes(codes, bits_of<HIGH, I, LOW>(load_bytes_at(above + I / (8 / HIGH) * QUAD + lane)));
            if constexpr (HAS_TABLE) codes = look_up(table, codes);
            store_bytes_at(to + I * QUAD + lane, codes);
        };
        for_each_quad(one, std::make_integer_sequence<int, 8>());
    }
}

template <int LOW, int HIGH, bool HAS_TABLE>
void unpack_blocks(const uint8_t* blocks, int64_t count, const uint8_t* entries, SuperPrefetch prefetch, uint8_t* to) {
    constexpr int64_t BLOCK_BYTES = (LOW + HIGH) * BLOCK * LANES / 8;
    Bytes table = HAS_TABLE ? table_of(entries) : Bytes();
    int64_t lines = (prefetch.num_bytes + 63) / 64, per_block = (lines + count - 1) / count;
    for (int64_t i = 0; i < count; i++, blocks += BLOCK_BYTES, to += BLOCK * LANES) {
        for (int64_t line = 0; line < per_block && lines > 0; line++, lines--, prefetch.address += 64)
            _mm_prefetch(prefetch.address, _MM_HINT_T0);
        unpack_block<LOW, HIGH, HAS_TABLE>(blocks, table, to);
    }
}

// -- scales and offsets

F load_numbers(NumberKind kind, const uint8_t* p) {
    switch (kind) {
        case HALF: return load_half(p);
        case BRAIN: return load(reinterpret_cast<const bf16*>(p));
        case SINGLE: return load(reinterpret_cast<const float*>(p));
        default: return load_power(p);
    }
}

// Where the scales and offsets of groups are.
struct GroupNumbers {
    const uint8_t *scales, *offsets, *sub_scales, *sub_offsets, *zeros;
    int64_t scale_step, offset_step;  // bytes from one group to the next

    GroupNumbers(const GroupedFormat& format, const PanelLayout& layout, const uint8_t* panel, int64_t super) {
        bool is_wide = layout.groups_per_super == 0;
        const uint8_t* at = is_wide ? panel : panel + layout.super_at(super);
        int64_t count = format.is_two_level ? 1 : is_wide ? layout.num_groups : layout.groups_of(super);
        int64_t of_scale = size_of(format.scale) * LANES, of_offset = size_of(format.offset) * LANES;
        scales = at, offsets = scales + count * of_scale;
        sub_scales = zeros = offsets + count * of_offset, sub_offsets = sub_scales + layout.groups_of(super) * LANES;
        scale_step = format.is_two_level ? 0 : of_scale, offset_step = format.is_two_level ? 0 : of_offset;
    }
};

template <NumberKind KIND>
[[gnu::always_inline]] inline F load_kind(const uint8_t* p) {
    if constexpr (KIND == HALF) return load_half(p);
    if constexpr (KIND == BRAIN) return load(reinterpret_cast<const bf16*>(p));
    if constexpr (KIND == SINGLE) return load(reinterpret_cast<const float*>(p));
    if constexpr (KIND == POWER) return load_power(p);
    return zero();
}

// The scales and offsets of the groups of one super, where a group is a chunk: one level, then two.
template <NumberKind SCALE, NumberKind OFFSET, bool HAS_FACTOR>
void decode_one_level(const GroupNumbers& at, int64_t count, F factor, UnpackedSuper* super) {
    for (int64_t i = 0; i < count * LANES; i += W) {
        F d = load_kind<SCALE>(at.scales + i * size_of(SCALE));
        store(super->d + i, HAS_FACTOR ? mul(d, factor) : d);
        if constexpr (OFFSET != NO_NUMBER) store(super->m + i, load_kind<OFFSET>(at.offsets + i * size_of(OFFSET)));
    }
}

template <bool HAS_OFFSETS, bool IS_SIGNED>
void decode_two_levels(const GroupNumbers& at, int64_t count, F factor, UnpackedSuper* super) {
    for (int64_t lane = 0; lane < LANES; lane += W) {
        F d = load_half(at.scales + 2 * lane), m = HAS_OFFSETS ? load_half(at.offsets + 2 * lane) : zero();
        for (int64_t i = lane; i < count * LANES; i += LANES) {
            F by = IS_SIGNED ? load(reinterpret_cast<const int8_t*>(at.sub_scales + i)) : load_unsigned(at.sub_scales + i);
            store(super->d + i, mul(mul(d, by), factor));
            if (HAS_OFFSETS) store(super->m + i, mul(m, load_unsigned(at.sub_offsets + i)));
        }
    }
}

// Any format.
void decode_any(const GroupedFormat& format, const PanelLayout& layout, const GroupNumbers& at, int64_t index, float factor,
                UnpackedSuper* super) {
    int64_t chunk = format.chunk(), num_columns = layout.blocks_of(index) * BLOCK;
    for (int64_t begin = 0, i = 0; begin < num_columns; begin += chunk, i++) {
        int64_t group = layout.groups_per_super ? begin / format.group : (index * SUPER + begin) / format.group;
        group = std::min(group, (layout.groups_per_super ? layout.groups_of(index) : layout.num_groups) - 1);
        for (int64_t lane = 0; lane < LANES; lane += W) {
            F d = load_numbers(format.scale, at.scales + group * at.scale_step + lane * size_of(format.scale)), m = zero();
            const uint8_t *of_scale = at.sub_scales + group * LANES + lane, *of_zero = at.zeros + group * LANES + lane;
            if (format.is_two_level)
                d = mul(d, format.has_signed_scales ? load(reinterpret_cast<const int8_t*>(of_scale)) : load_unsigned(of_scale));
            d = mul(d, splat(factor));
            if (format.offset != NO_NUMBER) {
                m = load_numbers(format.offset, at.offsets + group * at.offset_step + lane * size_of(format.offset));
                if (format.is_two_level) m = mul(m, load_unsigned(at.sub_offsets + group * LANES + lane));
            } else if (format.has_zeros) {
                m = sub(zero(), mul(d, load_unsigned(of_zero)));
            }
            store(super->d + i * LANES + lane, d);
            if (super->has_offsets) store(super->m + i * LANES + lane, m);
        }
    }
}

void decode_numbers(const GroupedFormat& format, const PanelLayout& layout, const uint8_t* panel, int64_t index,
                    float factor, UnpackedSuper* super) {
    GroupNumbers at(format, layout, panel, index);
    super->has_offsets = format.has_offsets();
    int64_t num_columns = layout.blocks_of(index) * BLOCK, count = layout.groups_of(index);
    if (count * format.group < num_columns)  // groups of 16, of which the last block has one: no scale for its padding
        std::memset(super->d + count * LANES, 0, LANES * 4), std::memset(super->m + count * LANES, 0, LANES * 4);
    F by = splat(factor);
    bool is_plain = layout.groups_per_super > 0 && !format.has_zeros;
    if (is_plain && !format.is_two_level && factor == 1.0f) {
        if (format.scale == HALF && format.offset == HALF) return decode_one_level<HALF, HALF, false>(at, count, by, super);
        if (format.scale == HALF && format.offset == NO_NUMBER)
            return decode_one_level<HALF, NO_NUMBER, false>(at, count, by, super);
        if (format.scale == BRAIN && format.offset == NO_NUMBER)
            return decode_one_level<BRAIN, NO_NUMBER, false>(at, count, by, super);
    }
    if (is_plain && !format.is_two_level && format.scale == POWER && format.offset == NO_NUMBER)
        return decode_one_level<POWER, NO_NUMBER, true>(at, count, by, super);
    if (is_plain && format.is_two_level && format.scale == HALF) {
        if (format.has_signed_scales && format.offset == NO_NUMBER)
            return decode_two_levels<false, true>(at, count, by, super);
        if (!format.has_signed_scales && format.offset == HALF) return decode_two_levels<true, false>(at, count, by, super);
    }
    decode_any(format, layout, at, index, factor, super);
}

}  // namespace

int32_t zero_of(const GroupedFormat& format, int turn) {
    switch (format.table) {
        case IQ4: return format.zero + 128;
        case E2M1: return 2 * format.zero + 12;
        case NF4: return turn == 0 ? 128 : 0;
        default: return format.zero;
    }
}

void unpack_scales(const GroupedFormat& format, const PanelLayout& layout, const uint8_t* panel, int64_t index,
                   float factor, UnpackedSuper* super) {
    decode_numbers(format, layout, panel, index, format.table == E2M1 ? 0.5f * factor : factor, super);
    super->num_quads = int32_t(layout.blocks_of(index) * BLOCK / 4), super->quads_per_chunk = int32_t(format.chunk() / 4);
}

void unpack_super(const GroupedFormat& format, const PanelLayout& layout, const uint8_t* panel, int64_t index, int turn,
                  float factor, SuperPrefetch prefetch, UnpackedSuper* super) {
    if (format.table == NF4) factor *= (turn == 0 ? 256.0f : 1.0f) / NF4_UNIT;
    unpack_scales(format, layout, panel, index, factor, super);
    if (turn > 0) super->has_offsets = false;
    int64_t count = layout.blocks_of(index);
    super->zero = zero_of(format, turn);
    const uint8_t *blocks = panel + layout.super_at(index) + layout.header_of(index), *entries = entries_of(format, turn);
    super->codes = format.low_bits() == 8 ? blocks : super->bytes;
    if (entries) return unpack_blocks<4, 0, true>(blocks, count, entries, prefetch, super->bytes);
    switch (format.low_bits() * 10 + format.high_bits()) {
        case 20: return unpack_blocks<2, 0, false>(blocks, count, entries, prefetch, super->bytes);
        case 21: return unpack_blocks<2, 1, false>(blocks, count, entries, prefetch, super->bytes);
        case 40: return unpack_blocks<4, 0, false>(blocks, count, entries, prefetch, super->bytes);
        case 41: return unpack_blocks<4, 1, false>(blocks, count, entries, prefetch, super->bytes);
        case 42: return unpack_blocks<4, 2, false>(blocks, count, entries, prefetch, super->bytes);
        default:
            for (int64_t i = 0; i < prefetch.num_bytes; i += 64) _mm_prefetch(prefetch.address + i, _MM_HINT_T0);
    }
}

void read_panel_row(const GroupedFormat& format, int64_t k, const uint8_t* panel, int64_t lane, float factor, float* to) {
    PanelLayout layout(format, k);
    UnpackedSuper super;
    for (int turn = 0; turn < num_turns(format); turn++)
        for (int64_t index = 0; index < layout.num_supers; index++) {
            unpack_super(format, layout, panel, index, turn, factor, {}, &super);
            for (int64_t i = 0; i < std::min(SUPER, k - index * SUPER); i++) {
                int64_t place = i / format.chunk() * LANES + lane;
                int32_t code = super.codes[i / 4 * QUAD + lane * 4 + i % 4] - super.zero;
                float number = super.d[place] * float(code) + (super.has_offsets ? super.m[place] : 0.0f);
                float* at = to + index * SUPER + i;
                *at = turn == 0 ? number : *at + number;
            }
        }
}

}  // namespace millrace
