#include "step/step_thread.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "machine/threads.h"

namespace millrace {

namespace {

class FunctionJob : public StepThread::Job {
  public:
    explicit FunctionJob(const std::function<void()>& function) : function_(function) {}
    void run() override { function_(); }

  private:
    const std::function<void()>& function_;
};

}  // namespace

StepThread::StepThread(int cpu) {
    std::unique_lock<std::mutex> lock(mutex_);
    bool has_started = false;
    thread_ = std::thread([this, cpu, &has_started] {
        if (cpu >= 0) pin({cpu});
        {
            std::lock_guard<std::mutex> inner(mutex_);
#ifdef __linux__
            thread_id_ = int32_t(syscall(SYS_gettid));
#endif
            has_started = true;
        }
        job_done_.notify_all();
        run_jobs();
    });
    job_done_.wait(lock, [&] { return has_started; });
}

StepThread::~StepThread() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_closed_ = true;
    }
    job_added_.notify_all();
    thread_.join();
}

void StepThread::submit(Job* job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        append(job);
    }
    job_added_.notify_one();
}

bool StepThread::submit_after(Job* job, const Job* before) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!last_ || last_ != before) return false;
    append(job);  // the thread is running, so it needs no wakeup
    return true;
}

void StepThread::append(Job* job) {
    job->is_queued_ = true, job->next_ = nullptr;
    (last_ ? last_->next_ : first_) = job;
    last_ = job;
    has_jobs_.store(true, std::memory_order_release);
}

void StepThread::wait(const Job* job) {
    std::unique_lock<std::mutex> lock(mutex_);
    job_done_.wait(lock, [&] { return !job->is_queued_; });
}

bool StepThread::is_queued(const Job* job) {
    std::lock_guard<std::mutex> lock(mutex_);
    return job->is_queued_;
}

void StepThread::call(const std::function<void()>& function) {
    FunctionJob job(function);
    submit(&job);
    wait(&job);
}

void StepThread::run_jobs() {
    while (Job* job = next_job()) {
        job->run();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            first_ = job->next_;
            if (!first_) last_ = nullptr;
            has_jobs_.store(first_ != nullptr, std::memory_order_release);
            job->is_queued_ = false;
        }
        job_done_.notify_all();
    }
}

// The next job; null when the queue is closed and empty. Waits as the workers of a `Pool` do.
StepThread::Job* StepThread::next_job() {
    spin_until([this] { return has_jobs_.load(std::memory_order_acquire); });
    std::unique_lock<std::mutex> lock(mutex_);
    job_added_.wait(lock, [&] { return is_closed_ || first_; });
    return first_;
}

}  // namespace millrace
