"""Beam search: the algorithm, and the requests that each step of a search makes.

Owns: the running searches, one task each.
In: `Request` with `BeamParams`, from the engine.
Out: a `Request` of one token per live beam and step, to the pipeline; the best answers, to the request's outbox.
Imports: the root of `stages`, `runtime`, and the rooms `tokenize`, `detokenize` and `exit`.
Start with: `algorithm.py`, which is plain code; `searches.py` runs it.
"""
