"""Encoder models: texts read in both directions, and turned into vectors.

Owns: BERT and its kin.
In: a checkpoint, and batches of token ids.
Out: one hidden state a token.
Imports: `model`, `model/checkpoint`.
Start with: `bidirectional.py`.
"""
