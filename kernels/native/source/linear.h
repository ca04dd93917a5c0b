// Products of a step's rows with packed weights.
//
// In vectors each number of a product is one chain of fused multiply-adds over k in rising order (in int4 a chain for each
// group, and one of these times their scales), whatever the number of rows, of threads, or the tile it falls in: so the same row
// gives the same bits in every batch.
//
// Weights become numbers of what is multiplied, which holds them exactly, in registers. Where there are enough tiles of
// rows (`is_widened`), the first one leaves a panel behind as these numbers, for the others.
//
// Where the machine has tile registers, bf16 is multiplied in these: see amx_linear.h.

#pragma once

#include <algorithm>

#include "amx_linear.h"
#include "upcoming.h"

namespace millrace {

constexpr int64_t MOST_SHARE = 256;  // bytes: the four lines of the cache that `sum_vectors` fetches at most at a time

// What is to be fetched while a tile is computed, so that memory is busy meanwhile: so many `times` the next `share`
// bytes from `place` on, whole lines. Where not all of the tile's columns are summed at a time, as many are fetched with
// the next ones, `apart` further on; 0: all are fetched with the first ones. And what else, with the first ones.
// `is_passing`: the panel itself is asked for, as what passes, and nothing ahead.
struct Ahead {
    const char* place;
    int64_t share, times, apart;
    Beside beside;
    bool is_passing = false;
};

// Rows up to which, with weights that are not quantized, sums take less time than memory. A core then reads ahead by itself,
// and faster: one to four rows in bf16 by 12 % on a Zen 5 class EPYC, by 13 to 20 where memory gives 76 GB/s; one or two
// with float32 sums by 3 % there, and by nothing at 47 (before panels lay in streams).
template <class Input>
constexpr int64_t FEW_ROWS = sizeof(Input) == 2 ? 4 : 2;

// Rows up to which weights pass by the caches, where these keep anything. Of quantized ones one: it takes 18 % less in int8
// and 15 in int4 where memory is slow, as long in int8 where it is fast, and two take as long (AVX-512, Zen 4 class EPYC);
// with AVX2 one takes 25 % more in int8.
template <class Input, class Stored>
constexpr int64_t PASSING_ROWS = IN_AMX<Input> ? 0
                                 : std::is_same<Stored, bf16>::value || std::is_same<Stored, float>::value ? FEW_ROWS<Input>
                                 : STREAMS == 1                                                            ? 1
                                                                                                           : 0;
template <class Weight>
int64_t passing_rows(const Linear& linear) {
    int64_t rows = 0;
    with_panels<Weight>(linear, [&](auto* panels) {
        rows = PASSING_ROWS<InputOf<Weight>, typename std::remove_pointer<decltype(panels)>::type>;
    });
    return rows;
}

// Pairs of k from one time to the next. With each pair lines came faster than memory has them, and what the sums
// themselves read waited behind them: every second one takes 4 to 11 % less with 8 and 10 rows and up to 5 with more, and
// in int4 from 5 % less to 5 more (AVX2 on a Zen 3 class EPYC). Where panels are one stream (AVX-512, and short groups)
// nobody has measured it yet.
constexpr int pairs_apart(int64_t num_streams) { return num_streams == 1 ? 1 : 2; }
constexpr int64_t num_times(int64_t num_pairs) { return num_pairs / pairs_apart(num_streams(num_pairs)); }

// Vectors of a panel that are summed at a time. Each sum waits for the one before it, so few rows take all of them.
constexpr int vectors_for(int rows) { return rows <= 2 ? int(PANEL) / W : GEMM_VECTORS; }

// Sums of R rows by V vectors of a panel's columns, from `lane` on, over some pairs of k, which lie in S streams. x of a
// tile of `TiledRows`; a row of out begins PANEL after the one before. Who fetches nothing does not look for that either:
// where two threads share a core, as those of virtual machines do, instructions beside the sums cost as much as these.
// WIDENS: these columns of `wide` become the panel's, as numbers of what is multiplied. A function of its own: within the
// loop over columns GCC had too few registers for it (4 rows in int4 took 1.3 times as long).
template <int R, int V, int S, Fetched FETCHED, bool WIDENS, class Input, class Stored>
[[gnu::noinline]] void sum_vectors(const Input* x, const Stored* panel, int64_t lane, int64_t num_pairs, float* out,
                                   const Ahead& ahead, Input* wide) {
    const char* line = ahead.place;
    const int64_t share = ahead.share, stream_size = num_pairs / S;
    int64_t times = ahead.times;
    const char* other = ahead.beside.place;
    int64_t others = ahead.beside.times, until_other = 1;
    F sums[R][V];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sums[r][v] = zero();
    for (int64_t turn = 0; turn < stream_size; turn++) {
        UNROLL for (int stream = 0; stream < S; stream++, x += 2 * R) {
            int64_t place = turn + stream * stream_size;
            if (FETCHED == Fetched::PASSING) {
                let_pass<place_in_pairs<Stored>(2, PANEL, 0)>(panel + place_in_pairs<Stored>(2 * place, PANEL, 0));
            } else if (FETCHED != Fetched::NONE && stream % pairs_apart(S) == 0 && times-- > 0) {
                _mm_prefetch(line, _MM_HINT_T1);
                if (share > 64) _mm_prefetch(line + 64, _MM_HINT_T1);
                if (share > 128) {
                    _mm_prefetch(line + 128, _MM_HINT_T1);
                    _mm_prefetch(line + 192, _MM_HINT_T1);
                }
                line += share;
            }
            if (FETCHED == Fetched::BOTH && --until_other == 0) {
                if (others-- > 0) _mm_prefetch(other, _MM_HINT_T1), _mm_prefetch(other + 64, _MM_HINT_T1);
                other += Upcoming::FETCHED, until_other = ahead.beside.apart;
            }
            float* to = WIDENS ? reinterpret_cast<float*>(wide + 2 * place * PANEL) + lane : nullptr;  // 4 bytes a lane
            F weights[V];
            if constexpr (sizeof(Input) == 2) {
#ifdef MILLRACE_BF16_DOT
                UNROLL for (int v = 0; v < V; v++) weights[v] = pairs_of(panel, place, PANEL, lane + v * W);
                if (WIDENS) UNROLL for (int v = 0; v < V; v++) store(to + v * W, weights[v]);
                UNROLL for (int r = 0; r < R; r++) {
                    uint32_t both = pair_at(x + 2 * r);
                    UNROLL for (int v = 0; v < V; v++) sums[r][v] = add_dots(sums[r][v], weights[v], both);
                }
#endif
            } else {
                UNROLL for (int v = 0; v < V; v++) weights[v] = even_of(panel, place, PANEL, lane + v * W);
                if (WIDENS) UNROLL for (int v = 0; v < V; v++) store(to + v * W, weights[v]);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(x[r]);
                    UNROLL for (int v = 0; v < V; v++) fma_to(sums[r][v], number, weights[v]);
                }
                UNROLL for (int v = 0; v < V; v++) weights[v] = odd_of(panel, place, PANEL, lane + v * W);
                if (WIDENS) UNROLL for (int v = 0; v < V; v++) store(to + PANEL + v * W, weights[v]);
                UNROLL for (int r = 0; r < R; r++) {
                    F number = splat(x[R + r]);
                    UNROLL for (int v = 0; v < V; v++) fma_to(sums[r][v], number, weights[v]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) store(out + r * PANEL + v * W, sums[r][v]);
}

// Rows of a tile that is one of several, at least.
constexpr int LEAST_OF_SEVERAL = GEMM_ROWS / 2;

// The same by a whole panel of 32 columns: out [R][32].
template <int R, int S, bool WIDENS, class Input, class Stored>
void sum_panel(const Input* x, const Stored* panel, int64_t num_pairs, float* out, const Ahead& ahead, Input* wide) {
    constexpr int V = vectors_for(R);
    constexpr bool PASSES = R <= PASSING_ROWS<Input, Stored>;
    auto sum = [&](int64_t lane, const Ahead& fetched, bool fetches) {
        if constexpr (WIDENS)  // one tile of several: it may look for what to fetch in vain, for the sake of less code
            sum_vectors<R, V, S, Fetched::AHEAD, true>(x, panel, lane, num_pairs, out + lane, fetched, wide);
        else if (R >= LEAST_OF_SEVERAL && fetched.beside.times > 0)
            sum_vectors<R, V, S, R >= LEAST_OF_SEVERAL ? Fetched::BOTH : Fetched::AHEAD, false>(
                x, panel, lane, num_pairs, out + lane, fetched, wide);
        else if (PASSES && fetched.is_passing)
            sum_vectors<R, V, S, PASSES ? Fetched::PASSING : Fetched::NONE, false>(x, panel, lane, num_pairs, out + lane,
                                                                                   fetched, wide);
        else if (fetches)
            sum_vectors<R, V, S, Fetched::AHEAD, false>(x, panel, lane, num_pairs, out + lane, fetched, wide);
        else
            sum_vectors<R, V, S, Fetched::NONE, false>(x, panel, lane, num_pairs, out + lane, fetched, wide);
    };
    sum(0, ahead, ahead.times > 0);
    for (int64_t lane = V * W; lane < PANEL; lane += V * W) {
        bool fetches = ahead.times > 0 && ahead.apart > 0;
        int64_t times = fetches ? ahead.times : 0;
        Ahead next{ahead.place + lane / (V * W) * ahead.apart, ahead.share, times, ahead.apart, {}, ahead.is_passing};
        sum(lane, next, fetches);
    }
}

// And in as many streams as there are.
template <int R, bool WIDENS, class Input, class Stored>
void sum_tile(const Input* x, const Stored* panel, int64_t num_pairs, float* out, const Ahead& ahead, Input* wide) {
    if (num_streams(num_pairs) == 1)
        sum_panel<R, 1, WIDENS>(x, panel, num_pairs, out, ahead, wide);
    else
        sum_panel<R, STREAMS, WIDENS>(x, panel, num_pairs, out, ahead, wide);
}

// R rows by a panel of a product: one sum, or one for each group of k, times its scales [groups][32].
template <int R, bool WIDENS, class Input, class Stored>
void multiply_tile(const Input* x, const Stored* panel, const bf16* scales, int64_t group_pairs, int64_t num_pairs,
                   float* out, Ahead ahead, Input* wide) {
    if (!scales) return sum_tile<R, WIDENS>(x, panel, num_pairs, out, ahead, wide);
    alignas(64) float sums[R * PANEL];
    int64_t pair_size = place_in_pairs<Stored>(2, PANEL, 0);
    for (int64_t begin = 0; begin < num_pairs; begin += group_pairs, scales += PANEL) {
        int64_t count = std::min(group_pairs, num_pairs - begin);
        sum_tile<R, WIDENS>(x + 2 * begin * R, panel + begin * pair_size, count, sums, ahead, wide);
        if (WIDENS) wide += 2 * count * PANEL;
        ahead.place += num_times(count) * ahead.share, ahead.times -= num_times(count);
        for (int64_t lane = 0; lane < PANEL; lane += W) {
            F scale = load(scales + lane);
            for (int64_t i = lane; i < R * PANEL; i += PANEL)
                store(out + i, begin ? fma(load(sums + i), scale, load(out + i)) : mul(load(sums + i), scale));
        }
    }
}

template <class Input, class Stored>
using MultiplyTile = void (*)(const Input*, const Stored*, const bf16*, int64_t, int64_t, float*, Ahead, Input*);

// None for rows of which the first of several tiles has more.
template <int R, bool WIDENS, class Input, class Stored>
constexpr MultiplyTile<Input, Stored> multiply_tile_or_none() {
    if constexpr (WIDENS && R < LEAST_OF_SEVERAL)
        return nullptr;
    else
        return multiply_tile<R, WIDENS, Input, Stored>;
}

// The tile for each number of rows, from 1.
template <bool WIDENS, class Input, class Stored, int... R>
MultiplyTile<Input, Stored> tile_for(int rows, std::integer_sequence<int, R...>) {
    static constexpr MultiplyTile<Input, Stored> TILES[] = {multiply_tile_or_none<R + 1, WIDENS, Input, Stored>()...};
    return TILES[rows - 1];
}

// Bytes of panels, as numbers that are multiplied, that stay in the second-level cache for all rows, while as many are
// fetched. With 16 and 32 rows up to 5 % faster than 384 KiB (Zen 5 class EPYC); where bf16 is multiplied in float32, half
// as many bytes of bf16 then: as many would make 8 to 32 rows 3 to 9 % slower (AVX2 on a Zen 3 class EPYC).
constexpr int64_t CACHED = 192 << 10;

// Panels that stay there.
template <class Weight>
int64_t num_held(const Linear& linear) {
    return std::max<int64_t>(1, CACHED / (linear.k * PANEL * int64_t(sizeof(InputOf<Weight>))));
}

// Whether the first of so many tiles of rows widens panels for the others, who read more bytes then. Widening is a shift
// in bf16 and pays late: eight tiles take 4 % less, seven as long, three to six up to 10 % more (AVX2 on a Zen 3 class
// EPYC, when there could be any number of tiles). Of quantized weights it is several instructions: three tiles take 4 to 15
// % less, two up to 10 % more. Where bf16 is multiplied two tiles widen, too; with AVX-512 nobody has measured any of this
// since the first tile does it.
template <class Weight>
bool is_widened(const Linear& linear, int64_t num_tiles) {
    using Input = InputOf<Weight>;
    if (!linear.is_quantized()) return sizeof(Input) != sizeof(Weight) && num_tiles >= 8;
    return num_tiles >= (sizeof(Input) == 2 ? 2 : 3);
}

// Whether two threads may share a product of so many tiles by its rows.
template <class Weight>
bool can_share_rows(const Linear& linear, int64_t num_tiles) {
    bool are_halves = num_tiles >= SHARED_TILES && num_tiles % 2 == 0;
    return !IN_AMX<InputOf<Weight>> && are_halves && !is_widened<Weight>(linear, num_tiles);
}

// Bytes of room for each thread in a product of so many rows: in vectors, for the held panels, widened.
template <class Weight>
int64_t room_bytes(const Linear& linear, int64_t num_rows) {
    using Input = InputOf<Weight>;
    if constexpr (IN_AMX<Input>) return RoomInTiles(linear, num_rows).num_bytes();
    if (!is_widened<Weight>(linear, TiledRows<Input>::num_tiles_of(num_rows))) return 0;
    return num_held<Weight>(linear) * linear.k * PANEL * int64_t(sizeof(Input));
}

// What this thread comes to do of x @ weight.T + bias, each tile handed to `out`: whole panels, for all rows, of which as many
// as are held at a time are a piece of the work.
//
// Of many rows each of two threads takes half, by all panels. Then most of what it reads it has written itself, as norms and
// keys are shared by rows, too. By columns half of it would be the other core's, which seems to take time where memory is
// fast, perhaps as the cores are on different dies then: steps of 32 rows take 4 % less so and of 64 to 512 tokens 7 to 9 in
// SmolLM2-135M's shape, 2 to 4 in Qwen3-0.6B's; where memory is slow as long, 2 % more or less (AVX-512 with bf16, Zen 4
// class EPYC). With AVX2 3 % less of 24 and 32 rows in the one case, 2 more in the other. Weights are read twice, once by each
// thread: only where the cache behind the cores keeps any of what they read (kept.h, which looks at no small models), as
// elsewhere memory may be slower beside the multiplier, and nobody has measured it; nor of more threads. A piece of the work
// is one thread's rows by as many panels as are held. What comes after is taken to be shared so, too: before a product of
// few rows one of the threads fetches what the other one multiplies.
template <class Weight, class Out>
class ProductInVectors {
    using Input = InputOf<Weight>;
    // Panels where there is one tile. With 1 to 8 rows 1, 2, 3 and 4 of them are within 3 % of each other.
    static constexpr int64_t HELD_FOR_ONE = 2;

  public:
    ProductInVectors(const Model& model, const Linear& linear, const TiledRows<Input>& x, const Out& out, Party::Seat seat,
                     Upcoming* upcoming = nullptr)
        : model_(model), linear_(linear), x_(x), out_(out), seat_(seat),
          upcoming_(fetches_beside(linear, x) ? upcoming : nullptr), num_tiles_(x.num_tiles()),
          is_by_rows_(model.is_shared_by_rows && seat.count == 2 && can_share_rows<Weight>(linear, num_tiles_)),
          num_together_(is_by_rows_ ? num_tiles_ / 2 : num_tiles_),
          held_(num_tiles_ == 1 ? HELD_FOR_ONE : num_held<Weight>(linear)),
          after_(is_by_rows_ ? linear.next->weight.template as<char>() : place_after(linear, seat)) {
        int64_t num_lines = ceil_div(linear.panel_bytes(), 64 * num_together_), num_pairs = linear.k / 2;
        int64_t together = std::min(num_pairs, linear.group_pairs());
        int64_t most_times = num_pairs / together * num_times(together) + num_times(num_pairs % together);
        // Where that is a line or more each time it is spread over all passes over the columns: with the first one alone
        // it came twice as fast as memory gives it, and nothing with the second.
        int64_t parts = num_lines < most_times ? 1 : PANEL / W / vectors_for(int(x.first_row(1)));
        num_lines = ceil_div(num_lines, parts);
        share_ = std::min(MOST_SHARE, 64 * ceil_div(num_lines, most_times)), times_ = ceil_div(64 * num_lines, share_);
        apart_ = parts > 1 ? times_ * share_ : 0, tile_bytes_ = parts * times_ * share_;
        is_passing_ = model.is_passing && x.num_rows <= passing_rows<Weight>(linear);
        if (is_passing_ || (x.num_rows <= FEW_ROWS<Input> && !linear.is_quantized())) times_ = 0;
    }

    // Whether tiles of this product fetch what is upcoming: where memory has time for it, and in one sum.
    static bool fetches_beside(const Linear& linear, const TiledRows<Input>& x) {
        return x.num_tiles() > 1 && linear.num_groups() <= 1;
    }

    template <class Stored>
    void run(const Stored* weights) const {
        int64_t num_panels = linear_.num_panels(), num_groups = ceil_div(num_panels, held_);
        if (!is_by_rows_)
            return seat_.each_piece(num_panels, held_, [&](int64_t first, int64_t last, int64_t end) {
                multiply_all(weights, {first, last}, end, {0, num_tiles_});
            });
        seat_.each_piece(2 * num_groups, 1, [&](int64_t piece, int64_t, int64_t end) {
            int64_t half = piece / num_groups, first = piece % num_groups * held_, last = std::min(num_panels, first + held_);
            Range parts{half * num_together_, (half + 1) * num_together_};
            multiply_all(weights, {first, last}, piece + 1 < end ? num_panels : last, parts);
        });
    }

  private:
    template <class Stored>
    int64_t panel_size() const {
        return linear_.panel_bytes() / int64_t(sizeof(Stored));
    }

    // The `index`-th of those that this thread holds.
    Input* wide_panel(int64_t index) const {
        return reinterpret_cast<Input*>(model_.room_of(seat_.place)) + index * linear_.k * PANEL;
    }

    struct Range {
        int64_t first, last;
    };

    // Panels, after which those until `end` come, by the tiles of rows `parts`.
    template <class Stored>
    void multiply_all(const Stored* weights, Range panels, int64_t end, Range parts) const {
        bool widens = is_widened<Weight>(linear_, num_tiles_);
        for (int64_t part = parts.first; part < parts.last; part++)
            for (int64_t panel = panels.first; panel < panels.last; panel++)
                multiply(weights + panel * panel_size<Stored>(), part, panel, ahead_of(panel, end, part - parts.first),
                         widens ? wide_panel(panel - panels.first) : nullptr);
    }

    // The share that the `index`-th of the tiles has of what this thread multiplies `held_` panels later: more of them, or as
    // many bytes of the next linear.
    Ahead ahead_of(int64_t panel, int64_t end, int64_t index) const {
        int64_t next = panel + held_, size = linear_.panel_bytes();
        const char* place = next < end ? linear_.weight.as<char>() + next * size : after_ + (next - end) * size;
        return {place + index * tile_bytes_, share_, times_, apart_, {}, is_passing_};
    }

    // Rows of tile `part` by `panel`, which holds `numbers`. `wide`: where the first tile leaves the panel for the others,
    // who read it there; none: each reads it as it is.
    template <class Stored>
    void multiply(const Stored* numbers, int64_t part, int64_t panel, Ahead ahead, Input* wide) const {
        if constexpr (!std::is_same<Stored, Input>::value) {
            if (wide && part == 0) return multiply_by<true>(numbers, part, panel, ahead, wide);
            if (wide) return multiply_by<false, Input>(wide, part, panel, ahead, nullptr);
        }
        multiply_by<false>(numbers, part, panel, ahead, nullptr);
    }

    template <bool WIDENS, class Stored>
    void multiply_by(const Stored* numbers, int64_t part, int64_t panel, Ahead ahead, Input* wide) const {
        alignas(64) float tile[GEMM_ROWS * PANEL];
        int64_t row = x_.first_row(part);
        int rows = int(x_.first_row(part + 1) - row);
        auto multiply_rows = tile_for<WIDENS, Input, Stored>(rows, std::make_integer_sequence<int, GEMM_ROWS>());
        int64_t num_pairs = linear_.k / 2;
        if (!WIDENS && upcoming_) ahead.beside = upcoming_->beside(num_pairs);
        out_.expect(row, rows, panel);
        multiply_rows(x_.tile(part), numbers, scales_of(linear_, panel), linear_.group_pairs(), num_pairs, tile, ahead, wide);
        hand_over(linear_, out_, tile, row, rows, panel);
    }

    const Model& model_;
    const Linear& linear_;
    const TiledRows<Input>& x_;
    const Out& out_;
    Party::Seat seat_;
    Upcoming* upcoming_;  // none: nothing is fetched beside tiles
    int64_t num_tiles_;
    bool is_by_rows_;
    int64_t num_together_;  // tiles that a thread multiplies with the same panels
    int64_t held_;
    int64_t share_, times_, apart_;  // of each tile, as in `Ahead`
    int64_t tile_bytes_;             // that a tile fetches
    const char* after_;              // what this thread reads first of the next linear
    bool is_passing_;                // panels, as in `Ahead`
};

// `linear` is one of the model's, which has room for products of so many rows: see `room_bytes`. What is `upcoming` for this
// thread, if anything, is fetched meanwhile where that costs nothing.
template <class Weight, class Out>
void multiply(const Model& model, const Linear& linear, const TiledRows<InputOf<Weight>>& x, const Out& out,
              Party::Seat seat, Upcoming* upcoming = nullptr) {
    if (x.num_rows == 0) return;  // a step of which nobody samples
    auto run = [&](auto&& product) { with_panels<Weight>(linear, [&](auto* panels) { product.run(panels); }); };
    if constexpr (IN_AMX<InputOf<Weight>>)
        run(ProductInTiles<Out>(model, linear, x, out, seat));
    else
        run(ProductInVectors<Weight, Out>(model, linear, x, out, seat, upcoming));
}

// How many pairs of k its tiles go through while they fetch what is upcoming, those of all threads.
template <class Weight>
int64_t num_pairs_beside(const Linear& linear, const TiledRows<InputOf<Weight>>& x) {
    using Product = ProductInVectors<Weight, Rows>;
    if (IN_AMX<InputOf<Weight>> || !Product::fetches_beside(linear, x)) return 0;
    int64_t num_tiles = x.num_tiles() - is_widened<Weight>(linear, x.num_tiles());  // who widens fetches no more
    return linear.num_panels() * num_tiles * (linear.k / 2);
}

// One row, [k], by one panel of a linear that is not quantized, in vectors: tile [32]. Meanwhile the panel `next` is fetched,
// or as much of it as one sum may.
template <class Weight>
void multiply_row(const Linear& linear, const InputOf<Weight>* row, int64_t panel, int64_t next, float* tile) {
    auto place = [&](int64_t index) { return linear.weight.as<char>() + index * linear.panel_bytes(); };
    int64_t num_pairs = linear.k / 2, times = num_times(num_pairs);
    Ahead ahead{place(next), std::min(MOST_SHARE, round_up(linear.panel_bytes() / times, 64)), times, 0, {}};
    auto numbers = reinterpret_cast<const Weight*>(place(panel));
    sum_tile<1, false>(row, numbers, num_pairs, tile, ahead, static_cast<InputOf<Weight>*>(nullptr));
}

}  // namespace millrace
