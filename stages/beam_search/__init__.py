"""Beam search: which answers live on, and the requests that each step of a search makes.

Owns: the searches under way.
In: a request with `beam_width`.
Out: requests of one token, and the best answers.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `algorithm.py`.
"""
