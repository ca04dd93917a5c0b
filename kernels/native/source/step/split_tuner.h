// Whether two threads take the rows of a step apart: each half of them, from the layer on before which both are there.
//
// Together they read each weight once, wait for each other some two hundred times a step, and read what the other one has
// written. Apart each reads all weights, and nobody waits. Where memory gives 47 to 53 GB/s, perhaps as the cores are on
// different dies then, 32 rows take 12 % less apart, 28 and 48 take 6; where it gives 33, up to 4 less or 2 more
// (SmolLM2-135M's shape, two cores of a Zen 4 class EPYC). So it is measured, as steps of both kinds that follow each other
// show it.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace millrace {

class SplitTuner {
  public:
    // What steps that are compared have in common.
    struct Kind {
        int64_t num_rows;
        int32_t output_kind;  // of them: whatever number stands for it

        bool operator==(const Kind& other) const { return num_rows == other.num_rows && output_kind == other.output_kind; }
    };

    // Whether the next step, which is such a one, is one whose rows are taken apart.
    bool should_split(const Kind& kind) const {
        if (is_fixed_) return fixed_;
        const Estimate& estimate = estimates_[bucket_of(kind)];
        if (estimate.num_compared < MIN_COMPARISONS) return follows_same_kind(kind) && !was_split_;
        return (estimate.gain > 0) != (estimate.until_trial == 0 && follows_same_kind(kind));
    }

    // That step took so long.
    void record(const Kind& kind, bool is_split, int64_t elapsed_ns) {
        Estimate& estimate = estimates_[bucket_of(kind)];
        elapsed_ns = std::max<int64_t>(1, elapsed_ns);
        bool is_comparable = follows_same_kind(kind) && was_split_ != is_split;
        if (is_comparable) {
            float log_ratio = std::log(float(elapsed_ns) / float(last_elapsed_ns_));
            float gain = std::clamp(is_split ? -log_ratio : log_ratio, -MAX_GAIN, MAX_GAIN);
            estimate.num_compared = std::min(estimate.num_compared + 1, MAX_COMPARISONS);
            estimate.gain += (gain - estimate.gain) / float(estimate.num_compared);
        }
        if (estimate.until_trial > 0)
            estimate.until_trial--;
        else if (is_comparable && estimate.num_compared >= MIN_COMPARISONS)
            estimate.until_trial = std::fabs(estimate.gain) < CLOSE_GAIN ? TRIAL_INTERVAL_CLOSE : TRIAL_INTERVAL_CLEAR;
        last_ = kind, was_split_ = is_split, last_elapsed_ns_ = elapsed_ns, has_last_ = true;
    }

    // A step came that can not be one of them.
    void skip() { has_last_ = false; }

    // From now on all such steps are so, or none is, and nothing is measured; below 0: it is measured again. For tests.
    void assume(int32_t is_split) { *this = SplitTuner(), is_fixed_ = is_split >= 0, fixed_ = is_split > 0; }

  private:
    static constexpr int MIN_COMPARISONS = 6;               // comparisons, before the better of the two is the rule
    static constexpr int MAX_COMPARISONS = 8;                // those that count, about
    static constexpr int TRIAL_INTERVAL_CLOSE = 31, TRIAL_INTERVAL_CLEAR = 255;  // x
    static constexpr float CLOSE_GAIN = 0.08f;         // a gain or loss below which that is soon
    static constexpr float MAX_GAIN = 0.5f;            // of which more is not believed: somebody else had a core

    // About steps of nearly as many rows.
    struct Estimate {
        float gain = 0;  // by taking rows apart: the logarithm of how many times as long they take together
        int num_compared = 0, until_trial = 0;
    };

    // Whether the last step was such a one.
    bool follows_same_kind(const Kind& kind) const { return has_last_ && last_ == kind; }

    static size_t bucket_of(const Kind& kind) { return size_t(std::min<int64_t>(kind.num_rows / 8, 15)); }

    std::array<Estimate, 16> estimates_{};
    Kind last_{};
    bool has_last_ = false, was_split_ = false;  // the last step
    int64_t last_elapsed_ns_ = 1;
    bool is_fixed_ = false, fixed_ = false;
};

}  // namespace millrace
