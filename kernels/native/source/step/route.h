// Router: which experts a row goes to, and with what weights. The rule is that of kernels/reference/experts.py.
//
// All in float32, row by row, so that nothing depends on other rows. Called in a phase of ExpertStep, on each compute
// thread.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "weights/shape.h"

namespace millrace {

class Router {
  public:
    // choice_bias [experts]: added to scores to choose; scales [experts]: multiply weights; null: none.
    Router(const ExpertsShape& shape, const float* choice_bias, const float* scales = nullptr)
        : shape_(shape), choice_bias_(choice_bias), scales_of_experts_(scales), scores_(shape.num_experts), choice_(shape.num_experts),
          group_scores_(shape.num_groups), is_taken_(std::max(shape.num_experts, shape.num_groups)) {}

    // The experts of a row, best first, and their weights: ids, weights [top_k]. Of equal ones the first goes first.
    void route(const float* logits, int32_t* ids, float* weights) {
        int64_t count = shape_.num_experts, top_k = shape_.top_k;
        if (shape_.is_softmax_of_chosen) {
            find_largest(logits, count, top_k, ids);
            for (int64_t i = 0; i < top_k; i++) weights[i] = logits[ids[i]];
            softmax(weights, top_k);
        } else {
            std::copy(logits, logits + count, scores_.begin());
            shape_.is_sigmoid ? sigmoid(scores_.data(), count) : softmax(scores_.data(), count);
            find_largest(choice_of(logits), count, top_k, ids);
            for (int64_t i = 0; i < top_k; i++) weights[i] = scores_[ids[i]];
            if (shape_.divides_by_sum) divide_by_sum(weights);
        }
        for (int64_t i = 0; i < top_k; i++) weights[i] *= shape_.scale;
        if (scales_of_experts_)
            for (int64_t i = 0; i < top_k; i++) weights[i] *= scales_of_experts_[ids[i]];
    }

    static void sigmoid(float* x, int64_t count) {
        for (int64_t i = 0; i < count; i++) x[i] = 1.0f / (1.0f + std::exp(-x[i]));
    }

  private:
    static void softmax(float* x, int64_t count) {
        float maximum = *std::max_element(x, x + count), sum = 0;
        for (int64_t i = 0; i < count; i++) x[i] = std::exp(x[i] - maximum), sum += x[i];
        for (int64_t i = 0; i < count; i++) x[i] /= sum;
    }

    void divide_by_sum(float* weights) const {
        float sum = 0;
        for (int64_t i = 0; i < shape_.top_k; i++) sum += weights[i];
        sum = std::max(sum + shape_.norm_eps, shape_.norm_min);
        for (int64_t i = 0; i < shape_.top_k; i++) weights[i] /= sum;
    }

    // What the best experts have most of. Scores rise with logits, so where nothing is added to them logits choose, and
    // no rounding of an exponential decides between two experts.
    const float* choice_of(const float* logits) {
        int64_t count = shape_.num_experts;
        bool sums_two = shape_.num_groups > 1 && shape_.sums_two_of_group;
        std::copy(logits, logits + count, choice_.begin());
        if (choice_bias_ || sums_two) choice_ = scores_;
        if (choice_bias_)
            for (int64_t i = 0; i < count; i++) choice_[i] += choice_bias_[i];
        if (shape_.num_groups > 1) leave_best_groups();
        return choice_.data();
    }

    void leave_best_groups() {
        constexpr float NONE = -std::numeric_limits<float>::infinity();
        int64_t num_groups = shape_.num_groups, size = shape_.num_experts / num_groups;
        for (int64_t group = 0; group < num_groups; group++) {
            float best = NONE, second = NONE;
            for (int64_t i = group * size; i < (group + 1) * size; i++) {
                second = std::max(second, std::min(best, choice_[i]));
                best = std::max(best, choice_[i]);
            }
            group_scores_[group] = shape_.sums_two_of_group && size > 1 ? best + second : best;
        }
        std::vector<int32_t> kept(shape_.num_groups_kept);
        find_largest(group_scores_.data(), num_groups, int64_t(kept.size()), kept.data());
        for (int64_t group = 0; group < num_groups; group++)
            if (std::find(kept.begin(), kept.end(), int32_t(group)) == kept.end())
                std::fill_n(choice_.begin() + group * size, size, NONE);
    }

    // Where the `wanted` largest of `count` numbers are; whatever the numbers are, each once.
    void find_largest(const float* numbers, int64_t count, int64_t wanted, int32_t* indices) {
        std::fill_n(is_taken_.begin(), count, 0);
        for (int64_t rank = 0; rank < wanted; rank++) {
            int64_t best = -1;
            for (int64_t i = 0; i < count; i++)
                if (!is_taken_[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
            indices[rank] = int32_t(best), is_taken_[best] = 1;
        }
    }

    const ExpertsShape& shape_;
    const float *choice_bias_, *scales_of_experts_;
    std::vector<float> scores_, choice_, group_scores_;
    std::vector<char> is_taken_;
};

}  // namespace millrace
