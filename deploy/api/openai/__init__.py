"""OpenAI's chat, completions and embeddings, and tokenization.

Owns: the handlers, their bodies and the shapes of answers.
In: validated bodies.
Out: whole answers and chunks of streams.
Imports: the root of `deploy`, `http`, the files of `api`, `api/schema`, `api/parsers`.
Start with: `generation.py`: `POST /v1/chat/completions` ends there.
"""
