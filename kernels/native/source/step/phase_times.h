// How a step goes about its phases: rows in pieces, and each part's time where somebody asks for it.

#pragma once

#include <array>

#include "weights/model.h"
#include "machine/threads.h"

namespace millrace {

constexpr int64_t ROWS_PER_PIECE = 16;  // a piece of the work between products

// Calls use(row) for the rows of a phase that a thread comes to take.
template <class Use>
void parallel_for_rows(ThreadTeam::Member member, int64_t num, const Use& use) {
    member.parallel_for(num, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
        for (int64_t row = first; row < last; row++) use(row);
    });
}

// The times of a step's parts, as who comes first sees them.
class PhaseTimes {
  public:
    explicit PhaseTimes(bool is_enabled) : is_enabled_(is_enabled) { start(); }

    void start() { since_ns_ = now_ns(); }
    int64_t since_ns() const { return since_ns_; }  // when the last phase ended

    // A phase, whose time is that of a part of the step.
    template <class Work>
    void run(Phases& phases, PhaseKind kind, const Work& work) {
        if (!phases.run(work) || !is_enabled_ || phases.member().rank > 0) return;
        int64_t now = now_ns();
        elapsed_ns_[kind] += now - since_ns_;
        since_ns_ = now;
    }

    // Adds them.
    void add_to(int64_t* phase_ns) const {
        for (int kind = 0; kind < NUM_PHASE_KINDS; kind++) phase_ns[kind] += elapsed_ns_[kind];
    }

  private:
    bool is_enabled_;
    int64_t since_ns_;
    std::array<int64_t, NUM_PHASE_KINDS> elapsed_ns_{};
};

}  // namespace millrace
