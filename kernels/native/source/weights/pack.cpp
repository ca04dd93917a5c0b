// Packing of a checkpoint's tensors into panels, one tensor at a time, and the memory that holds them.
//
// Called through api.cpp on the loading thread; large tensors are packed by all threads of the pool.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <tuple>

#include "grouped/grouped_linear.h"
#include "grouped/pack_rows.h"
#include "linear/panels.h"
#include "weights/quantize.h"
#include "step/argmax_screen.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace millrace {

constexpr int64_t LARGE_PAGE = 2 << 20;  // bytes

Memory::Memory(int64_t num_bytes) : num_bytes_(num_bytes) {
#ifdef __linux__
    if (num_bytes >= LARGE_PAGE) {  // maps one page more, to start on a large page, and unmaps the rest
        mapped_bytes_ = round_up(num_bytes, LARGE_PAGE);
        void* mapped = mmap(nullptr, mapped_bytes_ + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                            0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        int64_t before = -int64_t(reinterpret_cast<uintptr_t>(mapped)) & (LARGE_PAGE - 1);
        data_ = static_cast<char*>(mapped) + before;
        if (before > 0) munmap(mapped, before);
        munmap(as<char>() + mapped_bytes_, LARGE_PAGE - before);
        madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
        return;
    }
#endif
    data_ = std::aligned_alloc(4096, round_up(std::max<int64_t>(1, num_bytes), 4096));
    if (!data_) throw std::bad_alloc();
    std::memset(data_, 0, num_bytes);
}

Memory::~Memory() {
#ifdef __linux__
    if (mapped_bytes_ > 0) munmap(data_, mapped_bytes_), data_ = nullptr;
#endif
    if (!is_part_) std::free(data_);
}

Memory Memory::prefaulted(int64_t num_bytes, [[maybe_unused]] Pool& pool) {
    Memory memory(num_bytes);
#ifdef __linux__
    if (memory.mapped_bytes_ == 0) return memory;
    pool.run(pool.size(), [&](int thread) {
        int64_t first, last;
        split_evenly(memory.mapped_bytes_ / LARGE_PAGE, thread, pool.size(), &first, &last);
        char *begin = memory.as<char>() + first * LARGE_PAGE, *end = memory.as<char>() + last * LARGE_PAGE;
        for (volatile char* page = begin; page < end; page += 4096) *page = 0;
    });
#endif
    return memory;
}

void Memory::shrink(int64_t num_bytes) {
    num_bytes_ = num_bytes;
#ifdef __linux__
    int64_t mapped_bytes = std::max(LARGE_PAGE, round_up(num_bytes, LARGE_PAGE));
    if (mapped_bytes >= mapped_bytes_) return;
    munmap(as<char>() + mapped_bytes, mapped_bytes_ - mapped_bytes);
    mapped_bytes_ = mapped_bytes;
#endif
}

int64_t Model::weights_bytes(size_t max_experts_of_layer) const {
    auto of = [](const Linear& linear) {
        int64_t numbers = linear.weight.num_bytes() + linear.raw_blocks.num_bytes();
        return numbers + linear.scales.num_bytes() + int64_t(linear.bias.size()) * 4;
    };
    bool is_whole = max_experts_of_layer == SIZE_MAX;  // else what a token reads, of the table of inputs a row
    int64_t inputs = of(layer_inputs.projection) + layer_inputs.norm.num_bytes() + is_whole * layer_inputs.table.num_bytes();
    int64_t total = inputs + embedding.num_bytes() + learned_positions.num_bytes() + of(head) + of(embedding_codes) + final_norm.num_bytes() +
                    embedding_norm.num_bytes();
    for (const Layer& layer : layers) {
        layer.for_each_linear([&](const Linear& linear) { total += of(linear); }, max_experts_of_layer);
        total += of(layer.key_up) + of(layer.value_up) + of(layer.experts.router) + 4 * int64_t(layer.experts.choice_bias.size() + layer.experts.scales.size());
        for (const Norm* norm : layer.norms()) total += norm->num_bytes();
        total += layer.recurrent.num_bytes();
        total += 4 * int64_t(layer.output_scale.size() + layer.sinks.size() + layer.activation_params.size());
    }
    return total;
}

void link_linears(Model& model) {
    Linear* before = &model.head;
    auto link = [&](Linear& linear) { before->next = &linear, before = &linear; };
    if (model.layer_inputs.exist()) link(model.layer_inputs.projection);
    for (Layer& layer : model.layers)
        layer.for_each_linear([&](Linear& linear) {
            // Before the experts are known, the router is next.
            bool is_first_of_experts = layer.has_experts() && &linear == &layer.experts.each[0].gate_up;
            before->next = is_first_of_experts ? &layer.experts.router : &linear, before = &linear;
        });
    before->next = model.shape.has_head ? &model.head : model.head.next;
}

void place_states(Model& model) {
    int64_t at = 0, item_size = model.shape.dtype == BFLOAT16 ? 2 : 4;
    for (Layer& layer : model.layers)
        layer.recurrent.matrices_at = at, at += layer.shape.recurrent.matrices_bytes();
    for (Layer& layer : model.layers)
        if (layer.is_recurrent()) layer.recurrent.tail_at = at, at += layer.shape.recurrent.tail_size() * item_size;
    model.state_bytes = at;
}

void place_linears(Model& model) {
    model.layers_bytes = 0;
    for (Layer& layer : model.layers)
        layer.for_each_linear([&](Linear& linear) {
            linear.offset = model.layers_bytes, model.layers_bytes += round_up(linear.weight_bytes(), 64);
        });
}

namespace {

float half_to_float(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023, wide;
    if (exponent == 0) {
        float value = std::ldexp(float(fraction), -24);
        return sign ? -value : value;
    }
    wide = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | (fraction << 13);
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

void read(const void* data, DataType type, int64_t begin, int64_t count, float* to) {
    auto halves = static_cast<const uint16_t*>(data) + begin;
    if (type == FLOAT32)
        std::memcpy(to, static_cast<const float*>(data) + begin, count * 4);
    else if (type == BFLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] = widen(halves[i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = half_to_float(halves[i]);
}

}  // namespace

void read_numbers(const void* data, DataType type, int64_t begin, int64_t count, float* to) {
    read(data, type, begin, count, to);
}

namespace {

// Rounds to the storage type. False if a result is not finite.
template <class T>
bool round_all(const float* from, int64_t count, T* to) {
    int64_t num_broken = 0;
    for (int64_t i = 0; i < count; i++) {
        convert(from[i], to + i);
        num_broken += !(std::abs(widen(to[i])) <= std::numeric_limits<float>::max());
    }
    return num_broken == 0;
}

bool set_floats(std::vector<float>& to, int64_t offset, int64_t count, const void* data, DataType type, DataType rounded) {
    if (int64_t(to.size()) < offset + count) to.resize(offset + count);
    float* numbers = to.data() + offset;
    read(data, type, 0, count, numbers);
    if (rounded != BFLOAT16) return round_all(numbers, count, numbers);
    std::vector<bf16> converted(count);
    bool is_finite = round_all(numbers, count, converted.data());
    for (int64_t i = 0; i < count; i++) numbers[i] = widen(converted[i]);
    return is_finite;
}

// Column of row `row` of gate (half 0) or up (half 1) in the fused gate_up product.
int64_t interleaved(int64_t row, int half) { return row / 16 * 32 + half * 16 + row % 16; }

struct RowPlacement {  // maps a tensor's rows to columns of a fused linear
    int64_t offset = 0;
    int half = -1;  // 0: gate, 1: up, -1: contiguous
    int64_t column(int64_t row) const { return half < 0 ? offset + row : interleaved(row, half); }
};

RowPlacement up_place(bool is_gated) { return is_gated ? RowPlacement{0, 1} : RowPlacement{}; }

struct Matrix {  // where a matrix is stored
    Linear* linear = nullptr;
    RowPlacement place;
    int64_t num_rows = 0;   // to set
    int64_t first_row = 0;  // of these
};

// `linear` is null for a tensor that is no matrix.
Matrix matrix_of_experts(Layer& layer, int64_t expert, TensorKind kind, int64_t hidden) {
    const ExpertsShape& shape = layer.shape.experts;
    if (kind == ROUTER) return {&layer.experts.router, {}, shape.num_experts};
    if (kind == SHARED_GATE) return {&layer.experts.router, {shape.num_experts}, 1};
    Expert& its = layer.experts.each[expert];
    switch (kind) {
        case EXPERT_GATE: return {&its.gate_up, {0, 0}, shape.intermediate_size};
        case EXPERT_UP: return {&its.gate_up, up_place(shape.is_gated), shape.intermediate_size};
        case EXPERT_DOWN: return {&its.down, {}, hidden};
        default: return {};
    }
}

Matrix matrix_of_latents(Layer& layer, TensorKind kind) {
    switch (kind) {
        case Q_DOWN: return {&layer.qkv, {}, layer.shape.q_columns()};
        case KV_DOWN: return {&layer.qkv, {layer.shape.q_columns()}, layer.shape.kv_size()};
        case Q_UP: return {&layer.query_up, {}, layer.query_up.n};
        default: return {};
    }
}

// Of a recurrent layer, or the gates of attention.
Matrix matrix_of_mixer(Layer& layer, TensorKind kind, int64_t hidden) {
    const RecurrentShape& shape = layer.shape.recurrent;
    switch (kind) {
        case OUTPUT_GATE: return {&layer.qkv, {layer.shape.gates_at()}, layer.shape.attended_size()};
        case MIX_GATE: return {&layer.qkv, {}, shape.inner_size()};
        case MIXED: {
            int64_t at = shape.kind == SHORT_CONV ? 0 : shape.mixed_at();  // then its gates are in the same tensor
            return {&layer.qkv, {at}, shape.steps_at() - at};
        }
        case MIX_STEP: return {&layer.qkv, {shape.steps_at()}, shape.num_value_heads};
        case MIX_RATE: return {&layer.qkv, {shape.rates_at()}, shape.num_value_heads};
        case MIX_OUTPUT: return {&layer.output, {}, hidden};
        default: return {};
    }
}

Matrix matrix_of(Model& model, int64_t index, int64_t expert, TensorKind kind) {
    const Shape& shape = model.shape;
    int64_t hidden = shape.hidden_size;
    if (kind == HEAD || (kind == EMBEDDING && shape.is_tied)) return {&model.head, {}, shape.vocab_size};
    if (kind == EMBEDDING && model.embedding_codes.type == GROUPED) return {&model.embedding_codes, {}, shape.vocab_size};
    if (kind == INPUT_PROJECTION) return {&model.layer_inputs.projection, {}, model.layer_inputs.projection.n};
    if (kind == INPUT_GATE) return {&model.layers[index].input_gate, {}, shape.layer_inputs.width};
    if (kind == INPUT_UP) return {&model.layers[index].input_up, {}, hidden};
    if (kind >= OUTPUT_GATE) return matrix_of_mixer(model.layers[index], kind, hidden);
    if (kind > EXPERT_DOWN_BIAS) return matrix_of_latents(model.layers[index], kind);
    if (kind >= ROUTER) return matrix_of_experts(model.layers[index], expert, kind, hidden);
    if (kind < Q || kind > DOWN) return {};
    Layer& layer = model.layers[index];
    int64_t inner = layer.shape.intermediate_size, heads = layer.shape.q_columns(), kv = layer.shape.kv_size();
    switch (kind) {
        case Q: return {&layer.qkv, {}, heads};
        case K: return {&layer.qkv, {heads}, kv};
        case V: return {&layer.qkv, {heads + kv}, kv};
        case O: return {&layer.output, {}, hidden};
        case GATE: return {&layer.gate_up, {0, 0}, inner};
        case UP: return {&layer.gate_up, up_place(layer.shape.is_gated), inner};
        default: return {&layer.down, {}, hidden};
    }
}

template <class T>
void put_numbers(Linear& linear, int64_t column, const T* numbers) {
    int64_t lane = column % PANEL, second = index_in_pairs<T>(1, PANEL, lane) - index_in_pairs<T>(0, PANEL, lane);
    T* panel = linear.weight.as<T>() + column / PANEL * linear.k * PANEL + index_in_pairs<T>(0, PANEL, lane);
    for_each_pair(linear, [=](int64_t pair, int64_t place) {
        T* to = panel + 2 * PANEL * place;
        to[0] = numbers[2 * pair], to[second] = numbers[2 * pair + 1];
    });
}

// Writes a row to its panel. False if a number is not finite. `codes` [4 k] is scratch memory.
template <class T>
bool put_row(Linear& linear, int64_t column, const float* row, std::vector<uint8_t>& codes) {
    auto numbers = reinterpret_cast<T*>(codes.data());
    bool is_finite = round_all(row, linear.k, numbers);
    put_numbers(linear, column, numbers);
    return is_finite;
}

bf16* scale_of(Linear& linear, int64_t column, int64_t group) {
    return linear.scales.as<bf16>() + (column / PANEL * linear.num_groups() + group) * PANEL + column % PANEL;
}

template <>
bool put_row<int8_t>(Linear& linear, int64_t column, const float* row, std::vector<uint8_t>& codes) {
    auto numbers = reinterpret_cast<int8_t*>(codes.data());
    bf16 scale = *scale_of(linear, column, 0) = to_int8(row, linear.k, numbers);
    put_numbers(linear, column, numbers);
    return std::isfinite(widen(scale));
}

template <>
bool put_row<Int4Pair>(Linear& linear, int64_t column, const float* row, std::vector<uint8_t>& codes) {
    bool is_finite = true;
    for (int64_t begin = 0; begin < linear.k; begin += linear.group_size) {
        int64_t count = std::min(linear.group_size, linear.k - begin);
        bf16 scale = to_int4(row + begin, count, codes.data() + begin);
        *scale_of(linear, column, begin / linear.group_size) = scale;
        is_finite &= std::isfinite(widen(scale));
    }
    Int4Pair* panel = linear.weight.as<Int4Pair>() + column / PANEL * (linear.k / 2) * PANEL;
    for_each_pair(linear, [&](int64_t pair, int64_t place) {
        uint8_t both = uint8_t(codes[2 * pair] | codes[2 * pair + 1] << 4);
        panel[index_in_pairs<Int4Pair>(2 * place, PANEL, column % PANEL)].codes = both;
    });
    return is_finite;
}

// `count` must be a multiple of 8.
bool are_finite(const bf16* numbers, int64_t count) {
    const __m128i none = _mm_set1_epi16(0x7f80);  // the exponent of infinity and NaN
    __m128i broken = _mm_setzero_si128();
    for (int64_t i = 0; i < count; i += 8) {
        __m128i exponents = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + i)), none);
        broken = _mm_or_si128(broken, _mm_cmpeq_epi16(exponents, none));
    }
    return _mm_movemask_epi8(broken) == 0;
}

// Writes four rows of bf16, [4][k], to columns `column` to `column` + 3 of one panel, without conversion. False if a
// number is not finite. Four pairs of k at a time: they are contiguous, or one in each of four streams.
bool put_four_rows(Linear& linear, int64_t column, const bf16* rows) {
    int64_t k = linear.k, num_pairs = k / 2, streams = num_streams(num_pairs), whole = num_pairs / 4 * 4;
    static_assert(STREAMS == 1 || STREAMS == 4, "four pairs are one of each stream");
    int64_t stride = (streams == 1 ? 1 : num_pairs / streams) * 2 * PANEL;
    bf16* panel = linear.weight.as<bf16>() + column / PANEL * k * PANEL + 2 * (column % PANEL);
    for (int64_t pair = 0; pair < whole; pair += 4) {
        const bf16* from[4] = {rows + 2 * pair, rows + k + 2 * pair, rows + 2 * k + 2 * pair, rows + 3 * k + 2 * pair};
        transpose_4(from, panel + pair / streams * 2 * PANEL, stride);
    }
    for (int64_t pair = whole; pair < num_pairs; pair++)  // one stream only: four streams have a multiple of four pairs
        for (int r = 0; r < 4; r++) std::memcpy(panel + pair * 2 * PANEL + 2 * r, rows + r * k + 2 * pair, 4);
    return are_finite(rows, 4 * k);
}

template <class T>
bool pack_rows(Pool& pool, const Matrix& matrix, const void* data, DataType type) {
    Linear& linear = *matrix.linear;
    int64_t rows = matrix.num_rows, k = linear.k;
    std::atomic<bool> is_finite{true};
    int num_threads = rows * k > 1 << 16 ? pool.size() : 1;
    const bool is_copied_bf16 = std::is_same<T, bf16>::value && type == BFLOAT16;
    pool.run(num_threads, [&](int thread) {
        std::vector<float> row(k);
        std::vector<uint8_t> codes(4 * k);
        int64_t first, last;
        split_evenly(ceil_div(rows, 16), thread, num_threads, &first, &last);
        bool finite = true;
        for (int64_t r = first * 16, end = std::min(last * 16, rows); r < end; r++) {
            int64_t row_of_matrix = matrix.first_row + r, column = matrix.place.column(row_of_matrix);
            bool are_four = matrix.place.column(row_of_matrix + 3) == column + 3 && column % PANEL + 4 <= PANEL;
            if (is_copied_bf16 && r + 4 <= end && are_four) {
                finite &= put_four_rows(linear, column, static_cast<const bf16*>(data) + r * k);
                r += 3;
                continue;
            }
            read(data, type, r * k, k, row.data());
            finite &= put_row<T>(linear, column, row.data(), codes);
        }
        if (!finite) is_finite = false;
    });
    return is_finite;
}

// Quantizes a row to groups of codes of 4 or 8 bits and packs it. False if a number is not finite.
bool put_quantized_row(const Linear& linear, const GroupedFormat& format, int64_t column, const float* row,
                       std::vector<uint8_t>& codes, std::vector<bf16>& scales) {
    int64_t k = linear.k;
    bool is_finite = true;
    for (int64_t begin = 0, group = 0; begin < k; begin += format.group, group++) {
        int64_t count = std::min<int64_t>(format.group, k - begin);
        uint8_t* to = codes.data() + begin;
        if (format.bits == 4) {
            scales[group] = to_int4(row + begin, count, to);
        } else {
            scales[group] = to_int8(row + begin, count, reinterpret_cast<int8_t*>(to));
            for (int64_t i = 0; i < count; i++) to[i] ^= 0x80;  // adds the zero, 128
        }
        is_finite &= std::isfinite(widen(scales[group]));
    }
    GroupedRows rows{};
    rows.packing = BYTES, rows.codes = codes.data(), rows.scales = reinterpret_cast<const uint8_t*>(scales.data());
    put_grouped_row(linear, rows, 0, column, codes.data() + round_up(k, BLOCK));
    return is_finite;
}

bool quantize_rows(Pool& pool, const Matrix& matrix, const void* data, DataType type) {
    const Linear& linear = *matrix.linear;
    int64_t k = linear.k;
    std::atomic<bool> is_finite{true};
    int num_threads = matrix.num_rows * k > 1 << 16 ? pool.size() : 1;
    pool.run(num_threads, [&](int thread) {
        std::vector<float> row(k);
        std::vector<uint8_t> codes(2 * round_up(k, BLOCK));
        std::vector<bf16> scales(k);
        int64_t first, last;
        split_evenly(matrix.num_rows, thread, num_threads, &first, &last);
        for (int64_t r = first; r < last; r++) {
            int64_t column = matrix.place.column(matrix.first_row + r);
            read(data, type, r * k, k, row.data());
            if (!put_quantized_row(linear, linear.part_of(column / PANEL).format, column, row.data(), codes, scales))
                is_finite = false;
        }
    });
    return is_finite;
}

// A layer linear's part of the memory of all layers. The memory is allocated with the first linear: until then the free
// memory still shows whether the model is too large.
Memory layer_memory(Model& model, const Linear& linear) {
    if (!model.weights.num_bytes()) model.weights = Memory::prefaulted(model.layers_bytes, *model.pool);
    return Memory(model.weights, linear.offset, linear.weight_bytes());
}

// Builds the argmax screen of a packed head.
template <class Weight>
void make_screen(Model& model) {
    const Linear& head = model.head;
    ArgmaxScreen screen;
    screen.panels = Int8Panels(head.n, head.k, *model.pool);
    screen.scales.assign(head.num_panels() * PANEL, 0.0f), screen.error_bounds.resize(head.num_panels());
    model.pool->run(model.pool->size(), [&](int thread) {
        std::vector<float> row(head.k);
        std::vector<int8_t> codes(head.k);
        int64_t first, last;
        split_evenly(head.num_panels(), thread, model.pool->size(), &first, &last);
        for (int64_t r = first * PANEL; r < std::min(last * PANEL, head.n); r++) {
            read_row<Weight>(head, r, row.data());
            float scale = screen.scales[r] = widen(to_int8(row.data(), head.k, codes.data()));
            screen.panels.put(r, head.k, codes.data());
            ErrorBound &maximum = screen.error_bounds[r / PANEL],
                error_bound = error_bound_of(row.data(), codes.data(), scale, head.k);
            maximum = {std::max(maximum.error_norm, error_bound.error_norm), std::max(maximum.norm, error_bound.norm)};
        }
    });
    model.screen = std::move(screen);
}

void allocate(Model& model, Linear& linear, bool is_router = false) {
    if (linear.weight.num_bytes()) return;
    bool is_apart = is_router || &linear == &model.layer_inputs.projection || &linear == &model.head || &linear == &model.embedding_codes;
    linear.weight = is_apart ? Memory::prefaulted(linear.weight_bytes(), *model.pool) : layer_memory(model, linear);
    if (linear.is_quantized()) linear.scales = Memory(linear.num_panels() * linear.num_groups() * PANEL * 2);
}

bool set_matrix(Model& model, const Matrix& matrix, const void* data, DataType type, bool is_router) {
    Linear& linear = *matrix.linear;
    allocate(model, linear, is_router);
    switch (linear.type) {
        case INT8: return pack_rows<int8_t>(*model.pool, matrix, data, type);
        case INT4: return pack_rows<Int4Pair>(*model.pool, matrix, data, type);
        case GROUPED: return quantize_rows(*model.pool, matrix, data, type);
        case BFLOAT16: return pack_rows<bf16>(*model.pool, matrix, data, type);
        default: return pack_rows<float>(*model.pool, matrix, data, type);
    }
}

bool set_bias(Model& model, Linear& linear, RowPlacement place, int64_t rows, const void* data, DataType type) {
    linear.bias.resize(round_up(linear.n, PANEL));
    std::vector<float> numbers;
    bool is_finite = set_floats(numbers, 0, rows, data, type, DataType(model.shape.dtype));
    for (int64_t row = 0; row < rows; row++) linear.bias[place.column(row)] = numbers[row];
    return is_finite;
}

// Copies rows of a table [num_rows, hidden] in the model's dtype: the embedding, learned positions, or layers' inputs.
bool set_table(Model& model, Memory& table, int64_t num_rows, int64_t hidden, const Tensor& tensor) {
    int64_t first = tensor.first_row, count = tensor.num_rows;
    bool is_half = model.shape.dtype == BFLOAT16, is_finite = true;
    if (!count) count = num_rows;
    if (!first) table = Memory::prefaulted(num_rows * hidden * (is_half ? 2 : 4), *model.pool);
    std::vector<float> row(hidden);
    for (int64_t i = 0; i < count; i++) {
        int64_t to = (first + i) * hidden;
        read(tensor.data, tensor.type, i * hidden, hidden, row.data());
        is_finite &= is_half ? round_all(row.data(), hidden, table.as<bf16>() + to)
                             : round_all(row.data(), hidden, table.as<float>() + to);
    }
    return is_finite;
}

// Biases of mixers' products, and vectors of recurrent layers.
bool set_mixer_numbers(Model& model, const Tensor& tensor) {
    Layer& layer = model.layers[tensor.layer];
    RecurrentWeights& its = layer.recurrent;
    const RecurrentShape& shape = layer.shape.recurrent;
    const void* data = tensor.data;
    DataType type = tensor.type, rounded = DataType(model.shape.dtype);
    int64_t heads = shape.num_value_heads, channels = shape.conv_channels();
    if (tensor.kind < CONV) {
        Matrix matrix = matrix_of(model, tensor.layer, 0, TensorKind(tensor.kind - OUTPUT_GATE_BIAS + OUTPUT_GATE));
        return set_bias(model, *matrix.linear, matrix.place, matrix.num_rows, data, type);
    }
    switch (tensor.kind) {
        case CONV: {
            std::vector<float> stored;
            bool is_finite = set_floats(stored, 0, channels * shape.conv_width, data, type, rounded);
            its.set_conv(stored, shape.conv_width);
            return is_finite;
        }
        case CONV_BIAS: return set_floats(its.conv_bias, 0, channels, data, type, rounded);
        case DECAY: return set_floats(its.decay, 0, heads, data, type, FLOAT32);
        case STEP_BIAS: return set_floats(its.step_bias, 0, heads, data, type, FLOAT32);
        case SKIP: return set_floats(its.skip, 0, heads, data, type, FLOAT32);
        default: {
            int64_t size = shape.norm_group ? shape.inner_size() : shape.value_dim;
            return set_floats(its.norm.weight, 0, size, data, type, shape.norm.is_exact ? FLOAT32 : rounded);
        }
    }
}

bool pack(Model& model, const Tensor& tensor) {
    const Shape& shape = model.shape;
    int64_t index = tensor.layer;
    TensorKind kind = tensor.kind;
    const void* data = tensor.data;
    DataType type = tensor.type;
    Matrix matrix = matrix_of(model, index, tensor.expert, kind);
    if (matrix.linear) {
        bool is_head = matrix.linear == &model.head, is_last = true;
        if (tensor.num_rows) {
            is_last = tensor.first_row + tensor.num_rows == matrix.num_rows;
            matrix.first_row = tensor.first_row, matrix.num_rows = tensor.num_rows;
        }
        if (is_head) model.screen = ArgmaxScreen();
        if (!set_matrix(model, matrix, data, type, kind == ROUTER || kind == SHARED_GATE)) return false;
        auto make = model.head.type == BFLOAT16 ? make_screen<bf16> : make_screen<float>;
        if (is_head && is_last && can_screen(model)) make(model);
        return true;
    }
    if (kind >= OUTPUT_GATE_BIAS) return set_mixer_numbers(model, tensor);
    int64_t hidden = shape.hidden_size;
    DataType rounded = DataType(shape.dtype);
    auto set_norm = [&](const Norm& norm, std::vector<float>& to, int64_t size) {
        return set_floats(to, 0, size, data, type, norm.shape.is_exact ? FLOAT32 : rounded);
    };
    switch (kind) {
        case EMBEDDING: return set_table(model, model.embedding, shape.vocab_size, hidden, tensor);
        case LEARNED_POSITIONS:
            return set_table(model, model.learned_positions, shape.num_learned_positions, hidden, tensor);
        case INPUT_TABLE:
            return set_table(model, model.layer_inputs.table, shape.layer_inputs.rows, model.layer_inputs.projection.n, tensor);
        case INPUT_PROJECTION_NORM:
            return set_norm(model.layer_inputs.norm, model.layer_inputs.norm.weight, shape.layer_inputs.width);
        case HEAD_BIAS: return set_bias(model, model.head, {}, shape.vocab_size, data, type);
        case FINAL_NORM: return set_norm(model.final_norm, model.final_norm.weight, hidden);
        case FINAL_NORM_BIAS: return set_norm(model.final_norm, model.final_norm.bias, hidden);
        case EMBEDDING_NORM: return set_norm(model.embedding_norm, model.embedding_norm.weight, hidden);
        case EMBEDDING_NORM_BIAS: return set_norm(model.embedding_norm, model.embedding_norm.bias, hidden);
        default: break;
    }
    Layer& layer = model.layers[index];
    int64_t inner = layer.shape.intermediate_size, head_dim = layer.shape.head_dim;
    int64_t heads = layer.shape.q_columns(), kv = layer.shape.kv_size();
    bool has_whole_rows = layer.shape.is_qk_norm_over_row || layer.shape.has_weight_per_head;
    int64_t q_size = has_whole_rows ? heads : head_dim, k_size = has_whole_rows ? kv : head_dim;
    if (layer.shape.has_latents()) q_size = heads, k_size = layer.shape.latents.kv_rank;
    switch (kind) {
        case PRE_MIXER: return set_norm(layer.pre_mixer, layer.pre_mixer.weight, hidden);
        case PRE_MIXER_BIAS: return set_norm(layer.pre_mixer, layer.pre_mixer.bias, hidden);
        case POST_MIXER: return set_norm(layer.post_mixer, layer.post_mixer.weight, hidden);
        case POST_MIXER_BIAS: return set_norm(layer.post_mixer, layer.post_mixer.bias, hidden);
        case PRE_FEED: return set_norm(layer.pre_feed, layer.pre_feed.weight, hidden);
        case PRE_FEED_BIAS: return set_norm(layer.pre_feed, layer.pre_feed.bias, hidden);
        case POST_FEED: return set_norm(layer.post_feed, layer.post_feed.weight, hidden);
        case POST_FEED_BIAS: return set_norm(layer.post_feed, layer.post_feed.bias, hidden);
        case Q_NORM: return set_norm(layer.q_norm, layer.q_norm.weight, q_size);
        case Q_NORM_BIAS: return set_norm(layer.q_norm, layer.q_norm.bias, q_size);
        case K_NORM: return set_norm(layer.k_norm, layer.k_norm.weight, k_size);
        case K_NORM_BIAS: return set_norm(layer.k_norm, layer.k_norm.bias, k_size);
        case SINKS: return set_floats(layer.sinks, 0, layer.shape.num_heads, data, type, FLOAT32);
        case ACTIVATION_PARAMS: return set_floats(layer.activation_params, 0, 2, data, type, FLOAT32);
        case OUTPUT_SCALE: return set_floats(layer.output_scale, 0, 1, data, type, rounded);
        case INPUT_NORM: return set_norm(layer.input_norm, layer.input_norm.weight, hidden);
        case KV_UP: return set_latent_rows(model, tensor);
        case Q_DOWN_BIAS: return set_bias(model, layer.qkv, {}, heads, data, type);
        case KV_DOWN_BIAS: return set_bias(model, layer.qkv, {heads}, kv, data, type);
        case Q_BIAS: return set_bias(model, layer.qkv, {}, heads, data, type);
        case K_BIAS: return set_bias(model, layer.qkv, {heads}, kv, data, type);
        case V_BIAS: return set_bias(model, layer.qkv, {heads + kv}, kv, data, type);
        case O_BIAS: return set_bias(model, layer.output, {}, hidden, data, type);
        case GATE_BIAS: return set_bias(model, layer.gate_up, {0, 0}, inner, data, type);
        case UP_BIAS: return set_bias(model, layer.gate_up, up_place(layer.shape.is_gated), inner, data, type);
        case DOWN_BIAS: return set_bias(model, layer.down, {}, hidden, data, type);
        default: break;
    }
    Experts& experts = layer.experts;
    const ExpertsShape& its = layer.shape.experts;
    if (kind < ROUTER_BIAS || !layer.has_experts()) return false;
    Expert& expert = experts.each[tensor.expert];
    switch (kind) {
        case ROUTER_NORM: return set_norm(experts.router_norm, experts.router_norm.weight, hidden);
        case EXPERT_SCALES: return set_floats(experts.scales, 0, its.num_experts, data, type, FLOAT32);
        case BEFORE_EXPERTS: return set_norm(experts.before, experts.before.weight, hidden);
        case AFTER_EXPERTS: return set_norm(experts.after, experts.after.weight, hidden);
        case AFTER_OTHER: return set_norm(experts.after_other, experts.after_other.weight, hidden);
        case ROUTER_BIAS: return set_bias(model, experts.router, {}, its.num_experts, data, type);
        case CHOICE_BIAS: return set_floats(experts.choice_bias, 0, its.num_experts, data, type, FLOAT32);
        case EXPERT_GATE_BIAS: return set_bias(model, expert.gate_up, {0, 0}, its.intermediate_size, data, type);
        case EXPERT_UP_BIAS:
            return set_bias(model, expert.gate_up, up_place(its.is_gated), its.intermediate_size, data, type);
        case EXPERT_DOWN_BIAS: return set_bias(model, expert.down, {}, hidden, data, type);
        default: return false;
    }
}

// Drops the whole pages of a file mapping; the partial pages at its ends belong to other tensors as well. A later read
// gets them from the file again.
void forget(const void* data, int64_t num_bytes) {
#ifdef __linux__
    constexpr int64_t PAGE = 4096;
    int64_t begin = round_up(int64_t(reinterpret_cast<uintptr_t>(data)), PAGE);
    int64_t end = (int64_t(reinterpret_cast<uintptr_t>(data)) + num_bytes) / PAGE * PAGE;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
#endif
}

}  // namespace

bool set_tensor(Model& model, const Tensor& tensor) {
    bool is_finite = pack(model, tensor);
    forget(tensor.data, tensor.map_bytes);
    return is_finite;
}

void set_columns(Model& model, int64_t layer, int64_t expert, TensorKind kind, const int32_t* columns) {
    Linear& linear = *matrix_of(model, layer, expert, kind).linear;
    linear.columns.assign(columns, columns + linear.k);
    if (kind >= EXPERT_GATE && kind <= EXPERT_DOWN_BIAS) model.layers[layer].experts.has_columns = true;
}

bool set_rows(Model& model, const GroupedRows& rows) {
    Matrix matrix = matrix_of(model, rows.layer, rows.expert, TensorKind(rows.kind));
    Linear& linear = *matrix.linear;
    allocate(model, linear);
    GroupedPart& part = linear.parts[linear.part_index(matrix.place.column(rows.first_row) / PANEL)];
    if (!are_numbers_finite(part.format, linear.k, rows)) return false;
    part.factor = rows.factor;
    int num_threads = rows.num_rows * linear.k > 1 << 16 ? model.pool->size() : 1;
    model.pool->run(num_threads, [&](int thread) {
        std::vector<uint8_t> scratch(round_up(linear.k, BLOCK));
        int64_t first, last;
        split_evenly(rows.num_rows, thread, num_threads, &first, &last);
        for (int64_t i = first; i < last; i++)
            put_grouped_row(linear, rows, i, matrix.place.column(rows.first_row + i), scratch.data());
    });
    return true;
}

// Sets the formats of a linear's tensors, in order of their columns. Tensors of several formats must begin with panels.
bool set_parts(Linear& linear, const std::vector<std::pair<int64_t, const GroupedFormat*>>& tensors) {
    int64_t column = 0, bytes = 0;
    linear.parts.clear();
    for (auto& [rows, format] : tensors) {
        if (!format) return false;
        if (linear.parts.empty() || linear.parts.back().format != *format) {
            if (column % PANEL) return false;
            linear.parts.push_back({*format, PanelLayout(*format, linear.k), column / PANEL, 0, bytes});
        }
        GroupedPart& part = linear.parts.back();
        column += rows;
        part.end_panel = ceil_div(column, PANEL);
        bytes = part.offset + (part.end_panel - part.first_panel) * part.layout.panel_bytes;
    }
    linear.type = GROUPED;
    return linear.parts.back().end_panel == linear.num_panels();
}

// The matrices of a layer's first product, in the order of their rows.
std::vector<TensorKind> first_matrices(const LayerShape& shape) {
    if (!shape.has_mixer) return {};
    if (shape.recurrent.kind == SHORT_CONV) return {MIXED};
    if (shape.recurrent.kind == MAMBA2) return {MIX_GATE, MIXED, MIX_STEP};
    if (shape.recurrent.kind == GATED_DELTA) return {MIX_GATE, MIXED, MIX_STEP, MIX_RATE};
    if (shape.has_latents()) return {shape.latents.q_rank > 0 ? Q_DOWN : Q, KV_DOWN};
    std::vector<TensorKind> kinds{Q};
    if (!shape.is_reader) kinds.push_back(K);
    if (!shape.is_reader && !shape.is_k_v) kinds.push_back(V);
    if (shape.has_output_gate) kinds.push_back(OUTPUT_GATE);
    return kinds;
}

bool set_formats(Model& model, int64_t count, const TensorFormat* formats) {
    const Shape& shape = model.shape;
    std::map<std::tuple<int64_t, int64_t, TensorKind>, const GroupedFormat*> by_place;
    for (int64_t i = 0; i < count; i++) by_place[{formats[i].layer, formats[i].expert, formats[i].kind}] = &formats[i].format;
    auto find = [&](int64_t layer, TensorKind kind, int64_t expert = 0) -> const GroupedFormat* {
        auto found = by_place.find({layer, expert, kind});
        return found == by_place.end() ? nullptr : found->second;
    };
    auto set_alone = [&](Linear& linear, TensorKind kind, int64_t layer = 0, int64_t expert = 0) {
        const GroupedFormat* format = find(layer, kind, expert);
        return !format || set_parts(linear, {{linear.n, format}});
    };
    // Gate and up are one product, if there is a gate.
    auto set_gate_up = [&](Linear& linear, bool is_gated, TensorKind gate, TensorKind up, int64_t layer, int64_t expert = 0) {
        const GroupedFormat *of_gate = find(layer, gate, expert), *of_up = find(layer, up, expert);
        if (!is_gated || (!of_gate && !of_up)) return set_alone(linear, up, layer, expert);
        return of_gate && of_up && *of_gate == *of_up && set_parts(linear, {{linear.n, of_up}});
    };
    model.is_grouped = true;
    bool are_set = true;
    for (int64_t i = 0; i < shape.num_layers; i++) {
        Layer& layer = model.layers[i];
        std::vector<std::pair<int64_t, const GroupedFormat*>> parts;
        for (TensorKind kind : first_matrices(layer.shape))
            parts.push_back({matrix_of(model, i, 0, kind).num_rows, find(i, kind)});
        are_set &= set_alone(layer.query_up, Q_UP, i);
        if (std::any_of(parts.begin(), parts.end(), [](auto& part) { return part.second != nullptr; }))
            are_set &= set_parts(layer.qkv, parts);
        are_set &= set_alone(layer.output, MIX_OUTPUT, i);
        are_set &= set_alone(layer.input_gate, INPUT_GATE, i) && set_alone(layer.input_up, INPUT_UP, i);
        are_set &= set_gate_up(layer.gate_up, layer.shape.is_gated, GATE, UP, i);
        are_set &= set_alone(layer.output, O, i) && set_alone(layer.down, DOWN, i);
        for (size_t e = 0; e < layer.experts.each.size(); e++) {
            Expert& expert = layer.experts.each[e];
            are_set &= set_gate_up(expert.gate_up, layer.shape.experts.is_gated, EXPERT_GATE, EXPERT_UP, i, int64_t(e));
            are_set &= set_alone(expert.down, EXPERT_DOWN, i, int64_t(e));
        }
    }
    place_linears(model);
    if (shape.is_tied) return are_set && set_alone(model.head, EMBEDDING);
    model.embedding_codes.n = shape.vocab_size, model.embedding_codes.k = shape.hidden_size;
    return are_set && set_alone(model.head, HEAD) && set_alone(model.embedding_codes, EMBEDDING);
}

const Linear* linear_of(Model& model, int64_t layer, int64_t expert, TensorKind kind) {
    return matrix_of(model, layer, expert, kind).linear;
}

bool get_matrix(Model& model, int64_t index, int64_t expert, TensorKind kind, float* numbers) {
    Matrix matrix = matrix_of(model, index, expert, kind);
    if (!matrix.linear || !matrix.linear->weight.num_bytes()) return false;
    auto read = model.is_grouped                 ? read_any_row
                : model.shape.dtype == BFLOAT16 ? read_row<bf16>
                                                : read_row<float>;
    for (int64_t row = 0; row < matrix.num_rows; row++)
        read(*matrix.linear, matrix.place.column(row), numbers + row * matrix.linear->k);
    return true;
}

}  // namespace millrace
