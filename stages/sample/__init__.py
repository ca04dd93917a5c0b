"""The sample stage: chooses each step's tokens, and reports them to schedule.

Owns: each slot's sampling parameters and token counts, on the device thread.
In: `StepLogits`, from execute.
Out: `StepDone` or `StepVoid` to schedule, `StepTokens` to detokenize.
Imports: the root of `stages`, `runtime`, `model`, `stages/device`, `stages/grammar`.
Start with: `stage.py`, then `sampler.py`; `sampling_math.py` has the formulas.
"""
