// Packing of the matrix that makes keys and values of latents, [heads, nope_dim + value_dim rows, kv_rank].
//
// It becomes two matrices in the model's dtype: K_h transposed, [kv_rank, nope_dim], and V_h, [value_dim, kv_rank], of
// each head h in panels of its own. Called through api.cpp on the loading thread; packed by all threads of the pool.

#include <atomic>
#include <cmath>
#include <limits>

#include "latents/latent_step.h"

namespace millrace {

namespace {

// Where element `index` of k lies in a panel's column.
template <class T>
int64_t place_in_panel(const Linear& linear, int64_t index, int64_t lane) {
    int64_t num_pairs = linear.k / 2, streams = num_streams(num_pairs), pair = index / 2;
    int64_t place = pair % streams * (num_pairs / streams) + pair / streams;
    return 2 * PANEL * place + index_in_pairs<T>(index % 2, PANEL, lane);
}

// Writes element `index` of k, of a head's column. False if it is not finite.
template <class T>
bool put_number(Linear& linear, int64_t head, int64_t panels, int64_t column, int64_t index, float number) {
    T* panel = linear.weight.as<T>() + (head * panels + column / PANEL) * linear.k * PANEL;
    T* to = panel + place_in_panel<T>(linear, index, column % PANEL);
    convert(number, to);
    return std::abs(widen(*to)) <= std::numeric_limits<float>::max();
}

template <class T>
bool put_rows(Model& model, const Tensor& tensor) {
    Layer& layer = model.layers[tensor.layer];
    const LatentShape& sizes = layer.shape.latents;
    int64_t of_head = sizes.nope_dim + sizes.value_dim, rank = sizes.kv_rank;
    int64_t num_rows = tensor.num_rows ? tensor.num_rows : layer.shape.num_heads * of_head;
    int64_t key_panels = latent_panels(rank), value_panels = latent_panels(sizes.value_dim);
    std::atomic<bool> is_finite{true};
    int num_threads = num_rows * rank > 1 << 16 ? model.pool->size() : 1;
    model.pool->run(num_threads, [&](int thread) {
        std::vector<float> numbers(rank);
        int64_t first, last;
        split_evenly(ceil_div(num_rows, of_head), thread, num_threads, &first, &last);  // neighbours share pairs
        bool finite = true;
        for (int64_t i = first * of_head; i < std::min(num_rows, last * of_head); i++) {
            int64_t row = tensor.first_row + i, head = row / of_head, place = row % of_head;
            read_numbers(tensor.data, tensor.type, i * rank, rank, numbers.data());
            for (int64_t c = 0; c < rank; c++)
                finite &= place < sizes.nope_dim
                              ? put_number<T>(layer.key_up, head, key_panels, c, place, numbers[c])
                              : put_number<T>(layer.value_up, head, value_panels, place - sizes.nope_dim, c, numbers[c]);
        }
        if (!finite) is_finite = false;
    });
    return is_finite;
}

}  // namespace

bool set_latent_rows(Model& model, const Tensor& tensor) {
    Layer& layer = model.layers[tensor.layer];
    for (Linear* linear : {&layer.key_up, &layer.value_up})
        if (!linear->weight.num_bytes()) linear->weight = Memory::prefaulted(linear->weight_bytes(), *model.pool);
    return layer.key_up.type == BFLOAT16 ? put_rows<bf16>(model, tensor) : put_rows<float>(model, tensor);
}

}  // namespace millrace
