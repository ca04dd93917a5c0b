// Asking memory for what is needed soon, and telling the caches what to make of it.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "machine/simd.h"

namespace millrace {

// What is fetched while something else is computed: what comes after it; that, and what else comes later; or, in place of both,
// what is passing: read now and not again before a cache had forgotten it.
enum class PrefetchMode { NONE, NEXT_PANEL, NEXT_PANEL_AND_KV, STREAMING };

constexpr int64_t NONTEMPORAL_DISTANCE = 192;  // bytes before what is passing is read

// What comes right after these numbers is passing. Products of few rows take their weights so, since as long as a step these
// would be all that the cache behind the cores' own holds: what else is read, keys and values and whatever Python needs
// between steps, is found there then. A step of one row takes 12 % less in SmolLM2-135M's shape, of two to four 3 to 8, and
// in an engine the loop then takes half as long (AVX-512 with bf16, Zen 4 class EPYC). It is still the core that reads ahead,
// and this tells what to make of it shortly before numbers are summed: asked for 512 bytes ahead, one and two rows took 3 to
// 8 % more than without. With more rows the core alone is not ahead enough, and what is asked for early as passing is
// forgotten early: 8 to 32 rows took 8 to 20 % more.
//
// AHEAD: where each call is for half of what comes at a time, a multiple of that whole. What is less than a line is asked for
// more than once.
template <int64_t COUNT, int64_t DISTANCE = NONTEMPORAL_DISTANCE, class T>
void prefetch_nontemporal(const T* numbers) {
    auto address = reinterpret_cast<const char*>(numbers) + DISTANCE;
    UNROLL for (int64_t i = 0; i < COUNT * int64_t(sizeof(T)); i += 64) _mm_prefetch(address + i, _MM_HINT_NTA);
}

// Another thread's core may have a line of what is about to be written: asked for before a tile is summed, it is there
// after it. Linears of 16 rows and more take 2 to 4 % less so (AVX2, Zen 3 class EPYC), and 3 to 15 % where what two cores
// have passes between two dies (AVX-512, Zen 5 class EPYC). An instruction, since compilers know it only with a flag of
// its own.
inline void prefetch_for_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p))); }

}  // namespace millrace
