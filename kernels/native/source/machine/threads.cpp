#include "machine/threads.h"

#include <immintrin.h>

#include <algorithm>
#include <ctime>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace millrace {

namespace {

int64_t clock_ns(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * int64_t(1'000'000'000) + time.tv_nsec;
}

int64_t thread_cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }  // of this thread

bool is_pinned_to(int cpu) {
#ifdef __linux__
    cpu_set_t set;
    bool is_known = pthread_getaffinity_np(pthread_self(), sizeof set, &set) == 0;
    return is_known && CPU_COUNT(&set) == 1 && CPU_ISSET(cpu, &set);
#else
    (void)cpu;
    return false;
#endif
}

}  // namespace

void pin(const std::vector<int>& cpus) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    // If this is not permitted, the system places the thread, as before.
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)cpus;
#endif
}

int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

void WorkRanges::reset(int num_threads) {
    if (int(ranges_.size()) < num_threads) ranges_ = std::vector<ThreadRange>(num_threads);
    for (ThreadRange& hand : ranges_) hand.range.store({NO_PHASE, 0, 0}, std::memory_order_relaxed);
}

std::optional<int64_t> WorkRanges::take(uint32_t phase, int rank, int64_t num_pieces, bool from_end) {
    std::atomic<Range>& range = ranges_[rank].range;
    Range before = range.load(std::memory_order_relaxed), after;
    do {
        after = before.phase == phase ? before : Range{phase, 0, uint64_t(num_pieces)};
        if (after.first == after.last) return std::nullopt;
        from_end ? after.last-- : after.first++;
    } while (!range.compare_exchange_weak(before, after, std::memory_order_relaxed));
    return from_end ? int64_t(after.last) : int64_t(after.first) - 1;
}

void ThreadTeam::begin_region(int num_threads) {
    num_threads_ = num_threads;
    num_ranks_.store(1, std::memory_order_relaxed);
    work_ranges.reset(num_threads);
    state_.store({0, 1, 0}, std::memory_order_release);
}

void ThreadTeam::end_region() { state_.store({FINISHED, 0, 0}, std::memory_order_release); }

bool ThreadTeam::join(int thread, Member* member) {
    while (!is_due(thread, state_.load(std::memory_order_acquire).phase)) std::this_thread::yield();
    while (!try_to_join()) std::this_thread::yield();
    // Does not change until this thread has done its part, or the region has ended.
    State now = state_.load(std::memory_order_acquire);
    member->rank = member->scratch_index = num_ranks_.fetch_add(1, std::memory_order_relaxed);
    member->count = now.num_present, member->phase = now.phase;
    return now.phase != FINISHED;
}

bool ThreadTeam::try_to_join() {
    State before = state_.load(std::memory_order_acquire), after;
    do {
        if (before.phase == FINISHED) return true;
        after = before, after.num_joining++;
    } while (!state_.compare_exchange_weak(before, after, std::memory_order_acq_rel));
    uint32_t phase = before.phase;
    for (int spin = 0; spin < NUM_SPINS || join_delay >= 0; spin++) {
        if (state_.load(std::memory_order_acquire).phase != phase) return true;
        spin < NUM_SPINS ? _mm_pause() : std::this_thread::yield();
    }
    before = state_.load(std::memory_order_acquire);
    do {
        if (before.phase != phase) return true;
        after = before, after.num_joining--;
    } while (!state_.compare_exchange_weak(before, after, std::memory_order_acq_rel));
    return false;
}

void ThreadTeam::end_phase(Member* member) {
    State now;
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == member->count) {
        num_arrived_.store(0, std::memory_order_relaxed);
        if (join_delay >= 0) await_due(member->phase);
        State before = state_.load(std::memory_order_acquire);
        do {
            now = {before.phase + 1, uint16_t(before.num_present + before.num_joining), 0};
        } while (!state_.compare_exchange_weak(before, now, std::memory_order_acq_rel));
    } else {
        now = wait_for_others(member->phase);
    }
    member->count = now.num_present, member->phase++;
}

void ThreadTeam::await_due(uint32_t phase) const {
    int num_due = 1;
    while (num_due < num_threads_ && is_due(num_due, phase)) num_due++;
    for (State now = state_.load(); now.num_present + now.num_joining < num_due; now = state_.load())
        std::this_thread::yield();
}

ThreadTeam::State ThreadTeam::wait_for_others(uint32_t phase) const {
    for (int spin = 0;; spin++) {
        State now = state_.load(std::memory_order_acquire);
        if (now.phase != phase) return now;
        if (spin < NUM_SPINS)
            _mm_pause();
        else
            std::this_thread::yield();
    }
}

Pool::Pool(int num_threads, const std::vector<int>& cpus) : limit(num_threads), on_all_cpus_(num_threads) {
    if (int(cpus.size()) >= num_threads) cpus_.assign(cpus.begin(), cpus.begin() + num_threads);
    try {
        for (int thread = 1; thread < num_threads; thread++) {
            workers_.emplace_back([this, thread] {
                if (!cpus_.empty()) pin({cpus_[thread]});
                worker_loop(thread);
            });
        }
    } catch (...) {  // the system allows no further thread: a vector of running threads must not be destroyed
        end_workers();
        throw;
    }
}

Pool::~Pool() { end_workers(); }

void Pool::end_workers() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_stopping_ = true;
    }
    wakeup_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(int num_threads, const std::function<void(int)>& job) {
    int num_woken = is_probing ? size() : num_threads;
    uses_all_cpus_ = limit < size();
    set_affinity(0, uses_all_cpus_);
    began_ns_ = now_ns();
    job_ = &job;
    team.begin_region(num_threads);
    if (num_woken > 1) {
        num_unfinished_.store(num_woken - 1, std::memory_order_relaxed);
        is_running_.store(true, std::memory_order_relaxed);
        Region region{region_.load(std::memory_order_relaxed).number + 1, uint16_t(num_woken), uint16_t(num_threads)};
        {
            std::lock_guard<std::mutex> lock(mutex_);
            region_.store(region, std::memory_order_release);
        }
        wakeup_.notify_all();
    }
    run_job(0);
    team.end_region();
    is_running_.store(false, std::memory_order_relaxed);
    int64_t before = thread_cpu_ns();
    for (int spin = 0; num_woken > 1 && num_unfinished_.load(std::memory_order_acquire) > 0; spin++) {
        if (spin < NUM_SPINS)
            _mm_pause();
        else
            std::this_thread::yield();
    }
    // The thread had its core, as in waits between phases.
    used_ns_.fetch_add(thread_cpu_ns() - before, std::memory_order_relaxed);
    add_thread_times(now_ns() - began_ns_);  // includes the wait for late threads, because their lost time counts, too
}

void Pool::set_affinity(int thread, bool uses_all_cpus) {
    if (cpus_.empty() || uses_all_cpus == bool(on_all_cpus_[thread])) return;
    auto self = std::this_thread::get_id();
    if (thread == 0 && (uses_all_cpus ? !is_pinned_to(cpus_[0]) : self != released_caller_)) return;
    if (thread == 0) released_caller_ = self;
    pin(uses_all_cpus ? cpus_ : std::vector<int>{cpus_[thread]});
    on_all_cpus_[thread] = uses_all_cpus;
}

void Pool::run_job(int thread) {
    int64_t before = thread_cpu_ns();
    (*job_)(thread);
    int64_t used = thread_cpu_ns() - before;
    used_ns_.fetch_add(used, std::memory_order_relaxed);
    lost_ns_.fetch_add(std::max<int64_t>(0, now_ns() - began_ns_ - used), std::memory_order_relaxed);
}

void Pool::probe() {
    int64_t began = now_ns(), before = thread_cpu_ns();
    while (is_running_.load(std::memory_order_relaxed)) _mm_pause();
    int64_t elapsed = now_ns() - began, used = thread_cpu_ns() - before;
    probed_ns_.fetch_add(elapsed, std::memory_order_relaxed);
    lost_probing_ns_.fetch_add(std::max<int64_t>(0, elapsed - used), std::memory_order_relaxed);
}

void Pool::add_thread_times(int64_t elapsed_ns) {
    int64_t of_region[NUM_THREAD_TIMES] = {elapsed_ns, used_ns_.exchange(0), lost_ns_.exchange(0), probed_ns_.exchange(0),
                                           lost_probing_ns_.exchange(0)};
    for (int i = 0; i < NUM_THREAD_TIMES; i++) thread_times[i] += of_region[i];
}

void Pool::worker_loop(int thread) {
    uint32_t seen = 0;
    auto is_called = [&] {
        Region region = region_.load(std::memory_order_acquire);
        return region.number != seen && thread < region.num_woken;
    };
    for (;;) {
        if (!spin_until(is_called)) {
            std::unique_lock<std::mutex> lock(mutex_);
            wakeup_.wait(lock, [&] { return is_stopping_ || is_called(); });
            if (is_stopping_) return;
        }
        Region region = region_.load(std::memory_order_acquire);
        seen = region.number;
        bool does_compute = thread < region.num_computing;
        set_affinity(thread, does_compute && uses_all_cpus_);
        does_compute ? run_job(thread) : probe();
        num_unfinished_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace millrace
