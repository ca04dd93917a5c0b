// Helpers of a step's phases: loops over rows, and the times of the phases.
//
// Times are taken on rank 0 only, and only if requested.

#pragma once

#include <array>

#include "weights/model.h"
#include "machine/threads.h"

namespace millrace {

constexpr int64_t ROWS_PER_PIECE = 16;  // rows of a piece, in phases between products

// Calls use(row) for the rows of a phase that this thread takes.
template <class Use>
void parallel_for_rows(ThreadTeam::Member member, int64_t num, const Use& use) {
    member.parallel_for(num, ROWS_PER_PIECE, [&](int64_t first, int64_t last, int64_t) {
        for (int64_t row = first; row < last; row++) use(row);
    });
}

// Times of a step's phases, as rank 0 sees them.
class PhaseTimes {
  public:
    explicit PhaseTimes(bool is_enabled) : is_enabled_(is_enabled) { start(); }

    void start() { since_ns_ = now_ns(); }
    int64_t since_ns() const { return since_ns_; }  // end of the last phase

    // Runs a phase and adds its time to `kind`.
    template <class Work>
    void run(Phases& phases, PhaseKind kind, const Work& work) {
        if (!phases.run(work) || !is_enabled_ || phases.member().rank > 0) return;
        int64_t now = now_ns();
        elapsed_ns_[kind] += now - since_ns_;
        since_ns_ = now;
    }

    // Adds the times to the caller's.
    void add_to(int64_t* phase_ns) const {
        for (int kind = 0; kind < NUM_PHASE_KINDS; kind++) phase_ns[kind] += elapsed_ns_[kind];
    }

  private:
    bool is_enabled_;
    int64_t since_ns_;
    std::array<int64_t, NUM_PHASE_KINDS> elapsed_ns_{};
};

}  // namespace millrace
