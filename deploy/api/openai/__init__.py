"""OpenAI's chat, completions and embeddings, and tokenization.

Owns: the handlers, their bodies and the shapes of answers.
In: HTTP requests with plain-data bodies.
Out: whole answers and chunks of streams.
Imports: the root of `deploy`, `http`, the files of `api`, `api/schema`, `api/parsers`.
Start with: `generation.py`, the handler of `POST /v1/chat/completions`.
"""
