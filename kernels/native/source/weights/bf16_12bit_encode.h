// Encoder of bf16 weights to 12 bits: see bf16_12bit.h for the format. Called once through api.cpp, after loading.

#pragma once

#include "weights/model.h"

namespace millrace {

// Encodes the layers' bf16 linears and the head where this saves memory, and returns the memory saved. All tensors must
// be set; an encoded linear takes no more. Throws bad_alloc after it has tried all: a linear that lacked memory stays
// as it is.
void encode_bf16_12bit(Model& model);

}  // namespace millrace
