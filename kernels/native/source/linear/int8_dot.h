// int8 dot products of rows with int8 panels, four elements of k at a time (quads).
//
// The instructions that sum four byte products take unsigned bytes on one side. So weights are stored with 128 added
// (ZERO_POINT), and each row's sums start with the correction. NOTE: sums are exact int32: the same in every batch and
// with all instructions. AMX sums 64 elements of k at a time: see amx_int8_dot.h. Used by the argmax screen, on each
// compute thread.

#pragma once

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "linear/amx_int8_dot.h"
#include "linear/panels.h"

namespace millrace {

constexpr int64_t MAX_INT8_K = 1 << 16;  // 127 * 127 times this is below 2 ** 31

#if defined(__AVX512VNNI__)

constexpr int VECTOR_TILE_ROWS = 12;  // of a tile in vectors: 24 of 32 registers hold sums
using I = __m512i;
using Int8x4 = uint32_t;  // four numbers of a row

struct WeightInt8x4 {  // for as many columns as a vector has lanes
    I all;

    explicit WeightInt8x4(const uint8_t* p) : all(_mm512_loadu_si512(p)) {}
    I add_to(I sums, Int8x4 x) const { return _mm512_dpbusd_epi32(sums, all, _mm512_set1_epi32(int(x))); }
};

inline Int8x4 pack_int8x4(const int8_t* numbers) {
    Int8x4 quad;
    std::memcpy(&quad, numbers, 4);
    return quad;
}

#else

constexpr int VECTOR_TILE_ROWS = 4;  // with AVX2, 8 of 16 registers hold sums
struct Int8x4 {  // a row's first and third number, and the other two, in 16 bits each
    uint32_t even, odd;
};

inline Int8x4 pack_int8x4(const int8_t* numbers) {
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

struct WeightInt8x4 {
    I even, odd;

    explicit WeightInt8x4(const uint8_t* p) : even(load_bytes(p)), odd(odd_bytes(even)) {
        even = and_bits(even, 0x00ff00ff);
    }
    I add_to(I sums, Int8x4 x) const { return add_pairs(add_pairs(sums, even, x.even), odd, x.odd); }
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

// A row by a panel, in registers.
struct PanelSums {
    I of[PANEL_VECTORS];
};

// Lines to prefetch while a tile is summed.
struct LinePrefetch {
    const char* address;
    int64_t num_lines, lines_per_quad;  // lines_per_quad: 1 or 2
};

// Sums of a tile of R rows, [quads][R], by a panel: out [R][32].
template <int R, PrefetchMode MODE>
[[gnu::noinline]] void int8_dot_tile(const Int8x4* rows, const uint8_t* panel, int64_t num_quads,
                                     const int32_t* initial_sums, int32_t* out, LinePrefetch lines) {
    constexpr int V = 2;
    for (int64_t lane = 0; lane < PANEL; lane += V * W) {
        const uint8_t* weights = panel + lane * 4;
        const Int8x4* numbers = rows;
        I sums[R][V];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sums[r][v] = splat_whole(initial_sums[r]);
        for (int64_t quad = 0; quad < num_quads; quad++, weights += 4 * PANEL, numbers += R) {
            if (MODE == PrefetchMode::STREAMING) {
                constexpr int64_t DISTANCE = V * W == PANEL ? NONTEMPORAL_DISTANCE : round_up(NONTEMPORAL_DISTANCE,
                                                                                              4 * PANEL);
                prefetch_nontemporal<V * W * 4, DISTANCE>(weights);
            } else if (MODE == PrefetchMode::NEXT_PANEL && lines.num_lines > 0) {
                _mm_prefetch(lines.address, _MM_HINT_T1);
                if (lines.lines_per_quad > 1) _mm_prefetch(lines.address + 64, _MM_HINT_T1);
                lines.address += 64 * lines.lines_per_quad, lines.num_lines -= lines.lines_per_quad;
            }
            WeightInt8x4 columns[V] = {WeightInt8x4(weights), WeightInt8x4(weights + 4 * W)};
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < V; v++) sums[r][v] = columns[v].add_to(sums[r][v], numbers[r]);
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) store_whole(out + r * PANEL + lane + v * W, sums[r][v]);
    }
}

using Int8DotTile = void (*)(const Int8x4*, const uint8_t*, int64_t, const int32_t*, int32_t*, LinePrefetch);

// The function for each number of rows, from 1.
template <PrefetchMode MODE, int... R>
Int8DotTile int8_dot_for(int rows, std::integer_sequence<int, R...>) {
    static constexpr Int8DotTile SUMS[] = {int8_dot_tile<R + 1, MODE>...};
    return SUMS[rows - 1];
}

constexpr int INT8_TILE_ROWS = HAS_AMX ? AMX_TILE_ROWS : VECTOR_TILE_ROWS;  // of a tile

// Rows in the layout of these products: tiles of up to INT8_TILE_ROWS rows, of similar size, [quads][rows of the tile],
// in AMX [quads / 16][rows][16]. The part of a number beyond 8 bits (overflow) is multiplied separately. The residual,
// 8 bits more, is stored as a plain row.
class Int8Rows {
  public:
    void resize(int64_t num_rows, int64_t k) {
        num_rows_ = num_rows, num_quads_ = num_quads_of(k);
        quantized_.resize(num_rows * num_quads_), residual_.resize(num_rows * num_quads_);
        initial_sums_.resize(num_rows), residual_initial_sums_.resize(num_rows), overflow_.resize(num_rows);
        for (std::vector<Overflow>& overflow : overflow_) overflow.reserve(max_overflow(k));
    }

    // Upper bound, per row.
    static int64_t max_bytes(int64_t k) {
        int64_t overflow = int64_t(sizeof(std::vector<Overflow>)) + max_overflow(k) * int64_t(sizeof(Overflow));
        return 2 * num_quads_of(k) * int64_t(sizeof(Int8x4)) + 2 * int64_t(sizeof(int32_t)) + overflow;
    }

    // Sets a row: quantized numbers and residuals, both [4 * quads] with zeros past k. The former are overwritten.
    void put(int64_t row, int32_t* quantized, const int32_t* residual) {
        initial_sums_[row] = initial_sum_of(quantized), residual_initial_sums_[row] = initial_sum_of(residual);
        overflow_[row].clear();
        int64_t at = ((row + 1) * num_tiles() - 1) / num_rows_, first = first_row(at),
            tile_rows = first_row(at + 1) - first;
        Int8x4 *to = &quantized_[first * num_quads_ + (row - first) * QUADS_PER_STEP],
            *to_residual = &residual_[row * num_quads_];
        for (int64_t quad = 0; quad < num_quads_; quad++, quantized += 4, residual += 4) {
            int64_t among = quad % QUADS_PER_STEP;
            to[(quad - among) * tile_rows + among] = take_bytes(quantized);
            while (quantized[0] | quantized[1] | quantized[2] | quantized[3])
                overflow_[row].push_back({quad, take_bytes(quantized)});
            const int8_t bytes[4] = {int8_t(residual[0]), int8_t(residual[1]), int8_t(residual[2]), int8_t(residual[3])};
            to_residual[quad] = pack_int8x4(bytes);
        }
    }

    // This thread's part of all rows by `panels`; calls take(sums, row, panel). `is_streaming`: few rows read panels
    // non-temporally; no difference in AMX.
    template <class Take>
    void multiply(const Int8Panels& panels, ThreadTeam::Member member, bool is_streaming, const Take& take) const {
        constexpr int64_t PANELS_PER_PIECE = 4;
        TileScope tiles;
        member.parallel_for(panels.num_panels, PANELS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t panel = first; panel < last; panel++)
                for (int64_t at = 0; at < num_tiles(); at++) {
                    alignas(64) int32_t tile[INT8_TILE_ROWS * PANEL];
                    int64_t row = first_row(at);
                    int rows = int(first_row(at + 1) - row);
                    if constexpr (HAS_AMX)
                        sum_tile_amx(panels, panel, row, rows, tiles, tile);
                    else
                        sum_tile(panels, panel, at, rows, is_streaming, tile);
                    for (int r = 0; r < rows; r++)
                        take(add_overflow(panels.panel(panel), row + r, tile + r * PANEL), row + r, panel);
                }
        });
    }

    // A row's residual by a panel: out [32]. In two chains of sums per column, because each sum waits for the one
    // before it.
    void multiply_residual(int64_t row, const uint8_t* panel, int32_t* out) const {
        constexpr int V = 2, SUMS = 2;
        const Int8x4* numbers = &residual_[row * num_quads_];
        for (int64_t lane = 0; lane < PANEL; lane += V * W) {
            I sums[SUMS][V];
            UNROLL for (int v = 0; v < V; v++)
                sums[0][v] = splat_whole(residual_initial_sums_[row]), sums[1][v] = splat_whole(0);
            auto add = [&](int64_t quad, int to) {
                UNROLL for (int v = 0; v < V; v++)
                    sums[to][v] =
                        WeightInt8x4(panel + (quad * PANEL + lane + v * W) * 4).add_to(sums[to][v], numbers[quad]);
            };
            int64_t quad = 0;
            for (; quad + SUMS <= num_quads_; quad += SUMS) add(quad, 0), add(quad + 1, 1);
            if (quad < num_quads_) add(quad, 0);
            UNROLL for (int v = 0; v < V; v++) store_whole(out + lane + v * W, add_whole(sums[0][v], sums[1][v]));
        }
    }

  private:
    // For up to this many rows, sums take less time than memory, and the hardware prefetcher suffices.
    static constexpr int FEW_ROWS_INT8 = 4;

    static constexpr int64_t PREFETCH_DISTANCE = 1024;  // bytes, on into the next panel, which follows

    struct Overflow {  // 8 bits
        int64_t quad;
        Int8x4 numbers;
    };

    // At most k / 16 numbers exceed 4 times the root mean square.
    static int64_t max_overflow(int64_t k) { return k / 15 + 1; }

    int64_t num_tiles() const { return ceil_div(num_rows_, INT8_TILE_ROWS); }
    int64_t first_row(int64_t tile) const { return num_rows_ * tile / num_tiles(); }

    int32_t initial_sum_of(const int32_t* numbers) const {
        return -ZERO_POINT * std::accumulate(numbers, numbers + 4 * num_quads_, int32_t(0));
    }

    // Takes what a byte can hold of each of four numbers; the rest stays.
    static Int8x4 take_bytes(int32_t* numbers) {
        int8_t prefaulted[4];
        for (int i = 0; i < 4; i++) prefaulted[i] = int8_t(std::clamp(numbers[i], -127, 127)), numbers[i] -= prefaulted[i];
        return pack_int8x4(prefaulted);
    }

    // A tile of rows from `row` on, by a panel.
    void sum_tile_amx(const Int8Panels& panels, int64_t panel, int64_t row, int rows, TileScope& tiles,
                      int32_t* tile) const {
        tiles.configure(product_tile_config(rows));
        auto address = reinterpret_cast<const char*>(panels.panel(panel)) + PREFETCH_DISTANCE;
        int64_t num_steps = num_quads_ / QUADS_PER_STEP, size = panels.panel_bytes();
        int64_t num_lines_of_tile = row == 0 ? size / 64 / num_steps : 0;  // the first tile prefetches
        StepPrefetch prefetch{address, address + size, num_lines_of_tile, 1, 0};
        auto sum = rows > AMX_ROWS ? amx_int8_dot<2, Int8x4> : amx_int8_dot<1, Int8x4>;
        sum(&quantized_[row * num_quads_], rows, panels.panel(panel), num_steps, prefetch, tile);
        for (int r = 0; r < rows; r++, tile += PANEL)
            for (int64_t lane = 0; lane < PANEL; lane += W)
                store_whole(tile + lane, add_whole(load_whole(tile + lane), splat_whole(initial_sums_[row + r])));
    }

    // A tile of rows by a panel; prefetches its share of the next panel if there is time.
    void sum_tile(const Int8Panels& panels, int64_t panel, int64_t at, int rows, bool is_streaming, int32_t* tile) const {
        constexpr auto FEW_COUNTS = std::make_integer_sequence<int, FEW_ROWS_INT8>();
        constexpr auto ALL_COUNTS = std::make_integer_sequence<int, VECTOR_TILE_ROWS>();
        int64_t row = first_row(at);
        auto sum = [&](Int8DotTile sums, const LinePrefetch& lines) {
            sums(&quantized_[row * num_quads_], panels.panel(panel), num_quads_, &initial_sums_[row], tile, lines);
        };
        if (num_rows_ <= FEW_ROWS_INT8 && is_streaming)
            return sum(int8_dot_for<PrefetchMode::STREAMING>(rows, FEW_COUNTS), {});
        if (num_rows_ <= FEW_ROWS_INT8 || panel + 1 == panels.num_panels)
            return sum(int8_dot_for<PrefetchMode::NONE>(rows, ALL_COUNTS), {});
        int64_t num_lines = panels.panel_bytes() / 64, first_line = num_lines * at / num_tiles();
        auto next = reinterpret_cast<const char*>(panels.panel(panel + 1)) + 64 * first_line;
        int64_t num_lines_of_tile = num_lines * (at + 1) / num_tiles() - first_line;
        sum(int8_dot_for<PrefetchMode::NEXT_PANEL>(rows, ALL_COUNTS), {next, num_lines_of_tile, num_tiles() == 1 ? 2 : 1});
    }

    PanelSums add_overflow(const uint8_t* panel, int64_t row, const int32_t* tile) const {
        PanelSums sums;
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) sums.of[v] = load_whole(tile + v * W);
        for (const Overflow& overflow : overflow_[row])
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
                sums.of[v] = WeightInt8x4(panel + (overflow.quad * PANEL + v * W) * 4).add_to(sums.of[v], overflow.numbers);
        return sums;
    }

    int64_t num_rows_ = 0, num_quads_ = 0;
    std::vector<Int8x4> quantized_, residual_;
    std::vector<int32_t> initial_sums_, residual_initial_sums_;  // [rows] start values of the sums
    std::vector<std::vector<Overflow>> overflow_;                // [rows]
};

}  // namespace millrace
