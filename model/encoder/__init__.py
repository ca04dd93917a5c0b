"""Encoder models, which attend in both directions: hidden states of texts, or scores of pairs.

Owns: the encoders of transformers, and the trial run that a loaded one must pass.
In: a checkpoint, and batches of token ids.
Out: one hidden state a token, or one score a pair.
Imports: `model`'s own files, `model/checkpoint`, torch, transformers.
Start with: `bidirectional.py`; `probe.py` is the trial run.
"""
