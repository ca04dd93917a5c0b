// What is fetched while a tile of a product is summed, so that memory is busy meanwhile.
//
// Knows how much comes with each pair of k. Refuses to know what is summed.

#pragma once

#include "machine/prefetch.h"
#include "attention/kv_prefetch.h"

namespace millrace {

constexpr int64_t MOST_SHARE = 256;  // bytes: the four lines of the cache that are fetched at most at a time

// So many `times` the next `share` bytes from `place` on, whole lines. Where not all of the tile's columns are summed at a
// time, as many are fetched with the next ones, `apart` further on; 0: all are fetched with the first ones. And what else, with
// the first ones. `is_passing`: the panel itself is asked for, as what passes, and nothing ahead.
struct Ahead {
    const char* place;
    int64_t share, times, apart;
    Beside beside;
    bool is_passing = false;
};

// Fetches that, as sums go on. Who fetches nothing does not look for that either: where two threads share a core, as those of
// virtual machines do, instructions beside the sums cost as much as these.
template <Fetched FETCHED>
class Fetching {
  public:
    explicit Fetching(const Ahead& ahead)
        : line_(ahead.place), share_(ahead.share), times_(ahead.times), other_(ahead.beside.place), others_(ahead.beside.times),
          apart_(ahead.beside.apart) {}

    // What is ahead, one time.
    [[gnu::always_inline]] void once() {
        if (FETCHED == Fetched::NONE || FETCHED == Fetched::PASSING || times_-- <= 0) return;
        _mm_prefetch(line_, _MM_HINT_T1);
        if (share_ > 64) _mm_prefetch(line_ + 64, _MM_HINT_T1);
        if (share_ > 128) {
            _mm_prefetch(line_ + 128, _MM_HINT_T1);
            _mm_prefetch(line_ + 192, _MM_HINT_T1);
        }
        line_ += share_;
    }

    // And what else is, with a pair of k.
    [[gnu::always_inline]] void beside() {
        if (FETCHED != Fetched::BOTH || --until_other_ > 0) return;
        if (others_-- > 0) _mm_prefetch(other_, _MM_HINT_T1), _mm_prefetch(other_ + 64, _MM_HINT_T1);
        other_ += Upcoming::FETCHED, until_other_ = apart_;
    }

  private:
    const char* line_;
    int64_t share_, times_;
    const char* other_;
    int64_t others_, apart_, until_other_ = 1;
};

}  // namespace millrace
