// SplitTuner: decides whether the rows of a decoding step are split between two threads, from measured step times.
//
// Together, two threads read each weight once, wait for each other some two hundred times a step, and read each other's
// results. Split, each reads all weights, and neither waits. Where memory gives 47 to 53 GB/s, perhaps because the
// cores are on different dies then, 32 rows take 12 % less when split, 28 and 48 rows 6 %. Where it gives 33 GB/s they
// take up to 4 % less or 2 % more (SmolLM2-135M's shape, two cores of a Zen 4 class EPYC). So consecutive steps of both
// kinds are compared. Called by step_split.h, on the thread that runs the step.

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
        int32_t output_kind;  // a number for what the step outputs

        bool operator==(const Kind& other) const { return num_rows == other.num_rows && output_kind == other.output_kind; }
    };

    // Whether the next step, which is of this kind, should be split.
    bool should_split(const Kind& kind) const {
        if (is_fixed_) return fixed_;
        const Estimate& estimate = estimates_[bucket_of(kind)];
        if (estimate.num_compared < MIN_COMPARISONS) return follows_same_kind(kind) && !was_split_;
        return (estimate.gain > 0) != (estimate.until_trial == 0 && follows_same_kind(kind));
    }

    // Records the duration of such a step.
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

    // A step ran that cannot be split.
    void skip() { has_last_ = false; }

    // Always or never splits from now on, without measuring; a negative number resumes measuring. For tests.
    void assume(int32_t is_split) { *this = SplitTuner(), is_fixed_ = is_split >= 0, fixed_ = is_split > 0; }

  private:
    static constexpr int MIN_COMPARISONS = 6;  // comparisons before the faster way is the rule
    static constexpr int MAX_COMPARISONS = 8;  // comparisons that count, about
    // Steps until the other way is tried: two more comparisons.
    static constexpr int TRIAL_INTERVAL_CLOSE = 31, TRIAL_INTERVAL_CLEAR = 255;
    static constexpr float CLOSE_GAIN = 0.08f;  // TRIAL_INTERVAL_CLOSE applies to a gain or loss below this
    static constexpr float MAX_GAIN = 0.5f;     // limit of one comparison: beyond it another process had a core

    // For steps of similar numbers of rows.
    struct Estimate {
        float gain = 0;  // log(time together / time split)
        int num_compared = 0, until_trial = 0;
    };

    // Whether the last step was of this kind.
    bool follows_same_kind(const Kind& kind) const { return has_last_ && last_ == kind; }

    static size_t bucket_of(const Kind& kind) { return size_t(std::min<int64_t>(kind.num_rows / 8, 15)); }

    std::array<Estimate, 16> estimates_{};
    Kind last_{};
    bool has_last_ = false, was_split_ = false;  // of the last step
    int64_t last_elapsed_ns_ = 1;
    bool is_fixed_ = false, fixed_ = false;
};

}  // namespace millrace
