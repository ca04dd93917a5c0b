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

using Marks = uint64_t;  // of a panel, a bit for each of as many rows
constexpr int64_t MARKED_ROWS = 8 * sizeof(Marks);

// Rows of a step that has a screen, at most: something is kept of each with each panel.
constexpr int64_t SCREENED_ROWS = 512;

constexpr int64_t SCREENED_BYTES = 4 << 20;  // of a head; less may be in a cache

constexpr int64_t STEPS_OFF = 64;  // that go without where it tells little

inline bool wants_screen(const Linear& head) {
    bool is_half = head.type == BFLOAT16 || head.type == CODED;
    int64_t bytes = is_half ? head.num_panels() * PANEL * head.k * 2 : head.weight_bytes();
    return (is_half || head.type == FLOAT32) && bytes >= SCREENED_BYTES && head.k <= MOST_SUMMED;
}

// Squares of the numbers that are missed by whole ones times a scale, and of the numbers, added up.
struct Squares {
    float missed, all;

    template <class T, class Whole>
    Squares(const T* numbers, const Whole* whole, float scale, int64_t count) {
        F sums[2] = {zero(), zero()};
        auto add = [&](F number, F known) {
            F difference = sub(number, mul(known, splat(scale)));
            sums[0] = fma(difference, difference, sums[0]), sums[1] = fma(number, number, sums[1]);
        };
        int64_t vectors = count / W * W;
        for (int64_t i = 0; i < vectors; i += W) add(load(numbers + i), load(whole + i));
        if (vectors < count) {
            T last[W] = {};
            Whole last_whole[W] = {};
            std::copy(numbers + vectors, numbers + count, last), std::copy(whole + vectors, whole + count, last_whole);
            add(load(last), load(last_whole));
        }
        missed = sum_of(sums[0]), all = sum_of(sums[1]);
    }
};

// How far products with a row of the head and with its numbers in int8 can be from each other, for what has length 1: no sum
// of products is larger than the lengths multiplied, and each of `count` additions rounds. The factors are larger than it
// takes, since the lengths are rounded, too; the last number is for squares and products too small for float32.
inline Blur blur_of(const float* row, const int8_t* codes, float scale, int64_t count) {
    Squares squares(row, codes, scale, count);
    float missed = std::sqrt(squares.missed), size = std::sqrt(squares.all);
    float rounds = 4.0f * float(count) * std::numeric_limits<float>::epsilon(), tiny = 2e-19f * std::sqrt(float(count));
    return {1.01f * missed + rounds * (size + missed) + tiny, 1.01f * (size + missed) + tiny};
}

// A length by the squares' sum, or a little more. Infinite where sums of products with it may be: nothing is known then.
inline float length_at_most(float squares) {
    double length = 1.01 * std::sqrt(double(squares) + 1e-30);
    return length < 1e18 ? float(length) : std::numeric_limits<float>::infinity();
}

// A row as the screen multiplies it: whole numbers times a scale.
struct Screened {
    float length = 0, missed = 0, missed_finely = 0;  // of the row and of what these miss of it, or a little more
    float scale = 0;
    float expected = 0;  // what its largest logit is hardly below

    // By how much the largest logit of such a panel can be wrong, and that of a closer look.
    float wrong(const Blur& panel) const { return length * panel.missed + missed * panel.size; }
    float wrong_finely(const Blur& panel) const { return length * panel.missed + missed_finely * panel.size; }
};

constexpr int32_t FINER = 254;  // times: what whole numbers miss has 8 bits, too

// A row of numbers as the head reads them, [count], as so many times the scale, `whole`, and as many times a FINERth of it
// as that misses, `finely`. What is beyond four times the mean, squares' root, has more than 8 bits: that costs products
// more, is rare, and would make all others coarse. With three times most rows have some, and the screen takes 3 % more,
// although fewer panels are looked at closer (16 rows in Qwen3-0.6B's shape, AVX-512, Zen 4 class EPYC).
template <class T>
Screened to_whole(const T* row, int64_t count, int32_t* whole, int32_t* finely) {
    constexpr float CLIPPED = 4.0f;
    float largest = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) {
        float number = widen(row[i]);
        largest = std::max(largest, std::fabs(number)), squares += number * number;
    }
    float mean = std::sqrt(squares / float(count)), scale = std::min(largest, CLIPPED * mean) / 127.0f;
    float fine_scale = scale / float(FINER), length = length_at_most(squares);
    // Tiny, or nothing is known of it.
    if (!(fine_scale >= FLT_MIN && squares <= FLT_MAX)) return {length, length, length, 0.0f};
    for (int64_t i = 0; i < count; i++) {
        finely[i] = int32_t(std::lrintf(widen(row[i]) / fine_scale));
        whole[i] = int32_t(std::lrintf(float(finely[i]) / float(FINER)));
    }
    float rounded = 1e-6f * length;  // as differences are
    float missed = length_at_most(Squares(row, whole, scale, count).missed) + rounded;
    float missed_finely = length_at_most(Squares(row, finely, fine_scale, count).missed) + rounded;
    for (int64_t i = 0; i < count; i++) finely[i] -= FINER * whole[i];
    return {length, missed, missed_finely, scale};
}

constexpr float LESS_THAN_ALL = -std::numeric_limits<float>::infinity();

// What the largest logit of a row is at least, as far as is known; NaN: nothing is.
struct Least {
    float logit = LESS_THAN_ALL;

    void join(float other) { logit = std::isnan(other) || other > logit ? other : logit; }  // NaN stays: nothing is above it
    bool may_be(float most) const { return !(most < logit); }
};

// What one thread knows of a row's logits. Others may ask what they are at least, at any time.
struct Seen {
    Least least;
    float largest = LESS_THAN_ALL;  // of the panels that may have had the likeliest token
    int64_t panel = -1;             // that has it; none: there was none
    int32_t num_closer = 0;         // panels at which it looked closer

    void see(int64_t at, float most, float wrong) {
        join(std::isfinite(most - wrong) ? most - wrong : NAN);
        if (panel < 0 || most > largest) largest = most, panel = at;
    }

    void join(float other) {
        Least joined = least;
        joined.join(other);
        __atomic_store(&least.logit, &joined.logit, __ATOMIC_RELAXED);
    }

    float least_now() const {
        float logit;
        __atomic_load(&least.logit, &logit, __ATOMIC_RELAXED);
        return logit;
    }
};

// What a step keeps while it looks for the likeliest tokens of its rows with a screen.
template <class Input>
class Screening {
  public:
    void resize(const Linear& head, int64_t num_rows, int num_threads) {
        num_rows_ = num_rows, num_panels_ = head.num_panels(), num_tokens_ = head.n, size_ = head.k;
        padded_size_ = padded_size_of(head);
        num_marks_ = ceil_div(num_rows, MARKED_ROWS), num_threads_ = num_threads;
        inputs_.resize(num_rows * padded_size_), rows_.resize(num_rows), quads_.resize(num_rows, size_);
        least_.resize(num_rows), seen_.resize(num_threads * apart(num_rows));
        most_.resize(num_rows * num_panels_), marks_.resize(num_panels_ * num_marks_);
    }

    // What that takes, at most.
    static int64_t num_bytes(const Linear& head, int64_t num_rows, int num_threads) {
        int64_t of_inputs = padded_size_of(head) * int64_t(sizeof(Input)) + QuadRows::most_bytes(head.k);
        int64_t of_a_row = of_inputs + int64_t(sizeof(Screened) + sizeof(Least));
        int64_t of_a_thread = apart(num_rows) * int64_t(sizeof(Seen));
        int64_t of_a_panel = num_rows * int64_t(sizeof(float)) + ceil_div(num_rows, MARKED_ROWS) * int64_t(sizeof(Marks));
        return num_rows * of_a_row + num_threads * of_a_thread + head.num_panels() * of_a_panel;
    }

    const Input* row(int64_t i) const { return inputs_.data() + i * padded_size_; }  // as the head reads it, alone

    float length(int64_t i) const { return rows_[i].length; }

    // A row, normed: [size].
    void put(const Screen& screen, int64_t i, const float* numbers) {
        int64_t padded = 4 * num_quads_of(size_);
        thread_local std::vector<int32_t> whole, finely;
        whole.assign(padded, 0), finely.assign(padded, 0);
        narrow_all(numbers, size_, &inputs_[i * padded_size_]);
        rows_[i] = to_whole(row(i), size_, whole.data(), finely.data());
        quads_.put(i, whole.data(), finely.data());
        rows_[i].expected = screen.expected.at_least() * rows_[i].length;
    }

    // This thread's part of the panels by all rows. `is_passing`: as in `QuadRows`.
    void look(const Screen& screen, Party::Seat seat, bool is_passing) {
        Seen* seen = seen_by(seat.rank);
        quads_.multiply(screen.panels, seat, is_passing, [&](const PanelSums& sums, int64_t i, int64_t panel) {
            most_[i * num_panels_ + panel] = bounds(screen, sums, i, panel).is_any_not_less(seen[i].least.logit)
                                                 ? look_again(screen, sums, i, panel, &seen[i])
                                                 : LESS_THAN_ALL;
        });
    }

    // The panel that seems to have a row's likeliest token, once all threads have looked: to be multiplied before others are
    // marked, as no more of these are left than may have a logit above the one that it has.
    int64_t first_panel(int64_t i) {
        const Seen* best = &seen_by(0)[i];
        for (int thread = 1; thread < num_threads_; thread++) {
            const Seen& other = seen_by(thread)[i];
            if (best->panel < 0 || (other.panel >= 0 && other.largest > best->largest)) best = &other;
        }
        return best->panel;
    }

    // It was, and the largest of its logits is so large.
    void know(int64_t i, int64_t panel, float largest) {
        Least& least = least_[i];
        for (int thread = 0; thread < num_threads_; thread++) least.join(seen_by(thread)[i].least.logit);
        if (std::isfinite(largest)) least.join(largest);
        most_[i * num_panels_ + panel] = LESS_THAN_ALL;
    }

    // This thread's part of the panels: which other ones may have the likeliest token of a row.
    void mark(Party::Seat seat) {
        seat.each_piece(num_panels_, 1024, [&](int64_t first, int64_t last, int64_t) {
            for (int64_t i = 0; i < num_rows_; i++) {
                const float* most = most_.data() + i * num_panels_;
                Marks* marks = &marks_[i / MARKED_ROWS];
                for (int64_t begin = first; begin < last; begin += W) {
                    int64_t end = std::min(begin + W, last);
                    if (begin + W == end && !is_any_not_less(load(most + begin), splat(least_[i].logit))) continue;
                    for (int64_t panel = begin; panel < end; panel++)
                        marks[panel * num_marks_] |= Marks(least_[i].may_be(most[panel])) << i % MARKED_ROWS;
                }
            }
        });
    }

    // Panels to multiply, each once for each row that does, with the first one of each.
    int64_t num_left() const {
        int64_t num = num_rows_;
        for (Marks rows : marks_) num += __builtin_popcountll(rows);
        return num;
    }

    // use(panel, row, next) for this thread's part of them; `next` is the panel after it, or itself if none is known yet.
    template <class Use>
    void each_left(Party::Seat seat, const Use& use) const {
        seat.each_piece(num_panels_, 64, [&](int64_t first, int64_t last, int64_t) {
            auto next_of = [&](int64_t panel) {
                while (panel < last && !is_any_left(panel)) panel++;
                return panel;
            };
            for (int64_t panel = next_of(first), next; panel < last; panel = next) {
                next = next_of(panel + 1);
                for (int64_t at = 0; at < num_marks_; at++)
                    for (Marks left = marks_[panel * num_marks_ + at]; left; left &= left - 1)
                        use(panel, at * MARKED_ROWS + __builtin_ctzll(left), next < last ? next : panel);
            }
        });
    }

    int64_t num_closer() const {
        int64_t num = 0;
        for (const Seen& seen : seen_) num += seen.num_closer;
        return num;
    }

    // Whether so much is left, or was looked at closer, that it had been better to multiply all of the head.
    bool tells_little() const {
        int64_t num_tiles = ceil_div(num_rows_, 8);  // a row that is left costs about as much as eight together
        return num_left() * 4 > num_panels_ * num_tiles || num_closer() * 4 > num_panels_ * num_rows_;
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

    Bounds bounds(const Screen& screen, const PanelSums& sums, int64_t i, int64_t panel) const {
        F scale = splat(rows_[i].scale), wrong = splat(rows_[i].wrong(screen.blurs[panel]));
        const float* scales = &screen.scales[panel * PANEL];
        Bounds most;
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
            most.of[v] = fma(mul(widen(sums.of[v]), load(scales + v * W)), scale, wrong);
        return most;
    }

    // The most that the largest logit is of a panel that may have a row's likeliest token, as far as this thread knew, or less
    // than all where others know better. One that is below what is expected keeps what int8 tells: it is multiplied later if
    // it may have it still.
    // NOTE: those of the last panel's columns that are no token's are 0. They may have it looked at in vain, but must not count
    // as a logit that there is; so it is always looked at closer, where they are left out.
    [[gnu::noinline]] float look_again(const Screen& screen, const PanelSums& sums, int64_t i, int64_t panel, Seen* seen) const {
        Bounds most = bounds(screen, sums, i, panel);
        for (int thread = 0; thread < num_threads_; thread++) seen->join(seen_[thread * apart(num_rows_) + i].least_now());
        if (!most.is_any_not_less(seen->least.logit)) return LESS_THAN_ALL;
        bool is_full = (panel + 1) * PANEL <= num_tokens_;
        if (!is_full || most.is_any_not_less(rows_[i].expected)) return look_closer(screen, sums, i, panel, seen);
        F all = most.of[0];
        UNROLL for (int v = 1; v < PANEL_VECTORS; v++) all = max(most.of[v], all);
        float largest = max_of(all), wrong = rows_[i].wrong(screen.blurs[panel]);
        seen->see(panel, largest - wrong, wrong);
        return largest;
    }

    // The most that the largest logit of such a panel is, by more numbers of the row, while the panel is in a cache.
    float look_closer(const Screen& screen, const PanelSums& sums, int64_t i, int64_t panel, Seen* seen) const {
        alignas(64) int32_t fine[PANEL];
        alignas(64) float logits[PANEL];
        quads_.multiply_finely(i, screen.panels.panel(panel), fine);
        for (int v = 0; v < PANEL_VECTORS; v++) {
            F sum = fma(load(fine + v * W), splat(1.0f / float(FINER)), widen(sums.of[v]));
            store(logits + v * W, mul(sum, load(&screen.scales[panel * PANEL + v * W])));
        }
        float largest = largest_of(logits, std::min(PANEL, num_tokens_ - panel * PANEL)) * rows_[i].scale;
        float wrong = rows_[i].wrong_finely(screen.blurs[panel]);
        seen->see(panel, largest, wrong), seen->num_closer++;
        return largest + wrong;
    }

    bool is_any_left(int64_t panel) const {
        auto marks = marks_.begin() + panel * num_marks_;
        return std::any_of(marks, marks + num_marks_, [](Marks rows) { return rows != 0; });
    }

    Seen* seen_by(int thread) { return seen_.data() + thread * apart(num_rows_); }

    // From one row to the next, as each would lie in a tile alone: with zeros past its size in AMX.
    static int64_t padded_size_of(const Linear& head) { return TiledRows<Input>{nullptr, 1, head.k}.padded_size(); }

    // From what one thread has seen to what the next one has: no two write to the same line.
    static int64_t apart(int64_t num_rows) { return num_rows + ceil_div(64, int64_t(sizeof(Seen))); }

    int64_t num_rows_ = 0, num_panels_ = 0, num_tokens_ = 0, size_ = 0, padded_size_ = 0, num_marks_ = 0;
    int num_threads_ = 0;
    std::vector<Input> inputs_;         // [rows][padded size]
    std::vector<Screened> rows_;        // [rows]
    QuadRows quads_;
    std::vector<Seen> seen_;            // [threads][rows and a line's more]
    std::vector<Least> least_;          // [rows], by all threads and the first panel
    std::vector<float> most_;           // [rows][panels] that a logit is there, where it may be the largest; or less than all
    std::vector<Marks> marks_;          // [panels][marks of a panel] whose rows multiply them
};

}  // namespace millrace
