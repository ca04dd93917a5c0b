"""Decoders of families that have no spec of ours: transformers' modules on the paged cache.

Owns: the attention that transformers calls, its gate, its probe.
In: a checkpoint's folder.
Out: `TransformersDecoder`, which a runner uses as it does `Decoder`.
Imports: transformers; the root of `model`, `checkpoint`, `decoder`; `kernels`.
Start with: `transformers_decoder.py`.
"""
