#include "attention/typed_cache_phases.h"

namespace millrace {

template std::unique_ptr<CachePhases<InputOf<float>>> make_cache_phases<InputOf<float>, float>(Model&, const StepInputs&);
template std::unique_ptr<CachePhases<SplitRow>> make_cache_phases<SplitRow, float>(Model&, const StepInputs&);

}  // namespace millrace
