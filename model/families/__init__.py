"""The families of decoders: one file says how config.json becomes a `DecoderSpec`, and how its tensors are named.

Owns: which model types are served, the quirks of their checkpoints, the canonical tensors.
In: the contents of a config.json.
Out: a `DecoderSpec`, and the rows of the checkpoint that each canonical tensor is made of.
Imports: `model`'s own files.
Start with: `registry.py`, then `llama.py`, which the others are compared with.
"""
