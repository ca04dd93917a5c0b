#include "step/step_split.h"

namespace millrace {

template void run_typed<bf16>(Model&, const StepInputs&, int);
template void run_head_typed<bf16>(Model&, const float*, int64_t, float*, int);
template int64_t step_bytes_typed<bf16>(const Model&, int64_t, int64_t);

}  // namespace millrace
