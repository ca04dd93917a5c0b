"""The detokenize stage: tokens become text, and stop strings are matched.

Owns: each answer's undecoded tokens and the text held back for a stop string.
In: `StepTokens`, from sample.
Out: text to the exit; `Finish` to schedule when a stop string is matched.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `stage.py`; `stop_strings.py` matches.
"""
