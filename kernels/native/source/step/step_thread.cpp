#include "step/step_thread.h"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "machine/threads.h"

namespace millrace {

namespace {

class Call : public Line::Job {
  public:
    explicit Call(const std::function<void()>& function) : function_(function) {}
    void run() override { function_(); }

  private:
    const std::function<void()>& function_;
};

}  // namespace

Line::Line(int cpu) {
    std::unique_lock<std::mutex> lock(mutex_);
    bool has_begun = false;
    thread_ = std::thread([this, cpu, &has_begun] {
        if (cpu >= 0) pin({cpu});
        {
            std::lock_guard<std::mutex> inner(mutex_);
#ifdef __linux__
            thread_id_ = int32_t(syscall(SYS_gettid));
#endif
            has_begun = true;
        }
        over_.notify_all();
        work();
    });
    over_.wait(lock, [&] { return has_begun; });
}

Line::~Line() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_closed_ = true;
    }
    come_.notify_all();
    thread_.join();
}

void Line::add(Job* job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        append(job);
    }
    come_.notify_one();
}

bool Line::add_behind(Job* job, const Job* before) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!last_ || last_ != before) return false;
    append(job);  // the thread runs, so nobody has to be woken
    return true;
}

void Line::append(Job* job) {
    job->is_in_line_ = true, job->next_ = nullptr;
    (last_ ? last_->next_ : first_) = job;
    last_ = job;
    has_jobs_.store(true, std::memory_order_release);
}

void Line::wait(const Job* job) {
    std::unique_lock<std::mutex> lock(mutex_);
    over_.wait(lock, [&] { return !job->is_in_line_; });
}

bool Line::is_in_line(const Job* job) {
    std::lock_guard<std::mutex> lock(mutex_);
    return job->is_in_line_;
}

void Line::call(const std::function<void()>& function) {
    Call job(function);
    add(&job);
    wait(&job);
}

void Line::work() {
    while (Job* job = first()) {
        job->run();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            first_ = job->next_;
            if (!first_) last_ = nullptr;
            has_jobs_.store(first_ != nullptr, std::memory_order_release);
            job->is_in_line_ = false;
        }
        over_.notify_all();
    }
}

// The one to run next; none when all is over. Waits as workers of a `Pool` do.
Line::Job* Line::first() {
    awake_until([this] { return has_jobs_.load(std::memory_order_acquire); });
    std::unique_lock<std::mutex> lock(mutex_);
    come_.wait(lock, [&] { return is_closed_ || first_; });
    return first_;
}

}  // namespace millrace
