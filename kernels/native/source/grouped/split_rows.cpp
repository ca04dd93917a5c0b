#include "grouped/split_rows.h"

namespace millrace {

namespace {

#if defined(__AVX512F__)
using Whole = __m512i;
inline Whole to_whole(F x) { return _mm512_cvtps_epi32(x); }
inline int32_t sum_of_whole(Whole x) { return _mm512_reduce_add_epi32(x); }
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
// 256 * high and low in bf16, in each eight columns in the order 0 2 4 6 1 3 5 7.
inline void store_halves([[maybe_unused]] Whole q, [[maybe_unused]] char* to, [[maybe_unused]] int64_t to_low) {
#if defined(__AVX512BF16__)
    q = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), q);
    Whole up = _mm512_slli_epi32(_mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8), 8);
    store(reinterpret_cast<bf16*>(to), _mm512_cvtepi32_ps(up));
    store(reinterpret_cast<bf16*>(to + to_low), _mm512_cvtepi32_ps(_mm512_sub_epi32(q, up)));
#endif
}
#else
using Whole = __m256i;
inline Whole to_whole(F x) { return _mm256_cvtps_epi32(x); }
inline int32_t sum_of_whole(Whole x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_hadd_epi32(four, four);
    return _mm_cvtsi128_si32(_mm_hadd_epi32(four, four));
}
inline void store_bytes(Whole, char*, char*) {}  // no kernel takes them, nor these:
inline void store_halves(Whole, char*, int64_t) {}
inline void store_pairs(Whole q, char* to) {
    __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(pairs, order));
}
#endif

}  // namespace

void split_row(const float* x, int64_t size, bool takes_bytes, bool has_halves, char* record) {
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
    char* halves = record + at.halves_at;
    F factor = splat(inverse);
    for (int64_t i = 0; i < at.padded; i += 16, sums++) {
        int32_t sum = 0;
        UNROLL for (int64_t j = i; j < i + 16; j += W) {
            F numbers = j < whole ? load(x + j) : j < size ? load(rest) : zero();
            Whole q = to_whole(mul(numbers, factor));
            takes_bytes ? store_bytes(q, high + j, low + j) : store_pairs(q, high + 2 * j);
            if (has_halves) store_halves(q, halves + 2 * j, 2 * at.padded);
            sum += sum_of_whole(q);
        }
        *sums = sum;
    }
    for (int level = 1; level < NUM_CHUNK_SIZES; level++) {
        auto from = reinterpret_cast<const int32_t*>(record + at.sums_at[level - 1]);
        auto to = reinterpret_cast<int32_t*>(record + at.sums_at[level]);
        int64_t count = ceil_div(at.padded, 16 << (level - 1));
        for (int64_t i = 0; i < count; i += 2) to[i / 2] = from[i] + (i + 1 < count ? from[i + 1] : 0);
    }
}

}  // namespace millrace
