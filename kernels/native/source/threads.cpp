#include "threads.h"

#include <immintrin.h>

#include <chrono>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace millrace {

namespace {

constexpr int NUM_SPINS = 256;  // about 4 to 15 us
constexpr std::chrono::microseconds AWAKE{300};  // after a region; a busy server's next step begins within that time

void pin(int cpu) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // not allowed: the system places the thread, as before
#else
    (void)cpu;
#endif
}

}  // namespace

void Barrier::wait(int num_threads) {
    if (num_threads == 1) return;
    unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spin = 0; round_.load(std::memory_order_acquire) == round; spin++) {
        if (spin < NUM_SPINS)
            _mm_pause();
        else
            std::this_thread::yield();
    }
}

Pool::Pool(int num_threads, const std::vector<int>& cpus) {
    bool is_pinned = int(cpus.size()) >= num_threads;
    for (int thread = 1; thread < num_threads; thread++) {
        int cpu = is_pinned ? cpus[thread] : -1;
        workers_.emplace_back([this, thread, cpu] {
            if (cpu >= 0) pin(cpu);
            work(thread);
        });
    }
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_over_ = true;
        turn_.fetch_add(1, std::memory_order_release);
    }
    woken_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(int num_threads, const std::function<void(int)>& job) {
    if (num_threads <= 1 || workers_.empty()) return job(0);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = &job;
        num_active_ = num_threads;
        num_left_.store(int(workers_.size()), std::memory_order_relaxed);
        turn_.fetch_add(1, std::memory_order_release);
    }
    woken_.notify_all();
    job(0);
    for (int spin = 0; num_left_.load(std::memory_order_acquire) > 0; spin++) {
        if (spin < NUM_SPINS)
            _mm_pause();
        else
            std::this_thread::yield();
    }
}

void Pool::work(int thread) {
    unsigned seen = 0;
    while (true) {
        auto since = std::chrono::steady_clock::now();
        for (int spin = 0; turn_.load(std::memory_order_acquire) == seen; spin++) {
            if (spin < NUM_SPINS) {
                _mm_pause();
            } else if (std::chrono::steady_clock::now() - since < AWAKE) {
                std::this_thread::yield();
            } else {
                std::unique_lock<std::mutex> lock(mutex_);
                woken_.wait(lock, [&] { return turn_.load(std::memory_order_acquire) != seen; });
            }
        }
        seen = turn_.load(std::memory_order_acquire);
        if (is_over_) return;
        if (thread < num_active_) (*job_)(thread);
        num_left_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace millrace
