"""The encode stage: runs an encoder model on batches of prompts, for vectors or scores.

Owns: the current batch.
In: `TokenRequest`, from tokenize.
Out: `StepText` with vectors, to the exit.
Imports: the root of `stages`, `runtime`, `model`, `device`.
Start with: `stage.py`; `encoder_runner.py` runs the model, in a thread.
"""
