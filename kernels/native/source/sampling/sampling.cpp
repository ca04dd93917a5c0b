#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "machine/simd.h"

// The numbers of a draw, in the order of `DRAWS` in kernels/layout/sampling_fields.py, which is compared at load.
#define DRAW_FIELDS(X) \
    X(temperature)     \
    X(top_k) /* 0: off, as min_p */ \
    X(top_p) /* 1: off */ \
    X(min_p)           \
    X(top_n_sigma) /* 0: off */ \
    X(typical_p) /* 1: off */

namespace millrace {

struct DrawFields {
#define MEMBER(name) double name;
    DRAW_FIELDS(MEMBER)
#undef MEMBER
};

const char* draw_field_names() {
#define NAME(name) #name " "
    return DRAW_FIELDS(NAME);
#undef NAME
}

namespace {

constexpr int64_t BLOCK = 128;  // tokens processed together
constexpr int64_t WORDS = BLOCK / 32;  // mask words of a block
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
constexpr int NUM_LEVELS = 8;
constexpr float LEVEL_OFFSETS[NUM_LEVELS - 1] = {0.5f, 1, 2, 3, 4.5f, 7, 11};  // of log-weights below the largest, at first
constexpr int64_t MAX_SORTED = 128;  // logits that are sorted
constexpr int64_t FLOAT_SUM_LENGTH = 1024;  // weights that are summed in float32 before float64

// Sets the logits of tokens whose bits are 0 to -inf.
void mask_out(float* logits, const uint32_t* words, int64_t size) {
    for (int64_t first = 0; first < size; first += 32) {
        uint32_t word = words[first / 32];
        float* x = logits + first;
        if (size - first >= 32) {
            for (int i = 0; i < 32; i++) x[i] = word >> i & 1 ? x[i] : MINUS_INFINITY;  // one masked move
        } else {
            for (int i = 0; i < size - first; i++) x[i] = word >> i & 1 ? x[i] : MINUS_INFINITY;
        }
    }
}

struct Interval {  // [low, high)
    float low, high;
};

// Logit levels in falling order, and the mass (sum of weights) at or above each. The mass of the last is the total.
struct Levels {
    float at[NUM_LEVELS];
    double mass[NUM_LEVELS] = {};

    // The interval in which the cumulative mass, from the largest logit down, reaches `target`. `seen`: the mass above
    // the first level, updated to the mass above the interval.
    Interval find_interval(double target, double& seen) const {
        int r = 0;
        while (r + 1 < NUM_LEVELS && seen + mass[r] < target) r++;
        if (r > 0) seen += mass[r - 1];
        return {at[r], r > 0 ? at[r - 1] : std::numeric_limits<float>::infinity()};
    }
};

// Samples one row. Each thread keeps one and reuses its buffers.
class RowSampler {
  public:
    // Sets the row and applies the mask `words`, if any. A block in which no token is allowed is never read; in others
    // the hidden logits are overwritten. Grammars allow nearly all tokens or very few, so that most blocks are all or
    // nothing: 16 rows of 49,152 cost no more than without masks.
    void set_row(float* logits, int64_t size, const uint32_t* words) {
        logits_ = logits, size_ = size, num_blocks_ = (size + BLOCK - 1) / BLOCK;
        maxima_.resize(num_blocks_), sums_.resize(num_blocks_);
        best_ = MINUS_INFINITY;
        F has_nan = zero();
        for (int64_t b = 0; b < num_blocks_; b++) {
            if (words && !apply_mask(logits + b * BLOCK, words + b * WORDS, std::min(BLOCK, size - b * BLOCK))) {
                maxima_[b] = MINUS_INFINITY;
                continue;
            }
            const float* x = block(b);
            F maximum = splat(MINUS_INFINITY);
            for (int i = 0; i < BLOCK; i += W) {
                F numbers = load(x + i);
                maximum = max(numbers, maximum);
                has_nan = max(has_nan, select_ge(numbers, numbers, zero(), splat(1.0f)));
            }
            maxima_[b] = max_of(maximum);
            best_ = std::max(best_, maxima_[b]);
        }
        is_broken_ = max_of(has_nan) > 0 || !std::isfinite(best_);
    }

    bool is_broken() const { return is_broken_; }

    // The lowest id among the largest logits.
    int64_t argmax() {
        int64_t b = std::find(maxima_.begin(), maxima_.end(), best_) - maxima_.begin();
        const float* x = block(b);
        return b * BLOCK + (std::find(x, x + BLOCK, best_) - x);
    }

    // Samples by inverse CDF in vocabulary order from the tokens that top_k, then top_p, then min_p keep. Each keeps
    // all tokens at or above a threshold, so ties with the last kept token are kept.
    int64_t draw(const DrawFields& by, double u) {
        is_scaled_ = by.temperature != 1.0;
        temperature_ = float(by.temperature);
        float threshold = by.top_k > 0 && by.top_k < double(size_) ? top_k_threshold(int64_t(by.top_k)) : MINUS_INFINITY;
        if (by.top_p < 1.0) threshold = std::max(threshold, top_p_threshold(threshold, by.top_p));
        if (by.min_p > 0.0)
            threshold = std::max(threshold, float(double(best_) + by.temperature * std::log(by.min_p)));
        if (by.top_n_sigma > 0.0) threshold = std::max(threshold, float(best_ - by.top_n_sigma * deviation()));
        threshold = std::min(threshold, best_);
        if (by.typical_p < 1.0) threshold = hide_untypical(threshold, by.typical_p);
        return inverse_cdf(u, threshold);
    }

  private:
    // Whether any of up to 128 tokens is allowed; if so, hides the others.
    static bool apply_mask(float* logits, const uint32_t* words, int64_t count) {
        uint32_t any = 0, all = ~0u;
        for (int64_t i = 0; i < (count + 31) / 32; i++) any |= words[i], all &= words[i];
        if (any && all != ~0u) mask_out(logits, words, count);
        return any;
    }

    // Whether a token of the block may be chosen. The contents of other blocks are undefined.
    bool is_candidate(int64_t b, float threshold) const { return maxima_[b] > MINUS_INFINITY && maxima_[b] >= threshold; }

    // 128 logits; -inf past the end of the vocabulary.
    const float* block(int64_t b) {
        int64_t count = size_ - b * BLOCK;
        if (count >= BLOCK) return logits_ + b * BLOCK;
        std::fill(std::copy(logits_ + b * BLOCK, logits_ + size_, tail_), tail_ + BLOCK, MINUS_INFINITY);
        return tail_;
    }

    // Probabilities up to a common factor; the largest is 1, and those below `threshold` are 0. Returns their sum, in a
    // fixed order.
    double block_weights(int64_t b, float threshold, float* weights) {
        const float* x = block(b);
        F best = splat(best_), bound = splat(threshold), temperature = splat(temperature_), sum = zero();
        for (int i = 0; i < BLOCK; i += W) {
            F logits = load(x + i), weight = select_ge(logits, bound, weight_of(logits, best, temperature), zero());
            store(weights + i, weight);
            sum = add(sum, weight);
        }
        return sum_of(sum);
    }

    // The standard deviation of the logits that are not -inf.
    double deviation() {
        F best = splat(best_), lowest = splat(-std::numeric_limits<float>::max());
        double count = 0, mean = 0, squares = 0;
        sum_vectors([&](F logits) { return select_ge(logits, lowest, splat(1.0f), zero()); }, count);
        sum_vectors([&](F logits) { return select_ge(logits, lowest, sub(logits, best), zero()); }, mean);
        F middle = splat(float(mean /= count));
        auto square_apart = [&](F logits) {
            F apart = sub(sub(logits, best), middle);
            return select_ge(logits, lowest, mul(apart, apart), zero());
        };
        sum_vectors(square_apart, squares);
        return std::sqrt(squares / count);
    }

    // Keeps, of the tokens at or above `threshold`, those whose log-weights are nearest to their mean, until they have
    // `typical_p` of the mass. Hides the tokens above them in place, and returns the least logit kept.
    float hide_untypical(float threshold, double typical_p) {
        Interval all{std::max(threshold, -std::numeric_limits<float>::max()), std::numeric_limits<float>::infinity()};
        remaining_.resize(num_blocks_ * BLOCK + W);  // whole vectors are written
        int64_t count = 0;
        for_each_run(all.low, [&](const float* x, int64_t size) { count = gather_between(x, size, all, count); });
        std::fill_n(remaining_.begin() + count, W, best_);  // without weight, below
        scratch_.assign(count + W, 0.0f);
        F best = splat(best_), temperature = splat(temperature_);
        for (int64_t i = 0; i < count; i += W)
            store(scratch_.data() + i, weight_of(load(remaining_.data() + i), best, temperature));
        std::fill_n(scratch_.begin() + count, W, 0.0f);
        double mass = 0, moment = 0;
        for (int64_t i = 0; i < count; i++) mass += scratch_[i], moment += double(scratch_[i]) * (remaining_[i] - best_);
        float mean = float(best_ + moment / mass);
        // Bisection over the bits of the distance, whose order is that of the numbers.
        int32_t low = -1, high = 0x7F7FFFFF;
        double target = typical_p * mass_within(std::numeric_limits<float>::max(), mean, count);
        while (low + 1 < high) {
            int32_t middle = low + (high - low) / 2;
            (mass_within(float_of(middle), mean, count) >= target ? high : low) = middle;
        }
        float least = best_, most = MINUS_INFINITY;
        for (int64_t i = 0; i < count; i++)
            if (std::fabs(remaining_[i] - mean) <= float_of(high))
                least = std::min(least, remaining_[i]), most = std::max(most, remaining_[i]);
        for (int64_t b = 0; b < num_blocks_; b++) {
            if (!(maxima_[b] > most)) continue;
            for (int64_t i = b * BLOCK; i < std::min(size_, (b + 1) * BLOCK); i++)
                if (logits_[i] > most) logits_[i] = MINUS_INFINITY;
        }
        return least;
    }

    static float float_of(int32_t bits) {
        float number;
        std::memcpy(&number, &bits, sizeof number);
        return number;
    }

    // The sum of the weights in `scratch_` of the logits in `remaining_` that are at most `distance` from `mean`.
    double mass_within(float distance, float mean, int64_t count) const {
        double total = 0;
        F bound = splat(distance), middle = splat(mean);
        for (int64_t begin = 0; begin < count; begin += FLOAT_SUM_LENGTH) {
            F sum = zero();
            for (int64_t i = begin; i < std::min(count, begin + FLOAT_SUM_LENGTH); i += W) {
                F x = load(remaining_.data() + i), apart = max(sub(x, middle), sub(middle, x));
                sum = add(sum, select_ge(bound, apart, load(scratch_.data() + i), zero()));
            }
            total += sum_of(sum);
        }
        return total;
    }

    // Adds of(logits) of all vectors to `total`.
    template <class Of>
    void sum_vectors(const Of& of, double& total) {
        for_each_run(-std::numeric_limits<float>::max(), [&](const float* x, int64_t count) {
            for (int64_t begin = 0; begin < count; begin += FLOAT_SUM_LENGTH) {
                F sum = zero();
                for (int64_t i = begin; i < std::min(count, begin + FLOAT_SUM_LENGTH); i += W) sum = add(sum, of(load(x + i)));
                total += sum_of(sum);
            }
        });
    }

    // The k-th largest logit. At least k tokens are at or above the k-th largest block maximum, so only those are
    // inspected.
    float top_k_threshold(int64_t k) {
        float bound = MINUS_INFINITY;
        if (k <= num_blocks_) {
            scratch_ = maxima_;
            std::nth_element(scratch_.begin(), scratch_.begin() + k - 1, scratch_.end(), std::greater<float>());
            bound = scratch_[k - 1];
        }
        scratch_.clear();
        for (int64_t b = 0; b < num_blocks_; b++) {
            if (!is_candidate(b, bound)) continue;
            const float* x = block(b);
            for (int64_t i = 0; i < std::min(BLOCK, size_ - b * BLOCK); i++)
                if (x[i] >= bound) scratch_.push_back(x[i]);
        }
        if (int64_t(scratch_.size()) < k) return MINUS_INFINITY;
        std::nth_element(scratch_.begin(), scratch_.begin() + k - 1, scratch_.end(), std::greater<float>());
        return scratch_[k - 1];
    }

    // The smallest logit that top_p keeps: that of the last token, in falling order, before which less than `top_p` of
    // the mass at or above `threshold` is reached. Sums the mass at or above a few levels in one pass; the result lies
    // between two of them. Repeats this with the tokens in that interval until few enough are left to sort.
    float top_p_threshold(float threshold, double top_p) {
        float lowest = std::max(threshold, best_ - 87.0f * temperature_);  // weights below are next to nothing
        Levels levels;
        for (int r = 0; r + 1 < NUM_LEVELS; r++) levels.at[r] = std::max(best_ - LEVEL_OFFSETS[r] * temperature_, lowest);
        levels.at[NUM_LEVELS - 1] = lowest;
        for_each_run(lowest, [&](const float* x, int64_t size) { add_level_masses(x, size, levels); });
        double target = top_p * levels.mass[NUM_LEVELS - 1], seen = 0;
        Interval interval = levels.find_interval(target, seen);
        remaining_.resize(num_blocks_ * BLOCK + W);  // whole vectors are written
        int64_t count = 0;
        for_each_run(interval.low, [&](const float* x, int64_t size) { count = gather_between(x, size, interval, count); });
        while (count > MAX_SORTED) {
            auto [low, high] = remaining_range(count);
            if (low == high) return low;
            float step = (high - low) / NUM_LEVELS;
            for (int r = 0; r < NUM_LEVELS; r++) levels.at[r] = high - step * float(r + 1), levels.mass[r] = 0;
            levels.at[NUM_LEVELS - 1] = low;
            std::fill_n(remaining_.begin() + count, W, MINUS_INFINITY);
            add_level_masses(remaining_.data(), count, levels);
            interval = levels.find_interval(target, seen);
            count = gather_between(remaining_.data(), count, interval, 0);
        }
        std::sort(remaining_.begin(), remaining_.begin() + count, std::greater<float>());
        float last = std::min(interval.high, best_);
        for (int64_t i = 0; i < count && seen < target; i++) seen += weight_of(last = remaining_[i]);
        return last;
    }

    // Calls take(x, count) for runs of adjacent candidate blocks. The last block of the row, which may be padded, is
    // passed alone.
    template <class Take>
    void for_each_run(float threshold, const Take& set_row) {
        for (int64_t b = 0, first; b < num_blocks_; b++) {
            for (first = b; b + 1 < num_blocks_ && is_candidate(b, threshold);) b++;
            if (first < b) set_row(logits_ + first * BLOCK, (b - first) * BLOCK);
            if (b + 1 == num_blocks_ && is_candidate(b, threshold)) set_row(block(b), BLOCK);
        }
    }

    // Adds the mass at or above each level. Numbers past `count`, to a whole vector, must be -inf.
    void add_level_masses(const float* x, int64_t count, Levels& levels) const {
        F best = splat(best_), temperature = splat(temperature_);
        for (int64_t begin = 0; begin < count; begin += FLOAT_SUM_LENGTH) {
            F sums[NUM_LEVELS];
            for (F& sum : sums) sum = zero();
            for (int64_t i = begin; i < std::min(count, begin + FLOAT_SUM_LENGTH); i += W) {
                F logits = load(x + i), weight = weight_of(logits, best, temperature);
                UNROLL for (int r = 0; r < NUM_LEVELS; r++)
                    sums[r] = add(sums[r], select_ge(logits, splat(levels.at[r]), weight, zero()));
            }
            for (int r = 0; r < NUM_LEVELS; r++) levels.mass[r] += sum_of(sums[r]);
        }
    }

    // Appends the logits in the interval to `remaining_` behind `num_found` and returns the new number. `x` may be
    // `remaining_` itself, at or behind the write position. Numbers past `count`, to a whole vector, must be -inf.
    int64_t gather_between(const float* x, int64_t count, Interval interval, int64_t num_found) {
        F low = splat(interval.low), high = splat(interval.high);
        for (int64_t i = 0; i < count; i += W)
            num_found += compress_store_between(remaining_.data() + num_found, load(x + i), low, high);
        return num_found;
    }

    std::pair<float, float> remaining_range(int64_t count) const {
        int64_t i = 0;
        F falls = splat(MINUS_INFINITY), rises = falls;
        for (; i + W <= count; i += W) {
            F logits = load(remaining_.data() + i);
            falls = max(falls, sub(zero(), logits)), rises = max(rises, logits);
        }
        float low = -max_of(falls), high = max_of(rises);
        for (; i < count; i++) low = std::min(low, remaining_[i]), high = std::max(high, remaining_[i]);
        return {low, high};
    }

    F weight_of(F logits, F best, F temperature) const {
        F value = sub(logits, best);
        return exp(is_scaled_ ? div(value, temperature) : value);
    }

    double weight_of(float logit) const {
        return max_of(weight_of(splat(logit), splat(best_), splat(temperature_)));
    }

    // The first token at or above `threshold` whose cumulative probability exceeds u.
    int64_t inverse_cdf(double u, float threshold) {
        float weights[BLOCK];
        double total = 0;
        for (int64_t b = 0; b < num_blocks_; b++) {
            sums_[b] = is_candidate(b, threshold) ? block_weights(b, threshold, weights) : 0.0;
            total += sums_[b];
        }
        double target = std::min(u * total, std::nextafter(total, 0.0)), before = 0;
        int64_t b = 0;
        while (b + 1 < num_blocks_ && before + sums_[b] <= target) before += sums_[b++];
        while (sums_[b] == 0) b--;  // rounding raised `target` to the whole sum
        block_weights(b, threshold, weights);
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

    float* logits_ = nullptr;
    int64_t size_ = 0, num_blocks_ = 0;
    float best_ = 0, temperature_ = 1;
    bool is_broken_ = false, is_scaled_ = false;
    alignas(64) float tail_[BLOCK];
    std::vector<float> maxima_, scratch_, remaining_;
    std::vector<double> sums_;
};

uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// A number in [0, 1) from a seed and a token's absolute position. NOTE: the same bits as `uniform` in
// stages/sample/sampling_math.py.
double uniform(uint64_t seed, uint64_t position) {
    return double(mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) >> 11) * 0x1p-53;
}

void sample_row(RowSampler& row, const SlotSampling& sampling, const SamplingRows& all, int64_t i) {
    int64_t slot = all.slots[i];
    int64_t mask = all.masks ? all.mask_rows[i] : -1;
    const uint32_t* words = mask < 0 ? nullptr : all.masks + mask * all.num_words;
    row.set_row(all.logits + i * all.vocab_size, all.vocab_size, words);
    all.is_broken[i] = row.is_broken();
    if (row.is_broken())
        all.token_ids[i] = 0;
    else if (sampling.is_random[slot])
        all.token_ids[i] = row.draw(sampling.draws[slot],
                                    uniform(sampling.seeds[slot], sampling.num_prompt[slot] + all.positions[i]));
    else
        all.token_ids[i] = row.argmax();
}

int threads_for(const Pool& pool, int64_t num_rows, int64_t vocab_size) {
    constexpr int64_t WORTH = 1 << 16;  // logits that pay for another thread
    return int(std::min<int64_t>({pool.limit.load(), num_rows, 1 + num_rows * vocab_size / WORTH}));
}

}  // namespace

void sample(Model& model, const SlotSampling& sampling, const SamplingRows& rows) {
    std::lock_guard<std::mutex> lock(model.is_running);
    Pool& pool = *model.pool;
    int num_threads = threads_for(pool, rows.num_rows, rows.vocab_size);
    pool.run(num_threads, [&](int thread) {
        thread_local RowSampler row;
        int64_t first, last;
        split_evenly(rows.num_rows, thread, num_threads, &first, &last);
        for (int64_t i = first; i < last; i++) sample_row(row, sampling, rows, i);
    });
}

}  // namespace millrace
