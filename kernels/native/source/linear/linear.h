// Products of a step's rows with packed weights: out = x @ weight.T + bias, with the epilogue that `out` applies.
//
// NOTE: in vectors each number of a product is one chain of fused multiply-adds over k in rising order (int4: a chain
// per group, and a chain of these times their scales), whatever the number of rows, of threads, or its tile. So a row
// gives the same bits in every batch.
//
// Weights are converted to the type of the input in registers, exactly (panel_dot.h). With enough tiles of rows
// (`is_widened`) the first one stores the converted panel for the others. bf16 on machines with AMX uses tile
// registers: see amx_linear.h. `multiply` is called by Step and OutputHead, on each compute thread, with the same
// arguments.

#pragma once

#include <algorithm>

#include "grouped/grouped_linear.h"
#include "linear/amx_linear.h"
#include "linear/panel_dot.h"

namespace millrace {

// Bytes of converted panels that stay in L2 for all rows, while as many are prefetched. With 16 and 32 rows up to 5 %
// faster than 384 KiB (Zen 5 class EPYC). Where bf16 is multiplied in float32 these are half as many bytes of bf16: as
// many would make 8 to 32 rows 3 to 9 % slower (AVX2 on a Zen 3 class EPYC).
constexpr int64_t HELD_PANEL_BYTES = 192 << 10;

template <class Weight>
constexpr bool IS_GROUPED = std::is_same<Weight, Grouped>::value;

// Panels that stay in L2.
template <class Weight>
int64_t num_held_panels(const Linear& linear) {
    return std::max<int64_t>(1, HELD_PANEL_BYTES / (linear.k * PANEL * int64_t(sizeof(InputOf<Weight>))));
}

// Whether the first tile of rows stores converted panels for the others, which then read more bytes. For bf16 the
// conversion is a shift and pays late: eight tiles take 4 % less, seven as long, three to six up to 10 % more (AVX2 on
// a Zen 3 class EPYC, when any number of tiles was possible). For quantized weights it is several instructions: three
// tiles take 4 to 15 % less, two up to 10 % more. With bf16 dot products two tiles suffice; with AVX-512 this is not
// measured since the first tile does it. 12-bit panels are never stored: decoding costs nothing beside the sums of ten
// rows and more, storing 9 % of a tile (AVX-512 with bf16, Zen 4 class EPYC).
template <class Weight>
bool is_widened(const Linear& linear, int64_t num_tiles) {
    using Input = InputOf<Weight>;
    if (!linear.is_quantized()) return sizeof(Input) != sizeof(Weight) && num_tiles >= 8;
    return num_tiles >= (sizeof(Input) == 2 ? 2 : 3);
}

// Whether two threads may split a product of so many tiles by rows.
template <class Weight>
bool can_split_rows(const Linear& linear, int64_t num_tiles) {
    if (IS_GROUPED<Weight>) return false;
    bool are_halves = num_tiles >= MIN_TILES_TO_SPLIT && num_tiles % 2 == 0;
    return !USES_AMX<InputOf<Weight>> && are_halves && !is_widened<Weight>(linear, num_tiles);
}

// Workspace per thread in a product of so many rows, bytes; in vectors the held panels, converted.
template <class Weight>
int64_t workspace_bytes([[maybe_unused]] const Model& model, const Linear& linear, int64_t num_rows) {
    using Input = InputOf<Weight>;
    if constexpr (IS_GROUPED<Weight>) {
        return grouped_workspace_bytes(model, num_rows);
    } else if constexpr (USES_AMX<Input>) {
        return AmxWorkspace(linear, num_rows).num_bytes();
    } else {
        if (!is_widened<Weight>(linear, TiledRows<Input>::num_tiles_of(num_rows))) return 0;
        return num_held_panels<Weight>(linear) * linear.k * PANEL * int64_t(sizeof(Input));
    }
}

// This thread's part of x @ weight.T + bias: whole panels for all rows; a piece of work is as many panels as are held.
// Each tile is passed to `out`.
//
// Many rows may be split between two threads instead, each half by all panels (`splits_rows`). Then a thread reads
// mostly what it has written, because norms and keys are split by rows as well. Split by columns, half of it comes from
// the other core, which seems to cost time where memory is fast, perhaps because the cores are on different dies then:
// steps of 32 rows take 4 % less with rows split and of 64 to 512 tokens 7 to 9 % less in SmolLM2-135M's shape, 2 to 4
// % less in Qwen3-0.6B's. Where memory is slow they take as long within 2 % (AVX-512 with bf16, Zen 4 class EPYC). With
// AVX2 24 and 32 rows take 3 % less in the one case, 2 % more in the other.
//
// Weights are then read by both threads. So rows are split only where the shared cache retains what was read
// (machine/cache_probe.h, which skips small models): elsewhere memory may be slower than the multipliers; that is not
// measured, nor are more than two threads. A piece of work is one thread's rows by as many panels as are held. The
// following product is assumed to be split likewise: before a product of few rows one thread prefetches what the other
// one multiplies.
template <class Weight, class Out>
class VectorLinear {
    using Input = InputOf<Weight>;
    // For 1 to 8 rows, 1, 2, 3 and 4 are within 3 % of each other.
    static constexpr int64_t HELD_PANELS_FOR_ONE_TILE = 2;

  public:
    VectorLinear(const Model& model, const Linear& linear, const TiledRows<Input>& x, const Out& out,
                 ThreadTeam::Member member, KvPrefetcher* kv_prefetcher = nullptr)
        : model_(model), linear_(linear), x_(x), out_(out), member_(member),
          kv_prefetcher_(can_prefetch_kv(linear, x) ? kv_prefetcher : nullptr), num_tiles_(x.num_tiles()),
          splits_rows_(model.splits_rows && member.count == 2 && can_split_rows<Weight>(linear, num_tiles_)),
          num_tiles_per_thread_(splits_rows_ ? num_tiles_ / 2 : num_tiles_),
          held_(num_tiles_ == 1 ? HELD_PANELS_FOR_ONE_TILE : num_held_panels<Weight>(linear)),
          next_linear_(splits_rows_ ? linear.next->weight.template as<char>() : first_address_of_next(linear, member)) {
        int64_t num_lines = ceil_div(linear.panel_bytes(), 64 * num_tiles_per_thread_), num_pairs = linear.k / 2;
        int64_t together = std::min(num_pairs, linear.group_pairs());
        int64_t max_prefetches = num_pairs / together * num_prefetches_for(together) +
            num_prefetches_for(num_pairs % together);
        // If that is a line or more per prefetch, spread it over all passes over the columns. With the first pass alone
        // it came twice as fast as memory delivers, and nothing with the second.
        int64_t num_passes = num_lines < max_prefetches ? 1 : PANEL / W / vectors_for(int(x.first_row(1)));
        num_lines = ceil_div(num_lines, num_passes);
        bytes_per_prefetch_ = std::min(MAX_PREFETCH_BYTES, 64 * ceil_div(num_lines, max_prefetches)),
            num_prefetches_ = ceil_div(64 * num_lines, bytes_per_prefetch_);
        pass_stride_ = num_passes > 1 ? num_prefetches_ * bytes_per_prefetch_ : 0,
            tile_bytes_ = num_passes * num_prefetches_ * bytes_per_prefetch_;
        is_streaming_ = model.is_streaming && x.num_rows <= streaming_rows<Weight>(linear);
        if (is_streaming_ || (x.num_rows <= FEW_ROWS<Input> && !linear.is_quantized())) num_prefetches_ = 0;
    }

    // Whether tiles of this product prefetch keys and values: where memory is idle meanwhile, and there is one sum.
    static bool can_prefetch_kv(const Linear& linear, const TiledRows<Input>& x) {
        return x.num_tiles() > 1 && linear.num_groups() <= 1;
    }

    template <class Stored>
    void run(const Stored* weights) const {
        int64_t num_panels = linear_.num_panels(), num_groups = ceil_div(num_panels, held_);
        if (!splits_rows_)
            return member_.parallel_for(num_panels, held_, [&](int64_t first, int64_t last, int64_t end) {
                multiply_all(weights, {first, last}, end, {0, num_tiles_});
            });
        member_.parallel_for(2 * num_groups, 1, [&](int64_t piece, int64_t, int64_t end) {
            int64_t half = piece / num_groups, first = piece % num_groups * held_,
                last = std::min(num_panels, first + held_);
            Range tiles{half * num_tiles_per_thread_, (half + 1) * num_tiles_per_thread_};
            multiply_all(weights, {first, last}, piece + 1 < end ? num_panels : last, tiles);
        });
    }

  private:
    template <class Stored>
    int64_t panel_size() const {
        return linear_.panel_bytes() / int64_t(sizeof(Stored));
    }

    // The converted panel `index` of this thread's held ones.
    Input* wide_panel(int64_t index) const {
        return reinterpret_cast<Input*>(model_.workspace_of(member_.scratch_index)) + index * linear_.k * PANEL;
    }

    struct Range {
        int64_t first, last;
    };

    // Panels, which panels until `end` follow, by the given tiles of rows.
    template <class Stored>
    void multiply_all(const Stored* weights, Range panels, int64_t end, Range tiles) const {
        bool widens = is_widened<Weight>(linear_, num_tiles_);
        for (int64_t tile_index = tiles.first; tile_index < tiles.last; tile_index++)
            for (int64_t panel = panels.first; panel < panels.last; panel++)
                multiply(weights + panel * panel_size<Stored>(), tile_index, panel,
                         prefetch_of(panel, end, tile_index - tiles.first),
                             widens ? wide_panel(panel - panels.first) : nullptr);
    }

    // The share of tile `index` in prefetching what this thread multiplies `held_` panels later: panels, or as many
    // bytes of the next linear.
    WeightPrefetch prefetch_of(int64_t panel, int64_t end, int64_t index) const {
        int64_t next = panel + held_, size = linear_.panel_bytes();
        const char* place = next < end ? linear_.weight.as<char>() + next * size : next_linear_ + (next - end) * size;
        return {place + index * tile_bytes_, bytes_per_prefetch_, num_prefetches_, pass_stride_, {}, is_streaming_};
    }

    // Tile `tile_index` of rows by `panel`, which holds `numbers`. `wide`: where the first tile stores the converted
    // panel and the others read it; null: each converts it.
    template <class Stored>
    void multiply(const Stored* numbers, int64_t tile_index, int64_t panel, WeightPrefetch prefetch, Input* wide) const {
        if constexpr (!std::is_same<Stored, Input>::value && !std::is_same<Stored, Bf16In12Bits>::value) {
            if (wide && tile_index == 0) return multiply_by<true>(numbers, tile_index, panel, prefetch, wide);
            if (wide) return multiply_by<false, Input>(wide, tile_index, panel, prefetch, nullptr);
        }
        multiply_by<false>(numbers, tile_index, panel, prefetch, nullptr);
    }

    template <bool WIDENS, class Stored>
    void multiply_by(const Stored* numbers, int64_t tile_index, int64_t panel, WeightPrefetch prefetch, Input* wide) const {
        alignas(64) float tile[GEMM_ROWS * PANEL];
        int64_t row = x_.first_row(tile_index);
        int rows = int(x_.first_row(tile_index + 1) - row);
        auto multiply_rows = tile_for<WIDENS, Input, Stored>(rows, std::make_integer_sequence<int, GEMM_ROWS>());
        int64_t num_pairs = linear_.k / 2;
        if (!WIDENS && kv_prefetcher_) prefetch.kv = kv_prefetcher_->next(num_pairs);
        out_.prefetch_output(row, rows, panel);
        multiply_rows(x_.tile(tile_index), numbers, scales_of(linear_, panel), linear_.group_pairs(), num_pairs, tile,
                      prefetch, wide);
        emit_tile(linear_, out_, tile, row, rows, panel);
    }

    const Model& model_;
    const Linear& linear_;
    const TiledRows<Input>& x_;
    const Out& out_;
    ThreadTeam::Member member_;
    KvPrefetcher* kv_prefetcher_;  // null: nothing is prefetched beside tiles
    int64_t num_tiles_;
    bool splits_rows_;
    int64_t num_tiles_per_thread_;  // tiles that a thread multiplies by the same panels
    int64_t held_;
    int64_t bytes_per_prefetch_, num_prefetches_, pass_stride_;  // of each tile, as in `WeightPrefetch`
    int64_t tile_bytes_;                                         // that a tile prefetches
    const char* next_linear_;                                    // what this thread reads first of the next linear
    bool is_streaming_;                                          // as in `WeightPrefetch`
};

// Multiplies by a linear of the model, whose workspace must suffice: see `workspace_bytes`. Advances `kv_prefetcher`,
// if given, where that costs nothing.
template <class Weight, class Out>
void multiply(const Model& model, const Linear& linear, const TiledRows<InputOf<Weight>>& x, const Out& out,
              ThreadTeam::Member member, KvPrefetcher* kv_prefetcher = nullptr) {
    if (x.num_rows == 0) return;  // a step that requests no logits
    [[maybe_unused]] auto run = [&](auto&& product) {
        dispatch_panels<Weight>(linear, [&](auto* panels) { product.run(panels); });
    };
    if constexpr (IS_GROUPED<Weight>)
        multiply_grouped(model, linear, x, out, member);
    else if constexpr (USES_AMX<InputOf<Weight>>)
        run(AmxLinear<Out>(model, linear, x, out, member));
    else
        run(VectorLinear<Weight, Out>(model, linear, x, out, member, kv_prefetcher));
}

// One row, as it lies alone in a tile, by one panel of a linear that is not quantized: tile [32], the same bits as in a
// product of many rows. Prefetches the panel `next` meanwhile.
template <class Weight>
void multiply_row(const Linear& linear, const InputOf<Weight>* row, int64_t panel, int64_t next, float* tile) {
    if constexpr (USES_AMX<InputOf<Weight>>)
        multiply_row_amx(linear, row, panel, next, tile);
    else
        multiply_row_vectors<Weight>(linear, row, panel, next, tile);
}

// Pairs of k that the product's tiles go through while they prefetch keys and values, on all threads.
template <class Weight>
int64_t num_prefetch_pairs(const Linear& linear, const TiledRows<InputOf<Weight>>& x) {
    if constexpr (IS_GROUPED<Weight>) {
        return 0;
    } else {
        using Product = VectorLinear<Weight, FloatOutput>;
        if (USES_AMX<InputOf<Weight>> || !Product::can_prefetch_kv(linear, x)) return 0;
        // The tile that converts does not prefetch them.
        int64_t num_tiles = x.num_tiles() - is_widened<Weight>(linear, x.num_tiles());
        return linear.num_panels() * num_tiles * (linear.k / 2);
    }
}

}  // namespace millrace
