// Compute threads that outlive a step: they spin for a few microseconds, then yield, then sleep.
//
// Knows how to run one function on all of them, how they wait for each other, and how much of their time others had the
// cores. Refuses to know what is computed, and what is to be done about the others (neighbours.py).

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
constexpr int64_t YIELD_NS = 300'000;  // after a region; a busy server's next step begins within that time

void pin(const std::vector<int>& cpus);  // the calling thread
int64_t now_ns();

// Returns true when `is_so` is. False if that takes long, so that a thread had better sleep: it spins first, then yields.
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

// What is left of a phase's work, in pieces that any thread may take: each its own in rising order, and once those are
// taken what others have left, from their end. So what a thread has yet to begin need not wait until it has its core
// again, if somebody else has that meanwhile.
class WorkRanges {
  public:
    void reset(int num_threads);  // before a region

    // The first that is left of the `num_pieces` of thread `rank` in phase `phase`, or the last.
    std::optional<int64_t> take(uint32_t phase, int rank, int64_t num_pieces, bool from_end);

  private:
    struct Range {  // of a thread's pieces in the phase in which somebody last took one; room for four million
        uint64_t phase : 20, first : 22, last : 22;
    };
    static constexpr uint64_t NO_PHASE = (1 << 20) - 1;  // a step has some hundreds
    struct alignas(64) ThreadRange {
        std::atomic<Range> range;
    };

    std::vector<ThreadRange> ranges_;
};

// The threads that go through the phases of one region together: the caller from the first on, each other one from the
// phase after it has come. So nobody waits for a thread whose core is somebody else's when a region begins: each phase is
// shared by those who are there, and who yields its core before it takes part has not come.
//
// Between two phases they wait for each other. Who waits spins first, since the others are usually there within a
// microsecond; then it yields, so that a busy neighbour on the same core is not kept from letting the others on.
class ThreadTeam {
  public:
    // A thread as one of `count` that share a phase. The caller has rank 0, and nobody's rank changes.
    struct Member {
        int rank = 0, count = 1;
        uint32_t phase = 0;  // how many are over for all
        WorkRanges* work_ranges = nullptr;  // none: nobody else has a part of it
        int scratch_index = 0;         // of what each thread has for itself: its rank, or the one of a thread that is alone

        // All `num` things of the phase in pieces of `size` or fewer: use(first, last, end) for the pieces [first, last)
        // that this thread comes to take; it expects those until `end` next. Once in a phase, and for all threads alike.
        template <class Use>
        void parallel_for(int64_t num, int64_t size, const Use& use) const;
    };

    void begin_region(int num_threads);  // by the caller, before others may join; nobody is left of a region before
    void end_region();  // by the caller, when all phases are over
    // By another thread: returns when it is to take part. False if all was over before that.
    bool join(int thread, Member* member);
    // All who share the phase have come to its end. Those who have joined meanwhile share the next one.
    void end_phase(Member* member);

    // For tests: phases that thread 1 misses, thread 2 twice as many and so on; no phase begins before who is due has
    // come. Below 0: who comes when is left to the system, and a phase in which nobody is late may be the caller's alone.
    int32_t join_delay = -1;

    WorkRanges work_ranges;  // of the phase that all are in

  private:
    static constexpr uint32_t FINISHED = ~uint32_t(0);
    struct State {
        uint32_t phase;
        uint16_t num_present, num_joining;
    };

    bool is_due(int thread, uint32_t phase) const { return join_delay < 0 || int64_t(thread) * join_delay <= phase; }
    void await_due(uint32_t phase) const;
    State wait_for_others(uint32_t phase) const;
    // Says that this thread is there, and takes that back if the phase is not over in a moment. True if it is, or if all
    // phases are.
    bool try_to_join();

    int num_threads_ = 1;  // of the region, at most

    alignas(64) std::atomic<int> num_arrived_{0};
    std::atomic<int> num_ranks_{1};  // that are given
    alignas(64) std::atomic<State> state_{State{FINISHED, 0, 0}};
};

// Nanoseconds of all regions, added up: how long they took, how long their threads, all together, had cores and had
// none, and how long those that only tried ran and had none. As in neighbours.py.
enum ThreadTime : int32_t { ELAPSED, USED, LOST, PROBED, LOST_PROBING, NUM_THREAD_TIMES };

class Pool {
  public:
    // The caller of `run` is one of the threads. Of the others each is pinned to one of `cpus` in their order, and to
    // none when there are fewer of them. While threads are left out, the rest run on any of these: who wants a core may be
    // pinned, too, to that of a thread that goes on. A caller does so only if it is pinned itself.
    Pool(int num_threads, const std::vector<int>& cpus);
    ~Pool();

    int size() const { return int(workers_.size()) + 1; }

    // How many threads a region is to have at most. With `is_trying` those left out compute nothing and keep their cores
    // busy while a region runs, which shows whether anybody else is there. A region that runs does not heed a change.
    std::atomic<int> limit{0};
    std::atomic<bool> is_probing{false};

    std::array<int64_t, NUM_THREAD_TIMES> thread_times{};  // of all regions so far; the caller's of `run`

    // Calls job(thread) for each thread in [0, num_threads) and returns when all of them have. One caller at a time.
    void run(int num_threads, const std::function<void(int)>& job);

    ThreadTeam team;  // of the region that runs

  private:
    // What the workers are told of a region in one word, so that who has nothing to do in it need not say so.
    struct Region {
        uint32_t number;
        uint16_t num_woken, num_computing;  // threads; who is called and does not compute, tries
    };

    void worker_loop(int thread);
    void set_affinity(int thread, bool uses_all_cpus);  // by the thread itself, before it computes or tries
    void run_job(int thread);
    void probe();
    void add_thread_times(int64_t elapsed_ns);

    std::vector<std::thread> workers_;
    std::vector<int> cpus_;        // of each thread; none: they are where the system has them
    std::vector<char> on_all_cpus_;  // threads that run on any of these; each knows of itself
    bool uses_all_cpus_ = false;        // those of the region
    std::thread::id released_caller_;
    const std::function<void(int)>* job_ = nullptr;
    int64_t began_ns_ = 0;                   // the region
    alignas(64) std::atomic<Region> region_{};   // a new one for each region
    alignas(64) std::atomic<int> num_unfinished_{0};  // workers that have yet to finish the region
    std::atomic<bool> is_running_{false};       // the caller still computes
    std::atomic<int64_t> used_ns_{0}, lost_ns_{0}, probed_ns_{0}, lost_probing_ns_{0};  // of the region
    std::mutex mutex_;
    std::condition_variable wakeup_;
    bool is_stopping_ = false;
};

// A thread's way through a region that is made of phases.
class Phases {
  public:
    // For thread `thread` of a region of `pool`. The caller begins; another thread returns from here when it may join.
    Phases(Pool* pool, int thread) : team_(&pool->team), is_alone_(pool->size() == 1) {
        if (thread > 0 && !team_->join(thread, &member_)) member_.phase = ~uint32_t(0);
        member_.work_ranges = &team_->work_ranges;
    }

    // Of a thread that goes through them alone.
    explicit Phases(int scratch_index) : team_(nullptr), is_alone_(true) { member_.scratch_index = scratch_index; }

    // work(seat) is the next phase, and returns for nobody before it has for all. Nothing if it is one that was over
    // when this thread came.
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

    // Whether the next phase is one that this thread has a share of: not one that was over when it came.
    bool takes_part_in_next() const { return next_ >= member_.phase; }

  private:
    ThreadTeam* team_;
    ThreadTeam::Member member_;
    uint32_t next_ = 0;
    bool is_alone_;
};

// [first, last) of `count` things for one of the threads, each as many as the others or one more.
inline void split_evenly(int64_t count, int thread, int num_threads, int64_t* first, int64_t* last) {
    *first = count * thread / num_threads;
    *last = count * (thread + 1) / num_threads;
}

template <class Use>
void ThreadTeam::Member::parallel_for(int64_t num, int64_t size, const Use& use) const {
    if (!work_ranges) {
        for (int64_t begin = 0; begin < num; begin += size) use(begin, std::min(begin + size, num), num);
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
