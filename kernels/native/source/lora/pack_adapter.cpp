#include "lora/adapter.h"

namespace millrace {

namespace {

// Successive rows of a source that are columns of one slice; `first_column` counts the rows of gate or up alone.
struct Part {
    int64_t first_row, num_rows, first_column, first_block, step;
};

std::vector<Part> parts_of(const Layer& layer, const LoraSource& source) {
    std::vector<Part> parts;
    auto add = [&](int64_t begin, int64_t end, int64_t base, int64_t offset, int64_t step) {
        int64_t first = std::max(begin, source.first_row), last = std::min(end, source.first_row + source.num_rows);
        if (first >= last) return;
        int64_t column = first - base;
        parts.push_back({first - source.first_row, last - first, column, column / LORA_LANES * step + offset, step});
    };
    int64_t inner = layer.shape.intermediate_size, all = std::numeric_limits<int64_t>::max();
    if (source.target == LORA_GATE_UP && layer.shape.is_gated)
        add(0, inner, 0, 0, 2), add(inner, 2 * inner, inner, 1, 2);
    else
        add(0, all, 0, 0, 1);
    return parts;
}

const Linear& linear_of(const Layer& layer, int32_t target) {
    const Linear* all[] = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
    return *all[target];
}

// Places of an adapter's matrices, then the matrices themselves.
class Packing {
  public:
    Packing(const Model& model, DataType type, int64_t count, const LoraSource* sources)
        : model_(model), sources_(sources), count_(count), size_(type == BFLOAT16 ? 2 : 4),
          adapter_(std::make_shared<LoraAdapter>()) {
        adapter_->type = type;
        adapter_->layers.resize(model.layers.size());
    }

    template <class Stored>
    std::shared_ptr<const LoraAdapter> run() {
        for (int64_t layer = 0; layer < int64_t(model_.layers.size()); layer++)
            for (int32_t target = 0; target < NUM_LORA_TARGETS; target++) place(layer, target);
        adapter_->memory = Memory(num_bytes_ + LORA_OVERREAD_BYTES);
        for (const Matrix& matrix : matrices_) matrix.is_b ? pack_b<Stored>(matrix) : pack_a<Stored>(matrix);
        return std::move(adapter_);
    }

  private:
    struct Matrix {
        const LoraSource* source;
        const LoraProduct* product;
        bool is_b;
        size_t slice;       // of B
        Part part;          // of B
        int64_t first_sum;  // of A
    };

    int64_t take(int64_t num_bytes) {
        int64_t offset = num_bytes_;
        num_bytes_ += round_up(num_bytes, 64);
        return offset;
    }

    void place(int64_t layer, int32_t target) {
        LoraProduct& product = adapter_->layers[layer][target];
        const Linear& linear = linear_of(model_.layers[layer], target);
        struct Sums {
            const void* a;
            int64_t first, first_in_tiles;
        };
        std::vector<Sums> sums;  // of each A
        int64_t num_sums = 0, num_tile_sums = 0;
        std::vector<Matrix> all;
        for (const LoraSource* source = sources_; source < sources_ + count_; source++) {
            if (source->layer != layer || source->target != target) continue;
            auto known = std::find_if(sums.begin(), sums.end(), [&](auto& one) { return one.a == source->a; });
            if (known == sums.end()) {
                all.push_back({source, &product, false, 0, {}, num_sums});
                known = sums.insert(sums.end(), {source->a, num_sums, num_tile_sums});
                num_sums += round_up(source->rank, 2), num_tile_sums += round_up(source->rank, LORA_TILE_SUMS);
            }
            for (const Part& part : parts_of(model_.layers[layer], *source)) {
                int64_t lanes = part.first_column % LORA_LANES + part.num_rows;
                all.push_back({source, &product, true, product.slices.size(), part, 0});
                int64_t num_pairs = ceil_div(source->rank, 2), block_bytes = 2 * num_pairs * LORA_LANES * size_;
                product.slices.push_back({part.first_block, part.step, ceil_div(lanes, LORA_LANES), known->first,
                                          known->first_in_tiles, num_pairs, 0, block_bytes});
            }
        }
        product.num_panels = ceil_div(num_sums, LORA_LANES);
        product.panel_bytes = 2 * lora_pairs(linear.k, adapter_->type) * LORA_LANES * size_;
        product.offset = take(product.num_panels * product.panel_bytes);
        for (LoraSlice& slice : product.slices) slice.offset = take(slice.num_blocks * slice.block_bytes);
        adapter_->num_sums = std::max({adapter_->num_sums, product.num_panels * LORA_LANES, num_tile_sums});
        matrices_.insert(matrices_.end(), all.begin(), all.end());
    }

    template <class Stored>
    void pack_a(const Matrix& matrix) {
        const LoraSource& source = *matrix.source;
        int64_t k = linear_of(model_.layers[source.layer], source.target).k;
        for (int64_t rank = 0; rank < source.rank; rank++) {
            int64_t sum = matrix.first_sum + rank, lane = sum % LORA_LANES;
            Stored* panel = place_of<Stored>(matrix.product->offset + sum / LORA_LANES * matrix.product->panel_bytes);
            const Stored* from = static_cast<const Stored*>(source.a) + rank * k;
            for (int64_t i = 0; i < k; i++) panel[index_in_pairs<Stored>(i, LORA_LANES, lane)] = from[i];
        }
    }

    template <class Stored>
    void pack_b(const Matrix& matrix) {
        const LoraSource& source = *matrix.source;
        const LoraSlice& slice = matrix.product->slices[matrix.slice];
        for (int64_t row = 0; row < matrix.part.num_rows; row++) {
            int64_t column = matrix.part.first_column % LORA_LANES + row, lane = column % LORA_LANES;
            Stored* block = place_of<Stored>(slice.offset + column / LORA_LANES * slice.block_bytes);
            const Stored* from = static_cast<const Stored*>(source.b) + (matrix.part.first_row + row) * source.rank;
            for (int64_t i = 0; i < source.rank; i++) block[index_in_pairs<Stored>(i, LORA_LANES, lane)] = from[i];
        }
    }

    template <class Stored>
    Stored* place_of(int64_t offset) const {
        return reinterpret_cast<Stored*>(adapter_->memory.as<char>() + offset);
    }

    const Model& model_;
    const LoraSource* sources_;
    int64_t count_, size_, num_bytes_ = 0;
    std::shared_ptr<LoraAdapter> adapter_;
    std::vector<Matrix> matrices_;
};

}  // namespace

std::shared_ptr<const LoraAdapter> pack_adapter(const Model& model, DataType type, int64_t count,
                                                const LoraSource* sources) {
    Packing packing(model, type, count, sources);
    return type == BFLOAT16 ? packing.run<bf16>() : packing.run<float>();
}

}  // namespace millrace
