// How much of what cores read stays in the cache behind their own until it is read again.
//
// What a processor says of that cache tells little: others on the same machine fill it, too, and a host may leave a guest a
// part of it. So it is measured by reading weights twice in a row, and again after some time.

#pragma once

#include <algorithm>
#include <cstdint>

#include "machine/threads.h"

namespace millrace {

class CacheProbe {
  public:
    // Bytes, 0 where these are few or nobody knows, for who asks at `asked_ns`. They are measured by reading parts of `data`
    // that were last read before more than a cache holds: 96 MiB in all where MOST are kept, in 4.5 ms (Zen 4 class EPYC), and
    // 168 where LEAST or none are. They are measured again after PAUSE times as long, and if they were none PAUSE_IN_VAIN
    // times; but after MOST_PAUSE_NS at the latest, as somebody else may have had the core meanwhile.
    int64_t retained_bytes(const char* data, int64_t size, int64_t at_ns) {
        if (is_fixed_ || at_ns < next_ns_) return num_bytes_;
        int64_t spent_ns = 0;
        num_bytes_ = measure(data, size, &spent_ns);
        next_ns_ = at_ns + std::min(MAX_PAUSE_NS, spent_ns * (num_bytes_ > 0 ? PAUSE_FACTOR : PAUSE_FACTOR_IF_NONE));
        return num_bytes_;
    }

    int64_t num_bytes() const { return num_bytes_; }  // as last measured

    // From now on it is that many, and nothing is measured; below 0: it is measured again. For tests.
    void assume(int64_t num_bytes) {
        is_fixed_ = num_bytes >= 0;
        num_bytes_ = std::max<int64_t>(0, num_bytes), next_ns_ = 0;
    }

  private:
    static constexpr int64_t PAUSE_FACTOR = 2000, PAUSE_FACTOR_IF_NONE = 10000, MAX_PAUSE_NS = 120'000'000'000;
    // Of more nobody makes use, and less is no more than cores have for themselves.
    static constexpr int64_t MAX_BYTES = 16 << 20, MIN_BYTES = 4 << 20;
    static constexpr int NUM_TRIALS = 3;  // of the shortest times: others may have had the core
    // Reads that take less than two thirds of the time are from a cache: on a Zen 4 class EPYC it is a third.
    static constexpr int64_t FAST_RATIO = 2, SLOW_RATIO = 3;

    static int64_t measure(const char* data, int64_t size, int64_t* spent_ns) {
        if (size < NUM_TRIALS * MAX_BYTES) return 0;  // so few weights that a cache may have them all
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

    // How long it takes to read a number of each line.
    static int64_t read_ns(const char* data, int64_t num_bytes) {
        int64_t began_ns = now_ns();
        for (int64_t i = 0; i < num_bytes; i += 64) asm volatile("" : : "r"(data[i]));
        return now_ns() - began_ns;
    }

    int64_t num_bytes_ = 0, next_ns_ = 0;  // and when it is measured next
    bool is_fixed_ = false;
};

}  // namespace millrace
