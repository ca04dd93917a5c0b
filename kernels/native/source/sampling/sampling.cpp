#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "machine/simd.h"

namespace millrace {

namespace {

constexpr int64_t BLOCK = 128;  // tokens that are looked at together
constexpr int64_t WORDS = BLOCK / 32;  // of a mask, for a block
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int RUNGS = 8;
constexpr float FALLS[RUNGS - 1] = {0.5f, 1, 2, 3, 4.5f, 7, 11};  // of log-weights below the largest, at first
constexpr int64_t FEW = 128;  // logits, that are sorted
constexpr int64_t SUMMED = 1024;  // weights that are added up in float32, then in float64

// Sets the logits of tokens whose bits are 0 to -inf.
void hide(float* logits, const uint32_t* words, int64_t size) {
    for (int64_t first = 0; first < size; first += 32) {
        uint32_t word = words[first / 32];
        float* x = logits + first;
        if (size - first >= 32) {
            for (int i = 0; i < 32; i++) x[i] = word >> i & 1 ? x[i] : NOTHING;  // one masked move
        } else {
            for (int i = 0; i < size - first; i++) x[i] = word >> i & 1 ? x[i] : NOTHING;
        }
    }
}

struct Between {  // [low, high)
    float low, high;
};

// Logits, each at most the one before it, and the weights of what is at or above each; of the last, of all that counts.
struct Rungs {
    float at[RUNGS];
    double mass[RUNGS] = {};

    // Where tokens, from the likeliest on, come to `wanted`; `seen` are those before the first rung, and then those above.
    Between where(double wanted, double& seen) const {
        int r = 0;
        while (r + 1 < RUNGS && seen + mass[r] < wanted) r++;
        if (r > 0) seen += mass[r - 1];
        return {at[r], r > 0 ? at[r - 1] : std::numeric_limits<float>::infinity()};
    }
};

// One row, while its token is chosen.
class Row {
  public:
    // A block of which `words` allow nothing is never read; what they hide in others is lost. Grammars allow nearly all
    // tokens or very few, so that most blocks are one of both: 16 rows of 49,152 cost no more than without masks.
    void take(float* logits, int64_t size, const uint32_t* words) {
        logits_ = logits, size_ = size, num_blocks_ = (size + BLOCK - 1) / BLOCK;
        maxima_.resize(num_blocks_), sums_.resize(num_blocks_);
        best_ = NOTHING;
        F no_numbers = zero();
        for (int64_t b = 0; b < num_blocks_; b++) {
            if (words && !allow(logits + b * BLOCK, words + b * WORDS, std::min(BLOCK, size - b * BLOCK))) {
                maxima_[b] = NOTHING;
                continue;
            }
            const float* x = block(b);
            F most = splat(NOTHING);
            for (int i = 0; i < BLOCK; i += W) {
                F numbers = load(x + i);
                most = max(numbers, most);
                no_numbers = max(no_numbers, where_ge(numbers, numbers, zero(), splat(1.0f)));
            }
            maxima_[b] = max_of(most);
            best_ = std::max(best_, maxima_[b]);
        }
        is_broken_ = max_of(no_numbers) > 0 || !std::isfinite(best_);
    }

    bool is_broken() const { return is_broken_; }

    // The lowest id among the likeliest.
    int64_t likeliest() {
        int64_t b = std::find(maxima_.begin(), maxima_.end(), best_) - maxima_.begin();
        const float* x = block(b);
        return b * BLOCK + (std::find(x, x + BLOCK, best_) - x);
    }

    // By inverse CDF in the order of the vocabulary, from what top_k, then top_p, then min_p keep. Each keeps all that
    // is at least as likely as some token, so tokens that tie with the last one kept are kept.
    int64_t draw(double temperature, int64_t top_k, double top_p, double min_p, double u) {
        is_scaled_ = temperature != 1.0;
        temperature_ = float(temperature);
        float least = top_k > 0 && top_k < size_ ? kth_largest(top_k) : NOTHING;
        if (top_p < 1.0) least = std::max(least, least_of_share(least, top_p));
        if (min_p > 0.0) least = std::max(least, float(double(best_) + temperature * std::log(min_p)));
        return first_above(u, std::min(least, best_));
    }

  private:
    // Whether any of up to 128 tokens is allowed; if so, the others are hidden.
    static bool allow(float* logits, const uint32_t* words, int64_t count) {
        uint32_t any = 0, all = ~0u;
        for (int64_t i = 0; i < (count + 31) / 32; i++) any |= words[i], all &= words[i];
        if (any && all != ~0u) hide(logits, words, count);
        return any;
    }

    // Whether a token in it may be chosen. What others hold says nothing.
    bool counts(int64_t b, float least) const { return maxima_[b] > NOTHING && maxima_[b] >= least; }

    // 128 logits; past the end of the vocabulary they are -inf.
    const float* block(int64_t b) {
        int64_t count = size_ - b * BLOCK;
        if (count >= BLOCK) return logits_ + b * BLOCK;
        std::fill(std::copy(logits_ + b * BLOCK, logits_ + size_, tail_), tail_ + BLOCK, NOTHING);
        return tail_;
    }

    // Probabilities up to a factor, the largest is 1; 0 below `least`. Returns their sum, which is of one order.
    double weigh(int64_t b, float least, float* weights) {
        const float* x = block(b);
        F best = splat(best_), bound = splat(least), temperature = splat(temperature_), sum = zero();
        for (int i = 0; i < BLOCK; i += W) {
            F logits = load(x + i), weight = where_ge(logits, bound, weight_of(logits, best, temperature), zero());
            store(weights + i, weight);
            sum = add(sum, weight);
        }
        return sum_of(sum);
    }

    // k blocks have a maximum at or above the k-th largest maximum, so k tokens are: only those are looked at.
    float kth_largest(int64_t k) {
        float bound = NOTHING;
        if (k <= num_blocks_) {
            found_ = maxima_;
            std::nth_element(found_.begin(), found_.begin() + k - 1, found_.end(), std::greater<float>());
            bound = found_[k - 1];
        }
        found_.clear();
        for (int64_t b = 0; b < num_blocks_; b++) {
            if (!counts(b, bound)) continue;
            const float* x = block(b);
            for (int64_t i = 0; i < std::min(BLOCK, size_ - b * BLOCK); i++)
                if (x[i] >= bound) found_.push_back(x[i]);
        }
        if (int64_t(found_.size()) < k) return NOTHING;
        std::nth_element(found_.begin(), found_.begin() + k - 1, found_.end(), std::greater<float>());
        return found_[k - 1];
    }

    // The logit of the last token, from the likeliest on, before which less than `share` of what is at or above `least`
    // has been seen. How much is at or above a few logits is summed up at once; it lies between two of them, and the same
    // is done with the tokens there, until so few are left that they are sorted.
    float least_of_share(float least, double share) {
        float lowest = std::max(least, best_ - 87.0f * temperature_);  // below it weights are next to nothing
        Rungs rungs;
        for (int r = 0; r + 1 < RUNGS; r++) rungs.at[r] = std::max(best_ - FALLS[r] * temperature_, lowest);
        rungs.at[RUNGS - 1] = lowest;
        each_run(lowest, [&](const float* x, int64_t size) { weigh_above(x, size, rungs); });
        double wanted = share * rungs.mass[RUNGS - 1], seen = 0;
        Between between = rungs.where(wanted, seen);
        left_.resize(num_blocks_ * BLOCK + W);  // whole vectors are written
        int64_t count = 0;
        each_run(between.low, [&](const float* x, int64_t size) { count = gather(x, size, between, count); });
        while (count > FEW) {
            auto [lowest_left, highest_left] = extremes_left(count);
            if (lowest_left == highest_left) return lowest_left;
            float step = (highest_left - lowest_left) / RUNGS;
            for (int r = 0; r < RUNGS; r++) rungs.at[r] = highest_left - step * float(r + 1), rungs.mass[r] = 0;
            rungs.at[RUNGS - 1] = lowest_left;
            std::fill_n(left_.begin() + count, W, NOTHING);
            weigh_above(left_.data(), count, rungs);
            between = rungs.where(wanted, seen);
            count = gather(left_.data(), count, between, 0);
        }
        std::sort(left_.begin(), left_.begin() + count, std::greater<float>());
        float last = std::min(between.high, best_);
        for (int64_t i = 0; i < count && seen < wanted; i++) seen += weight_of(last = left_[i]);
        return last;
    }

    // `take(x, count)` of blocks that count and follow each other; the last one of all, which may be filled up, is alone.
    template <class Take>
    void each_run(float least, const Take& take) {
        for (int64_t b = 0, first; b < num_blocks_; b++) {
            for (first = b; b + 1 < num_blocks_ && counts(b, least);) b++;
            if (first < b) take(logits_ + first * BLOCK, (b - first) * BLOCK);
            if (b + 1 == num_blocks_ && counts(b, least)) take(block(b), BLOCK);
        }
    }

    // Adds weights of what is at or above each rung. Numbers past `count`, to a whole vector, are -inf.
    void weigh_above(const float* x, int64_t count, Rungs& rungs) const {
        F best = splat(best_), temperature = splat(temperature_);
        for (int64_t begin = 0; begin < count; begin += SUMMED) {
            F sums[RUNGS];
            for (F& sum : sums) sum = zero();
            for (int64_t i = begin; i < std::min(count, begin + SUMMED); i += W) {
                F logits = load(x + i), weight = weight_of(logits, best, temperature);
                UNROLL for (int r = 0; r < RUNGS; r++)
                    sums[r] = add(sums[r], where_ge(logits, splat(rungs.at[r]), weight, zero()));
            }
            for (int r = 0; r < RUNGS; r++) rungs.mass[r] += sum_of(sums[r]);
        }
    }

    // Writes the logits between two to `left_`, behind `num_found`; how many there are then. From there, too, at or behind
    // where they are written to. Numbers past `count`, to a whole vector, are -inf.
    int64_t gather(const float* x, int64_t count, Between between, int64_t num_found) {
        F low = splat(between.low), high = splat(between.high);
        for (int64_t i = 0; i < count; i += W) num_found += store_between(left_.data() + num_found, load(x + i), low, high);
        return num_found;
    }

    std::pair<float, float> extremes_left(int64_t count) const {
        int64_t i = 0;
        F falls = splat(NOTHING), rises = falls;
        for (; i + W <= count; i += W) {
            F logits = load(left_.data() + i);
            falls = max(falls, sub(zero(), logits)), rises = max(rises, logits);
        }
        float low = -max_of(falls), high = max_of(rises);
        for (; i < count; i++) low = std::min(low, left_[i]), high = std::max(high, left_[i]);
        return {low, high};
    }

    F weight_of(F logits, F best, F temperature) const {
        F value = sub(logits, best);
        return exp(is_scaled_ ? div(value, temperature) : value);
    }

    double weight_of(float logit) const {
        return max_of(weight_of(splat(logit), splat(best_), splat(temperature_)));
    }

    // The first token at or above `least` whose cumulative probability is above u.
    int64_t first_above(double u, float least) {
        float weights[BLOCK];
        double total = 0;
        for (int64_t b = 0; b < num_blocks_; b++) {
            sums_[b] = counts(b, least) ? weigh(b, least, weights) : 0.0;
            total += sums_[b];
        }
        double target = std::min(u * total, std::nextafter(total, 0.0)), before = 0;
        int64_t b = 0;
        while (b + 1 < num_blocks_ && before + sums_[b] <= target) before += sums_[b++];
        while (sums_[b] == 0) b--;  // rounding has brought `target` up to the whole sum
        weigh(b, least, weights);
        int64_t chosen = 0;
        double inside = 0;
        for (int i = 0; i < BLOCK; i++) {
            if (weights[i] == 0) continue;
            chosen = b * BLOCK + i;
            inside += weights[i];
            if (inside > target - before) break;
        }
        return chosen;
    }

    const float* logits_ = nullptr;
    int64_t size_ = 0, num_blocks_ = 0;
    float best_ = 0, temperature_ = 1;
    bool is_broken_ = false, is_scaled_ = false;
    alignas(64) float tail_[BLOCK];
    std::vector<float> maxima_, found_, left_;
    std::vector<double> sums_;
};

uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// In [0, 1), of a seed and a token's absolute position: as `uniform` of stages/sample/sampling_math.py, to the bit.
double uniform(uint64_t seed, uint64_t position) {
    return double(mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) >> 11) * 0x1p-53;
}

void choose_row(Row& row, const Asked& asked, const Choices& all, int64_t i) {
    int64_t slot = all.slots[i];
    int64_t mask = all.masks ? all.mask_rows[i] : -1;
    const uint32_t* words = mask < 0 ? nullptr : all.masks + mask * all.num_words;
    row.take(all.logits + i * all.vocab_size, all.vocab_size, words);
    all.is_broken[i] = row.is_broken();
    if (row.is_broken())
        all.token_ids[i] = 0;
    else if (asked.is_random[slot])
        all.token_ids[i] = row.draw(asked.temperature[slot], asked.top_k[slot], asked.top_p[slot], asked.min_p[slot],
                                    uniform(asked.seeds[slot], asked.num_prompt[slot] + all.places[i]));
    else
        all.token_ids[i] = row.likeliest();
}

int threads_for(const Pool& pool, int64_t num_rows, int64_t vocab_size) {
    constexpr int64_t WORTH = 1 << 16;  // logits that pay for another thread
    return int(std::min<int64_t>({pool.limit.load(), num_rows, 1 + num_rows * vocab_size / WORTH}));
}

}  // namespace

void choose(Model& model, const Asked& asked, const Choices& choices) {
    std::lock_guard<std::mutex> lock(model.is_running);
    Pool& pool = *model.pool;
    int num_threads = threads_for(pool, choices.num_rows, choices.vocab_size);
    pool.run(num_threads, [&](int thread) {
        thread_local Row row;
        int64_t first, last;
        share(choices.num_rows, thread, num_threads, &first, &last);
        for (int64_t i = first; i < last; i++) choose_row(row, asked, choices, i);
    });
}

}  // namespace millrace
