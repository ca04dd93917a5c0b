// Where the largest logits of rows are, found without multiplying all of the head.
//
// What a step of few rows reads may be the head for a quarter, and so may what one of many rows multiplies. In int8 the head
// is half of bf16's bytes, two thirds of coded ones', and by rows in int8 twice as many products are one instruction. How far
// such a logit can be from the head's own is known: no more than what is missed of the head's row and the length of ours, and
// the other way round.
// So a panel whose largest logit in int8 is further below a row's best one than both can be wrong does not have the largest.
// The panel that seems to have it is multiplied by the head itself, for that row, and then what is left: panels that may have
// a logit above the one that is known now, with the first one three of a row's 1,536 and four to six of its 4,748 (steps of 1 to
// 32 rows in the two shapes below). The likeliest tokens are the head's own, to the bit, and so are equals and broken rows.
//
// A panel that may have the largest logit, as far as is known by then, is looked at closer while it is in a cache, in finer
// numbers of the row. Before much is known that is many of them: 142 of a row's 4,748, by one thread. So what other threads
// know counts, and what largest logits were lately: panels that are below that are left for later, and 26 remain.
//
// In bf16 steps of 1 / 8 / 16 / 32 / 512 rows take 10 / 7 / 6 / 6 / 7 % less so in SmolLM2-135M's shape and of 1 / 8 / 16 / 32
// / 128 rows 13 / 9 / 5 / 6 / 7 in Qwen3-0.6B's; without bf16's and bytes' instructions those of 1 / 8 / 16 / 32 / 512 rows 12 /
// 4 / 5 / 5 / 5 % less in the former with AVX-512, and 15 / 2 / 2 / 3 / 2 with AVX2, where 4 rows take 2 % more (two cores of a
// Zen 4 class EPYC; memory at 31 to 59 GB/s).
//
// Knows how wrong a logit can be. Refuses to know how tokens are found among logits.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "linear/int8_dot.h"
#include "linear/row_tiles.h"

namespace millrace {

using RowMask = uint64_t;  // of a panel, a bit for each of as many rows
constexpr int64_t ROWS_PER_MASK = 8 * sizeof(RowMask);

// Rows of a step that has a screen, at most: something is kept of each with each panel.
constexpr int64_t MAX_SCREENED_ROWS = 512;

constexpr int64_t MIN_SCREENED_BYTES = 4 << 20;  // of a head; less may be in a cache

constexpr int64_t NUM_STEPS_DISABLED = 64;  // that go without where it tells little

inline bool can_screen(const Linear& head) {
    bool is_half = head.type == BFLOAT16 || head.type == BF16_12BIT;
    int64_t bytes = is_half ? head.num_panels() * PANEL * head.k * 2 : head.weight_bytes();
    return (is_half || head.type == FLOAT32) && bytes >= MIN_SCREENED_BYTES && head.k <= MAX_INT8_K;
}

// Squares of the numbers that are missed by whole ones times a scale, and of the numbers, added up.
struct Squares {
    float error_norm, all;

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
        error_norm = sum_of(sums[0]), all = sum_of(sums[1]);
    }
};

// How far products with a row of the head and with its numbers in int8 can be from each other, for what has length 1: no sum
// of products is larger than the lengths multiplied, and each of `count` additions rounds. The factors are larger than it
// takes, since the lengths are rounded, too; the last number is for squares and products too small for float32.
inline ErrorBound error_bound_of(const float* row, const int8_t* codes, float scale, int64_t count) {
    Squares squares(row, codes, scale, count);
    float error_norm = std::sqrt(squares.error_norm), size = std::sqrt(squares.all);
    float rounds = 4.0f * float(count) * std::numeric_limits<float>::epsilon(), tiny = 2e-19f * std::sqrt(float(count));
    return {1.01f * error_norm + rounds * (size + error_norm) + tiny, 1.01f * (size + error_norm) + tiny};
}

// A length by the squares' sum, or a little more. Infinite where sums of products with it may be: nothing is known then.
inline float norm_upper_bound(float squares) {
    double norm = 1.01 * std::sqrt(double(squares) + 1e-30);
    return norm < 1e18 ? float(norm) : std::numeric_limits<float>::infinity();
}

// A row as the screen multiplies it: whole numbers times a scale.
struct ScreenedRow {
    float norm = 0, error_norm = 0, residual_error_norm = 0;  // of the row and of what these miss of it, or a little more
    float scale = 0;
    float expected = 0;  // what its largest logit is hardly below

    // By how much the largest logit of such a panel can be wrong, and that of a closer look.
    float error(const ErrorBound& panel) const { return norm * panel.error_norm + error_norm * panel.norm; }
    float residual_error(const ErrorBound& panel) const {
        return norm * panel.error_norm + residual_error_norm * panel.norm;
    }
};

constexpr int32_t RESIDUAL_SCALE = 254;  // times: what whole numbers miss has 8 bits, too

// A row of numbers as the head reads them, [count], as so many times the scale, `whole`, and as many times a FINERth of it
// as that misses, `finely`. What is beyond four times the mean, squares' root, has more than 8 bits: that costs products
// more, is rare, and would make all others coarse. With three times most rows have some, and the screen takes 3 % more,
// although fewer panels are looked at closer (16 rows in Qwen3-0.6B's shape, AVX-512, Zen 4 class EPYC).
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
    // Tiny, or nothing is known of it.
    if (!(fine_scale >= FLT_MIN && squares <= FLT_MAX)) return {norm, norm, norm, 0.0f};
    for (int64_t i = 0; i < count; i++) {
        residual[i] = int32_t(std::lrintf(widen(row[i]) / fine_scale));
        quantized[i] = int32_t(std::lrintf(float(residual[i]) / float(RESIDUAL_SCALE)));
    }
    float rounded = 1e-6f * norm;  // as differences are
    float error_norm = norm_upper_bound(Squares(row, quantized, scale, count).error_norm) + rounded;
    float residual_error_norm = norm_upper_bound(Squares(row, residual, fine_scale, count).error_norm) + rounded;
    for (int64_t i = 0; i < count; i++) residual[i] -= RESIDUAL_SCALE * quantized[i];
    return {norm, error_norm, residual_error_norm, scale};
}

constexpr float NO_LOGIT = -std::numeric_limits<float>::infinity();

// What the largest logit of a row is at least, as far as is known; NaN: nothing is.
struct LowerBound {
    float logit = NO_LOGIT;

    void raise(float other) { logit = std::isnan(other) || other > logit ? other : logit; }  // NaN stays: nothing is above it
    bool may_hold_max(float upper) const { return !(upper < logit); }
};

// What one thread knows of a row's logits. Others may ask what they are at least, at any time.
struct ThreadBounds {
    LowerBound lower_bound;
    float largest = NO_LOGIT;  // of the panels that may have had the likeliest token
    int64_t panel = -1;             // that has it; none: there was none
    int32_t num_refined = 0;         // panels at which it looked closer

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

// What a step keeps while it looks for the likeliest tokens of its rows with a screen.
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

    // What that takes, at most.
    static int64_t num_bytes(const Linear& head, int64_t num_rows, int num_threads) {
        int64_t of_inputs = padded_size_of(head) * int64_t(sizeof(Input)) + Int8Rows::most_bytes(head.k);
        int64_t of_a_row = of_inputs + int64_t(sizeof(ScreenedRow) + sizeof(LowerBound));
        int64_t of_a_thread = thread_stride(num_rows) * int64_t(sizeof(ThreadBounds));
        int64_t of_a_panel = num_rows * int64_t(sizeof(float)) + ceil_div(num_rows,
                                                                          ROWS_PER_MASK) * int64_t(sizeof(RowMask));
        return num_rows * of_a_row + num_threads * of_a_thread + head.num_panels() * of_a_panel;
    }

    const Input* row(int64_t i) const { return inputs_.data() + i * padded_size_; }  // as the head reads it, alone

    float norm(int64_t i) const { return rows_[i].norm; }

    // A row, normed: [size].
    void put(const ArgmaxScreen& screen, int64_t i, const float* numbers) {
        int64_t padded = 4 * num_quads_of(size_);
        thread_local std::vector<int32_t> quantized, residual;
        quantized.assign(padded, 0), residual.assign(padded, 0);
        convert_all(numbers, size_, &inputs_[i * padded_size_]);
        rows_[i] = quantize_row(row(i), size_, quantized.data(), residual.data());
        int8_rows_.put(i, quantized.data(), residual.data());
        rows_[i].expected = screen.expected.lower_bound() * rows_[i].norm;
    }

    // This thread's part of the panels by all rows. `is_passing`: as in `QuadRows`.
    void screen_panels(const ArgmaxScreen& screen, ThreadTeam::Member member, bool is_streaming) {
        ThreadBounds* thread_bounds = bounds_of(member.rank);
        int8_rows_.multiply(screen.panels, member, is_streaming, [&](const PanelSums& sums, int64_t i, int64_t panel) {
            upper_bounds_[i * num_panels_ + panel] = bounds(screen, sums, i,
                                                            panel).is_any_not_less(thread_bounds[i].lower_bound.logit)
                                                 ? recheck(screen, sums, i, panel, &thread_bounds[i])
                                                 : NO_LOGIT;
        });
    }

    // The panel that seems to have a row's likeliest token, once all threads have looked: to be multiplied before others are
    // marked, as no more of these are left than may have a logit above the one that it has.
    int64_t best_panel(int64_t i) {
        const ThreadBounds* best = &bounds_of(0)[i];
        for (int thread = 1; thread < num_threads_; thread++) {
            const ThreadBounds& other = bounds_of(thread)[i];
            if (best->panel < 0 || (other.panel >= 0 && other.largest > best->largest)) best = &other;
        }
        return best->panel;
    }

    // It was, and the largest of its logits is so large.
    void set_known(int64_t i, int64_t panel, float largest) {
        LowerBound& lower_bound = lower_bounds_[i];
        for (int thread = 0; thread < num_threads_; thread++) lower_bound.raise(bounds_of(thread)[i].lower_bound.logit);
        if (std::isfinite(largest)) lower_bound.raise(largest);
        upper_bounds_[i * num_panels_ + panel] = NO_LOGIT;
    }

    // This thread's part of the panels: which other ones may have the likeliest token of a row.
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

    // Panels to multiply, each once for each row that does, with the first one of each.
    int64_t num_candidates() const {
        int64_t num = num_rows_;
        for (RowMask rows : masks_) num += __builtin_popcountll(rows);
        return num;
    }

    // use(panel, row, next) for this thread's part of them; `next` is the panel after it, or itself if none is known yet.
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

    // Whether so much is left, or was looked at closer, that it had been better to multiply all of the head.
    bool is_ineffective() const {
        int64_t num_tiles = ceil_div(num_rows_, 8);  // a row that is left costs about as much as eight together
        return num_candidates() * 4 > num_panels_ * num_tiles || num_refined() * 4 > num_panels_ * num_rows_;
    }

  private:
    // The most that each logit of a row by a panel is, by its sums with it.
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

    // The most that the largest logit is of a panel that may have a row's likeliest token, as far as this thread knew, or less
    // than all where others know better. One that is below what is expected keeps what int8 tells: it is multiplied later if
    // it may have it still.
    // NOTE: those of the last panel's columns that are no token's are 0. They may have it looked at in vain, but must not count
    // as a logit that there is; so it is always looked at closer, where they are left out.
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

    // The most that the largest logit of such a panel is, by more numbers of the row, while the panel is in a cache.
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

    // From one row to the next, as each would lie in a tile alone: with zeros past its size in AMX.
    static int64_t padded_size_of(const Linear& head) { return TiledRows<Input>{nullptr, 1, head.k}.padded_size(); }

    // From what one thread has seen to what the next one has: no two write to the same line.
    static int64_t thread_stride(int64_t num_rows) { return num_rows + ceil_div(64, int64_t(sizeof(ThreadBounds))); }

    int64_t num_rows_ = 0, num_panels_ = 0, num_tokens_ = 0, size_ = 0, padded_size_ = 0, masks_per_panel_ = 0;
    int num_threads_ = 0;
    std::vector<Input> inputs_;         // [rows][padded size]
    std::vector<ScreenedRow> rows_;        // [rows]
    Int8Rows int8_rows_;
    std::vector<ThreadBounds> thread_bounds_;            // [threads][rows and a line's more]
    std::vector<LowerBound> lower_bounds_;          // [rows], by all threads and the first panel
    std::vector<float> upper_bounds_;           // [rows][panels] that a logit is there, where it may be the largest; or less than all
    std::vector<RowMask> masks_;          // [panels][marks of a panel] whose rows multiply them
};

}  // namespace millrace
