"""The families with experts.

Owns: how routers, experts and shared networks of each family are described in config.json, and named in files.
In: the contents of a config.json.
Out: a `DecoderSpec` whose feeds are `MoeSpec`s, and where the tensors of experts lie.
Imports: the families' building parts.
Start with: `mixtral.py`; `mixtures.py` has what several read.
"""
