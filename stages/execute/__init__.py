"""The execute stage: runs each granted step on the device.

Owns: the arrays that one step of the decoder reads.
In: `StepGrant`, from allocate.
Out: `StepLogits` to sample, or `StepVoid`.
Imports: the root of `stages`, `runtime`, `model`, `kernels`, `stages/device`.
Start with: `stage.py`; `model_runner.py` turns a grant into arrays.
"""
