// A decoder's shape, its packed weights and the memory of a step.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "step/split_tuner.h"
#include "machine/cache_probe.h"
#include "step/step_thread.h"
#include "machine/simd.h"
#include "machine/threads.h"

namespace millrace {

constexpr int64_t PANEL = 32;  // columns of a product that lie together

enum DataType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4, BF16_12BIT = 5 };  // the last: bf16 in 12 bits

constexpr int64_t CODEBOOK_BYTES = 64, BF16_12BIT_BLOCK_BYTES = 192;  // of a coded panel, and of four of k: see coded.h

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Rows of activations are this many numbers apart: not a multiple of 4 KiB, which would put a tile's rows in one set of
// the cache.
inline int64_t row_stride(int64_t size) { return round_up(size, 32) + 32; }

struct Shape {  // as `_Shape` of library.py
    int64_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size;
    int64_t rotary_dim;
    float rms_norm_eps;
    int32_t dtype;       // FLOAT32 or BFLOAT16: of the computing, and of what the next two do not say otherwise
    int32_t linears;     // how the layers' matrices are kept: as dtype, INT8 or INT4
    int32_t head;        // and the head's: as dtype or INT8
    int32_t cache;       // and keys and values: as dtype or INT8
    int32_t group_size;  // numbers of a row of an INT4 matrix that share a scale; even
    int32_t has_head, is_tied;
};

// Memory on whole pages, large ones where the system gives them; zero at the start. Linux hands large ones out when somebody
// first writes to them.
class Memory {
  public:
    Memory() = default;
    explicit Memory(int64_t num_bytes);
    // A part of other memory, which has to outlive it.
    Memory(const Memory& whole, int64_t offset, int64_t num_bytes)
        : data_(whole.as<char>() + offset), num_bytes_(num_bytes), is_part_(true) {}
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(num_bytes_, other.num_bytes_);
        std::swap(mapped_bytes_, other.mapped_bytes_);
        std::swap(is_part_, other.is_part_);
        return *this;
    }
    ~Memory();

    // The same, and all large pages are there: the system hands them out to all threads at once. It takes 0.2 ms for each, and
    // 5 in a virtual machine whose host does the same, where two threads wait half as long. They are written to, as whoever has
    // the system populate a range (madvise) holds up whatever other thread maps memory meanwhile: Python's imports took 0.5 s
    // longer.
    static Memory prefaulted(int64_t num_bytes, Pool& pool);

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    int64_t num_bytes() const { return data_ ? num_bytes_ : 0; }

    // Only so many are needed from now on; the system gets what it has mapped beyond them.
    void shrink(int64_t num_bytes);

  private:
    void* data_ = nullptr;
    int64_t num_bytes_ = 0;
    int64_t mapped_bytes_ = 0;  // to give back to the system; 0: it is from the C library, or a part
    bool is_part_ = false;
};

// A weight [n, k] in panels of 32 of its n rows, which are columns of the product: [n / 32][k / 2][32][2] in bf16,
// [n / 32][k][32] in float32 and int8, [n / 32][k / 2][32] bytes of two numbers in int4, and coded as coded.h tells. What is
// past n is zero. In which order the pairs of k lie is told by `each_pair`.
// A number of int8 and int4 is to be multiplied by the scale of its row and its group of k.
struct Linear {
    int64_t n = 0, k = 0;
    DataType type = FLOAT32;
    int64_t group_size = 0;   // of k, and k where there is one group; the last one may be smaller
    const Linear* next = nullptr;  // what is multiplied after it, and after a step's last one the first
    int64_t offset = 0;       // of a layer's weight in the memory of all
    Memory weight;            // none until a tensor is set
    Memory raw_blocks;      // of panels that are coded
    Memory scales;            // bf16 [n / 32][groups][32]; none where numbers are what they are
    std::vector<float> bias;  // [n rounded up to 32] in the order of the columns; empty: none

    int64_t num_panels() const { return ceil_div(n, PANEL); }
    bool is_quantized() const { return type == INT8 || type == INT4; }
    int64_t num_groups() const { return is_quantized() ? ceil_div(k, group_size) : 0; }
    int64_t group_pairs() const { return group_size / 2; }  // summed one after the other
    int64_t weight_bytes() const { return num_panels() * panel_bytes(); }
    int64_t panel_bytes() const {
        int64_t numbers = k * PANEL;
        if (type == BF16_12BIT) return CODEBOOK_BYTES + k / 4 * BF16_12BIT_BLOCK_BYTES;
        return type == INT4 ? numbers / 2 : type == INT8 ? numbers : type == BFLOAT16 ? numbers * 2 : numbers * 4;
    }
};

struct Layer {
    std::vector<float> input_norm, post_norm, q_norm, k_norm;  // the last two may be empty
    Linear qkv, output, gate_up, down;                         // gate_up: 16 columns of each in turn
    int64_t window = 0;                                        // keys a query sees, itself included; 0: all
};

constexpr int32_t ZERO_POINT = 128;  // stands for 0 in what follows

// Quads of k that are multiplied together: as many as a tile register has rows.
constexpr int64_t QUADS_PER_STEP = HAS_AMX ? 16 : 1;
constexpr int64_t num_quads_of(int64_t k) { return round_up(ceil_div(k, 4), QUADS_PER_STEP); }

// A weight [n, k] of int8 in panels of 32 of its n rows, [n / 32][quads of k][32][4], each number 128 more than it is. What is
// past n or k is 0, stored as NO_WEIGHT. See quads.h.
struct Int8Panels {
    int64_t num_panels = 0, num_quads = 0;
    Memory weight;

    Int8Panels() = default;
    Int8Panels(int64_t n, int64_t k, Pool& pool) : num_panels(ceil_div(n, PANEL)), num_quads(num_quads_of(k)) {
        weight = Memory::prefaulted(num_panels * panel_bytes(), pool);
        int64_t first = k < 4 * num_quads ? 0 : n / PANEL * panel_bytes();  // that rows do not fill
        std::memset(weight.as<char>() + first, ZERO_POINT, weight.num_bytes() - first);
    }

    int64_t panel_bytes() const { return num_quads * 4 * PANEL; }
    const uint8_t* panel(int64_t index) const { return weight.as<uint8_t>() + index * panel_bytes(); }

    void put(int64_t row, int64_t k, const int8_t* numbers) {
        uint8_t* to = weight.as<uint8_t>() + row / PANEL * panel_bytes() + row % PANEL * 4;
        int64_t whole = k / 4 * 4;
        for (int64_t i = 0; i < whole; i += 4) {
            uint32_t four;
            std::memcpy(&four, numbers + i, 4);
            four ^= uint32_t(ZERO_POINT) * 0x01010101;  // the highest bit of each: 128 more, modulo 256
            std::memcpy(to + i * PANEL, &four, 4);
        }
        for (int64_t i = whole; i < k; i++) to[whole * PANEL + i % 4] = uint8_t(numbers[i] + ZERO_POINT);
    }
};

// What the largest logits of rows are, for what has length 1, as those of the last ones tell.
class ExpectedMax {
  public:
    void add(float largest) {
        if (!std::isfinite(largest)) return;
        num_ = std::min(num_ + 1, MAX_SAMPLES);
        float from_mean = largest - mean_;
        mean_ += from_mean / float(num_);
        variance_ += (from_mean * (largest - mean_) - variance_) / float(num_);
    }

    // What few are below, and each may be.
    float lower_bound() const {
        return num_ < MIN_SAMPLES ? -std::numeric_limits<float>::infinity() : mean_ - 2.0f * std::sqrt(variance_);
    }

  private:
    static constexpr int MIN_SAMPLES = 8, MAX_SAMPLES = 64;  // rows, before anything is expected, and that count, about
    float mean_ = 0, variance_ = 0;
    int num_ = 0;
};

// How far products with a panel's rows can be from those with their numbers in int8: for what has length 1 by as much as
// `missed`; and the length of these numbers, by which what is missed of the other side counts.
struct ErrorBound {
    float error_norm = 0, norm = 0;
};

// The head in int8, and how far that can be from it: tells which of the head's panels have the largest logits. See screen.h.
struct ArgmaxScreen {
    Int8Panels panels;            // none: there is no screen
    std::vector<float> scales;    // [panels][32] of each row of the head
    std::vector<ErrorBound> error_bounds;      // [panels], the most of their rows
    ExpectedMax expected;
    int64_t num_steps_disabled = 0;    // that are yet to go without, as it told little
    int64_t num_refined = 0;       // panels that the last step looked at closer, each once for each row
    int64_t num_candidates = -1;        // panels that it left in the last step, each once for each row; -1: that went without

    bool is_made() const { return panels.num_panels > 0; }
    int64_t num_bytes() const {
        return panels.weight.num_bytes() + int64_t(scales.size() * sizeof(float) + error_bounds.size() *
                                                   sizeof(ErrorBound));
    }
};

// What a step's time is spent on: products with weights, attention, and what lies between them.
enum PhaseKind : int32_t { LINEARS, ATTENTION, OTHER, NUM_PHASE_KINDS };

// What a decoding step reads, made for it.
struct DecodeBuffers {
    std::vector<int64_t> input_ids, slot_mapping, rows;
    std::vector<int32_t> block_tables, query_starts, lengths;
};

class StepChain;

struct Model {
    Shape shape;
    std::vector<Layer> layers;
    std::vector<float> final_norm;
    Linear head;
    ArgmaxScreen screen;            // of the head
    Memory weights;           // of all layers' linears, one after the other, so that large pages hold them whole;
                              // none until the first of them is set
    Memory embedding;         // [V, hidden], none where it is the head
    int64_t num_positions = 0;    // P
    std::vector<float> cos, sin;  // [P, rotary_dim / 2]
    std::unique_ptr<Pool> pool;
    int64_t min_work_per_thread = 1;  // work that pays for another: bytes of weights read, or as many products of four rows
    std::mutex is_running;       // one step at a time
    Memory activations;     // of the largest step so far
    Memory scratch;         // of attention, for every thread
    Memory partials;        // of attention that is split over keys
    Memory workspace;            // of products, for every thread: see `room_bytes`
    int64_t workspace_stride = 0;        // bytes from one thread's to the next one's
    CacheProbe cache_probe;                     // by the cache behind the cores' own
    bool splits_rows = false;  // products of many rows, where they can be: in the last step, as its first one said
    bool is_streaming = false;         // weights by few rows, so that the caches keep what else is read: in the last step
    SplitTuner split_tuner;                     // whether steps' rows are taken so
    bool is_step_split = false;           // the last step's were
    int num_layers_before_split = 0;            // layers before the last such step's were; -1: one thread alone had both halves
    int64_t kv_prefetched_bytes = 0;  // of keys and values that the last step fetched beside products
    DecodeBuffers decode_buffers;  // for who decodes, one at a time
    int64_t* phase_ns = nullptr;  // [NUM_PARTS + 1] to add each step's times to, and one for the step; none: nobody asks
    int64_t* thread_times = nullptr;   // [NUM_SHARES] for those of the steps that somebody has waited for; none: nobody asks
    std::unique_ptr<StepChain> step_chain;  // of who has a line
    std::unique_ptr<StepThread> step_thread;    // computes what is asked for; none: whoever asks does. The last: it ends first

    int64_t qkv_size() const { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim; }
    int64_t attended_size() const { return shape.num_heads * shape.head_dim; }
    int64_t weights_bytes() const;
    char* workspace_of(int thread) const { return workspace.as<char>() + thread * workspace_stride; }
};

// Grows memory that holds nothing of worth.
inline void grow(Memory* memory, int64_t num_bytes) {
    if (memory->num_bytes() >= num_bytes) return;
    *memory = Memory();  // a statement of its own: what was there is given back before more is taken
    *memory = Memory(num_bytes);
}

// A tensor's place in a model: see `kind` in library.py.
enum TensorKind : int32_t {
    EMBEDDING, HEAD, FINAL_NORM, INPUT_NORM, POST_NORM, Q_NORM, K_NORM,
    Q, K, V, O, GATE, UP, DOWN, Q_BIAS, K_BIAS, V_BIAS, O_BIAS, GATE_BIAS, UP_BIAS, DOWN_BIAS
};

// Tells each linear which one is multiplied after it.
void link_linears(Model& model);

// One of a checkpoint, [rows, columns]. As library.py has it.
struct Tensor {
    int64_t layer;
    TensorKind kind;
    DataType type;
    const void* data;
    int64_t map_bytes;  // whose pages this process needs no longer once the tensor is packed: a file has them; 0: none
};

// Puts a tensor in its place, in a linear that is not coded. False if a number is not finite in the model's dtype.
bool set_tensor(Model& model, const Tensor& tensor);

// What products see of a tensor that has rows and columns, [rows, columns]. False for any other, and for one not yet set.
bool get_matrix(Model& model, int64_t layer, TensorKind kind, float* numbers);

}  // namespace millrace
