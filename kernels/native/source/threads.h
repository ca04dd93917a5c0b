// Compute threads that outlive a step: they spin for a few microseconds, then yield, then sleep.
//
// Knows how to run one function on all of them, how they wait for each other, and how much of their time others had the
// cores. Refuses to know what is computed, and what is to be done about the others (neighbours.py).

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace millrace {

// Where the threads of one region wait for each other. Who waits spins first, since the others are usually there within
// a microsecond; then it yields, so that a busy neighbour on the same core is not kept from letting the others on.
class Barrier {
  public:
    void wait(int num_threads);

  private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

// Nanoseconds of all regions, added up: how long they took, how long their threads, all together, had cores and had
// none, and how long those that only tried ran and had none. As in neighbours.py.
enum Share : int32_t { PASSED, USED, LOST, TRIED, LOST_TRYING, NUM_SHARES };

class Pool {
  public:
    // The caller of `run` is one of the threads. Of the others each is pinned to one of `cpus` in their order, and to
    // none when there are fewer of them.
    Pool(int num_threads, const std::vector<int>& cpus);
    ~Pool();

    int size() const { return int(workers_.size()) + 1; }

    // How many threads a region is to have at most. With `is_trying` those left out compute nothing and keep their cores
    // busy while a region runs, which shows whether anybody else is there. Not to be changed while one runs.
    int limit = 0;
    bool is_trying = false;
    int64_t* shares = nullptr;  // [NUM_SHARES] to add each region's to; none: nobody asks

    // Calls job(thread) for each thread in [0, num_threads) and returns when all of them have. One caller at a time.
    void run(int num_threads, const std::function<void(int)>& job);

    Barrier barrier;  // for the threads of the region that runs

  private:
    // What the workers are told of a region in one word, so that who has nothing to do in it need not say so.
    struct Turn {
        uint32_t number;
        uint16_t num_called, num_computing;  // threads; who is called and does not compute, tries
    };

    void work(int thread);
    void compute(int thread);
    void keep_busy();
    void add_shares(int64_t passed_ns);

    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    int64_t began_ns_ = 0;                   // the region
    alignas(64) std::atomic<Turn> turn_{};   // a new one for each region
    alignas(64) std::atomic<int> num_left_{0};  // workers that have yet to finish the region
    std::atomic<bool> is_running_{false};       // the caller still computes
    std::atomic<int64_t> used_ns_{0}, lost_ns_{0}, tried_ns_{0}, lost_trying_ns_{0};  // of the region
    std::mutex mutex_;
    std::condition_variable woken_;
    bool is_over_ = false;
};

// [first, last) of `count` things for one of the threads, each as many as the others or one more.
inline void share(int64_t count, int thread, int num_threads, int64_t* first, int64_t* last) {
    *first = count * thread / num_threads;
    *last = count * (thread + 1) / num_threads;
}

}  // namespace millrace
