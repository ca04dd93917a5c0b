// A thread of its own for steps, one behind the other: it begins the next one when the last is over, whatever whoever
// asked for them does meanwhile.
//
// Knows order and waiting. Refuses to know what a step computes.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace millrace {

class StepThread {
  public:
    // Something to run. Whoever has it keeps it until it is over.
    class Job {
      public:
        virtual ~Job() = default;
        virtual void run() = 0;  // throws nothing

      private:
        friend class StepThread;
        bool is_queued_ = false;
        Job* next_ = nullptr;  // in line; so a line takes no memory
    };

    // The thread is pinned to `cpu`; below 0 it is not.
    explicit StepThread(int cpu);
    ~StepThread();  // runs what is in line first

    // By any thread, as all that follows. Runs `job` behind all that is in line; does not wait.
    void submit(Job* job);
    // The same, but only if `before` is the last in line; false, and nothing is done, if it is over or somebody is behind.
    bool submit_after(Job* job, const Job* before);
    // Returns when `job` is over; at once if it is not in line.
    void wait(const Job* job);
    bool is_queued(const Job* job);
    // `add` and `wait`, of a function.
    void call(const std::function<void()>& function);

    int32_t thread_id() const { return thread_id_; }  // the system's

  private:
    void run_jobs();
    void append(Job* job);
    Job* next_job();

    std::mutex mutex_;
    std::condition_variable job_added_, job_done_;
    Job *first_ = nullptr, *last_ = nullptr;  // in line; the first runs
    std::atomic<bool> has_jobs_{false};       // whether there is one, for who looks often
    bool is_closed_ = false;
    int32_t thread_id_ = 0;
    std::thread thread_;
};

}  // namespace millrace
