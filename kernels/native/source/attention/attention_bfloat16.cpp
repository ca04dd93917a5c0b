#include "attention/typed_cache_phases.h"

namespace millrace {

template std::unique_ptr<CachePhases<InputOf<bf16>>> make_cache_phases<InputOf<bf16>, bf16>(Model&, const StepInputs&);
template std::unique_ptr<CachePhases<SplitRow>> make_cache_phases<SplitRow, bf16>(Model&, const StepInputs&);

}  // namespace millrace
