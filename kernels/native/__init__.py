"""The native step: a decoder from token ids to logits in one call of a C++ library, for CPUs. Numpy and ctypes only."""
