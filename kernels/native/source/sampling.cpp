#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace millrace {

namespace {

constexpr int64_t BLOCK = 128;  // tokens that are looked at together
constexpr int64_t WORDS = BLOCK / 32;  // of a mask, for a block
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int NUM_BUCKETS = 4096;
constexpr float BUCKETS_PER_UNIT = 128.0f;  // of a log-weight; what is below e ** -32 shares the last bucket

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
        scale_ = float(1.0 / temperature);
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
            F logits = load(x + i), value = sub(logits, best);
            if (is_scaled_) value = div(value, temperature);
            F weight = where_ge(logits, bound, exp(value), zero());
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
    // has been seen. Tokens are counted in buckets of about the same likelihood, and one bucket is sorted.
    float least_of_share(float least, double share) {
        buckets_.assign(NUM_BUCKETS, 0.0);
        weights_.resize(num_blocks_ * BLOCK);
        double mass = 0;
        for (int64_t b = 0; b < num_blocks_; b++) {
            if (!counts(b, least)) continue;
            float* weights = weights_.data() + b * BLOCK;
            mass += weigh(b, least, weights);
            const float* x = block(b);
            for (int i = 0; i < BLOCK; i++)
                if (weights[i] > 0) buckets_[bucket(x[i])] += weights[i];
        }
        double wanted = share * mass, seen = 0;
        int crossing = 0;
        while (crossing < NUM_BUCKETS && seen + buckets_[crossing] < wanted) seen += buckets_[crossing++];
        if (crossing == NUM_BUCKETS) return least;
        sorted_.clear();
        for (int64_t b = 0; b < num_blocks_; b++) {
            if (!counts(b, least) || bucket(maxima_[b]) > crossing) continue;
            const float *x = block(b), *weights = weights_.data() + b * BLOCK;
            for (int i = 0; i < BLOCK; i++)
                if (weights[i] > 0 && bucket(x[i]) == crossing) sorted_.emplace_back(x[i], weights[i]);
        }
        std::sort(sorted_.begin(), sorted_.end(), [](auto& a, auto& b) { return a.first > b.first; });
        float last = best_;
        for (auto& [logit, weight] : sorted_) {
            if (seen >= wanted) break;
            last = logit;
            seen += weight;
        }
        return last;
    }

    int bucket(float logit) const {
        return int(std::min((best_ - logit) * scale_ * BUCKETS_PER_UNIT, float(NUM_BUCKETS - 1)));
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
    float best_ = 0, scale_ = 1, temperature_ = 1;
    bool is_broken_ = false, is_scaled_ = false;
    alignas(64) float tail_[BLOCK];
    std::vector<float> maxima_, found_, weights_;
    std::vector<double> sums_, buckets_;
    std::vector<std::pair<float, float>> sorted_;
};

uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// In [0, 1), of a seed and a token's absolute position: as `uniform` of stages/logits.py, to the bit.
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
