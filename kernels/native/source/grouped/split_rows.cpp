#include "grouped/split_rows.h"

namespace millrace {

namespace {

#if defined(__AVX512F__)
using Whole = __m512i;
inline Whole to_whole(F x) { return _mm512_cvtps_epi32(x); }
inline Whole no_whole() { return _mm512_setzero_si512(); }
// The sums of each of four vectors, and how those of 16 columns are stored.
inline __m128i sums_of_whole(const Whole (&q)[4]) {
    auto fold = [](Whole a, Whole b) { return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
    Whole first = fold(q[0], q[2]), second = fold(q[1], q[3]);
    Whole all = fold(first, second);  // 0 1 2 3 in each lane of 128 bits
    __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}
inline void store_sums(__m128i sums, int32_t* to) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), sums); }
inline void store_bytes(Whole q, char* high, char* low) {
    Whole up = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(up));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(q));  // modulo 256
}
inline void store_pairs(Whole q, char* to) {
    __m256i pairs = _mm512_cvtepi32_epi16(q);
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(pairs, order));
}
// 32 columns of a row as two rows of tiles: 256 * high and low in bf16, in each eight columns in the order 0 2 4 6 1 3 5
// 7. Both are whole numbers of 8 bits and a sign, so a shift rounds nothing off.
inline void store_halves([[maybe_unused]] Whole first, [[maybe_unused]] Whole second, [[maybe_unused]] char* to) {
    auto join = [](Whole a, Whole b) {  // the upper halves of the numbers of a, then of b
        const __m512i order = _mm512_set_epi16(63, 59, 55, 51, 61, 57, 53, 49, 47, 43, 39, 35, 45, 41, 37, 33,  //
                                               31, 27, 23, 19, 29, 25, 21, 17, 15, 11, 7, 3, 13, 9, 5, 1);
        return _mm512_permutex2var_epi16(a, order, b);
    };
    auto up = [](Whole q) { return _mm512_slli_epi32(_mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8), 8); };
    auto bits = [](Whole q) { return _mm512_castps_si512(_mm512_cvtepi32_ps(q)); };
    Whole high[2] = {up(first), up(second)};
    _mm512_storeu_si512(to, join(bits(high[0]), bits(high[1])));
    _mm512_storeu_si512(to + HalfRows::GROUP_BYTES / 2,
                        join(bits(_mm512_sub_epi32(first, high[0])), bits(_mm512_sub_epi32(second, high[1]))));
}
#else
using Whole = __m256i;
inline Whole to_whole(F x) { return _mm256_cvtps_epi32(x); }
inline Whole no_whole() { return _mm256_setzero_si256(); }
inline __m128i sums_of_whole(const Whole (&q)[4]) {
    __m256i two = _mm256_hadd_epi32(_mm256_hadd_epi32(q[0], q[1]), _mm256_hadd_epi32(q[2], q[3]));
    return _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}
inline void store_sums(__m128i sums, int32_t* to) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_hadd_epi32(sums, sums));
}
inline void store_bytes(Whole, char*, char*) {}  // no kernel takes them, nor these:
inline void store_halves(Whole, Whole, char*) {}
inline void store_pairs(Whole q, char* to) {
    __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(pairs, order));
}
#endif

}  // namespace

void split_row(const float* x, int64_t size, bool takes_bytes, char* record, const HalfRows* halves, bool is_in_tiles,
               int64_t row) {
    SplitRecord at(size);
    F maximum = zero(), nothing = zero();
    int64_t whole = size / W * W;
    alignas(64) float rest[W] = {};
    std::copy(x + whole, x + size, rest);
    auto look = [&](F numbers) {
        maximum = max(maximum, max(numbers, sub(zero(), numbers)));
        nothing = fma(numbers, zero(), nothing);
    };
    for (int64_t i = 0; i < whole; i += W) look(load(x + i));
    look(load(rest));
    float largest = max_of(maximum), nan = sum_of(nothing);
    // Numbers that are all nearly 0 become 0; a NaN or infinity makes the scale NaN.
    bool is_zero = !(largest >= FLT_MIN * MAX_SPLIT);
    float inverse = is_zero ? 0.0f : MAX_SPLIT / largest;
    *reinterpret_cast<float*>(record) = (is_zero ? 0.0f : largest / MAX_SPLIT) + nan;
    char *high = record + at.numbers_at, *low = high + at.padded;
    auto sums = reinterpret_cast<int32_t*>(record + at.sums_at[0]);
    F factor = splat(inverse);
    constexpr int64_t PART = 4 * W;  // columns whose sums come together
    for (int64_t begin = 0; begin < at.padded; begin += PART) {
        Whole q[4];
        UNROLL for (int i = 0; i < 4; i++) {
            int64_t j = begin + i * W;
            q[i] = j < at.padded ? to_whole(mul(j < whole ? load(x + j) : j < size ? load(rest) : zero(), factor)) : no_whole();
            if (j < at.padded && !is_in_tiles) takes_bytes ? store_bytes(q[i], high + j, low + j) : store_pairs(q[i], high + 2 * j);
        }
        if (halves)
            UNROLL for (int i = 0; i < 4; i += 2) {
                int64_t j = begin + i * W;
                if (j < at.padded)
                    store_halves(q[i], q[i + 1], halves->tile(row / HalfRows::ROWS, j / BLOCK) + row % HalfRows::ROWS * 64);
            }
        store_sums(sums_of_whole(q), &sums[begin / 16]);
    }
    for (int level = 1; level < NUM_CHUNK_SIZES; level++) {
        auto from = reinterpret_cast<const int32_t*>(record + at.sums_at[level - 1]);
        auto to = reinterpret_cast<int32_t*>(record + at.sums_at[level]);
        int64_t count = ceil_div(at.padded, 16 << (level - 1));
        for (int64_t i = 0; i < count; i += 2) to[i / 2] = from[i] + (i + 1 < count ? from[i + 1] : 0);
    }
    if (!halves) return;
    auto by_block = reinterpret_cast<const int32_t*>(record + at.sums_at[SplitRecord::size_index(BLOCK)]);
    for (int64_t i = 0; i < halves->num_groups; i++)
        halves->sums_of(row / HalfRows::ROWS, i / HalfRows::GROUPS)[row % HalfRows::ROWS * HalfRows::GROUPS + i % HalfRows::GROUPS] =
            float(by_block[i]);
}

}  // namespace millrace
