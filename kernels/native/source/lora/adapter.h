// LoraAdapter: the packed matrices of an adapter, y += B (A x) for rows of some products. LoraRows: the rows of a batch
// by adapter.
//
// An adapter is packed by pack_adapter.cpp, on the thread that loads it, and never changes. Steps read it on all
// compute threads: shrink.h computes the sums A x of a product's rows, update.h adds B times the sums to its tiles.

#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "weights/model.h"

namespace millrace {

// The products that adapters change. Numbered as in lora.py.
enum LoraTarget : int32_t { LORA_QKV, LORA_OUTPUT, LORA_GATE_UP, LORA_DOWN, NUM_LORA_TARGETS };

// Sums of A, and columns of a product, that are packed together: a vector, or two of AVX2.
constexpr int64_t LORA_LANES = 16;
constexpr int64_t LORA_BLOCKS = PANEL / LORA_LANES;  // of a product's panel
constexpr int64_t LORA_TILE_SUMS = 32;  // sums of a step in tiles, of which blocks have as many rows
constexpr int64_t LORA_OVERREAD_BYTES = LORA_TILE_SUMS * LORA_LANES * 2;  // behind a block, of any finite numbers

// Pairs of k in a panel of A: whole steps of AMX where bf16 is multiplied in tiles.
inline int64_t lora_pairs(int64_t k, DataType type) {
    return HAS_AMX && type == BFLOAT16 ? round_up(k / 2, 16) : k / 2;
}

// Columns of a product in blocks of 16, every `step`-th from `first_block` on, and the matrix B of them:
// [blocks][pairs of ranks][16][2] in bf16, [blocks][2 * pairs][16] in float32. Zeros in columns that no row is for.
struct LoraSlice {
    int64_t first_block, step, num_blocks;
    int64_t first_sum;  // of its sums
    int64_t first_tile_sum;  // where they begin in tiles: see `LoraUpdate`
    int64_t num_pairs;  // of ranks; an odd rank has a last sum of 0
    int64_t offset, block_bytes;  // in `LoraAdapter::memory`

    // Which of its blocks is block `block` of the product; negative: none.
    int64_t index_of(int64_t block) const {
        int64_t from_first = block - first_block;
        return from_first < 0 || from_first % step || from_first / step >= num_blocks ? -1 : from_first / step;
    }
};

// A product's part of an adapter. A: panels of 16 sums, [panels][pairs of k][16][2] or [panels][k][16].
struct LoraProduct {
    int64_t num_panels = 0, offset = 0, panel_bytes = 0;
    std::vector<LoraSlice> slices;
};

struct LoraAdapter {
    DataType type;         // FLOAT32 or BFLOAT16
    int64_t num_sums = 0;  // the most of a product, in whole panels and whole steps of tiles
    std::vector<std::array<LoraProduct, NUM_LORA_TARGETS>> layers;
    Memory memory;

    const LoraProduct& product(int layer, LoraTarget target) const { return layers[layer][target]; }
    const char* at(int64_t offset) const { return memory.as<char>() + offset; }
};

// Rows of a linear that an adapter changes. Mirrored by `LoraSliceStruct` in library.py. Gate and up lie one after
// another, as in a checkpoint. Slices may have the same A.
struct LoraSource {
    int64_t layer;
    int32_t target, is_unused;
    int64_t first_row, num_rows, rank;
    const void *a, *b;  // [rank, k] and [num_rows, rank] of the adapter's type
};

// Packs an adapter for a model.
std::shared_ptr<const LoraAdapter> pack_adapter(const Model& model, DataType type, int64_t count,
                                                const LoraSource* sources);

// Rows of a batch that have one adapter, within 32 successive ones: `rows[first]` to `rows[end - 1]`, rising.
struct LoraChunk {
    const LoraAdapter* adapter;
    int64_t first, end;
};

// The rows of a batch that have adapters. Empty if none has, which costs nothing.
class LoraRows {
  public:
    static constexpr int64_t ROWS_OF_BLOCK = 32;  // a tile of AMX

    // `slots` [num_rows]: the adapter of each row as a slot of the model; 0: none. Null: no row has one.
    LoraRows(const Model& model, const int64_t* slots, int64_t num_rows) {
        if (!slots || std::all_of(slots, slots + num_rows, [](int64_t slot) { return slot == 0; })) return;
        for (int64_t begin = 0; begin < num_rows; begin += ROWS_OF_BLOCK) {
            first_chunks_.push_back(int64_t(chunks_.size()));
            int64_t end = std::min(begin + ROWS_OF_BLOCK, num_rows), first = int64_t(rows_.size());
            for (int64_t row = begin; row < end; row++)
                if (slots[row] != 0) rows_.push_back(row);
            std::stable_sort(rows_.begin() + first, rows_.end(),
                             [=](int64_t a, int64_t b) { return slots[a] < slots[b]; });
            for (int64_t i = first; i < int64_t(rows_.size()); chunks_.back().end = ++i)
                if (i == first || slots[rows_[i]] != slots[rows_[i - 1]])
                    chunks_.push_back({model.adapters[slots[rows_[i]]].get(), i, i});
        }
        first_chunks_.push_back(int64_t(chunks_.size()));
    }

    bool is_empty() const { return chunks_.empty(); }
    int64_t num_chunks() const { return int64_t(chunks_.size()); }
    const LoraChunk& chunk(int64_t index) const { return chunks_[index]; }
    int64_t row(int64_t index) const { return rows_[index]; }

    // Calls use(adapter, first, end) for the rows of each adapter, `row(first)` to `row(end - 1)`, that are among `num`
    // rows from `first_row` on. Rows of one adapter may come in several calls.
    template <class Use>
    void for_each_within(int64_t first_row, int64_t num, const Use& use) const {
        int64_t end_row = first_row + num, end_block = ceil_div(end_row, ROWS_OF_BLOCK);
        for (int64_t i = first_chunks_[first_row / ROWS_OF_BLOCK]; i < first_chunks_[end_block]; i++) {
            int64_t first = chunks_[i].first, end = chunks_[i].end;
            while (first < end && rows_[first] < first_row) first++;
            while (first < end && rows_[end - 1] >= end_row) end--;
            if (first < end) use(*chunks_[i].adapter, first, end);
        }
    }

  private:
    std::vector<int64_t> rows_, first_chunks_;  // the latter by block of rows
    std::vector<LoraChunk> chunks_;
};

}  // namespace millrace
