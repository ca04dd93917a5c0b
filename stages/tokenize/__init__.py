"""The tokenize stage: prompts and chats become token ids, in threads.

Owns: the threads that tokenize.
In: `Request`, from intake.
Out: `TokenRequest`, to schedule.
Imports: the root of `stages`, `runtime`, `model`, `kernels`.
Start with: `stage.py`.
"""
