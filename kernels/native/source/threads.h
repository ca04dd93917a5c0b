// Compute threads that outlive a step: they spin for a few microseconds, then yield, then sleep.
//
// Knows how to run one function on all of them and how they wait for each other. Refuses to know what is computed.

#pragma once

#include <atomic>
#include <condition_variable>
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

class Pool {
  public:
    // The caller of `run` is one of the threads. Of the others each is pinned to one of `cpus` in their order, and to
    // none when there are fewer of them.
    Pool(int num_threads, const std::vector<int>& cpus);
    ~Pool();

    int size() const { return int(workers_.size()) + 1; }

    // Calls job(thread) for each thread in [0, num_threads) and returns when all of them have. One caller at a time.
    void run(int num_threads, const std::function<void(int)>& job);

    Barrier barrier;  // for the threads of the region that runs

  private:
    void work(int thread);

    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    int num_active_ = 0;
    alignas(64) std::atomic<unsigned> turn_{0};  // raised for each region
    alignas(64) std::atomic<int> num_left_{0};   // workers that have yet to finish the region
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
