// Prefetch instructions: modes of weight prefetching, non-temporal prefetch, and prefetch for writing.
//
// Used by the products in linear/, on each compute thread.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "machine/simd.h"

namespace millrace {

// What a product prefetches while it computes: nothing; the next panel; the next panel and keys and values of the next
// layer; or only its own panel, non-temporally, because it is not read again before a cache would evict it.
enum class PrefetchMode { NONE, NEXT_PANEL, NEXT_PANEL_AND_KV, STREAMING };

constexpr int64_t NONTEMPORAL_DISTANCE = 192;  // bytes ahead of the read

// Prefetches non-temporally what follows COUNT numbers. Products of few rows read their weights this way. Otherwise the
// weights of one step would evict everything else from the shared cache: the keys and values, and the data that Python
// needs between steps. A step of one row takes 12 % less in SmolLM2-135M's shape, one of two to four rows 3 to 8 %
// less, and the engine's loop between steps takes half as long (AVX-512 with bf16, Zen 4 class EPYC).
//
// The hardware prefetcher still fetches the data; this only sets the cache policy shortly before the read. With a
// distance of 512 bytes one and two rows took 3 to 8 % more than without. With more rows the hardware prefetcher alone
// is not far enough ahead, and lines that are prefetched early as non-temporal are evicted early: 8 to 32 rows took 8
// to 20 % more.
//
// DISTANCE: bytes ahead; if each call covers half of what is read at a time, a multiple of the whole. Several calls may
// fall into one cache line.
template <int64_t COUNT, int64_t DISTANCE = NONTEMPORAL_DISTANCE, class T>
void prefetch_nontemporal(const T* numbers) {
    auto address = reinterpret_cast<const char*>(numbers) + DISTANCE;
    UNROLL for (int64_t i = 0; i < COUNT * int64_t(sizeof(T)); i += 64) _mm_prefetch(address + i, _MM_HINT_NTA);
}

// Prefetches a line in exclusive state, because another core may hold a line that is about to be written. Issued before
// a tile is summed, the line is there afterwards. Linears of 16 rows and more take 2 to 4 % less (AVX2, Zen 3 class
// EPYC), and 3 to 15 % less where the two cores are on different dies (AVX-512, Zen 5 class EPYC). Inline assembly,
// because compilers offer the intrinsic only with a flag of its own.
inline void prefetch_for_write(const void* p) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(p))); }

}  // namespace millrace
