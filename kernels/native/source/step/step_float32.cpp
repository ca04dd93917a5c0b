#include "step/step_split.h"

namespace millrace {

template void run_typed<float>(Model&, const StepInputs&, int);
template void run_head_typed<float>(Model&, const float*, int64_t, float*, int);
template int64_t step_bytes_typed<float>(const Model&, int64_t, int64_t);

void run_norm(const Model& model, const float* hidden, int64_t count, float* normed) {
    norm_rows(model, hidden, count, normed);
}

}  // namespace millrace
