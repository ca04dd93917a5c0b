"""The families with recurrent layers.

Owns: how delta nets, Mamba-2 and short convolutions of each family are described in config.json, and named in files.
In: the contents of a config.json.
Out: a `DecoderSpec` some of whose mixers are `RecurrentSpec`s, and where their tensors lie.
Imports: the families' building parts, and those of mixtures of experts.
Start with: `lfm2.py`; `mamba2.py` has what several read.
"""
