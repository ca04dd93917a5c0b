// Lossless coding of bf16 weights in 12 bits per number, and its decoder.
//
// A step of few rows takes as long as its weights take to arrive from memory. The upper byte of a bf16 number (sign and
// seven bits of the exponent) varies little: 16 values cover all but one of 10,000 normally distributed numbers. So a
// panel has a codebook of its 16 most common upper bytes, and per number a 4-bit code and the lower byte. A block with
// any other upper byte is stored raw as well, elsewhere. Products sum the original numbers in the original order, so
// that no bit of a logit changes.
//
// Steps of 1 / 4 / 8 rows take 7 to 27 / 3 to 17 / 0 to 10 % less, most where memory is slow; other steps and prompts
// take as long as before within 2 % (SmolLM2-135M's and Qwen3-0.6B's shape, random numbers; two cores of a Zen 4 class
// EPYC, memory at 33 to 57 GB/s). Logits of 1 / 2 / 4 rows by a head of 151,936 x 1,024, as random sampling needs them,
// take 19 / 9 / 9 % less, those of 8 to 32 rows 1 to 2 % more.
//
// With AMX the numbers are decoded to columns of tile registers, one step of k ahead of the products: 600 MiB of
// weights take 13.2 / 14.0 / 13.8 / 15.7 ms for 1 / 8 / 16 / 32 rows, and 17.6 / 17.9 / 18.3 / 18.4 ms uncoded. Steps
// of 1 / 8 / 16 / 32 rows take 16 to 19 / 9 to 14 / 9 to 13 / 2 to 3 % less in the two shapes, with the screen; prompts
// of 24 and 48 tokens 13 and 4 % less, of 128 5 % more, of 256 2 % less (two cores of a Granite Rapids class Xeon,
// memory at 28 to 38 GB/s).
//
// Only with bf16 dot products: there one instruction joins the bytes of 32 numbers to pairs. For weights that are
// converted to float32 it is not measured. bf16_12bit_encode.cpp encodes; the products in linear/ decode, on each
// compute thread.

#pragma once

#include <cstdint>

#include "machine/prefetch.h"
#include "weights/model.h"
#include "machine/simd.h"

namespace millrace {

#if defined(MILLRACE_BF16_DOT)
constexpr bool HAS_BF16_12BIT = true;
#else
constexpr bool HAS_BF16_12BIT = false;
#endif

constexpr int64_t BLOCK_NUMBERS = 4 * PANEL;  // two pairs of k

// A block that is stored raw: [2][32][2].
struct alignas(64) RawBlock {
    bf16 numbers[BLOCK_NUMBERS];
    int64_t next;  // index within the panel of the next raw block; NO_RAW_BLOCK if there is none
};
constexpr int64_t NO_RAW_BLOCK = INT64_MAX;

// The head of a panel; its k / 4 blocks follow. A block holds the lower bytes of its first pair of k, those of its
// second pair, then the codes, the first pair's in the lower halves of the bytes.
struct alignas(64) Codebook {
    uint8_t upper[16];    // indexed by code
    const RawBlock* raw;  // the panel's raw blocks, contiguous
    // Index of the first raw block, or NO_RAW_BLOCK; stored here so that a panel without one reads no other memory.
    int64_t first_raw;
};
static_assert(sizeof(Codebook) == CODEBOOK_BYTES && BLOCK_NUMBERS * 3 / 2 == BF16_12BIT_BLOCK_BYTES);

constexpr int64_t offset_of_block(int64_t block) { return CODEBOOK_BYTES + block * BF16_12BIT_BLOCK_BYTES; }

inline const uint8_t* block_of(const Bf16In12Bits* panel, int64_t block) {
    return reinterpret_cast<const uint8_t*>(panel) + offset_of_block(block);
}

// Position of a number among the 64 bytes of a pair, as the unpack instructions order them.
constexpr int64_t byte_index(int64_t lane, int64_t is_second) {
    return lane % 16 / 4 * 16 + lane / 16 * 8 + lane % 4 * 2 + is_second;
}

// Element `index` of row `lane` of a panel, in stored order.
inline float element_at(const Bf16In12Bits* panel, int64_t index, int64_t lane) {
    auto book = reinterpret_cast<const Codebook*>(panel);
    int64_t pair = index / 2 % 2;
    const RawBlock* raw = book->raw;
    int64_t at = book->first_raw;
    while (at < index / 4) at = raw++->next;
    if (at == index / 4) return widen(raw->numbers[2 * (pair * PANEL + lane) + index % 2]);
    const uint8_t *block = block_of(panel, index / 4), *codes = block + BLOCK_NUMBERS;
    int64_t byte = byte_index(lane, index % 2), code = pair ? codes[byte] >> 4 : codes[byte] & 15;
    return widen(bf16(book->upper[code] << 8 | block[pair * 2 * PANEL + byte]));
}

#if defined(MILLRACE_BF16_DOT)

// Reads a panel's blocks in order, from block `first`.
class Bf16In12BitsReader {
  public:
    explicit Bf16In12BitsReader(const Bf16In12Bits* panel, int64_t first = 0) : block_(block_of(panel, first)), at_(first) {
        auto book = reinterpret_cast<const Codebook*>(panel);
        upper_ = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(book->upper)));
        raw_ = book->raw, next_raw_ = book->first_raw;
        while (next_raw_ < first) next_raw_ = raw_++->next;
        prefetch_raw();
    }

    // Reads the next block: two pairs of k by 32 columns.
    [[gnu::always_inline]] void read(F (&pairs)[2][2]) {
        if (__builtin_expect(at_ == next_raw_, 0))
            read_raw(pairs);
        else
            decode(pairs);
        at_++, block_ += BF16_12BIT_BLOCK_BYTES;
    }

    // Prefetches the next block non-temporally.
    [[gnu::always_inline]] void prefetch_next_nontemporal() const { prefetch_nontemporal<BF16_12BIT_BLOCK_BYTES>(block_); }

  private:
    [[gnu::always_inline]] void decode(F (&pairs)[2][2]) const {
        const __m512i half = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(block_ + BLOCK_NUMBERS);
        UNROLL for (int pair = 0; pair < 2; pair++) {
            __m512i own = _mm512_and_si512(pair ? _mm512_srli_epi16(codes, 4) : codes, half);
            __m512i upper = _mm512_shuffle_epi8(upper_, own), lower = _mm512_loadu_si512(block_ + pair * 2 * PANEL);
            pairs[pair][0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(lower, upper));
            pairs[pair][1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(lower, upper));
        }
    }

    [[gnu::always_inline]] void read_raw(F (&pairs)[2][2]) {
        auto numbers = reinterpret_cast<const float*>(raw_->numbers);
        UNROLL for (int i = 0; i < 4; i++) pairs[i / 2][i % 2] = load(numbers + i * W);
        next_raw_ = raw_++->next;
        prefetch_raw();
    }

    // Prefetches the next raw block, long before it is read.
    [[gnu::always_inline]] void prefetch_raw() const {
        auto place = reinterpret_cast<const char*>(raw_);
        for (int64_t i = 0; i < int64_t(sizeof(RawBlock)); i += 64) _mm_prefetch(place + i, _MM_HINT_T1);
    }

    __m512i upper_;
    const uint8_t* block_;
    const RawBlock* raw_;
    int64_t at_, next_raw_;
};

#endif

}  // namespace millrace
