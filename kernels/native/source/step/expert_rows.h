// ExpertRows: the pairs of a row and one of its experts, sorted by expert. Each expert's rows lie together, in tiles of
// their own.
//
// Pairs of one expert are in the order of rows. Made in each layer after routing, by one thread.

#pragma once

#include <algorithm>
#include <vector>

#include "step/batch.h"

namespace millrace {

// An expert that rows of the batch go to: `num_rows` pairs from `first_pair` on, and where its rows are.
struct ActiveExpert {
    int64_t expert, first_pair, num_rows;
    int64_t input_at, inner_at;  // bytes, in `Activations::expert_inputs` and `expert_inner`
};

// Rows of an active expert that one thread puts at a time.
struct ExpertChunk {
    int64_t index, first, last;
};

template <class Input>
class ExpertRows {
  public:
    // For layers with at most so many experts in all, and of a row.
    ExpertRows(int64_t num_rows, int64_t max_experts, int64_t max_top_k)
        : ids(num_rows * max_top_k), weights(num_rows * max_top_k), place_of(num_rows * max_top_k),
          pairs(num_rows * max_top_k), first_of_(max_experts + 1) {
        active.reserve(std::min(max_experts, num_rows * max_top_k));
        chunks.reserve(ceil_div(num_rows * max_top_k, ROWS_PER_PIECE) + active.capacity());
    }

    // By row and rank: expert and its weight, and the place of the pair among the sorted ones.
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::vector<int32_t> place_of;
    std::vector<int32_t> pairs;  // row * top_k + rank, sorted
    std::vector<ActiveExpert> active;
    std::vector<ExpertChunk> chunks;

    // Sorts the pairs of `ids`, and places the rows of experts, of `size` numbers, and `inner` behind the activation.
    void sort(int64_t num_rows, const ExpertsShape& shape, int64_t size) {
        int64_t num_pairs = num_rows * shape.top_k;
        std::fill(first_of_.begin(), first_of_.end(), 0);
        for (int64_t pair = 0; pair < num_pairs; pair++) first_of_[ids[pair] + 1]++;
        active.clear(), chunks.clear();
        int64_t input_at = 0, inner_at = 0;
        for (int64_t expert = 0; expert < shape.num_experts; expert++) {
            int64_t first = first_of_[expert], count = first_of_[expert + 1];
            first_of_[expert + 1] += first;
            if (count == 0) continue;
            for (int64_t row = 0; row < count; row += ROWS_PER_PIECE)
                chunks.push_back({int64_t(active.size()), row, std::min(count, row + ROWS_PER_PIECE)});
            active.push_back({expert, first, count, input_at, inner_at});
            input_at += bytes_of(count, size), inner_at += bytes_of(count, shape.intermediate_size);
        }
        for (int64_t pair = 0; pair < num_pairs; pair++) {
            int64_t place = first_of_[ids[pair]]++;
            place_of[pair] = int32_t(place), pairs[place] = int32_t(pair);
        }
    }

    // The rows of an active expert in a buffer, of which they begin at byte `at`.
    static TiledRows<Input> rows_at(char* buffer, int64_t at, int64_t num_rows, int64_t size) {
        return {reinterpret_cast<Input*>(buffer + at), num_rows, size};
    }

  private:
    static int64_t bytes_of(int64_t num_rows, int64_t size) {
        TiledRows<Input> rows{nullptr, num_rows, size};
        return round_up(num_rows * rows.padded_size() * int64_t(sizeof(Input)) + rows.bytes_behind(), 64);
    }

    std::vector<int64_t> first_of_;  // [experts + 1]
};

}  // namespace millrace
