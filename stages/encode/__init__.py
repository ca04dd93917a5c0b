"""The encode stage of an encoder model: prompts go in, vectors come out.

Owns: the batch under way.
In: `TokenRequest`, from tokenize.
Out: vectors, to the exit.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `stages/device`.
Start with: `stage.py`.
"""
