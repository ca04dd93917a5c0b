// From a checkpoint's rows to packed panels, one tensor at a time.

#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

#include "model.h"
#include "simd.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace millrace {

Memory::Memory(int64_t num_bytes) : num_bytes_(num_bytes) {
    const int64_t large = 2 << 20;
    int64_t alignment = num_bytes >= large ? large : 4096;
    data_ = std::aligned_alloc(alignment, round_up(num_bytes ? num_bytes : 1, alignment));
    if (!data_) throw std::bad_alloc();
#ifdef __linux__
    if (num_bytes >= large) madvise(data_, num_bytes, MADV_HUGEPAGE);
#endif
    std::memset(data_, 0, num_bytes);
}

int64_t Model::weights_bytes() const {
    auto of = [](const Linear& linear) { return linear.weight.num_bytes() + int64_t(linear.bias.size()) * 4; };
    int64_t total = embedding.num_bytes() + of(head) + int64_t(final_norm.size()) * 4;
    for (const Layer& layer : layers) {
        total += of(layer.qkv) + of(layer.output) + of(layer.gate_up) + of(layer.down);
        total += 4 * int64_t(layer.input_norm.size() + layer.post_norm.size());
        total += 4 * int64_t(layer.q_norm.size() + layer.k_norm.size());
    }
    return total;
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

float read(const void* data, Type type, int64_t index) {
    if (type == FLOAT32) return static_cast<const float*>(data)[index];
    uint16_t bits = static_cast<const uint16_t*>(data)[index];
    return type == BFLOAT16 ? widen(bits) : half_to_float(bits);
}

bool set_floats(std::vector<float>& to, int64_t offset, int64_t count, const void* data, Type type, Type rounded) {
    if (int64_t(to.size()) < offset + count) to.resize(offset + count);
    bool is_finite = true;
    for (int64_t i = 0; i < count; i++) {
        float value = read(data, type, i);
        to[offset + i] = rounded == BFLOAT16 ? widen(to_bf16(value)) : value;
        is_finite &= std::isfinite(to[offset + i]);
    }
    return is_finite;
}

// Where row `row` of gate (half 0) or of up (half 1) is among the columns of the fused product.
int64_t interleaved(int64_t row, int half) { return row / 16 * 32 + half * 16 + row % 16; }

struct Rows {  // which columns of a fused linear a tensor's rows become
    int64_t offset = 0;
    int half = -1;  // of gate and up; -1: one after the other
    int64_t column(int64_t row) const { return half < 0 ? offset + row : interleaved(row, half); }
};

template <class T>
bool pack_rows(Model& model, Linear& linear, Rows place, int64_t rows, const void* data, Type type) {
    int64_t panel_size = linear.k * PANEL, k = linear.k;
    T* packed = linear.weight.as<T>();
    std::atomic<bool> is_finite{true};
    int num_threads = rows * k > 1 << 16 ? model.pool->size() : 1;
    model.pool->run(num_threads, [&](int thread) {
        int64_t first, last;
        share(ceil_div(rows, 16), thread, num_threads, &first, &last);
        bool finite = true;
        for (int64_t row = first * 16; row < std::min(last * 16, rows); row++) {
            int64_t column = place.column(row);
            T* panel = packed + column / PANEL * panel_size;
            for (int64_t i = 0; i < k; i++) {
                T* to = panel + place_in_pairs<T>(i, PANEL, column % PANEL);
                narrow(read(data, type, row * k + i), to);
                finite &= std::isfinite(widen(*to));
            }
        }
        if (!finite) is_finite = false;
    });
    return is_finite;
}

bool set_rows(Model& model, Linear& linear, Rows place, int64_t rows, const void* data, Type type) {
    bool is_half = model.shape.dtype == BFLOAT16;
    if (!linear.weight.num_bytes())
        linear.weight = Memory(linear.num_panels() * PANEL * linear.k * (is_half ? 2 : 4));
    return is_half ? pack_rows<bf16>(model, linear, place, rows, data, type)
                   : pack_rows<float>(model, linear, place, rows, data, type);
}

bool set_bias(Model& model, Linear& linear, Rows place, int64_t rows, const void* data, Type type) {
    linear.bias.resize(round_up(linear.n, PANEL));
    std::vector<float> numbers;
    bool is_finite = set_floats(numbers, 0, rows, data, type, Type(model.shape.dtype));
    for (int64_t row = 0; row < rows; row++) linear.bias[place.column(row)] = numbers[row];
    return is_finite;
}

bool set_embedding(Model& model, const void* data, Type type) {
    const Shape& shape = model.shape;
    int64_t count = shape.vocab_size * shape.hidden_size;
    bool is_half = shape.dtype == BFLOAT16, is_finite = true;
    model.embedding = Memory(count * (is_half ? 2 : 4));
    for (int64_t i = 0; i < count; i++) {
        float value = read(data, type, i);
        if (is_half) {
            bf16 narrowed = to_bf16(value);
            model.embedding.as<bf16>()[i] = narrowed;
            value = widen(narrowed);
        } else {
            model.embedding.as<float>()[i] = value;
        }
        is_finite &= std::isfinite(value);
    }
    return is_finite;
}

}  // namespace

bool set_tensor(Model& model, int64_t index, Kind kind, const void* data, Type type) {
    const Shape& shape = model.shape;
    int64_t hidden = shape.hidden_size, inner = shape.intermediate_size;
    int64_t heads = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
    Type rounded = Type(shape.dtype);
    if (kind == EMBEDDING && shape.is_tied) return set_rows(model, model.head, {}, shape.vocab_size, data, type);
    if (kind == EMBEDDING) return set_embedding(model, data, type);
    if (kind == HEAD) return set_rows(model, model.head, {}, shape.vocab_size, data, type);
    if (kind == FINAL_NORM) return set_floats(model.final_norm, 0, hidden, data, type, rounded);
    Layer& layer = model.layers[index];
    Rows k_rows{heads}, v_rows{heads + kv}, gate{0, 0}, up{0, 1};
    switch (kind) {
        case INPUT_NORM: return set_floats(layer.input_norm, 0, hidden, data, type, rounded);
        case POST_NORM: return set_floats(layer.post_norm, 0, hidden, data, type, rounded);
        case Q_NORM: return set_floats(layer.q_norm, 0, shape.head_dim, data, type, rounded);
        case K_NORM: return set_floats(layer.k_norm, 0, shape.head_dim, data, type, rounded);
        case Q: return set_rows(model, layer.qkv, {}, heads, data, type);
        case K: return set_rows(model, layer.qkv, k_rows, kv, data, type);
        case V: return set_rows(model, layer.qkv, v_rows, kv, data, type);
        case O: return set_rows(model, layer.output, {}, hidden, data, type);
        case GATE: return set_rows(model, layer.gate_up, gate, inner, data, type);
        case UP: return set_rows(model, layer.gate_up, up, inner, data, type);
        case DOWN: return set_rows(model, layer.down, {}, hidden, data, type);
        case Q_BIAS: return set_bias(model, layer.qkv, {}, heads, data, type);
        case K_BIAS: return set_bias(model, layer.qkv, k_rows, kv, data, type);
        case V_BIAS: return set_bias(model, layer.qkv, v_rows, kv, data, type);
        case O_BIAS: return set_bias(model, layer.output, {}, hidden, data, type);
        case GATE_BIAS: return set_bias(model, layer.gate_up, gate, inner, data, type);
        case UP_BIAS: return set_bias(model, layer.gate_up, up, inner, data, type);
        case DOWN_BIAS: return set_bias(model, layer.down, {}, hidden, data, type);
        default: return false;
    }
}

}  // namespace millrace
