// The model: its shape, its packed weights, and the buffers and state that steps use.
//
// Weights are packed in panels of 32 columns (`Linear`) by pack.cpp, once, on the loading thread. Steps read them on
// all compute threads. `Model::is_running` serializes the steps, which own the buffers and the state of the last step.

#pragma once

#include <algorithm>
#include <array>
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
#include "weights/recurrent.h"
#include "weights/shape.h"
#include "grouped/format.h"
#include "grouped/pack_rows.h"

namespace millrace {

constexpr int64_t PANEL = 32;  // columns of a product that are stored together

// The last two: bf16 in 12 bits, and groups of codes.
enum DataType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, INT4 = 4, BF16_12BIT = 5, GROUPED = 6 };

constexpr int64_t CODEBOOK_BYTES = 64, BF16_12BIT_BLOCK_BYTES = 192;  // of a 12-bit panel, and of four of k: see bf16_12bit.h

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Distance between rows of activations, in numbers. Not a multiple of 4 KiB, which would map all rows of a tile to one
// cache set.
inline int64_t row_stride(int64_t size) { return round_up(size, 32) + 32; }

// Page-aligned memory, zeroed, on large pages where the system gives them. Linux hands out a large page at the first
// write to it.
class Memory {
  public:
    Memory() = default;
    explicit Memory(int64_t num_bytes);
    // A part of other memory, which must outlive it.
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

    // Allocates memory and touches all large pages, on all threads. A page takes 0.2 ms, and 5 ms in a virtual machine
    // whose host does the same, where two threads halve the time. NOTE: the pages are written to, not populated by
    // madvise, which blocks every other thread that maps memory meanwhile: Python's imports took 0.5 s longer.
    static Memory prefaulted(int64_t num_bytes, Pool& pool);

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    int64_t num_bytes() const { return data_ ? num_bytes_ : 0; }

    // Shrinks to `num_bytes` and returns mapped memory beyond it to the system.
    void shrink(int64_t num_bytes);

  private:
    void* data_ = nullptr;
    int64_t num_bytes_ = 0;
    int64_t mapped_bytes_ = 0;  // to unmap; 0: from the C library, or a part
    bool is_part_ = false;
};

// Panels of a linear with one format: q, k and v of a layer may differ.
struct GroupedPart {
    GroupedFormat format;
    PanelLayout layout;
    int64_t first_panel, end_panel, offset;  // bytes of the panels before
    float factor = 1.0f;                     // multiplies all scales
};

// A weight [n, k] in panels of 32 of its n rows, which are columns of the product: [n / 32][k / 2][32][2] in bf16, [n /
// 32][k][32] in float32 and int8, [n / 32][k / 2][32] bytes of two numbers in int4, as in bf16_12bit.h in 12 bits,
// and as in grouped/format.h in groups of codes.
// Numbers past n are 0. `for_each_pair` (linear/panels.h) gives the order of the pairs of k.
// An int8 or int4 number is to be multiplied by the scale of its row and its group of k.
struct Linear {
    int64_t n = 0, k = 0;
    DataType type = FLOAT32;
    int64_t group_size = 0;        // of k; k if there is one group; the last group may be smaller
    const Linear* next = nullptr;  // the linear that is multiplied next; after the last of a step the first
    int64_t offset = 0;            // of a layer's weight in `Model::weights`
    Memory weight;                 // empty until a tensor is set
    Memory raw_blocks;             // of 12-bit panels
    Memory scales;                 // bf16 [n / 32][groups][32]; empty if not quantized
    std::vector<float> bias;       // [n rounded up to 32] in column order; empty: no bias
    std::vector<GroupedPart> parts;  // of groups of codes; else empty
    std::vector<int32_t> columns;  // [k] the input's column that each column of codes multiplies; empty: in order

    int64_t num_panels() const { return ceil_div(n, PANEL); }
    bool is_quantized() const { return type == INT8 || type == INT4; }
    int64_t num_groups() const { return is_quantized() ? ceil_div(k, group_size) : 0; }
    int64_t group_pairs() const { return group_size / 2; }  // pairs that are summed in one chain
    int64_t weight_bytes() const {
        if (type != GROUPED) return num_panels() * panel_bytes();
        const GroupedPart& last = parts.back();
        return last.offset + (last.end_panel - last.first_panel) * last.layout.panel_bytes;
    }
    size_t part_index(int64_t panel) const {
        size_t i = 0;
        while (panel >= parts[i].end_panel) i++;
        return i;
    }
    const GroupedPart& part_of(int64_t panel) const { return parts[part_index(panel)]; }
    uint8_t* grouped_panel(const GroupedPart& part, int64_t panel) const {
        return weight.as<uint8_t>() + part.offset + (panel - part.first_panel) * part.layout.panel_bytes;
    }
    int64_t panel_bytes() const {
        int64_t numbers = k * PANEL;
        if (type == BF16_12BIT) return CODEBOOK_BYTES + k / 4 * BF16_12BIT_BLOCK_BYTES;
        return type == INT4 ? numbers / 2 : type == INT8 ? numbers : type == BFLOAT16 ? numbers * 2 : numbers * 4;
    }
};

// A network of which tokens take some.
struct Expert {
    Linear gate_up, down;
};

struct Experts {
    Linear router;  // [experts, and a row more for the gate of the other network]; in the model's dtype
    std::vector<float> choice_bias;        // [experts], added to scores to choose; empty: none
    std::vector<float> scales;             // [experts], that multiply weights; empty: none
    Norm router_norm, before, after, after_other;  // see ExpertsShape
    std::vector<float> activation_params;  // of all experts
    bool has_columns = false;              // any of their matrices has columns in an order of its own
    std::vector<Expert> each;              // empty: the layer has none
};

// Aligned so that the norms take a cache line each.
struct alignas(64) Layer {
    LayerShape shape;
    Norm pre_mixer, post_mixer, pre_feed, post_feed, q_norm, k_norm, v_norm, input_norm;
    Linear qkv, output;    // of a recurrent layer: the products into it and out of it
    Linear gate_up, down;  // gate_up: 16 columns of gate, 16 of up, alternating; up alone if not gated
    Linear query_up;           // of compressed queries, with latents
    Linear key_up, value_up;   // of latents, in the model's dtype, of each head in panels of its own: see latents/
    Linear input_gate, input_up;           // of the layer's input, if the model has such: see step/layer_inputs.h
    std::vector<float> output_scale;       // a number, if the layer has it
    std::vector<float> activation_params;  // those of the activation
    std::vector<float> sinks;              // [heads], if it has any
    Experts experts;                       // beside gate_up and down, or instead
    RecurrentWeights recurrent;

    void set_shape(const LayerShape& its) {
        shape = its;
        pre_mixer.shape = its.pre_mixer, post_mixer.shape = its.post_mixer;
        pre_feed.shape = its.pre_feed, post_feed.shape = its.post_feed;
        q_norm.shape = k_norm.shape = its.qk_norm, v_norm.shape = its.v_norm;
        experts.router_norm.shape = its.experts.router_norm;
        experts.before.shape = experts.after.shape = experts.after_other.shape = its.experts.own_norms;
        recurrent.norm.shape = its.recurrent.norm;
    }

    // The norm before the feed-forward network.
    const Norm& feed_norm() const {
        return shape.is_parallel && shape.pre_feed.kind == NO_NORM ? pre_mixer : pre_feed;
    }

    bool has_post_norm() const { return shape.post_mixer.kind != NO_NORM || shape.post_feed.kind != NO_NORM; }

    bool is_recurrent() const { return shape.recurrent.kind != NOT_RECURRENT; }
    bool has_attention() const { return shape.has_mixer && !is_recurrent(); }
    bool has_experts() const { return !experts.each.empty(); }
    bool has_own_norms() const { return !experts.before.is_none(); }
    // The norms of what the experts and their router read.
    const Norm& experts_norm() const { return has_own_norms() ? experts.before : feed_norm(); }
    const Norm& router_norm() const { return experts.router_norm.is_none() ? experts_norm() : experts.router_norm; }
    bool has_network() const { return shape.intermediate_size > 0; }

    // Calls use(linear) for the linears in the order in which they lie in `Model::weights`, which is that in which they
    // are multiplied; of the first `max_experts` experts.
    template <class Use>
    void for_each_linear(const Use& use, size_t max_experts = SIZE_MAX) {
        if (shape.has_mixer) use(qkv);
        if (query_up.n > 0) use(query_up);
        if (shape.has_mixer && !shape.is_parallel) use(output);
        if (has_network()) use(gate_up);
        if (shape.is_parallel) use(output);
        if (has_network()) use(down);
        for (size_t i = 0; i < std::min(max_experts, experts.each.size()); i++)
            use(experts.each[i].gate_up), use(experts.each[i].down);
        if (input_gate.n > 0) use(input_gate), use(input_up);
    }
    template <class Use>
    void for_each_linear(const Use& use, size_t max_experts = SIZE_MAX) const {
        const_cast<Layer*>(this)->for_each_linear([&](const Linear& linear) { use(linear); }, max_experts);
    }
    std::array<const Norm*, 11> norms() const {
        return {&pre_mixer, &post_mixer, &pre_feed, &post_feed, &q_norm, &k_norm, &input_norm,
                &experts.router_norm, &experts.before, &experts.after, &experts.after_other};
    }
};

// What the inputs of all layers are made with: see step/layer_inputs.h.
struct LayerInputs {
    Linear projection;  // [layers * width, hidden], in the model's dtype; n = 0: there are no such inputs
    Memory table;       // [rows, layers * width]
    Norm norm;          // of a layer's part of the projection
    float scale = 1.0f;  // of the table

    bool exist() const { return projection.n > 0; }
};

// Rotary positions: cos and sin [P, half] of the pairs (i, i + half) of a head. The caller keeps the numbers.
struct RopeTable {
    int64_t half = 0;
    const float *cos = nullptr, *sin = nullptr;
};

constexpr int32_t ZERO_POINT = 128;  // the stored value that stands for 0

// Quads (four elements of k) that are multiplied together: as many as a tile register has rows.
constexpr int64_t QUADS_PER_STEP = HAS_AMX ? 16 : 1;
constexpr int64_t num_quads_of(int64_t k) { return round_up(ceil_div(k, 4), QUADS_PER_STEP); }

// An int8 weight [n, k] in panels of 32 of its n rows, [n / 32][quads of k][32][4], each number stored with ZERO_POINT
// added. Numbers past n or k are 0, stored as ZERO_POINT. Used by linear/int8_dot.h.
struct Int8Panels {
    int64_t num_panels = 0, num_quads = 0;
    Memory weight;

    Int8Panels() = default;
    Int8Panels(int64_t n, int64_t k, Pool& pool) : num_panels(ceil_div(n, PANEL)), num_quads(num_quads_of(k)) {
        weight = Memory::prefaulted(num_panels * panel_bytes(), pool);
        int64_t first = k < 4 * num_quads ? 0 : n / PANEL * panel_bytes();  // the part that rows do not fill
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
            four ^= uint32_t(ZERO_POINT) * 0x01010101;  // flips the highest bit of each byte: adds 128 modulo 256
            std::memcpy(to + i * PANEL, &four, 4);
        }
        for (int64_t i = whole; i < k; i++) to[whole * PANEL + i % 4] = uint8_t(numbers[i] + ZERO_POINT);
    }
};

// Running estimate of the largest logit of a row divided by the row's norm, from recent rows.
class ExpectedMax {
  public:
    void add(float largest) {
        if (!std::isfinite(largest)) return;
        num_ = std::min(num_ + 1, MAX_SAMPLES);
        float from_mean = largest - mean_;
        mean_ += from_mean / float(num_);
        variance_ += (from_mean * (largest - mean_) - variance_) / float(num_);
    }

    // A bound that few rows are below; any row may be.
    float lower_bound() const {
        return num_ < MIN_SAMPLES ? -std::numeric_limits<float>::infinity() : mean_ - 2.0f * std::sqrt(variance_);
    }

  private:
    static constexpr int MIN_SAMPLES = 8, MAX_SAMPLES = 64;  // rows before there is an estimate, and rows that count, about
    float mean_ = 0, variance_ = 0;
    int num_ = 0;
};

// Bounds for a panel's rows and their int8 copies. `error_norm`: the most that products with both differ, for an input
// of norm 1. `norm`: the most that an error of norm 1 of the input changes a product with the int8 copy.
struct ErrorBound {
    float error_norm = 0, norm = 0;
};

// The head in int8 and its error bounds: finds the panels of the head that may hold the largest logits. See
// step/argmax_screen.h.
struct ArgmaxScreen {
    Int8Panels panels;                     // empty: there is no screen
    std::vector<float> scales;             // [panels][32], per row of the head
    std::vector<ErrorBound> error_bounds;  // [panels], the largest of the panel's rows
    ExpectedMax expected;
    int64_t num_steps_disabled = 0;  // steps left that do not use it, because it was ineffective
    int64_t num_refined = 0;         // (row, panel) pairs that the last step refined
    int64_t num_candidates = -1;     // (row, panel) pairs that the last step's screen left; -1: the step did not use it

    bool is_made() const { return panels.num_panels > 0; }
    int64_t num_bytes() const {
        return panels.weight.num_bytes() +
               int64_t(scales.size() * sizeof(float) + error_bounds.size() * sizeof(ErrorBound));
    }
};

// The kinds of phases by which a step's time is reported: products with weights, attention, and everything else.
enum PhaseKind : int32_t { LINEARS, ATTENTION, OTHER, NUM_PHASE_KINDS };

// The inputs of a decoding step, built from its slots.
struct DecodeBuffers {
    std::vector<int64_t> input_ids, positions, slot_mapping, rows, adapters;
    std::vector<int32_t> block_tables, query_starts, lengths;
};

class StepChain;
struct LoraAdapter;

struct Model {
    Shape shape;
    std::vector<Layer> layers;
    int64_t intermediate_size = 0;  // the largest of the layers
    int64_t max_qkv_size = 0, max_attended_size = 0;  // likewise
    int64_t max_query_size = 0, max_absorbed_size = 0;  // of layers with latents: behind `query_up`, and for the cache
    int64_t state_bytes = 0;  // of a sequence's recurrent layers: their matrices, then their tails; 0: there are none
    bool has_branches = false;      // any layer has a norm behind a product, or a network beside experts
    int64_t max_experts = 0, max_top_k = 0, max_expert_size = 0;  // the most of a layer
    Norm embedding_norm, final_norm;
    LayerInputs layer_inputs;
    Linear head;
    ArgmaxScreen screen;  // of the head
    int64_t layers_bytes = 0;  // of `weights`, once it is allocated
    Memory weights;  // of all layers' linears, contiguous, so that large pages hold them whole; empty until one is set
    Memory embedding;  // [V, hidden]; empty if the head is the embedding
    Linear embedding_codes;  // the same in groups of codes
    bool is_grouped = false;  // has matrices in groups of codes
    Memory learned_positions;  // [rows, hidden], added to the embedding; empty if there are none
    float embedding_scale = 1.0f;
    int64_t num_positions = 0;  // P
    std::vector<RopeTable> ropes;
    std::unique_ptr<Pool> pool;
    // Work that pays for one more thread: bytes of weights read, or as many products of four rows.
    int64_t min_work_per_thread = 1;
    std::mutex is_running;         // one step at a time
    Memory activations;            // of the largest step so far
    Memory scratch;                // of attention, per thread
    Memory partials;               // results of attention that is split over keys
    Memory workspace;              // of products, per thread: see `workspace_bytes`
    int64_t workspace_stride = 0;  // bytes from one thread's to the next
    CacheProbe cache_probe;        // of the shared cache behind the cores' private caches
    // In the last step, two threads split products of many rows by rows, where possible; decided by its first product.
    bool splits_rows = false;
    bool is_streaming = false;  // in the last step, few rows read weights non-temporally
    SplitTuner split_tuner;  // whether to split a step's rows between two threads
    bool is_step_split = false;  // the last step was
    int num_layers_before_split = 0;  // layers before the last split step was split; -1: one thread alone took both halves
    int64_t kv_prefetched_bytes = 0;  // of keys and values, by the last step, beside products
    std::vector<std::shared_ptr<const LoraAdapter>> adapters;  // by slot; slot 0 has none; see lora/adapter.h
    int64_t num_lora_sums = 0;  // the most of a row in a product; 0: the model takes no adapters
    DecodeBuffers decode_buffers;  // for one decoding step at a time
    int64_t* phase_ns = nullptr;  // [NUM_PHASE_KINDS + 1]: steps add their times, and 1 per step; null: not measured
    int64_t* thread_times = nullptr;  // [NUM_THREAD_TIMES] as of the last step that was waited for; null: not copied
    std::unique_ptr<StepChain> step_chain;  // of a model with a step thread
    // Runs steps; null: the caller does. NOTE: the last member, because it must end first.
    std::unique_ptr<StepThread> step_thread;

    bool has_attention_alone() const {
        return std::all_of(layers.begin(), layers.end(), [](const Layer& layer) { return layer.has_attention(); });
    }
    int64_t max_columns() const {
        return std::max({shape.hidden_size, max_attended_size, intermediate_size, max_expert_size});
    }
    int64_t router_stride() const { return round_up(max_experts + 1, PANEL); }  // logits of a row
    int64_t weights_bytes(size_t max_experts_of_layer = SIZE_MAX) const;
    char* workspace_of(int thread) const { return workspace.as<char>() + thread * workspace_stride; }
};

// Grows memory; its contents are lost.
inline void grow(Memory* memory, int64_t num_bytes) {
    if (memory->num_bytes() >= num_bytes) return;
    *memory = Memory();  // a separate statement, so that the old memory is freed before the new is allocated
    *memory = Memory(num_bytes);
}

// Which tensor of the model: numbered as in tensors.py.
enum TensorKind : int32_t {
    EMBEDDING, HEAD, FINAL_NORM, PRE_MIXER, PRE_FEED, Q_NORM, K_NORM,
    Q, K, V, O, GATE, UP, DOWN, Q_BIAS, K_BIAS, V_BIAS, O_BIAS, GATE_BIAS, UP_BIAS, DOWN_BIAS,
    POST_MIXER, POST_FEED, PRE_MIXER_BIAS, PRE_FEED_BIAS, POST_MIXER_BIAS, POST_FEED_BIAS, Q_NORM_BIAS, K_NORM_BIAS,
    SINKS, ACTIVATION_PARAMS, LEARNED_POSITIONS, EMBEDDING_NORM, EMBEDDING_NORM_BIAS, FINAL_NORM_BIAS, HEAD_BIAS,
    ROUTER, ROUTER_BIAS, CHOICE_BIAS, SHARED_GATE, EXPERT_GATE, EXPERT_UP, EXPERT_DOWN, EXPERT_GATE_BIAS, EXPERT_UP_BIAS,
    EXPERT_DOWN_BIAS,
    INPUT_TABLE = 60, INPUT_PROJECTION, INPUT_PROJECTION_NORM, OUTPUT_SCALE, INPUT_GATE, INPUT_UP, INPUT_NORM,
    Q_DOWN, KV_DOWN, Q_UP, KV_UP, Q_DOWN_BIAS, KV_DOWN_BIAS,
    ROUTER_NORM, EXPERT_SCALES, BEFORE_EXPERTS, AFTER_EXPERTS, AFTER_OTHER,
    // Matrices of mixers, then their biases in the same order, then what else recurrent layers have.
    OUTPUT_GATE = 80, MIX_GATE, MIXED, MIX_STEP, MIX_RATE, MIX_OUTPUT,
    OUTPUT_GATE_BIAS, MIX_GATE_BIAS, MIXED_BIAS, MIX_STEP_BIAS, MIX_RATE_BIAS, MIX_OUTPUT_BIAS,
    CONV, CONV_BIAS, DECAY, STEP_BIAS, SKIP, MIX_NORM
};

// Sets `Linear::next` of each linear.
void link_linears(Model& model);

// Sets where each recurrent layer's state lies in a sequence's, by their sizes.
void place_states(Model& model);

// Sets where each linear lies in `Model::weights`, by their sizes.
void place_linears(Model& model);

// A tensor of a checkpoint, [rows, columns]. Mirrored by `TensorStruct` in library.py.
struct Tensor {
    int64_t layer;
    TensorKind kind;
    DataType type;
    const void* data;
    int64_t map_bytes;  // of a file mapping, whose pages may be dropped once the tensor is packed; 0: none
    int64_t first_row, num_rows;  // the rows that `data` has, of a matrix or a table; num_rows 0: all
    int64_t expert;               // whose tensor it is, if experts have such
};

// Packs a tensor into its linear, which must not be 12-bit; quantizes it if its format is of `own_formats` in grouped.py.
// False if a number is not finite in the model's dtype.
bool set_tensor(Model& model, const Tensor& tensor);

// Packs rows of the matrix that makes keys and values of latents: see latents/pack_latents.cpp. Likewise.
bool set_latent_rows(Model& model, const Tensor& tensor);

// Reads numbers [begin, begin + count) of a tensor's data as float32.
void read_numbers(const void* data, DataType type, int64_t begin, int64_t count, float* to);

// The format of a matrix in groups of codes. Mirrored by `FormatStruct` in library.py.
struct TensorFormat {
    int64_t layer, expert;
    TensorKind kind;
    GroupedFormat format;
};

// Sets the formats of matrices, before any tensor is set. False for formats that do not fit one product.
bool set_formats(Model& model, int64_t count, const TensorFormat* formats);

// Sets the order of a matrix's columns, [k], which must be that of all matrices in its product. Before its rows.
void set_columns(Model& model, int64_t layer, int64_t expert, TensorKind kind, const int32_t* columns);

// Packs rows of a matrix that has a format. False if a scale or offset is not finite.
bool set_rows(Model& model, const GroupedRows& rows);

// The linear that has a matrix; null for another tensor.
const Linear* linear_of(Model& model, int64_t layer, int64_t expert, TensorKind kind);

// The numbers that products use for a matrix, [rows, columns]. False for another tensor, or one that is not set.
bool get_matrix(Model& model, int64_t layer, int64_t expert, TensorKind kind, float* numbers);

}  // namespace millrace
