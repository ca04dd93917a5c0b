// Argmax screening: finds the largest logits of greedy rows with an int8 copy of the head, so that little of the head
// is read.
//
// The head may be a quarter of what a step of few rows reads, and of what a step of many rows multiplies. The int8 copy
// has half the bytes of bf16, two thirds of 12-bit bf16, and int8 dot products do twice the work per instruction. The
// error of an int8 logit is bounded: by the norm of the row times the error of the head's row, plus the other way
// round.
// So a panel whose largest int8 logit is below the row's best one by more than both errors cannot hold the maximum. The
// most promising panel is multiplied by the head itself, then all candidates: panels that may hold a logit above the
// one that is known now. Including the first these are 3 of a row's 1,536 panels and 4 to 6 of 4,748 (steps of 1 to 32
// rows in the two shapes below). The resulting tokens, ties and broken rows are the head's own, bit for bit.
//
// A panel that may hold the maximum by what is known so far is refined while it is in a cache, with a finer residual of
// the row. At first that is many panels: 142 of a row's 4,748 with one thread. So bounds from other threads count as
// well, and so does an estimate from recent rows: panels below it are left for later, and 26 remain.
//
// In bf16, steps of 1 / 8 / 16 / 32 / 512 rows take 10 / 7 / 6 / 6 / 7 % less in SmolLM2-135M's shape, and of 1 / 8 /
// 16 / 32 / 128 rows 13 / 9 / 5 / 6 / 7 % less in Qwen3-0.6B's. Without bf16 and int8 dot products, steps of 1 / 8 / 16
// / 32 / 512 rows take 12 / 4 / 5 / 5 / 5 % less in the former with AVX-512 and 15 / 2 / 2 / 3 / 2 % less with AVX2,
// where 4 rows take 2 % more (two cores of a Zen 4 class EPYC; memory at 31 to 59 GB/s).
//
// Used by OutputHead, on all compute threads; NOTE: threads read each other's `ThreadBounds` with relaxed atomics.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "linear/int8_dot.h"
#include "linear/row_tiles.h"

namespace millrace {

using RowMask = uint64_t;  // a bit per row
constexpr int64_t ROWS_PER_MASK = 8 * sizeof(RowMask);

// Most rows of a step that uses the screen: it stores something per row and panel.
constexpr int64_t MAX_SCREENED_ROWS = 512;

constexpr int64_t MIN_SCREENED_BYTES = 4 << 20;  // of the head; a smaller one may be in a cache

constexpr int64_t NUM_STEPS_DISABLED = 64;  // steps without the screen after one in which it was ineffective

// Whether a head that is set gets a screen. The bounds know no bias.
inline bool can_screen(const Model& model) {
    const Linear& head = model.head;
    if (model.shape.has_head_bias || model.is_grouped) return false;
    bool is_half = head.type == BFLOAT16 || head.type == BF16_12BIT;
    int64_t bytes = is_half ? head.num_panels() * PANEL * head.k * 2 : head.weight_bytes();
    return (is_half || head.type == FLOAT32) && bytes >= MIN_SCREENED_BYTES && head.k <= MAX_INT8_K;
}

// Sums of squares: of the errors of quantized numbers, and of the numbers.
struct Squares {
    float errors, all;

    template <class T, class Whole>
    Squares(const T* numbers, const Whole* quantized, float scale, int64_t count) {
        F sums[2] = {zero(), zero()};
        auto add = [&](F number, F known) {
            F difference = sub(number, mul(known, splat(scale)));
            sums[0] = fma(difference, difference, sums[0]), sums[1] = fma(number, number, sums[1]);
        };
        int64_t vectors = count / W * W;
        for (int64_t i = 0; i < vectors; i += W) add(load(numbers + i), load(quantized + i));
        if (vectors < count) {
            T last[W] = {};
            Whole last_quantized[W] = {};
            std::copy(numbers + vectors, numbers + count, last),
                std::copy(quantized + vectors, quantized + count, last_quantized);
            add(load(last), load(last_quantized));
        }
        errors = sum_of(sums[0]), all = sum_of(sums[1]);
    }
};

// The most that products with a row of the head and with its int8 copy differ, for an input of norm 1. A dot product is
// at most the product of the norms, and each of `count` additions rounds. The factors are larger than needed, because
// the norms are rounded, too. The last term covers squares and products too small for float32.
inline ErrorBound error_bound_of(const float* row, const int8_t* codes, float scale, int64_t count) {
    Squares squares(row, codes, scale, count);
    float error_norm = std::sqrt(squares.errors), size = std::sqrt(squares.all);
    float rounds = 4.0f * float(count) * std::numeric_limits<float>::epsilon(), tiny = 2e-19f * std::sqrt(float(count));
    return {1.01f * error_norm + rounds * (size + error_norm) + tiny, 1.01f * (size + error_norm) + tiny};
}

// An upper bound of the norm from the sum of squares. Infinite if dot products may overflow: then nothing is known.
inline float norm_upper_bound(float squares) {
    double norm = 1.01 * std::sqrt(double(squares) + 1e-30);
    return norm < 1e18 ? float(norm) : std::numeric_limits<float>::infinity();
}

// A row as the screen multiplies it: integers times a scale.
struct ScreenedRow {
    float norm = 0, error_norm = 0, residual_error_norm = 0;  // upper bounds: of the row and of its quantization errors
    float scale = 0;
    float expected = 0;  // lower bound of its largest logit, by estimate

    // Upper bounds of the error of a panel's largest logit: of the screen, and after refinement.
    float error(const ErrorBound& panel) const { return norm * panel.error_norm + error_norm * panel.norm; }
    float residual_error(const ErrorBound& panel) const {
        return norm * panel.error_norm + residual_error_norm * panel.norm;
    }
};

constexpr int32_t RESIDUAL_SCALE = 254;  // the residual has 8 bits, too

// Quantizes a row as the head reads it, [count]: to `quantized` times the scale, and to `residual` times scale /
// RESIDUAL_SCALE. Numbers beyond 4 times the root mean square get more than 8 bits. They cost more, are rare, and would
// make all other numbers coarse. With a factor of 3 most rows have some, and the screen takes 3 % more although fewer
// panels are refined (16 rows in Qwen3-0.6B's shape, AVX-512, Zen 4 class EPYC).
template <class T>
ScreenedRow quantize_row(const T* row, int64_t count, int32_t* quantized, int32_t* residual) {
    constexpr float CLIP_RMS = 4.0f;
    float largest = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) {
        float number = widen(row[i]);
        largest = std::max(largest, std::fabs(number)), squares += number * number;
    }
    float rms = std::sqrt(squares / float(count)), scale = std::min(largest, CLIP_RMS * rms) / 127.0f;
    float fine_scale = scale / float(RESIDUAL_SCALE), norm = norm_upper_bound(squares);
    // Too small, or not finite: nothing is known of it.
    if (!(fine_scale >= FLT_MIN && squares <= FLT_MAX)) return {norm, norm, norm, 0.0f};
    for (int64_t i = 0; i < count; i++) {
        residual[i] = int32_t(std::lrintf(widen(row[i]) / fine_scale));
        quantized[i] = int32_t(std::lrintf(float(residual[i]) / float(RESIDUAL_SCALE)));
    }
    float rounded = 1e-6f * norm;  // rounding of the differences
    float error_norm = norm_upper_bound(Squares(row, quantized, scale, count).errors) + rounded;
    float residual_error_norm = norm_upper_bound(Squares(row, residual, fine_scale, count).errors) + rounded;
    for (int64_t i = 0; i < count; i++) residual[i] -= RESIDUAL_SCALE * quantized[i];
    return {norm, error_norm, residual_error_norm, scale};
}

constexpr float NO_LOGIT = -std::numeric_limits<float>::infinity();

// A lower bound of the largest logit of a row, as far as known; NaN: nothing is known.
struct LowerBound {
    float logit = NO_LOGIT;

    // A NaN stays, as no comparison with it is true.
    void raise(float other) { logit = std::isnan(other) || other > logit ? other : logit; }
    bool may_hold_max(float upper) const { return !(upper < logit); }
};

// What one thread knows of a row's logits. Other threads may read the lower bound at any time.
struct ThreadBounds {
    LowerBound lower_bound;
    float largest = NO_LOGIT;  // of the candidate panels
    int64_t panel = -1;        // that holds it; -1: none
    int32_t num_refined = 0;   // panels that the thread refined

    void add_panel(int64_t at, float upper, float error) {
        raise(std::isfinite(upper - error) ? upper - error : NAN);
        if (panel < 0 || upper > largest) largest = upper, panel = at;
    }

    void raise(float other) {
        LowerBound joined = lower_bound;
        joined.raise(other);
        __atomic_store(&lower_bound.logit, &joined.logit, __ATOMIC_RELAXED);
    }

    float lower_bound_now() const {
        float logit;
        __atomic_load(&lower_bound.logit, &logit, __ATOMIC_RELAXED);
        return logit;
    }
};

// The state of one step's screening.
template <class Input>
class ScreenedArgmax {
  public:
    void resize(const Linear& head, int64_t num_rows, int num_threads) {
        num_rows_ = num_rows, num_panels_ = head.num_panels(), num_tokens_ = head.n, size_ = head.k;
        padded_size_ = padded_size_of(head);
        masks_per_panel_ = ceil_div(num_rows, ROWS_PER_MASK), num_threads_ = num_threads;
        inputs_.resize(num_rows * padded_size_), rows_.resize(num_rows), int8_rows_.resize(num_rows, size_);
        lower_bounds_.resize(num_rows), thread_bounds_.resize(num_threads * thread_stride(num_rows));
        upper_bounds_.resize(num_rows * num_panels_), masks_.resize(num_panels_ * masks_per_panel_);
    }

    // An upper bound of its memory.
    static int64_t num_bytes(const Linear& head, int64_t num_rows, int num_threads) {
        int64_t of_inputs = padded_size_of(head) * int64_t(sizeof(Input)) + Int8Rows::max_bytes(head.k);
        int64_t of_a_row = of_inputs + int64_t(sizeof(ScreenedRow) + sizeof(LowerBound));
        int64_t of_a_thread = thread_stride(num_rows) * int64_t(sizeof(ThreadBounds));
        int64_t of_a_panel =
            num_rows * int64_t(sizeof(float)) + ceil_div(num_rows, ROWS_PER_MASK) * int64_t(sizeof(RowMask));
        return num_rows * of_a_row + num_threads * of_a_thread + head.num_panels() * of_a_panel;
    }

    const Input* row(int64_t i) const { return inputs_.data() + i * padded_size_; }  // as the head reads it, alone in a tile

    float norm(int64_t i) const { return rows_[i].norm; }

    // Sets a normalized row: [size].
    void put(const ArgmaxScreen& screen, int64_t i, const float* numbers) {
        int64_t padded = 4 * num_quads_of(size_);
        thread_local std::vector<int32_t> quantized, residual;
        quantized.assign(padded, 0), residual.assign(padded, 0);
        convert_all(numbers, size_, &inputs_[i * padded_size_]);
        rows_[i] = quantize_row(row(i), size_, quantized.data(), residual.data());
        int8_rows_.put(i, quantized.data(), residual.data());
        rows_[i].expected = screen.expected.lower_bound() * rows_[i].norm;
    }

    // This thread's panels by all rows. `is_streaming`: as in `Int8Rows`.
    void screen_panels(const ArgmaxScreen& screen, ThreadTeam::Member member, bool is_streaming) {
        ThreadBounds* thread_bounds = bounds_of(member.rank);
        int8_rows_.multiply(screen.panels, member, is_streaming, [&](const PanelSums& sums, int64_t i, int64_t panel) {
            upper_bounds_[i * num_panels_ + panel] =
                bounds(screen, sums, i, panel).is_any_not_less(thread_bounds[i].lower_bound.logit)
                    ? recheck(screen, sums, i, panel, &thread_bounds[i])
                    : NO_LOGIT;
        });
    }

    // The most promising panel of a row, after all threads have screened. It is multiplied by the head before
    // candidates are marked, because its logit then excludes more panels.
    int64_t best_panel(int64_t i) {
        const ThreadBounds* best = &bounds_of(0)[i];
        for (int thread = 1; thread < num_threads_; thread++) {
            const ThreadBounds& other = bounds_of(thread)[i];
            if (best->panel < 0 || (other.panel >= 0 && other.largest > best->largest)) best = &other;
        }
        return best->panel;
    }

    // Records the largest logit of that panel.
    void set_known(int64_t i, int64_t panel, float largest) {
        LowerBound& lower_bound = lower_bounds_[i];
        for (int thread = 0; thread < num_threads_; thread++) lower_bound.raise(bounds_of(thread)[i].lower_bound.logit);
        if (std::isfinite(largest)) lower_bound.raise(largest);
        upper_bounds_[i * num_panels_ + panel] = NO_LOGIT;
    }

    // This thread's panels: marks those that may still hold a row's largest logit.
    void mark_candidates(ThreadTeam::Member member) {
        member.parallel_for(num_panels_, 1024, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t i = 0; i < num_rows_; i++) {
                const float* upper = upper_bounds_.data() + i * num_panels_;
                RowMask* masks = &masks_[i / ROWS_PER_MASK];
                for (int64_t begin = first; begin < last; begin += W) {
                    int64_t end = std::min(begin + W, last);
                    if (begin + W == end && !is_any_not_less(load(upper + begin), splat(lower_bounds_[i].logit))) continue;
                    for (int64_t panel = begin; panel < end; panel++)
                        masks[panel * masks_per_panel_] |=
                            RowMask(lower_bounds_[i].may_hold_max(upper[panel])) << i % ROWS_PER_MASK;
                }
            }
        });
    }

    // (row, panel) pairs to multiply by the head, including the first of each row.
    int64_t num_candidates() const {
        int64_t num = num_rows_;
        for (RowMask rows : masks_) num += __builtin_popcountll(rows);
        return num;
    }

    // Calls use(panel, row, next) for this thread's candidates; `next` is the panel after it, or `panel` if none is
    // known yet.
    template <class Use>
    void for_each_candidate(ThreadTeam::Member member, const Use& use) const {
        member.parallel_for(num_panels_, 64, [&](int64_t first, int64_t last, int64_t) {
            auto next_of = [&](int64_t panel) {
                while (panel < last && !has_candidate(panel)) panel++;
                return panel;
            };
            for (int64_t panel = next_of(first), next; panel < last; panel = next) {
                next = next_of(panel + 1);
                for (int64_t at = 0; at < masks_per_panel_; at++)
                    for (RowMask left = masks_[panel * masks_per_panel_ + at]; left; left &= left - 1)
                        use(panel, at * ROWS_PER_MASK + __builtin_ctzll(left), next < last ? next : panel);
            }
        });
    }

    int64_t num_refined() const {
        int64_t num = 0;
        for (const ThreadBounds& thread_bounds : thread_bounds_) num += thread_bounds.num_refined;
        return num;
    }

    // Whether so many panels are left or were refined that multiplying the whole head would be cheaper.
    bool is_ineffective() const {
        int64_t num_tiles = ceil_div(num_rows_, 8);  // a candidate row costs about as much as eight rows together
        return num_candidates() * 4 > num_panels_ * num_tiles || num_refined() * 4 > num_panels_ * num_rows_;
    }

  private:
    // Upper bounds of a row's logits in a panel, from the int8 sums.
    struct Bounds {
        F of[PANEL_VECTORS];

        bool is_any_not_less(float other) const {
            bool is_any = false;
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) is_any |= millrace::is_any_not_less(of[v], splat(other));
            return is_any;
        }
    };

    Bounds bounds(const ArgmaxScreen& screen, const PanelSums& sums, int64_t i, int64_t panel) const {
        F scale = splat(rows_[i].scale), error = splat(rows_[i].error(screen.error_bounds[panel]));
        const float* scales = &screen.scales[panel * PANEL];
        Bounds upper;
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
            upper.of[v] = fma(mul(widen(sums.of[v]), load(scales + v * W)), scale, error);
        return upper;
    }

    // Upper bound of the largest logit of a panel that may hold the row's maximum as far as this thread knew; NO_LOGIT
    // if other threads know better. A panel below the estimate keeps its int8 bound: it is multiplied later if it is
    // still a candidate.
    // NOTE: in the last panel, columns past the vocabulary have logit 0. They may cause a refinement in vain but must
    // not count as a known logit. So the last panel is always refined, which leaves them out.
    [[gnu::noinline]] float recheck(const ArgmaxScreen& screen, const PanelSums& sums, int64_t i, int64_t panel,
                                    ThreadBounds* thread_bounds) const {
        Bounds upper = bounds(screen, sums, i, panel);
        for (int thread = 0; thread < num_threads_; thread++)
            thread_bounds->raise(thread_bounds_[thread * thread_stride(num_rows_) + i].lower_bound_now());
        if (!upper.is_any_not_less(thread_bounds->lower_bound.logit)) return NO_LOGIT;
        bool is_full = (panel + 1) * PANEL <= num_tokens_;
        if (!is_full || upper.is_any_not_less(rows_[i].expected)) return refine(screen, sums, i, panel, thread_bounds);
        F all = upper.of[0];
        UNROLL for (int v = 1; v < PANEL_VECTORS; v++) all = max(upper.of[v], all);
        float largest = max_of(all), error = rows_[i].error(screen.error_bounds[panel]);
        thread_bounds->add_panel(panel, largest - error, error);
        return largest;
    }

    // A tighter upper bound from the row's residual, while the panel is in a cache.
    float refine(const ArgmaxScreen& screen, const PanelSums& sums, int64_t i, int64_t panel,
                 ThreadBounds* thread_bounds) const {
        alignas(64) int32_t fine[PANEL];
        alignas(64) float logits[PANEL];
        int8_rows_.multiply_residual(i, screen.panels.panel(panel), fine);
        for (int v = 0; v < PANEL_VECTORS; v++) {
            F sum = fma(load(fine + v * W), splat(1.0f / float(RESIDUAL_SCALE)), widen(sums.of[v]));
            store(logits + v * W, mul(sum, load(&screen.scales[panel * PANEL + v * W])));
        }
        float largest = max_of_columns(logits, std::min(PANEL, num_tokens_ - panel * PANEL)) * rows_[i].scale;
        float error = rows_[i].residual_error(screen.error_bounds[panel]);
        thread_bounds->add_panel(panel, largest, error), thread_bounds->num_refined++;
        return largest + error;
    }

    bool has_candidate(int64_t panel) const {
        auto masks = masks_.begin() + panel * masks_per_panel_;
        return std::any_of(masks, masks + masks_per_panel_, [](RowMask rows) { return rows != 0; });
    }

    ThreadBounds* bounds_of(int thread) { return thread_bounds_.data() + thread * thread_stride(num_rows_); }

    // Distance of rows, each as it lies alone in a tile: padded with zeros in AMX.
    static int64_t padded_size_of(const Linear& head) { return TiledRows<Input>{nullptr, 1, head.k}.padded_size(); }

    // Distance of threads' entries. NOTE: the padding keeps threads from writing to the same cache line.
    static int64_t thread_stride(int64_t num_rows) { return num_rows + ceil_div(64, int64_t(sizeof(ThreadBounds))); }

    int64_t num_rows_ = 0, num_panels_ = 0, num_tokens_ = 0, size_ = 0, padded_size_ = 0, masks_per_panel_ = 0;
    int num_threads_ = 0;
    std::vector<Input> inputs_;      // [rows][padded size]
    std::vector<ScreenedRow> rows_;  // [rows]
    Int8Rows int8_rows_;
    std::vector<ThreadBounds> thread_bounds_;  // [threads][rows, and one cache line]
    std::vector<LowerBound> lower_bounds_;     // [rows], from all threads and the first panel
    std::vector<float> upper_bounds_;          // [rows][panels] upper bounds of candidates' logits; else NO_LOGIT
    std::vector<RowMask> masks_;               // [panels][masks per panel] rows for which the panel is a candidate
};

}  // namespace millrace
