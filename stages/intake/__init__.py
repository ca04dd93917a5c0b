"""The intake stage: each request is checked once, before it has cost anything.

Owns: the counts of requests under way and waiting.
In: `Request`, from a client.
Out: `Request` to tokenize, or a refusal to the exit.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `stage.py`; `admission.py` decides on load.
"""
