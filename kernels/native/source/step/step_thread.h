// StepThread: a thread that runs jobs in order, each as soon as the one before is over.
//
// It decouples steps from the threads that request them, which may be busy or descheduled meanwhile. The queue is an
// intrusive list of jobs. All methods may be called by any thread.

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
    // A job. The caller owns it and must keep it until it is over.
    class Job {
      public:
        virtual ~Job() = default;
        virtual void run() = 0;  // must not throw

      private:
        friend class StepThread;
        bool is_queued_ = false;
        Job* next_ = nullptr;  // in the queue, so that queuing allocates nothing
    };

    // Pins the thread to `cpu` unless it is negative.
    explicit StepThread(int cpu);
    ~StepThread();  // runs the queued jobs first

    // Queues `job` behind all others; does not wait.
    void submit(Job* job);
    // Like `submit`, but only if `before` is the last in the queue. Returns false and does nothing if it is over or not
    // the last.
    bool submit_after(Job* job, const Job* before);
    // Waits until `job` is over; returns at once if it is not queued.
    void wait(const Job* job);
    bool is_queued(const Job* job);
    // `submit` and `wait`, for a function.
    void call(const std::function<void()>& function);

    int32_t thread_id() const { return thread_id_; }  // the system's

  private:
    void run_jobs();
    void append(Job* job);
    Job* next_job();

    std::mutex mutex_;
    std::condition_variable job_added_, job_done_;
    Job *first_ = nullptr, *last_ = nullptr;  // the queue; the first is running
    std::atomic<bool> has_jobs_{false};       // whether the queue is not empty, for polling
    bool is_closed_ = false;
    int32_t thread_id_ = 0;
    std::thread thread_;
};

}  // namespace millrace
