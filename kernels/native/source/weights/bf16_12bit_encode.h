// How weights of bf16 become coded ones: see coded.h. Refuses to know who multiplies them.

#pragma once

#include "weights/model.h"

namespace millrace {

// Codes linears that are kept in bf16, the layers' and the head, where that is worth it, and gives memory back. All tensors are
// set: a linear that is coded takes no more of them. Throws bad_alloc when it is through: what there was no memory for stays as
// it is.
void encode_bf16_12bit(Model& model);

}  // namespace millrace
