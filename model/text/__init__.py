"""Text: tokenizer, detokenizer, chat template with its sandbox, and grammars.

Owns: the vocabulary and the limits on untrusted templates and grammars.
In: texts, chat messages, token ids, grammars.
Out: token ids, texts, and compiled grammars.
Imports: `model`'s own files (`errors`, `files`), `schema`.
Start with: `tokenizer.py`.
"""
