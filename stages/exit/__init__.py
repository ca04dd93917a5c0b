"""The exit: sorts text into outboxes, ends requests, and parks slow readers.

Owns: the outboxes, the single terminal event of each request, and the writing end of the control lane.
In: `StepText` from detokenize or encode; failures from any stage; cancels and deadlines from callers.
Out: `Delta`s, read by clients; causes on the control lane, to schedule or encode; calls to intake and detokenize.
Imports: the root of `stages`, `runtime`.
Start with: `outboxes.py`, then `request_outbox.py`.
"""
