// Access to a weight's panels: dispatch on the storage type, order of the pairs of k, single elements and rows.
//
// Pairs of k that are summed in one chain are stored in streams: pair 0 first in the first stream, pair 1 first in the
// second, and so on in turn; the order of sums does not change. A core that goes through a panel then reads from as
// many pages as there are streams, and the hardware prefetcher follows each: 41 GB/s from one stream, 52 from three to
// six, 47 from eight (one row in bf16, AVX2 on two cores of a Zen 3 class EPYC). Used for packing, embedding and
// products, on any thread.

#pragma once

#include <algorithm>

#include "weights/bf16_12bit.h"
#include "machine/prefetch.h"
#include "weights/model.h"
#include "machine/simd.h"

namespace millrace {

// Calls `use` with a pointer to the linear's panels, by storage type; `Weight` is the model's dtype.
template <class Weight, class Use>
void dispatch_panels(const Linear& linear, const Use& use) {
    if constexpr (HAS_BF16_12BIT && std::is_same<Weight, bf16>::value)
        if (linear.type == BF16_12BIT) return use(linear.weight.as<Bf16In12Bits>());
    switch (linear.type) {
        case INT8: return use(linear.weight.as<int8_t>());
        case INT4: return use(linear.weight.as<Int4Pair>());
        default: return use(linear.weight.as<Weight>());
    }
}

// A panel's scales, [groups][32]; null if not quantized.
inline const bf16* scales_of(const Linear& linear, int64_t panel) {
    const bf16* scales = linear.scales.as<bf16>();
    return scales ? scales + panel * linear.num_groups() * PANEL : nullptr;
}

// With AVX-512 one: with four, one to four rows took 6 to 25 % longer, and 32 rows 12 % (Zen 5 class EPYC).
constexpr int64_t STREAMS = W == 8 ? 4 : 1;

// Streams of `num` pairs that are summed in one chain, all of one length; in bf16 at least a page.
constexpr int64_t num_streams(int64_t num) { return num % STREAMS || num < 32 * STREAMS ? 1 : STREAMS; }

// Calls use(pair, place) for a linear's pairs of k, in stored order.
template <class Use>
void for_each_pair(const Linear& linear, const Use& use) {
    int64_t num = linear.k / 2, size = linear.group_pairs();
    for (int64_t begin = 0; begin < num; begin += size) {
        int64_t count = std::min(size, num - begin), streams = num_streams(count), place = begin;
        for (int64_t stream = 0; stream < streams; stream++)
            for (int64_t pair = begin + stream; pair < begin + count; pair += streams) use(pair, place++);
    }
}

// Element `index` of row `lane` of a panel, in stored order, without its scale.
template <class T>
float element_at(const T* panel, int64_t index, int64_t lane) {
    return widen(panel[index_in_pairs<T>(index, PANEL, lane)]);
}
inline float element_at(const Int4Pair* panel, int64_t index, int64_t lane) {
    uint8_t codes = panel[index_in_pairs<Int4Pair>(index, PANEL, lane)].codes;
    return INT4_VALUES[index % 2 ? codes >> 4 : codes & 15];
}

// Byte offset of a pair of k in a panel whose pairs are stored in order. For 12-bit panels an even pair; pair 0
// includes the codebook.
template <class Stored>
constexpr int64_t offset_of_pair(int64_t pair) {
    if constexpr (std::is_same<Stored, Bf16In12Bits>::value) return pair == 0 ? 0 : offset_of_block(pair / 2);
    return index_in_pairs<Stored>(2 * pair, PANEL, 0) * int64_t(sizeof(Stored));
}

// A row of the weight, [k], as products use it.
template <class Weight>
void read_row(const Linear& linear, int64_t row, float* to) {
    int64_t panel = row / PANEL, lane = row % PANEL;
    dispatch_panels<Weight>(linear, [&](auto* panels) {
        auto from = panels + panel * (linear.panel_bytes() / int64_t(sizeof(*panels)));
        for_each_pair(linear, [&](int64_t pair, int64_t place) {
            for (int64_t i : {0, 1}) to[2 * pair + i] = element_at(from, 2 * place + i, lane);
        });
    });
    if (!linear.is_quantized()) return;
    const bf16* scales = scales_of(linear, panel) + lane;
    for (int64_t i = 0; i < linear.k; i++) to[i] *= widen(scales[i / linear.group_size * PANEL]);
}

// What this thread reads first of the next linear.
inline const char* first_address_of_next(const Linear& linear, const ThreadTeam::Member& member) {
    int64_t first, last;
    split_evenly(linear.next->num_panels(), member.rank, member.count, &first, &last);
    return linear.next->weight.as<char>() + first * linear.next->panel_bytes();
}

}  // namespace millrace
