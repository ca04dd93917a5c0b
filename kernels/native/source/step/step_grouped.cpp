#include "step/step_split.h"

namespace millrace {

template void run_typed<Grouped>(Model&, const StepInputs&, int);
template void run_head_typed<Grouped>(Model&, const float*, int64_t, float*, int);
template int64_t step_bytes_typed<Grouped>(const Model&, int64_t, int64_t);

void run_product(Model& model, const Linear& linear, const float* x, int64_t num_rows, float* out) {
    std::lock_guard<std::mutex> lock(model.is_running);
    TiledRows<SplitRow> rows{nullptr, num_rows, linear.k};
    Memory memory(num_rows * rows.padded_size() + rows.bytes_behind());
    rows.data = memory.as<SplitRow>();
    rows.put_rows(0, num_rows, 0, linear.k, x, linear.k);
    if (!linear.columns.empty()) rows.columns = linear.columns.data();
    rows.split(0, num_rows, rows);
    reserve_workspace<Grouped>(&model, num_rows, model.pool->size());
    FloatOutput to{out, linear.n, StoreMode::STORE};
    model.pool->run(model.pool->size(), [&](int thread) {
        Phases phases(model.pool.get(), thread);
        phases.run([&](ThreadTeam::Member member) { multiply<Grouped>(model, linear, rows, to, member); });
    });
}

}  // namespace millrace
