// The C interface of the library, called through ctypes by library.py. No exception leaves it.
//
// Steps, sampling and the head run on the step thread if the model has one (several compute threads), else on the
// caller's. `millrace_follow` never blocks and may be called with Python's interpreter lock held.

#include <algorithm>
#include <cstring>
#include <new>

#include "step/route.h"
#include "step/step_chain.h"
#include "weights/bf16_12bit_encode.h"
#include "weights/model.h"
#include "sampling/sampling.h"
#include "grouped/super_sums.h"
#include "lora/adapter.h"
#include "step/argmax_screen.h"
#include "step/step.h"

using namespace millrace;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Does not check for AMX: machine.py does, because a process must also request AMX from the system.
EXPORT int32_t millrace_is_supported() {
#if defined(__AVX512F__)
    bool is = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(__AVX512BF16__)
    is = is && __builtin_cpu_supports("avx512bf16");
#endif
    return is;
#else
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
}

namespace {

// Returns the result of `call`, which may throw bad_alloc only. Runs it on the step thread if the model has one.
template <class Call>
int32_t run_on_step_thread(Model* model, const Call& call) {
    int32_t result = FINE;
    auto run = [&] {
        try {
            result = call();
        } catch (const std::bad_alloc&) {
            result = NO_MEMORY;
        }
        if (model->thread_times)
            std::copy(model->pool->thread_times.begin(), model->pool->thread_times.end(), model->thread_times);
    };
    model->step_thread ? model->step_thread->call(run) : run();
    return result;
}

}  // namespace

// layers [num_layers]. cpus [num_cpus]: see Pool; the first is the step thread's, which a model with several compute
// threads has. min_work_per_thread: see Model.
EXPORT Model* millrace_model_new(const Shape* shape, const LayerShape* layers, int32_t num_threads, const int32_t* cpus,
                                 int32_t num_cpus, int64_t min_work_per_thread) {
    try {
        auto model = std::make_unique<Model>();
        model->shape = *shape;
        model->min_work_per_thread = std::max<int64_t>(1, min_work_per_thread);
        bool is_half = shape->dtype == BFLOAT16;
        model->embedding_scale = is_half ? widen(to_bf16(shape->embedding_scale)) : shape->embedding_scale;
        model->embedding_norm.shape = shape->embedding_norm, model->final_norm.shape = shape->final_norm;
        auto define = [&](Linear& linear, int64_t n, int64_t k, int32_t type) {
            linear.n = n, linear.k = k, linear.type = DataType(type);
            linear.group_size = type == INT4 ? shape->group_size : std::max<int64_t>(1, k);
        };
        int64_t hidden = shape->hidden_size;
        auto define_network = [&](Linear& gate_up, Linear& down, bool is_gated, int64_t inner) {
            define(gate_up, is_gated ? 2 * round_up(inner, 16) : inner, hidden, shape->linears);
            define(down, hidden, inner, shape->linears);
        };
        model->layers.resize(shape->num_layers);
        for (int64_t i = 0; i < shape->num_layers; i++) {
            Layer& layer = model->layers[i];
            layer.set_shape(layers[i]);
            int64_t inner = layer.shape.intermediate_size;
            model->intermediate_size = std::max(model->intermediate_size, inner);
            model->has_branches |= layer.has_post_norm();
            const RecurrentShape& recurrent = layer.shape.recurrent;
            bool attends = !layer.is_recurrent();
            define(layer.qkv, attends ? layer.shape.qkv_columns() : recurrent.num_columns(), hidden, shape->linears);
            define(layer.output, hidden, attends ? layer.shape.attended_size() : recurrent.inner_size(), shape->linears);
            model->max_qkv_size = std::max({model->max_qkv_size, layer.qkv.n, attends ? layer.shape.qkv_size() : 0});
            model->max_attended_size = std::max(model->max_attended_size, layer.output.k);
            if (const LatentShape& latents = layer.shape.latents; layer.shape.has_latents()) {
                int64_t heads = layer.shape.num_heads, queries = heads * layer.shape.query_dim();
                if (latents.q_rank > 0) define(layer.query_up, queries, latents.q_rank, shape->linears);
                define(layer.key_up, heads * round_up(latents.kv_rank, PANEL), latents.nope_dim, shape->dtype);
                define(layer.value_up, heads * round_up(latents.value_dim, PANEL), latents.kv_rank, shape->dtype);
                model->max_query_size = std::max(model->max_query_size, latents.q_rank > 0 ? queries : 0);
                model->max_absorbed_size = std::max(model->max_absorbed_size, heads * layer.shape.head_dim);
                model->intermediate_size = std::max(model->intermediate_size, latents.q_rank);
            }
            define_network(layer.gate_up, layer.down, layer.shape.is_gated, inner);
            if (layer.shape.activation == SWIGLU_CLAMPED) layer.activation_params = {layer.shape.alpha, layer.shape.limit};
            const ExpertsShape& experts = layer.shape.experts;
            if (experts.num_experts == 0) continue;
            model->has_branches |= inner > 0 || layer.has_own_norms();
            model->max_experts = std::max(model->max_experts, experts.num_experts);
            model->max_top_k = std::max(model->max_top_k, experts.top_k);
            model->max_expert_size = std::max(model->max_expert_size, experts.intermediate_size);
            define(layer.experts.router, experts.num_experts + (experts.has_shared_gate != 0), hidden, shape->dtype);
            layer.experts.each.resize(experts.num_experts);
            for (Expert& expert : layer.experts.each)
                define_network(expert.gate_up, expert.down, experts.is_gated, experts.intermediate_size);
            if (experts.activation == SWIGLU_CLAMPED) layer.experts.activation_params = {experts.alpha, experts.limit};
        }
        if (const LayerInputsShape& inputs = shape->layer_inputs; inputs.width > 0) {
            model->layer_inputs.scale = is_half ? widen(to_bf16(inputs.scale)) : inputs.scale;
            model->layer_inputs.norm.shape = inputs.norm;
            define(model->layer_inputs.projection, shape->num_layers * inputs.width, hidden, shape->dtype);
            for (Layer& layer : model->layers) {
                define(layer.input_gate, inputs.width, hidden, shape->linears);
                define(layer.input_up, hidden, inputs.width, shape->linears);
                layer.input_norm.shape = inputs.norm;
            }
            model->intermediate_size = std::max(model->intermediate_size, inputs.width);
            model->has_branches = true;
        }
        place_states(*model);
        place_linears(*model);
        define(model->head, shape->vocab_size, hidden, shape->head);
        link_linears(*model);
        model->pool = std::make_unique<Pool>(num_threads, std::vector<int>(cpus, cpus + num_cpus));
        if (num_threads > 1) {
            model->step_chain = std::make_unique<StepChain>(*model);
            model->step_thread = std::make_unique<StepThread>(num_cpus >= num_threads ? cpus[0] : -1);
        }
        return model.release();
    } catch (const std::exception&) {
        return nullptr;
    }
}

// Bytes of Shape, LayerShape, ExpertsShape and RecurrentShape, for the check that library.py mirrors them.
EXPORT int64_t millrace_shape_bytes() { return sizeof(Shape); }
EXPORT int64_t millrace_layer_shape_bytes() { return sizeof(LayerShape); }
EXPORT int64_t millrace_experts_shape_bytes() { return sizeof(ExpertsShape); }
EXPORT int64_t millrace_recurrent_shape_bytes() { return sizeof(RecurrentShape); }

EXPORT void millrace_model_delete(Model* model) { delete model; }

// The system's id of the step thread; 0: the model has none.
EXPORT int32_t millrace_step_thread_id(const Model* model) {
    return model->step_thread ? model->step_thread->thread_id() : 0;
}

// Replaces the rotary tables: cos[i], sin[i] [count, halves[i]] of table i, which stay where they are until the model is
// deleted or has others. Positions of tokens are below `count`.
EXPORT int32_t millrace_set_positions(Model* model, int64_t count, int64_t num_tables, const int64_t* halves,
                                      const float* const* cos, const float* const* sin) {
    try {
        std::vector<RopeTable> ropes(num_tables);
        for (int64_t i = 0; i < num_tables; i++) ropes[i] = {halves[i], cos[i], sin[i]};
        model->ropes = std::move(ropes);
        model->num_positions = count;
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// Packs tensors in order, in one call: a loader thread beside threads that hold Python's interpreter lock waits for it
// once, not once per tensor. Returns 0 if all are set. Otherwise `num_set` are, and the next one failed: 1: a number is
// not finite; 2: no memory.
EXPORT int32_t millrace_set_tensors(Model* model, const Tensor* tensors, int64_t count, int64_t* num_set) {
    try {
        for (*num_set = 0; *num_set < count; ++*num_set)
            if (!set_tensor(*model, tensors[*num_set])) return 1;
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// Sets the formats of matrices in groups of codes, before their rows. Returns 0, or 1 for formats that do not fit.
EXPORT int32_t millrace_set_formats(Model* model, int64_t count, const TensorFormat* formats) {
    try {
        return set_formats(*model, count, formats) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// Sets the order [k] of the columns of a matrix that has a format. Returns 0; 2: no memory.
EXPORT int32_t millrace_set_columns(Model* model, int64_t layer, int32_t kind, int64_t expert, const int32_t* columns) {
    try {
        set_columns(*model, layer, expert, TensorKind(kind), columns);
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// Packs rows of a matrix that has a format. Returns 0; 1: a scale or offset is not finite; 2: no memory.
EXPORT int32_t millrace_set_rows(Model* model, const GroupedRows* rows) {
    try {
        return set_rows(*model, *rows) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// For tests: see `run_product`. x [num_rows, k], out [num_rows, n].
EXPORT int32_t millrace_product(Model* model, int64_t layer, int32_t kind, int64_t expert, const float* x, int64_t num_rows,
                                float* out) {
    return run_on_step_thread(model, [&] {
        run_product(*model, *linear_of(*model, layer, expert, TensorKind(kind)), x, num_rows, out);
        return FINE;
    });
}

// Lets the model take adapters in slots 1 to num_slots, of a rank of at most `max_rank` for each of three slices.
// Returns 0; 2: no memory.
EXPORT int32_t millrace_reserve_adapters(Model* model, int64_t num_slots, int64_t max_rank) {
    try {
        std::lock_guard<std::mutex> lock(model->is_running);
        model->adapters.resize(num_slots + 1);
        model->num_lora_sums = 3 * round_up(max_rank, LORA_TILE_SUMS);
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

using Adapter = std::shared_ptr<const LoraAdapter>;

// Packs an adapter, for `millrace_use_adapter`. Null: no memory. May be called beside steps.
EXPORT Adapter* millrace_adapter_new(const Model* model, int32_t type, int64_t count, const LoraSource* sources) {
    try {
        return new Adapter(pack_adapter(*model, DataType(type), count, sources));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
EXPORT void millrace_adapter_delete(Adapter* adapter) { delete adapter; }
EXPORT int64_t millrace_adapter_bytes(const Adapter* adapter) { return (*adapter)->memory.num_bytes(); }

// Puts an adapter into a slot in place of the one there; null: none. Waits for the step that runs.
EXPORT void millrace_use_adapter(Model* model, int64_t slot, const Adapter* adapter) {
    Adapter before = adapter ? *adapter : nullptr;
    {
        std::lock_guard<std::mutex> lock(model->is_running);
        if (before) model->num_lora_sums = std::max(model->num_lora_sums, before->num_sums);
        std::swap(model->adapters[slot], before);
    }
}

// For tests: see `use_plain_kernels`.
EXPORT void millrace_use_plain_kernels(int32_t is_plain) { use_plain_kernels(is_plain != 0); }

// Bytes of GroupedRows and TensorFormat, for the check that library.py mirrors them.
EXPORT int64_t millrace_rows_bytes() { return sizeof(GroupedRows); }
EXPORT int64_t millrace_format_bytes() { return sizeof(TensorFormat); }

// Call once all tensors are set; the model takes no more. 0: done; 2: no memory for some linears, which stay as they
// are.
EXPORT int32_t millrace_encode_bf16_12bit(Model* model) {
    try {
        std::lock_guard<std::mutex> lock(model->is_running);
        encode_bf16_12bit(*model);
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    }
}

// The numbers that products use for a matrix, [rows, columns]. False for a tensor that is no matrix.
EXPORT int32_t millrace_get_matrix(Model* model, int64_t layer, int32_t kind, int64_t expert, float* numbers) {
    return get_matrix(*model, layer, expert, TensorKind(kind), numbers);
}

EXPORT int64_t millrace_weights_bytes(const Model* model) { return model->weights_bytes(); }

// Of these, what a step of one token reads: of experts those of a token. All experts are taken to have equal formats.
EXPORT int64_t millrace_token_weights_bytes(const Model* model) {
    return model->weights_bytes(model->max_top_k);
}

// Memory of the argmax screen, which `millrace_weights_bytes` leaves out.
EXPORT int64_t millrace_screen_bytes(const Model* model) { return model->screen.num_bytes(); }

// Whether a head that is set gets a screen.
EXPORT int32_t millrace_can_screen(const Model* model) { return can_screen(*model); }

// (row, panel) pairs of the head that the last step's screen left, and those that it refined. -1: the step used no
// screen.
EXPORT int64_t millrace_screen_candidates(const Model* model) { return model->screen.num_candidates; }
EXPORT int64_t millrace_screen_refined(const Model* model) { return model->screen.num_refined; }

// Whether two threads split products by rows in the last step.
EXPORT int32_t millrace_is_split_by_rows(const Model* model) { return model->splits_rows; }

// Whether the last step's rows were split between two threads.
EXPORT int32_t millrace_is_split(const Model* model) { return model->is_step_split; }

EXPORT int32_t millrace_num_layers_before_split(const Model* model) { return model->num_layers_before_split; }

// For tests: see SplitTuner.
EXPORT void millrace_assume_split(Model* model, int32_t is_step_split) {
    std::lock_guard<std::mutex> lock(model->is_running);
    model->split_tuner.assume(is_step_split);
}

// Whether few rows read weights non-temporally in the last step.
EXPORT int32_t millrace_is_streaming(const Model* model) { return model->is_streaming; }

// Bytes of a sequence's state in recurrent layers; 0: the model has none.
EXPORT int64_t millrace_state_bytes(const Model* model) { return model->state_bytes; }

EXPORT int64_t millrace_step_bytes(const Model* model, int64_t num_tokens, int64_t num_logits) {
    return step_bytes(*model, num_tokens, num_logits);
}

// phase_ns [NUM_PHASE_KINDS + 1]: see Model. Owned by the caller; must outlive the steps.
EXPORT void millrace_time_phases(Model* model, int64_t* phase_ns) {
    std::lock_guard<std::mutex> lock(model->is_running);
    model->phase_ns = phase_ns;
}

// thread_times [NUM_THREAD_TIMES]: see Model. Owned by the caller; must outlive the steps.
EXPORT void millrace_count_thread_times(Model* model, int64_t* thread_times) { model->thread_times = thread_times; }

// Limits the threads of the following steps; with `is_probing` those left out probe: see Pool.
EXPORT void millrace_limit_threads(Model* model, int32_t num_threads, int32_t is_probing) {
    model->pool->limit = num_threads;
    model->pool->is_probing = is_probing != 0;
}

// For tests: see ThreadTeam.
EXPORT void millrace_set_join_delay(Model* model, int32_t num_phases) {
    std::lock_guard<std::mutex> lock(model->is_running);
    model->pool->team.join_delay = num_phases;
}

// For tests: see CacheProbe.
EXPORT void millrace_assume_retained(Model* model, int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(model->is_running);
    model->cache_probe.assume(num_bytes);
}

// Bytes of keys and values that the last step prefetched beside products.
EXPORT int64_t millrace_kv_prefetched_bytes(Model* model) {
    std::lock_guard<std::mutex> lock(model->is_running);
    return model->kv_prefetched_bytes;
}

EXPORT int32_t millrace_step(Model* model, const StepInputs* inputs) {
    return run_on_step_thread(model, [&] {
        Error error = check(*model, *inputs);
        if (error == FINE && inputs->num_tokens > 0) run_step(*model, *inputs);
        return error;
    });
}

EXPORT int32_t millrace_decode(Model* model, const DecodeSlots* decode_slots, int64_t num_rows, float* logits,
                               int64_t* argmax, uint8_t* is_broken) {
    return run_on_step_thread(model, [&] { return decode(*model, *decode_slots, num_rows, {logits, argmax, is_broken}); });
}

EXPORT void millrace_norm(Model* model, const float* hidden, int64_t count, float* normed) {
    run_norm(*model, hidden, count, normed);
}

EXPORT int32_t millrace_head(Model* model, const float* hidden, int64_t count, float* logits) {
    return run_on_step_thread(model, [&] {
        if (count > 0) run_head(*model, hidden, count, logits);
        return FINE;
    });
}

// For tests: the experts of each row, and their weights, [num_rows, top_k] each: see `route`. logits [num_rows, experts],
// choice_bias [experts] or null.
EXPORT void millrace_route(const ExpertsShape* shape, const float* logits, const float* choice_bias, int64_t num_rows,
                           int32_t* ids, float* weights) {
    Router router(*shape, choice_bias);
    for (int64_t row = 0; row < num_rows; row++, ids += shape->top_k, weights += shape->top_k)
        router.route(logits + row * shape->num_experts, ids, weights);
}

EXPORT const char* millrace_draw_fields() { return draw_field_names(); }

EXPORT int32_t millrace_sample(Model* model, const SlotSampling* sampling, const SamplingRows* rows) {
    return run_on_step_thread(model, [&] {
        if (rows->num_rows > 0) sample(*model, *sampling, *rows);
        return FINE;
    });
}

// Returns once the step thread's queue is empty.
EXPORT void millrace_drain(Model* model) {
    if (model->step_thread) model->step_thread->call([] {});
}

// The next three need a model with a step thread: see StepChain. Returns NO_MEMORY or FINE.
EXPORT int32_t millrace_begin(Model* model, int64_t number, const DecodeSlots* decode_slots, const SlotSampling* sampling,
                              int64_t num_rows) {
    try {
        model->step_chain->begin(number, *decode_slots, *sampling, num_rows);
        return FINE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// 1 if the step follows. It does not if there is no memory.
EXPORT int32_t millrace_follow(Model* model, int64_t number, const DecodeSlots* decode_slots, const SlotSampling* sampling,
                               int64_t num_rows) {
    try {
        return model->step_chain->follow(number, *decode_slots, *sampling, num_rows);
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

EXPORT int32_t millrace_wait(Model* model, int64_t number, int64_t num_rows, int64_t* token_ids, uint8_t* is_broken) {
    return model->step_chain->wait(number, num_rows, token_ids, is_broken);
}
