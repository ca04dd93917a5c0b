"""The execute stage: runs each granted step on the device.

Owns: the runner's copy of each slot's prompt and block table, on the device thread.
In: `StepGrant`, from allocate.
Out: `StepLogits` to sample, one for each grant; `Rates` to allocate, once.
Imports: the root of `stages`, `runtime`, `model`, `stages/device`.
Start with: `stage.py`; `model_runner.py` turns a grant into arrays.
"""
