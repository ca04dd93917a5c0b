"""GPT and its kin, with LayerNorm and mostly ungated feeds: learned positions, alibi or rotary ones.

Owns: the quirks of these checkpoints.
In: the contents of a config.json.
Out: a `DecoderSpec`, and where its tensors lie.
Imports: `families`, and the root of `model`.
Start with: `gpt2.py`.
"""
