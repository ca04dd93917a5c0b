// Products of rows with weights where both are whole numbers of 8 bits, four of k at a time.
//
// Instructions that sum four products of bytes want those of one side not to be negative. So weights are 128 more than what
// they stand for, and each row's sums begin with what that comes to. Sums are whole numbers of 32 bits: exact, the same in
// every batch and with all instructions. Tile registers sum 64 of k at a time: see amx_quads.h.
//
// Knows whole numbers. Refuses to know what they stand for.

#pragma once

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "linear/amx_int8_dot.h"
#include "linear/panels.h"

namespace millrace {

constexpr int64_t MOST_SUMMED = 1 << 16;  // numbers: 127 * 127 times that is less than 2 ** 31

#if defined(__AVX512VNNI__)

constexpr int SUMMED_ROWS = 12;  // of a tile in vectors: 24 of 32 registers are sums
using I = __m512i;
using Quad = uint32_t;  // four numbers of a row

struct WeightQuads {  // of as many columns as a vector has
    I all;

    explicit WeightQuads(const uint8_t* p) : all(_mm512_loadu_si512(p)) {}
    I add_to(I sums, Quad x) const { return _mm512_dpbusd_epi32(sums, all, _mm512_set1_epi32(int(x))); }
};

inline Quad quad_of(const int8_t* numbers) {
    Quad quad;
    std::memcpy(&quad, numbers, 4);
    return quad;
}

#else

constexpr int SUMMED_ROWS = 4;  // with AVX2 8 of 16 registers are sums
struct Quad {  // of a row's four numbers the first and third, and the others, in 16 bits each
    uint32_t even, odd;
};

inline Quad quad_of(const int8_t* numbers) {
    auto both = [&](int i) { return uint32_t(uint16_t(numbers[i])) | uint32_t(uint16_t(numbers[i + 2])) << 16; };
    return {both(0), both(1)};
}

#if defined(__AVX512F__)
using I = __m512i;
inline I and_bits(I a, int bits) { return _mm512_and_si512(a, _mm512_set1_epi32(bits)); }
inline I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I odd_bytes(I a) { return _mm512_srli_epi16(a, 8); }
inline I add_pairs(I sums, I a, uint32_t x) {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(a, _mm512_set1_epi32(int(x))));
}
#else
using I = __m256i;
inline I and_bits(I a, int bits) { return _mm256_and_si256(a, _mm256_set1_epi32(bits)); }
inline I load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline I odd_bytes(I a) { return _mm256_srli_epi16(a, 8); }
inline I add_pairs(I sums, I a, uint32_t x) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, _mm256_set1_epi32(int(x))));
}
#endif

struct WeightQuads {
    I even, odd;

    explicit WeightQuads(const uint8_t* p) : even(load_bytes(p)), odd(odd_bytes(even)) { even = and_bits(even, 0x00ff00ff); }
    I add_to(I sums, Quad x) const { return add_pairs(add_pairs(sums, even, x.even), odd, x.odd); }
};

#endif

#if defined(__AVX512F__)
inline I splat_whole(int32_t x) { return _mm512_set1_epi32(x); }
inline I load_whole(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_whole(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
inline I add_whole(I a, I b) { return _mm512_add_epi32(a, b); }
inline F widen(I x) { return _mm512_cvtepi32_ps(x); }
#else
inline I splat_whole(int32_t x) { return _mm256_set1_epi32(x); }
inline I load_whole(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_whole(int32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline I add_whole(I a, I b) { return _mm256_add_epi32(a, b); }
inline F widen(I x) { return _mm256_cvtepi32_ps(x); }
#endif
inline F load(const int32_t* p) { return widen(load_whole(p)); }

constexpr int PANEL_VECTORS = int(PANEL) / W;

// Of a row by a panel, in registers.
struct PanelSums {
    I of[PANEL_VECTORS];
};

// Lines to fetch while a tile is summed, so many with each quad of k.
struct LinesAhead {
    const char* place;
    int64_t num, at_a_time;  // 1 or 2
};

// Sums of a tile of R rows, [quads][R], by a panel: out [R][32]. `lines` are what is ahead.
template <int R, Fetched FETCHED>
[[gnu::noinline]] void sum_quads(const Quad* rows, const uint8_t* panel, int64_t num_quads, const int32_t* begins, int32_t* out,
                                 LinesAhead lines) {
    constexpr int V = 2;
    for (int64_t lane = 0; lane < PANEL; lane += V * W) {
        const uint8_t* weights = panel + lane * 4;
        const Quad* numbers = rows;
        I sums[R][V];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sums[r][v] = splat_whole(begins[r]);
        for (int64_t quad = 0; quad < num_quads; quad++, weights += 4 * PANEL, numbers += R) {
            if (FETCHED == Fetched::PASSING) {
                let_pass<V * W * 4, V * W == PANEL ? SHORTLY : round_up(SHORTLY, 4 * PANEL)>(weights);
            } else if (FETCHED == Fetched::AHEAD && lines.num > 0) {
                _mm_prefetch(lines.place, _MM_HINT_T1);
                if (lines.at_a_time > 1) _mm_prefetch(lines.place + 64, _MM_HINT_T1);
                lines.place += 64 * lines.at_a_time, lines.num -= lines.at_a_time;
            }
            WeightQuads columns[V] = {WeightQuads(weights), WeightQuads(weights + 4 * W)};
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < V; v++) sums[r][v] = columns[v].add_to(sums[r][v], numbers[r]);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) store_whole(out + r * PANEL + lane + v * W, sums[r][v]);
    }
}

using SumQuads = void (*)(const Quad*, const uint8_t*, int64_t, const int32_t*, int32_t*, LinesAhead);

// For each number of rows, from 1.
template <Fetched FETCHED, int... R>
SumQuads sum_for(int rows, std::integer_sequence<int, R...>) {
    static constexpr SumQuads SUMS[] = {sum_quads<R + 1, FETCHED>...};
    return SUMS[rows - 1];
}

constexpr int QUAD_ROWS = HAS_AMX ? AMX_TILE_ROWS : SUMMED_ROWS;  // of a tile

// Rows as such products read them: in tiles of up to QUAD_ROWS rows, as equal as may be, [quads][rows of the tile], in AMX
// [quads / 16][rows][16]. What a number has beyond 8 bits is multiplied once more. What is missed of each, in 8 bits more, lies
// by itself, as a row.
class QuadRows {
  public:
    void resize(int64_t num_rows, int64_t k) {
        num_rows_ = num_rows, num_quads_ = num_quads_of(k);
        whole_.resize(num_rows * num_quads_), finely_.resize(num_rows * num_quads_);
        begins_.resize(num_rows), fine_begins_.resize(num_rows), beyond_.resize(num_rows);
        for (std::vector<Beyond>& beyond : beyond_) beyond.reserve(most_beyond(k));
    }

    // Of a row, at most.
    static int64_t most_bytes(int64_t k) {
        int64_t beyond = int64_t(sizeof(std::vector<Beyond>)) + most_beyond(k) * int64_t(sizeof(Beyond));
        return 2 * num_quads_of(k) * int64_t(sizeof(Quad)) + 2 * int64_t(sizeof(int32_t)) + beyond;
    }

    // Puts a row in its place: whole numbers and what they miss, both [4 * quads] with zeros past k. The former are lost.
    void put(int64_t row, int32_t* whole, const int32_t* finely) {
        begins_[row] = begin_of(whole), fine_begins_[row] = begin_of(finely);
        beyond_[row].clear();
        int64_t at = ((row + 1) * num_tiles() - 1) / num_rows_, first = first_row(at), apart = first_row(at + 1) - first;
        Quad *to = &whole_[first * num_quads_ + (row - first) * QUADS_TOGETHER], *fine = &finely_[row * num_quads_];
        for (int64_t quad = 0; quad < num_quads_; quad++, whole += 4, finely += 4) {
            int64_t among = quad % QUADS_TOGETHER;
            to[(quad - among) * apart + among] = take_bytes(whole);
            while (whole[0] | whole[1] | whole[2] | whole[3]) beyond_[row].push_back({quad, take_bytes(whole)});
            const int8_t bytes[4] = {int8_t(finely[0]), int8_t(finely[1]), int8_t(finely[2]), int8_t(finely[3])};
            fine[quad] = quad_of(bytes);
        }
    }

    // What this thread comes to do of all rows by `panels`; each row's sums to `take(sums, row, panel)`. `is_passing`: few
    // rows' panels, so that no cache keeps them; in tile registers that makes no difference.
    template <class Take>
    void multiply(const QuadPanels& panels, Party::Seat seat, bool is_passing, const Take& take) const {
        constexpr int64_t TOGETHER = 4;  // panels
        TilesInUse tiles;
        seat.each_piece(panels.num_panels, TOGETHER, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t panel = first; panel < last; panel++)
                for (int64_t at = 0; at < num_tiles(); at++) {
                    alignas(64) int32_t tile[QUAD_ROWS * PANEL];
                    int64_t row = first_row(at);
                    int rows = int(first_row(at + 1) - row);
                    if constexpr (HAS_AMX)
                        sum_in_tiles(panels, panel, row, rows, tiles, tile);
                    else
                        sum_tile(panels, panel, at, rows, is_passing, tile);
                    for (int r = 0; r < rows; r++)
                        take(with_beyond(panels.panel(panel), row + r, tile + r * PANEL), row + r, panel);
                }
        });
    }

    // Products of what a row's numbers miss, by a panel: out [32]. In several sums of each column, since each waits for the
    // one before it.
    void multiply_finely(int64_t row, const uint8_t* panel, int32_t* out) const {
        constexpr int V = 2, SUMS = 2;
        const Quad* numbers = &finely_[row * num_quads_];
        for (int64_t lane = 0; lane < PANEL; lane += V * W) {
            I sums[SUMS][V];
            UNROLL for (int v = 0; v < V; v++) sums[0][v] = splat_whole(fine_begins_[row]), sums[1][v] = splat_whole(0);
            auto add = [&](int64_t quad, int to) {
                UNROLL for (int v = 0; v < V; v++)
                    sums[to][v] = WeightQuads(panel + (quad * PANEL + lane + v * W) * 4).add_to(sums[to][v], numbers[quad]);
            };
            int64_t quad = 0;
            for (; quad + SUMS <= num_quads_; quad += SUMS) add(quad, 0), add(quad + 1, 1);
            if (quad < num_quads_) add(quad, 0);
            UNROLL for (int v = 0; v < V; v++) store_whole(out + lane + v * W, add_whole(sums[0][v], sums[1][v]));
        }
    }

  private:
    // With so few rows sums take less time than memory, and a core reads ahead by itself: whole numbers, whatever products of
    // others may have.
    static constexpr int FEW_QUADS = 4;

    static constexpr int64_t NEAR_AHEAD = 1024;  // bytes, on into the panel after it, which comes next

    struct Beyond {  // 8 bits
        int64_t quad;
        Quad numbers;
    };

    // At most k / 16 where what is beyond is more than four times the mean.
    static int64_t most_beyond(int64_t k) { return k / 15 + 1; }

    int64_t num_tiles() const { return ceil_div(num_rows_, QUAD_ROWS); }
    int64_t first_row(int64_t tile) const { return num_rows_ * tile / num_tiles(); }

    int32_t begin_of(const int32_t* numbers) const {
        return -NO_WEIGHT * std::accumulate(numbers, numbers + 4 * num_quads_, int32_t(0));
    }

    // As much of four numbers as a byte each has; what is left stays.
    static Quad take_bytes(int32_t* numbers) {
        int8_t taken[4];
        for (int i = 0; i < 4; i++) taken[i] = int8_t(std::clamp(numbers[i], -127, 127)), numbers[i] -= taken[i];
        return quad_of(taken);
    }

    // A tile's rows, from `row` on, by a panel.
    void sum_in_tiles(const QuadPanels& panels, int64_t panel, int64_t row, int rows, TilesInUse& tiles, int32_t* tile) const {
        tiles.shape(product_shapes(rows));
        auto near = reinterpret_cast<const char*>(panels.panel(panel)) + NEAR_AHEAD;
        int64_t num_steps = num_quads_ / QUADS_TOGETHER, size = panels.panel_bytes();
        int64_t share = row == 0 ? size / 64 / num_steps : 0;  // the first tile's rows have it fetched
        StepsAhead ahead{near, near + size, share, 1, 0};
        auto sum = rows > AMX_ROWS ? sum_quads_in_tiles<2, Quad> : sum_quads_in_tiles<1, Quad>;
        sum(&whole_[row * num_quads_], rows, panels.panel(panel), num_steps, ahead, tile);
        for (int r = 0; r < rows; r++, tile += PANEL)
            for (int64_t lane = 0; lane < PANEL; lane += W)
                store_whole(tile + lane, add_whole(load_whole(tile + lane), splat_whole(begins_[row + r])));
    }

    // A tile's rows by a panel, while its share of the next panel is fetched where there is time for it.
    void sum_tile(const QuadPanels& panels, int64_t panel, int64_t at, int rows, bool is_passing, int32_t* tile) const {
        constexpr auto FEW = std::make_integer_sequence<int, FEW_QUADS>();
        constexpr auto ANY = std::make_integer_sequence<int, SUMMED_ROWS>();
        int64_t row = first_row(at);
        auto sum = [&](SumQuads sums, const LinesAhead& lines) {
            sums(&whole_[row * num_quads_], panels.panel(panel), num_quads_, &begins_[row], tile, lines);
        };
        if (num_rows_ <= FEW_QUADS && is_passing) return sum(sum_for<Fetched::PASSING>(rows, FEW), {});
        if (num_rows_ <= FEW_QUADS || panel + 1 == panels.num_panels) return sum(sum_for<Fetched::NONE>(rows, ANY), {});
        int64_t num_lines = panels.panel_bytes() / 64, line = num_lines * at / num_tiles();
        auto next = reinterpret_cast<const char*>(panels.panel(panel + 1)) + 64 * line;
        int64_t share = num_lines * (at + 1) / num_tiles() - line;
        sum(sum_for<Fetched::AHEAD>(rows, ANY), {next, share, num_tiles() == 1 ? 2 : 1});
    }

    PanelSums with_beyond(const uint8_t* panel, int64_t row, const int32_t* tile) const {
        PanelSums sums;
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) sums.of[v] = load_whole(tile + v * W);
        for (const Beyond& beyond : beyond_[row])
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
                sums.of[v] = WeightQuads(panel + (beyond.quad * PANEL + v * W) * 4).add_to(sums.of[v], beyond.numbers);
        return sums;
    }

    int64_t num_rows_ = 0, num_quads_ = 0;
    std::vector<Quad> whole_, finely_;
    std::vector<int32_t> begins_, fine_begins_;  // [rows] what sums begin with
    std::vector<std::vector<Beyond>> beyond_;    // [rows]
};

}  // namespace millrace
