"""The detokenize stage: converts tokens to text and matches stop strings.

Owns: the decoder state of each answer, the text held back for a stop string, and inter-token latencies.
In: `StepTokens`, from sample; a call from the exit when a request ends.
Out: `StepText` to the exit, with a `Finish` per ended answer; the exit tells schedule of matched stop strings.
Imports: the root of `stages`, `runtime`.
Start with: `stage.py`, then `answer_text.py` for one answer; `stop_strings.py` matches stop strings.
"""
