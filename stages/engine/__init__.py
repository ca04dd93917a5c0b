"""The engine: a model, the seven stages around it, and the Python interface to both.

Owns: the running pipeline.
In: requests, as text, chat or token ids.
Out: pieces of answers, whole answers, embeddings.
Imports: all of `stages` but `split`, `testing`.
Start with: `engine.py`; `llm.py` is the blocking interface.
"""
