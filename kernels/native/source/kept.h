// How much of what cores read stays in the cache behind their own until it is read again.
//
// What a processor says of that cache tells little: others on the same machine fill it, too, and a host may leave a guest a
// small part of it. Of 32 MiB a Zen 4 class EPYC was seen to keep 16 and more for two cores, a Zen 5 class one no two.
// So it is measured, and again after some time, by reading weights twice in a row.

#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.h"

namespace millrace {

class Kept {
  public:
    // Bytes, 0 where few or unknown: measured with `data`, of which no part was read in the last milliseconds but by what
    // asks here, in 1.5 to 5 ms, each `ASKED` times that somebody asks.
    int64_t num_bytes(const char* data, int64_t size) {
        if (is_assumed_) return num_bytes_;
        if (num_asked_++ % ASKED == 0) num_bytes_ = measure(data, size);
        return num_bytes_;
    }

    int64_t num_bytes() const { return num_bytes_; }  // as last measured

    // From now on it is that many, and nothing is measured; below 0: it is measured again. For tests.
    void assume(int64_t num_bytes) {
        is_assumed_ = num_bytes >= 0;
        num_bytes_ = num_bytes, num_asked_ = 0;
    }

  private:
    static constexpr int64_t ASKED = 1000;
    static constexpr int64_t MOST = 16 << 20, LEAST = 4 << 20;
    static constexpr int LOOKS = 3;  // of the shortest times: others may have had the core

    static int64_t measure(const char* data, int64_t size) {
        const char *place = data, *end = data + size;
        for (int64_t bytes = MOST; bytes >= LEAST; bytes /= 2) {
            int64_t first_ns = INT64_MAX, again_ns = INT64_MAX;
            for (int look = 0; look < LOOKS; look++, place += bytes) {
                if (end - place < bytes) return 0;  // as good as all weights may be in the cache
                first_ns = std::min(first_ns, read_ns(place, bytes));
                again_ns = std::min(again_ns, read_ns(place, bytes));
            }
            if (3 * again_ns < 2 * first_ns) return bytes;
        }
        return 0;
    }

    // How long it takes to read a number of each line.
    static int64_t read_ns(const char* data, int64_t num_bytes) {
        int64_t began_ns = now_ns();
        for (int64_t i = 0; i < num_bytes; i += 64) asm volatile("" : : "r"(data[i]));
        return now_ns() - began_ns;
    }

    int64_t num_bytes_ = 0, num_asked_ = 0;
    bool is_assumed_ = false;
};

}  // namespace millrace
