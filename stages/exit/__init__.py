"""The exit: each answer's outbox, from which its client reads, and slow readers.

Owns: the outboxes, and the one terminal event of each request.
In: text, vectors, failures and finishes, from any stage.
Out: what clients read.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `outboxes.py`.
"""
