"""The tokenize stage: converts prompts and chats to token ids, in threads.

Owns: the tokenizer threads.
In: `Request`, from intake.
Out: one `TokenRequest` per prompt, to schedule (to encode, for an encoder model).
Imports: the root of `stages`, `runtime`, `model`.
Start with: `stage.py`; `prompt_encoder.py` wraps a checkpoint's tokenizer and chat template, `yes_no.py` the
prompt of a reranker.
"""
