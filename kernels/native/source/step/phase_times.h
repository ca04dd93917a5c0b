// How a step goes about its phases: rows in pieces, and each part's time where somebody asks for it.

#pragma once

#include <array>

#include "weights/model.h"
#include "machine/threads.h"

namespace millrace {

constexpr int64_t ROWS = 16;  // a piece of the work between products

// Calls use(row) for the rows of a phase that a thread comes to take.
template <class Use>
void each_row(Party::Seat seat, int64_t num, const Use& use) {
    seat.each_piece(num, ROWS, [&](int64_t first, int64_t last, int64_t) {
        for (int64_t row = first; row < last; row++) use(row);
    });
}

// The times of a step's parts, as who comes first sees them.
class PartTimes {
  public:
    explicit PartTimes(bool is_asked) : is_asked_(is_asked) { start(); }

    void start() { since_ns_ = now_ns(); }
    int64_t since_ns() const { return since_ns_; }  // when the last phase ended

    // A phase, whose time is that of a part of the step.
    template <class Work>
    void pass(Phases& phases, Part part, const Work& work) {
        if (!phases.run(work) || !is_asked_ || phases.seat().rank > 0) return;
        int64_t now = now_ns();
        spent_ns_[part] += now - since_ns_;
        since_ns_ = now;
    }

    // Adds them.
    void tell(int64_t* part_ns) const {
        for (int part = 0; part < NUM_PARTS; part++) part_ns[part] += spent_ns_[part];
    }

  private:
    bool is_asked_;
    int64_t since_ns_;
    std::array<int64_t, NUM_PARTS> spent_ns_{};
};

}  // namespace millrace
