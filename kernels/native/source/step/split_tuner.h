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

class Apart {
  public:
    // What steps that are compared have in common.
    struct Kind {
        int64_t num_rows;
        int32_t wants;  // of them: whatever number stands for it

        bool operator==(const Kind& other) const { return num_rows == other.num_rows && wants == other.wants; }
    };

    // Whether the next step, which is such a one, is one whose rows are taken apart.
    bool is_next(const Kind& kind) const {
        if (is_assumed_) return assumed_;
        const Found& found = found_[place_of(kind)];
        if (found.num_compared < FIRST) return is_behind(kind) && !was_apart_;
        return (found.gained > 0) != (found.until_trial == 0 && is_behind(kind));
    }

    // That step took so long.
    void note(const Kind& kind, bool is_apart, int64_t took_ns) {
        Found& found = found_[place_of(kind)];
        took_ns = std::max<int64_t>(1, took_ns);
        bool is_compared = is_behind(kind) && was_apart_ != is_apart;
        if (is_compared) {
            float longer = std::log(float(took_ns) / float(took_ns_));
            float gained = std::clamp(is_apart ? -longer : longer, -FAR, FAR);
            found.num_compared = std::min(found.num_compared + 1, LATE);
            found.gained += (gained - found.gained) / float(found.num_compared);
        }
        if (found.until_trial > 0)
            found.until_trial--;
        else if (is_compared && found.num_compared >= FIRST)
            found.until_trial = std::fabs(found.gained) < CLOSE ? SOON : LATER;
        last_ = kind, was_apart_ = is_apart, took_ns_ = took_ns, is_behind_one_ = true;
    }

    // A step came that can not be one of them.
    void pass() { is_behind_one_ = false; }

    // From now on all such steps are so, or none is, and nothing is measured; below 0: it is measured again. For tests.
    void assume(int32_t is_apart) { *this = Apart(), is_assumed_ = is_apart >= 0, assumed_ = is_apart > 0; }

  private:
    static constexpr int FIRST = 6;               // comparisons, before the better of the two is the rule
    static constexpr int LATE = 8;                // those that count, about
    static constexpr int SOON = 31, LATER = 255;  // steps to the next one of the other kind: two more comparisons
    static constexpr float CLOSE = 0.08f;         // a gain or loss below which that is soon
    static constexpr float FAR = 0.5f;            // of which more is not believed: somebody else had a core

    // About steps of nearly as many rows.
    struct Found {
        float gained = 0;  // by taking rows apart: the logarithm of how many times as long they take together
        int num_compared = 0, until_trial = 0;
    };

    // Whether the last step was such a one.
    bool is_behind(const Kind& kind) const { return is_behind_one_ && last_ == kind; }

    static size_t place_of(const Kind& kind) { return size_t(std::min<int64_t>(kind.num_rows / 8, 15)); }

    std::array<Found, 16> found_{};
    Kind last_{};
    bool is_behind_one_ = false, was_apart_ = false;  // the last step
    int64_t took_ns_ = 1;
    bool is_assumed_ = false, assumed_ = false;
};

}  // namespace millrace
