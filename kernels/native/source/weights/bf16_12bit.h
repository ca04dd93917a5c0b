// Weights of bf16 in 12 bits a number, to the bit.
//
// What a step of few rows takes is the time in which its weights come from memory. A number's upper byte, its sign and seven
// bits of its exponent, hardly differs from one weight to another: 16 of them are those of all but one of 10,000 numbers that
// are normally distributed. So a panel has a book of its 16 most common upper bytes, and of each number 4 bits that tell which
// of them it has, and the lower byte. A block with any other upper byte is kept whole as well, elsewhere. Sums are those of the
// numbers themselves, in their order: no bit of a logit changes. Steps of 1 / 4 / 8 rows take 7 to 27 / 3 to 17 / 0 to 10 %
// less, most where memory is slow, others and prompts as long as before, 2 % more or less (SmolLM2-135M's and Qwen3-0.6B's
// shape, of random numbers; two cores of a Zen 4 class EPYC, memory at 33 to 57 GB/s). Logits of 1 / 2 / 4 rows by a head of
// 151,936 x 1,024, which drawn tokens take, 19 / 9 / 9 % less, those of 8 to 32 one or two more.
//
// In AMX numbers are put together to columns of tile registers, a step of k ahead of those that are multiplied: 600 MiB
// of weights take 13.2 / 14.0 / 13.8 / 15.7 ms for 1 / 8 / 16 / 32 rows where these themselves take 17.6 / 17.9 / 18.3 / 18.4,
// and steps of 1 / 8 / 16 / 32 rows 16 to 19 / 9 to 14 / 9 to 13 / 2 to 3 % less in the two shapes, with the screen; prompts of
// 24 and 48 tokens 13 and 4 % less, of 128 5 more, of 256 2 less (two cores of a Granite Rapids class Xeon, memory at 28 to 38
// GB/s).
//
// Only where bf16 is multiplied as such: there one instruction joins the bytes of 32 numbers to pairs. Whether it pays where
// weights become float32 nobody has measured.
//
// Knows how coded numbers lie, and puts them together. Refuses to know how they get there: see coding.cpp.

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

// A block that is kept whole: [2][32][2].
struct alignas(64) RawBlock {
    bf16 numbers[BLOCK_NUMBERS];
    int64_t next;  // number, within the panel, of the next one; NO_BLOCK: there is none
};
constexpr int64_t NO_RAW_BLOCK = INT64_MAX;

// A panel begins with it, and its k / 4 blocks follow. A block has the lower bytes of its first pair, those of its second pair,
// and then codes, the first pair's in the lower halves of bytes.
struct alignas(64) Codebook {
    uint8_t upper[16];        // by their codes
    const RawBlock* raw;  // one after the other
    int64_t first_raw;      // its number, or NO_BLOCK: told here, so that nobody waits for other memory than the panel's
};
static_assert(sizeof(Codebook) == CODEBOOK_BYTES && BLOCK_NUMBERS * 3 / 2 == BF16_12BIT_BLOCK_BYTES);

constexpr int64_t offset_of_block(int64_t block) { return CODEBOOK_BYTES + block * BF16_12BIT_BLOCK_BYTES; }

inline const uint8_t* block_of(const Bf16In12Bits* panel, int64_t block) {
    return reinterpret_cast<const uint8_t*>(panel) + offset_of_block(block);
}

// Where among a pair's 64 bytes a number is: as instructions that put bytes together take them.
constexpr int64_t byte_index(int64_t lane, int64_t is_second) {
    return lane % 16 / 4 * 16 + lane / 16 * 8 + lane % 4 * 2 + is_second;
}

// Number `index` of row `lane` of a panel, by its place.
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

// A panel's blocks from `first` on, one after the other.
class Bf16In12BitsReader {
  public:
    explicit Bf16In12BitsReader(const Bf16In12Bits* panel, int64_t first = 0) : block_(block_of(panel, first)), at_(first) {
        auto book = reinterpret_cast<const Codebook*>(panel);
        upper_ = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(book->upper)));
        raw_ = book->raw, next_raw_ = book->first_raw;
        while (next_raw_ < first) next_raw_ = raw_++->next;
        prefetch_raw();
    }

    // The next one's two pairs of k by 32 columns.
    [[gnu::always_inline]] void read(F (&pairs)[2][2]) {
        if (__builtin_expect(at_ == next_raw_, 0))
            read_raw(pairs);
        else
            decode(pairs);
        at_++, block_ += BF16_12BIT_BLOCK_BYTES;
    }

    // The one that comes next is passing.
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

    // The one that comes next, long before it is read.
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
