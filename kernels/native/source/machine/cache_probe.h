// CacheProbe: measures how many recently read bytes the shared cache behind the cores' private caches retains.
//
// The size that the processor reports is of little use: other tenants fill the same cache, and a host may give a guest
// only a part. So the probe reads parts of the weights twice in a row and compares the times, and repeats this from
// time to time. Used by Step (step/decoder.h) on the calling thread, before a step's threads start.

#pragma once

#include <algorithm>
#include <cstdint>

#include "machine/threads.h"

namespace millrace {

class CacheProbe {
  public:
    // Returns the retained bytes; 0 if they are few or unknown. `at_ns` is the current time. A measurement reads parts
    // of `data` that were last read before more than a cache holds: 96 MiB in all if MAX_BYTES are retained, which
    // takes 4.5 ms (Zen 4 class EPYC), and 168 MiB if MIN_BYTES or none are. The next one follows after PAUSE_FACTOR
    // times its duration, or PAUSE_FACTOR_IF_NONE times if nothing is retained, but after MAX_PAUSE_NS at the latest,
    // because another process may have had the core meanwhile.
    int64_t retained_bytes(const char* data, int64_t size, int64_t at_ns) {
        if (is_fixed_ || at_ns < next_ns_) return num_bytes_;
        int64_t spent_ns = 0;
        num_bytes_ = measure(data, size, &spent_ns);
        next_ns_ = at_ns + std::min(MAX_PAUSE_NS, spent_ns * (num_bytes_ > 0 ? PAUSE_FACTOR : PAUSE_FACTOR_IF_NONE));
        return num_bytes_;
    }

    int64_t num_bytes() const { return num_bytes_; }  // as last measured

    // Fixes the result and stops measuring; a negative number resumes measuring. For tests.
    void assume(int64_t num_bytes) {
        is_fixed_ = num_bytes >= 0;
        num_bytes_ = std::max<int64_t>(0, num_bytes), next_ns_ = 0;
    }

  private:
    static constexpr int64_t PAUSE_FACTOR = 2000, PAUSE_FACTOR_IF_NONE = 10000, MAX_PAUSE_NS = 120'000'000'000;
    // More is of no use; less is no more than the cores' private caches hold.
    static constexpr int64_t MAX_BYTES = 16 << 20, MIN_BYTES = 4 << 20;
    static constexpr int NUM_TRIALS = 3;  // the shortest time of these counts: another process may have had the core
    // A second read that takes less than 2/3 of the first comes from a cache. On a Zen 4 class EPYC it takes 1/3.
    static constexpr int64_t FAST_RATIO = 2, SLOW_RATIO = 3;

    static int64_t measure(const char* data, int64_t size, int64_t* spent_ns) {
        if (size < NUM_TRIALS * MAX_BYTES) return 0;  // a cache may hold all of so few weights
        int64_t offset = 0;
        for (int64_t bytes = MAX_BYTES; bytes >= MIN_BYTES; bytes /= 2) {
            int64_t first_ns = INT64_MAX, again_ns = INT64_MAX;
            for (int trial = 0; trial < NUM_TRIALS; trial++, offset += bytes) {
                if (offset + bytes > size) offset = 0;
                for (int64_t* least_ns : {&first_ns, &again_ns}) {
                    int64_t took_ns = read_ns(data + offset, bytes);
                    *least_ns = std::min(*least_ns, took_ns), *spent_ns += took_ns;
                }
            }
            if (again_ns * SLOW_RATIO < first_ns * FAST_RATIO) return bytes;
        }
        return 0;
    }

    // Time to read one byte of each cache line.
    static int64_t read_ns(const char* data, int64_t num_bytes) {
        int64_t began_ns = now_ns();
        for (int64_t i = 0; i < num_bytes; i += 64) asm volatile("" : : "r"(data[i]));
        return now_ns() - began_ns;
    }

    int64_t num_bytes_ = 0, next_ns_ = 0;  // the second is the time of the next measurement
    bool is_fixed_ = false;
};

}  // namespace millrace
