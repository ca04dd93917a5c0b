// SIMD vectors of float32 on AVX-512 or AVX2, and loads and stores of the stored number types: bf16, int8, int4.
//
// The same source is compiled once per instruction set; W is the number of lanes of the float32 vector F. Used by all
// kernels, on every compute thread. NOTE: each function gives the same bits for an element in whatever lane it is.
// Batch invariance depends on this.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace millrace {

// Placed before a loop over registers: compilers keep an array in registers only if no index remains.
#define UNROLL _Pragma("GCC unroll 16")

using bf16 = uint16_t;
struct Int4Pair {  // two 4-bit numbers, the first in the lower half
    uint8_t codes;
};

struct Bf16In12Bits {  // storage type of 12-bit bf16 panels: see weights/bf16_12bit.h
    uint8_t byte;
};

// The values of the 16 codes of int4, before the scale.
alignas(64) constexpr float INT4_VALUES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }

// Rounds to nearest, ties to even. A NaN stays a NaN.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void convert(float x, bf16* to) { *to = to_bf16(x); }
inline void convert(float x, float* to) { *to = x; }

// Sum and maximum of 8 numbers: adds the halves, then the halves of the result, and so on.
inline float sum_of_8(__m256 x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_of_8(__m256 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// NOTE: `fma_to` is inline assembly and not an intrinsic. In long runs of FMAs compilers swap the register of the sum
// for that of a factor, which costs a move each.

#if defined(__AVX512F__)

using F = __m512;
constexpr int W = 16;  // lanes
constexpr int GEMM_ROWS = 12, GEMM_VECTORS = 2;  // a tile: 24 of 32 registers hold sums

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F splat(float x) { return _mm512_set1_ps(x); }
inline F zero() { return _mm512_setzero_ps(); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline void fma_to(F& sum, F a, F b) { asm("vfmadd231ps %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b)); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x where a >= b, otherwise y.
inline F select_ge(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), y, x); }
// Whether any a < b is false, so also for a NaN.
inline bool is_any_not_less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ) != 0; }
// x * 2 ** n where a >= b, otherwise 0. Where it is not 0, n must be an integer in [-126, 127].
inline F times_power_where_ge(F a, F b, F x, F n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x, n);
}
inline float sum_of(F x) { return sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))); }
inline float max_of(F x) { return max_of_8(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))); }
// Writes the lanes of x that are in [low, high), in order, and returns their number. Up to W numbers are overwritten.
inline int64_t compress_store_between(float* p, F x, F low, F high) {
    __mmask16 is_between = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), x, high, _CMP_LT_OQ);
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(is_between, x));
    return __builtin_popcount(is_between);
}
inline F iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
// Loads W interleaved pairs (a, b) of bf16: load_even returns the a's, load_odd the b's.
inline F load_even(const bf16* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline F load_odd(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))));
}
// Loads W numbers of bf16 or int8.
inline F load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline F load(const int8_t* p) {
    __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtepi32_ps(wide);
}
// Rounds to integers, ties to even; they must fit int8.
inline void store(int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
// Writes W numbers as the first or the second elements of W pairs. The other elements are not written.
inline void store_in_pairs(bf16* pairs, const bf16* from, bool is_second) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    if (is_second)
        _mm512_mask_storeu_epi16(pairs, 0xaaaaaaaa, _mm512_slli_epi32(wide, 16));
    else
        _mm512_mask_storeu_epi16(pairs, 0x55555555, wide);
}
// Loads W bytes of two int4 numbers: the values of the lower halves, or of the upper halves.
inline F load_even(const Int4Pair* p) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_permutexvar_ps(codes, _mm512_load_ps(INT4_VALUES));
}
inline F load_odd(const Int4Pair* p) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), _mm512_load_ps(INT4_VALUES));
}
// Interleaves numbers that bf16 holds exactly to pairs (even, odd) of bf16.
inline F join(F even, F odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(odd)));
}

#elif defined(__AVX2__) && defined(__FMA__)

using F = __m256;
constexpr int W = 8;
constexpr int GEMM_ROWS = 6, GEMM_VECTORS = 2;  // 12 of 16 registers hold sums

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F splat(float x) { return _mm256_set1_ps(x); }
inline F zero() { return _mm256_setzero_ps(); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline void fma_to(F& sum, F a, F b) { asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(a), "x"(b)); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F select_ge(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
inline bool is_any_not_less(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ)) != 0; }
inline F times_power_where_ge(F a, F b, F x, F n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return select_ge(a, b, mul(x, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23))), zero());
}
inline float sum_of(F x) { return sum_of_8(x); }
inline float max_of(F x) { return max_of_8(x); }
inline int64_t compress_store_between(float* p, F x, F low, F high) {
    F is_between = _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GE_OQ), _mm256_cmp_ps(x, high, _CMP_LT_OQ));
    alignas(32) float numbers[W];
    store(numbers, x);
    int64_t count = 0;
    for (int bits = _mm256_movemask_ps(is_between); bits; bits &= bits - 1) p[count++] = numbers[__builtin_ctz(bits)];
    return count;
}
inline F iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
inline F load_even(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
inline F load_odd(const bf16* p) {
    __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000))));
}
inline F load(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store(int8_t* p, F x) {
    __m256i whole = _mm256_cvtps_epi32(x);
    __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(packed, packed));
}
inline F level_of(__m256i codes) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8))); }
inline F load_even(const Int4Pair* p) {
    __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return level_of(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
}
inline F load_odd(const Int4Pair* p) {
    __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return level_of(_mm256_srli_epi32(codes, 4));
}
inline F join(F even, F odd) {
    __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
    return _mm256_castsi256_ps(_mm256_or_si256(low, _mm256_castps_si256(odd)));
}

#else
#error "the native step needs AVX-512 (F, BW, VL, DQ) or AVX2 with FMA"
#endif

// Numbers are stored in pairs along the summed dimension. bf16: the two of a pair side by side, [pairs][width][2].
// int4: a pair in one byte, [pairs][width]. float32 and int8: whole rows, [2 * pairs][width]. These functions read all
// of them.
inline F even_of(const bf16* base, int64_t pair, int64_t width, int64_t lane) {
    return load_even(base + 2 * (pair * width + lane));
}
inline F odd_of(const bf16* base, int64_t pair, int64_t width, int64_t lane) {
    return load_odd(base + 2 * (pair * width + lane));
}
inline F even_of(const Int4Pair* base, int64_t pair, int64_t width, int64_t lane) {
    return load_even(base + pair * width + lane);
}
inline F odd_of(const Int4Pair* base, int64_t pair, int64_t width, int64_t lane) {
    return load_odd(base + pair * width + lane);
}
template <class T>
inline F even_of(const T* base, int64_t pair, int64_t width, int64_t lane) {
    return load(base + 2 * pair * width + lane);
}
template <class T>
inline F odd_of(const T* base, int64_t pair, int64_t width, int64_t lane) {
    return load(base + (2 * pair + 1) * width + lane);
}
// Either half of a pair.
template <bool IS_ODD, class T>
inline F half_of(const T* base, int64_t pair, int64_t width, int64_t lane) {
    return IS_ODD ? odd_of(base, pair, width, lane) : even_of(base, pair, width, lane);
}
// Both halves as W pairs of bf16, if bf16 holds them exactly.
inline F pairs_of(const bf16* base, int64_t pair, int64_t width, int64_t lane) {
    return load(reinterpret_cast<const float*>(base + 2 * (pair * width + lane)));
}
template <class T>
inline F pairs_of(const T* base, int64_t pair, int64_t width, int64_t lane) {
    return join(even_of(base, pair, width, lane), odd_of(base, pair, width, lane));
}
// Index of element `index` of the summed dimension in lane `lane`. Two int4 elements share an index: see `Int4Pair`.
template <class T>
constexpr int64_t index_in_pairs(int64_t index, int64_t width, int64_t lane) {
    if (std::is_same<T, bf16>::value) return 2 * ((index / 2) * width + lane) + index % 2;
    if (std::is_same<T, Int4Pair>::value) return index / 2 * width + lane;
    return index * width + lane;
}

// Transposes four rows of four 4-byte units to four columns, which are `to_stride` elements apart.
template <class T>
inline void transpose_4(const T* const (&rows)[4], T* to, int64_t to_stride) {
    __m128 a[4];
    UNROLL for (int i = 0; i < 4; i++) a[i] = _mm_loadu_ps(reinterpret_cast<const float*>(rows[i]));
    _MM_TRANSPOSE4_PS(a[0], a[1], a[2], a[3]);
    UNROLL for (int i = 0; i < 4; i++) _mm_storeu_ps(reinterpret_cast<float*>(to + i * to_stride), a[i]);
}

// Transposes two rows of four 4-byte units to four columns of two.
template <class T>
inline void transpose_4(const T* const (&rows)[2], T* to, int64_t to_stride) {
    __m128 a = _mm_loadu_ps(reinterpret_cast<const float*>(rows[0]));
    __m128 b = _mm_loadu_ps(reinterpret_cast<const float*>(rows[1]));
    __m128 low = _mm_unpacklo_ps(a, b), high = _mm_unpackhi_ps(a, b);
    _mm_storel_pi(reinterpret_cast<__m64*>(to), low);
    _mm_storeh_pi(reinterpret_cast<__m64*>(to + to_stride), low);
    _mm_storel_pi(reinterpret_cast<__m64*>(to + 2 * to_stride), high);
    _mm_storeh_pi(reinterpret_cast<__m64*>(to + 3 * to_stride), high);
}

// Two adjacent bf16 numbers.
inline uint32_t pair_at(const bf16* p) {
    uint32_t both;
    std::memcpy(&both, p, 4);
    return both;
}

// Whether products of bf16 run in AMX tile registers: see machine/amx.h.
#if defined(__AMX_BF16__) || defined(MILLRACE_EMULATE_AMX)
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif
template <class T>
constexpr bool USES_AMX = HAS_AMX && std::is_same<T, bf16>::value;

// sums += dot product of two bf16 pairs: each lane's pair, as `pairs_of` loads it, with the one pair `x`.
#if defined(__AVX512BF16__)
#define MILLRACE_BF16_DOT 1
inline F dot2_add(F sums, F pairs, uint32_t x) {
    return _mm512_dpbf16_ps(sums, __m512bh(_mm512_castps_si512(pairs)), __m512bh(_mm512_set1_epi32(int(x))));
}
#elif defined(MILLRACE_EMULATE_BF16_DOT)  // stands in for those instructions: for tests
#define MILLRACE_BF16_DOT 1
inline F dot2_add(F sums, F pairs, uint32_t x) {
    float both[W];
    store(both, pairs);
    auto at = reinterpret_cast<const bf16*>(both);
    sums = fma(load_odd(at), splat(widen(bf16(x >> 16))), sums);
    return fma(load_even(at), splat(widen(bf16(x))), sums);
}
#endif

// Whether bf16 is multiplied as bf16, by an instruction or by its emulation, and not converted to float32.
#if defined(MILLRACE_BF16_DOT)
constexpr bool HAS_BF16_DOT = true;
#else
constexpr bool HAS_BF16_DOT = false;
#endif

// Stores W numbers rounded to bf16.
inline void store(bf16* p, F x) {
#if defined(__AVX512BF16__)
    __m256bh converted = _mm512_cvtneps_pbh(x);
    std::memcpy(p, &converted, 32);
#else
    float numbers[W];
    store(numbers, x);
    for (int i = 0; i < W; i++) p[i] = to_bf16(numbers[i]);
#endif
}

template <class T>
void convert_all(const float* x, int64_t count, T* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load(x + i));
    for (; i < count; i++) convert(x[i], to + i);
}

// e ** x for x up to 88, to 2 units in the last place. Exactly 1 at 0, and exactly 0 below -87.3, where float32 would
// be subnormal, and for a NaN. Computes N vectors side by side, because the operations on one depend on each other.
template <int N>
[[gnu::always_inline]] inline void exp_all(F (&x)[N]) {
    constexpr float FACTORS[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                 5.0000001201e-1f};
    F n[N], r[N], sum[N];
    UNROLL for (int i = 0; i < N; i++) n[i] = round(mul(x[i], splat(1.44269504f)));
    UNROLL for (int i = 0; i < N; i++) r[i] = fma(n[i], splat(-0.693359375f), x[i]);
    UNROLL for (int i = 0; i < N; i++) r[i] = fma(n[i], splat(2.12194440e-4f), r[i]);
    UNROLL for (int i = 0; i < N; i++) sum[i] = splat(1.9875691500e-4f);
    UNROLL for (float factor : FACTORS)
        UNROLL for (int i = 0; i < N; i++) sum[i] = fma(sum[i], r[i], splat(factor));
    UNROLL for (int i = 0; i < N; i++) sum[i] = add(fma(mul(sum[i], r[i]), r[i], r[i]), splat(1.0f));
    UNROLL for (int i = 0; i < N; i++) x[i] = times_power_where_ge(x[i], splat(-87.3f), sum[i], n[i]);
}

inline F exp(F x) {
    F one[] = {x};
    exp_all(one);
    return one[0];
}

}  // namespace millrace
