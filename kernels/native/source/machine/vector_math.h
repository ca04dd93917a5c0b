// Functions of vectors beyond `exp`: e ** x - 1, tanh, and the tail of the normal distribution.
//
// Used by activations and soft caps, on every compute thread. Each lane gives the same bits wherever it is.

#pragma once

#include "machine/simd.h"

namespace millrace {

// The sum factors[0] + factors[1] * x + ..., for N vectors side by side.
template <int N, int K>
[[gnu::always_inline]] inline void polynomials(const F (&x)[N], const float (&factors)[K], F (&sums)[N]) {
    UNROLL for (int i = 0; i < N; i++) sums[i] = splat(factors[K - 1]);
    UNROLL for (int k = K - 2; k >= 0; k--)
        UNROLL for (int i = 0; i < N; i++) sums[i] = fma(sums[i], x[i], splat(factors[k]));
}

// e ** x - 1 for x up to 0, to 3 units in the last place. -1 for a NaN.
template <int N>
[[gnu::always_inline]] inline void expm1_all(F (&x)[N]) {
    constexpr float FACTORS[] = {5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f,
                                 8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};
    constexpr float SMALL = -0.34f;  // above it, the difference of `exp` and 1 would lose digits
    F sums[N], powers[N];
    polynomials(x, FACTORS, sums);
    UNROLL for (int i = 0; i < N; i++) powers[i] = x[i];
    exp_all(powers);
    UNROLL for (int i = 0; i < N; i++)
        x[i] = select_ge(x[i], splat(SMALL), fma(mul(sums[i], x[i]), x[i], x[i]), sub(powers[i], splat(1.0f)));
}

// tanh(x) to 4 units in the last place; NaN where x is not finite.
inline F tanh(F x) {
    F negative[] = {mul(splat(-2.0f), max(x, sub(zero(), x)))};
    expm1_all(negative);
    F magnitude = div(sub(zero(), negative[0]), add(negative[0], splat(2.0f)));
    F signed_magnitude = select_ge(x, zero(), magnitude, sub(zero(), magnitude));
    return add(signed_magnitude, sub(x, x));
}

// cap * tanh(x / cap)
inline F soft_cap(F x, float cap) { return mul(splat(cap), tanh(div(x, splat(cap)))); }

// The share of the standard normal distribution beyond |x|, erfc(|x| / sqrt(2)) / 2: to 2.4e-6 of itself up to 4, and to
// 1e-8 in all. It is e ** -p(|x|) for a polynomial p, fitted so that x times it has the least error up to 6; beyond, p
// rises on.
template <int N>
[[gnu::always_inline]] inline void normal_tail_all(F (&x)[N]) {
    constexpr float FACTORS[] = {6.931471825e-01f,  7.978849411e-01f,  3.183069229e-01f,  3.634510189e-02f,
                                 -4.797114525e-03f, -2.640792809e-05f, 2.133658854e-04f,  -6.100704559e-05f,
                                 9.444282114e-06f,  -8.166553584e-07f, 3.076083033e-08f};
    F sums[N];
    UNROLL for (int i = 0; i < N; i++) x[i] = max(x[i], sub(zero(), x[i]));
    polynomials(x, FACTORS, sums);
    UNROLL for (int i = 0; i < N; i++) x[i] = sub(zero(), sums[i]);
    exp_all(x);
}

}  // namespace millrace
