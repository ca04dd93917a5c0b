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

int64_t computed_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }  // by this thread

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
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // not allowed: the system places the thread, as before
#else
    (void)cpus;
#endif
}

int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

void Deal::clear(int num_threads) {
    if (int(hands_.size()) < num_threads) hands_ = std::vector<Hand>(num_threads);
    for (Hand& hand : hands_) hand.left.store({NO_PHASE, 0, 0}, std::memory_order_relaxed);
}

std::optional<int64_t> Deal::take(uint32_t phase, int rank, int64_t num_pieces, bool is_last) {
    std::atomic<Left>& left = hands_[rank].left;
    Left before = left.load(std::memory_order_relaxed), after;
    do {
        after = before.phase == phase ? before : Left{phase, 0, uint64_t(num_pieces)};
        if (after.first == after.last) return std::nullopt;
        is_last ? after.last-- : after.first++;
    } while (!left.compare_exchange_weak(before, after, std::memory_order_relaxed));
    return is_last ? int64_t(after.last) : int64_t(after.first) - 1;
}

void Party::open(int num_threads) {
    num_threads_ = num_threads;
    num_ranks_.store(1, std::memory_order_relaxed);
    deal.clear(num_threads);
    state_.store({0, 1, 0}, std::memory_order_release);
}

void Party::close() { state_.store({OVER, 0, 0}, std::memory_order_release); }

bool Party::join(int thread, Seat* seat) {
    while (!is_due(thread, state_.load(std::memory_order_acquire).phase)) std::this_thread::yield();
    while (!try_to_join()) std::this_thread::yield();
    State now = state_.load(std::memory_order_acquire);  // stays so until this thread has done its part, or all is over
    seat->rank = seat->place = num_ranks_.fetch_add(1, std::memory_order_relaxed);
    seat->count = now.num_present, seat->phase = now.phase;
    return now.phase != OVER;
}

bool Party::try_to_join() {
    State before = state_.load(std::memory_order_acquire), after;
    do {
        if (before.phase == OVER) return true;
        after = before, after.num_joining++;
    } while (!state_.compare_exchange_weak(before, after, std::memory_order_acq_rel));
    uint32_t phase = before.phase;
    for (int spin = 0; spin < NUM_SPINS || lateness >= 0; spin++) {
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

void Party::end_phase(Seat* seat) {
    State now;
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == seat->count) {
        num_arrived_.store(0, std::memory_order_relaxed);
        if (lateness >= 0) await_due(seat->phase);
        State before = state_.load(std::memory_order_acquire);
        do {
            now = {before.phase + 1, uint16_t(before.num_present + before.num_joining), 0};
        } while (!state_.compare_exchange_weak(before, now, std::memory_order_acq_rel));
    } else {
        now = wait_for_other(seat->phase);
    }
    seat->count = now.num_present, seat->phase++;
}

void Party::await_due(uint32_t phase) const {
    int num_due = 1;
    while (num_due < num_threads_ && is_due(num_due, phase)) num_due++;
    for (State now = state_.load(); now.num_present + now.num_joining < num_due; now = state_.load())
        std::this_thread::yield();
}

Party::State Party::wait_for_other(uint32_t phase) const {
    for (int spin = 0;; spin++) {
        State now = state_.load(std::memory_order_acquire);
        if (now.phase != phase) return now;
        if (spin < NUM_SPINS)
            _mm_pause();
        else
            std::this_thread::yield();
    }
}

Pool::Pool(int num_threads, const std::vector<int>& cpus) : limit(num_threads), are_loose_(num_threads) {
    if (int(cpus.size()) >= num_threads) cpus_.assign(cpus.begin(), cpus.begin() + num_threads);
    for (int thread = 1; thread < num_threads; thread++) {
        workers_.emplace_back([this, thread] {
            if (!cpus_.empty()) pin({cpus_[thread]});
            work(thread);
        });
    }
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_over_ = true;
    }
    woken_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(int num_threads, const std::function<void(int)>& job) {
    int num_called = is_trying ? size() : num_threads;
    is_loose_ = limit < size();
    settle(0, is_loose_);
    began_ns_ = now_ns();
    job_ = &job;
    party.open(num_threads);
    if (num_called > 1) {
        num_left_.store(num_called - 1, std::memory_order_relaxed);
        is_running_.store(true, std::memory_order_relaxed);
        Turn turn{turn_.load(std::memory_order_relaxed).number + 1, uint16_t(num_called), uint16_t(num_threads)};
        {
            std::lock_guard<std::mutex> lock(mutex_);
            turn_.store(turn, std::memory_order_release);
        }
        woken_.notify_all();
    }
    compute(0);
    party.close();
    is_running_.store(false, std::memory_order_relaxed);
    int64_t before = computed_ns();
    for (int spin = 0; num_called > 1 && num_left_.load(std::memory_order_acquire) > 0; spin++) {
        if (spin < NUM_SPINS)
            _mm_pause();
        else
            std::this_thread::yield();
    }
    used_ns_.fetch_add(computed_ns() - before, std::memory_order_relaxed);  // it had its core, as in waits between phases
    add_shares(now_ns() - began_ns_);  // with those waited for that came late, as their loss counts, too
}

void Pool::settle(int thread, bool is_loose) {
    if (cpus_.empty() || is_loose == bool(are_loose_[thread])) return;
    auto self = std::this_thread::get_id();
    if (thread == 0 && (is_loose ? !is_pinned_to(cpus_[0]) : self != loose_caller_)) return;
    if (thread == 0) loose_caller_ = self;
    pin(is_loose ? cpus_ : std::vector<int>{cpus_[thread]});
    are_loose_[thread] = is_loose;
}

void Pool::compute(int thread) {
    int64_t before = computed_ns();
    (*job_)(thread);
    int64_t used = computed_ns() - before;
    used_ns_.fetch_add(used, std::memory_order_relaxed);
    lost_ns_.fetch_add(std::max<int64_t>(0, now_ns() - began_ns_ - used), std::memory_order_relaxed);
}

void Pool::keep_busy() {
    int64_t began = now_ns(), before = computed_ns();
    while (is_running_.load(std::memory_order_relaxed)) _mm_pause();
    int64_t passed = now_ns() - began, used = computed_ns() - before;
    tried_ns_.fetch_add(passed, std::memory_order_relaxed);
    lost_trying_ns_.fetch_add(std::max<int64_t>(0, passed - used), std::memory_order_relaxed);
}

void Pool::add_shares(int64_t passed_ns) {
    int64_t of_region[NUM_SHARES] = {passed_ns, used_ns_.exchange(0), lost_ns_.exchange(0), tried_ns_.exchange(0),
                                     lost_trying_ns_.exchange(0)};
    for (int i = 0; i < NUM_SHARES; i++) shares[i] += of_region[i];
}

void Pool::work(int thread) {
    uint32_t seen = 0;
    auto is_called = [&] {
        Turn turn = turn_.load(std::memory_order_acquire);
        return turn.number != seen && thread < turn.num_called;
    };
    for (;;) {
        if (!awake_until(is_called)) {
            std::unique_lock<std::mutex> lock(mutex_);
            woken_.wait(lock, [&] { return is_over_ || is_called(); });
            if (is_over_) return;
        }
        Turn turn = turn_.load(std::memory_order_acquire);
        seen = turn.number;
        bool does_compute = thread < turn.num_computing;
        settle(thread, does_compute && is_loose_);
        does_compute ? compute(thread) : keep_busy();
        num_left_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace millrace
