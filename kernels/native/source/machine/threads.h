// Compute threads that outlive a step: the pool, the barrier between phases, and work stealing within a phase.
//
// `Pool::run` runs one function on several threads: a region. A region consists of phases (`Phases`), with a barrier
// after each (`ThreadTeam`). Within a phase each thread has a range of pieces, and takes pieces of others when its own
// are done (`WorkRanges`). Idle threads spin for some microseconds, then yield, then sleep. The pool also adds up how
// long other processes had the cores; thread_throttle.py decides from that how many threads compute.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <immintrin.h>

namespace millrace {

constexpr int NUM_SPINS = 256;  // about 4 to 15 us
constexpr int64_t YIELD_NS = 300'000;  // after a region; a busy server begins its next step within that time

void pin(const std::vector<int>& cpus);  // pins the calling thread
int64_t now_ns();

// Waits for `is_so`: spins first, then yields. Returns false if it takes long, so that the thread should sleep.
template <class Condition>
bool spin_until(const Condition& is_so) {
    for (int spin = 0; spin < NUM_SPINS; spin++) {
        if (is_so()) return true;
        _mm_pause();
    }
    for (int64_t began_ns = now_ns(); now_ns() - began_ns < YIELD_NS; std::this_thread::yield())
        if (is_so()) return true;
    return false;
}

// The unfinished pieces of a phase, one range per thread. A thread takes pieces of its own range in rising order, then
// pieces of other ranges from their end. So the pieces of a thread that lost its core do not wait until it runs again.
class WorkRanges {
  public:
    void reset(int num_threads);  // before a region

    // Takes the first piece of the range of thread `rank` in phase `phase`, or the last one if `from_end`; none if it
    // is empty. `num_pieces` is the length of the whole range.
    std::optional<int64_t> take(uint32_t phase, int rank, int64_t num_pieces, bool from_end);

  private:
    struct Range {  // a thread's pieces in the phase in which one was last taken; up to four million
        uint64_t phase : 20, first : 22, last : 22;
    };
    static constexpr uint64_t NO_PHASE = (1 << 20) - 1;  // a step has some hundreds
    struct alignas(64) ThreadRange {
        std::atomic<Range> range;
    };

    std::vector<ThreadRange> ranges_;
};

// The threads that go through the phases of one region together. The caller takes part from the first phase, each other
// thread from the phase after it has joined. So a region does not wait for a thread whose core runs another process at
// its start: the threads that have joined share each phase. A thread that yields its core before it takes part has not
// joined.
//
// Between two phases the threads wait for each other. A waiting thread spins first, because the others usually arrive
// within a microsecond. Then it yields, so that a neighbour on its core does not delay the other threads.
class ThreadTeam {
  public:
    // A thread as one of the `count` threads that share a phase. The caller has rank 0. Ranks do not change in a
    // region.
    struct Member {
        int rank = 0, count = 1;
        uint32_t phase = 0;  // number of phases that all threads have finished
        WorkRanges* work_ranges = nullptr;  // none: the thread is alone
        int scratch_index = 0;  // index of the thread's own buffers: its rank, or a fixed one for a thread that is alone
        // Of a thread that is alone: the items that it takes of each `parallel_for`, and up to where it expects to.
        int64_t first_item = 0, last_item = INT64_MAX, end_item = INT64_MAX;

        // Runs the `num` items of the phase in pieces of at most `size`: use(first, last, end) for the items [first,
        // last) that this thread takes; it expects to take those until `end` next. At most once per phase, with the
        // same arguments on all threads.
        template <class Use>
        void parallel_for(int64_t num, int64_t size, const Use& use) const;

        // This thread for a part of a phase: alone, with the items [first, last) and those until `end` expected next.
        Member for_items(int64_t first, int64_t last, int64_t end) const {
            Member part;
            part.phase = phase, part.scratch_index = scratch_index;
            part.first_item = first, part.last_item = last, part.end_item = end;
            return part;
        }
    };

    // By the caller, before other threads may join; no thread may be left of the region before.
    void begin_region(int num_threads);
    void end_region();  // by the caller, after the last phase
    // By another thread: waits until it takes part. False if the region ended before that.
    bool join(int thread, Member* member);
    // The barrier: waits until all threads that share the phase have arrived. Threads that joined meanwhile share the
    // next phase.
    void end_phase(Member* member);

    // For tests: thread 1 misses this many phases, thread 2 twice as many, and so on, and no phase begins before every
    // thread that is due has joined. Negative: threads join as the system schedules them, and a phase that no thread
    // has joined in time may be the caller's alone.
    int32_t join_delay = -1;

    WorkRanges work_ranges;  // of the current phase

  private:
    static constexpr uint32_t FINISHED = ~uint32_t(0);
    struct State {
        uint32_t phase;
        uint16_t num_present, num_joining;
    };

    bool is_due(int thread, uint32_t phase) const { return join_delay < 0 || int64_t(thread) * join_delay <= phase; }
    void await_due(uint32_t phase) const;
    State wait_for_others(uint32_t phase) const;
    // Announces this thread, and withdraws the announcement if the current phase does not end soon. True if it ended,
    // or the region did.
    bool try_to_join();

    int num_threads_ = 1;  // of the region, at most

    alignas(64) std::atomic<int> num_arrived_{0};
    std::atomic<int> num_ranks_{1};  // ranks that are given out
    alignas(64) std::atomic<State> state_{State{FINISHED, 0, 0}};
};

// Nanoseconds, added up over all regions: their duration; the time that their threads, added up, had cores and lost
// cores; and the time that probing threads ran and lost their cores. Mirrored by `ThreadShare` in thread_throttle.py.
enum ThreadTime : int32_t { ELAPSED, USED, LOST, PROBED, LOST_PROBING, NUM_THREAD_TIMES };

class Pool {
  public:
    // The caller of `run` is thread 0. Each worker is pinned to one of `cpus` in order, or none is if there are fewer
    // cpus than threads. While threads are left out, the others may run on any of the cpus, because the process that
    // wants a core may be pinned to the core of a thread that goes on. A caller changes its affinity only if it is
    // pinned itself.
    Pool(int num_threads, const std::vector<int>& cpus);
    ~Pool();

    int size() const { return int(workers_.size()) + 1; }

    // `limit`: the most threads of a region. With `is_probing` the threads that are left out keep their cores busy
    // while a region runs and compute nothing, which shows whether another process wants the cores. A running region
    // ignores changes.
    std::atomic<int> limit{0};
    std::atomic<bool> is_probing{false};

    std::array<int64_t, NUM_THREAD_TIMES> thread_times{};  // of all regions so far; owned by the caller of `run`

    // Calls job(thread) for each thread in [0, num_threads) and returns when all calls have. One caller at a time.
    void run(int num_threads, const std::function<void(int)>& job);

    ThreadTeam team;  // of the region that runs

  private:
    // Describes a region to the workers in one atomic word, so that a worker with no part in it need not answer.
    struct Region {
        uint32_t number;
        uint16_t num_woken, num_computing;  // numbers of threads; a thread that is woken and does not compute probes
    };

    void worker_loop(int thread);
    void end_workers();  // and waits for them
    void set_affinity(int thread, bool uses_all_cpus);  // by the thread itself, before it computes or probes
    void run_job(int thread);
    void probe();
    void add_thread_times(int64_t elapsed_ns);

    std::vector<std::thread> workers_;
    std::vector<int> cpus_;          // one per thread; empty: the system places the threads
    std::vector<char> on_all_cpus_;  // which threads may run on any of the cpus; each thread uses its own entry
    bool uses_all_cpus_ = false;     // in the current region
    std::thread::id released_caller_;
    const std::function<void(int)>* job_ = nullptr;
    int64_t began_ns_ = 0;  // start of the region
    alignas(64) std::atomic<Region> region_{};  // a new value per region
    alignas(64) std::atomic<int> num_unfinished_{0};  // workers that have not finished the region
    std::atomic<bool> is_running_{false};  // the caller still computes
    std::atomic<int64_t> used_ns_{0}, lost_ns_{0}, probed_ns_{0}, lost_probing_ns_{0};  // in the region
    std::mutex mutex_;
    std::condition_variable wakeup_;
    bool is_stopping_ = false;
};

// A thread's way through the phases of a region.
class Phases {
  public:
    // For thread `thread` of a region of `pool`. Thread 0 begins; another thread waits here until it takes part.
    Phases(Pool* pool, int thread) : team_(&pool->team), is_alone_(pool->size() == 1) {
        if (thread > 0 && !team_->join(thread, &member_)) member_.phase = ~uint32_t(0);
        member_.work_ranges = &team_->work_ranges;
    }

    // For a thread that goes through the phases alone.
    explicit Phases(int scratch_index) : team_(nullptr), is_alone_(true) { member_.scratch_index = scratch_index; }

    // Runs work(member) as the next phase; returns after all threads have finished it. Does nothing and returns false
    // if the phase was over when this thread joined.
    template <class Work>
    bool run(const Work& worker_loop) {
        if (next_++ < member_.phase) return false;
        worker_loop(member_);
        if (is_alone_)
            member_.phase++;
        else
            team_->end_phase(&member_);
        return true;
    }

    const ThreadTeam::Member& member() const { return member_; }

    // Whether this thread takes part in the next phase: false if the phase was over when it joined.
    bool takes_part_in_next() const { return next_ >= member_.phase; }

  private:
    ThreadTeam* team_;
    ThreadTeam::Member member_;
    uint32_t next_ = 0;
    bool is_alone_;
};

// The part [first, last) of `count` items for one of the threads; parts differ by one item at most.
inline void split_evenly(int64_t count, int thread, int num_threads, int64_t* first, int64_t* last) {
    *first = count * thread / num_threads;
    *last = count * (thread + 1) / num_threads;
}

template <class Use>
void ThreadTeam::Member::parallel_for(int64_t num, int64_t size, const Use& use) const {
    if (!work_ranges) {
        int64_t last = std::min(num, last_item), end = std::min(num, end_item);
        for (int64_t begin = first_item; begin < last; begin += size) use(begin, std::min(begin + size, last), end);
        return;
    }
    for (int step = 0; step < count; step++) {
        int owner = (rank + step) % count;
        int64_t first, last;
        split_evenly(num, owner, count, &first, &last);
        int64_t num_pieces = (last - first + size - 1) / size;
        while (auto piece = work_ranges->take(phase, owner, num_pieces, step > 0)) {
            int64_t begin = first + *piece * size, end = std::min(begin + size, last);
            use(begin, end, step == 0 ? last : end);
        }
    }
}

}  // namespace millrace
