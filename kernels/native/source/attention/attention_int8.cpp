#include "attention/typed_cache_phases.h"

namespace millrace {

template std::unique_ptr<CachePhases<float>> make_cache_phases<float, int8_t>(Model&, const StepInputs&);
template std::unique_ptr<CachePhases<SplitRow>> make_cache_phases<SplitRow, int8_t>(Model&, const StepInputs&);
#ifdef MILLRACE_BF16_DOT  // else rows of such models are float32
template std::unique_ptr<CachePhases<bf16>> make_cache_phases<bf16, int8_t>(Model&, const StepInputs&);
#endif

}  // namespace millrace
