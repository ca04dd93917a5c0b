"""OpenAI's chat: handler, body, operations and the shapes of answers.

Owns: nothing.
In: bodies of `POST /v1/chat/completions`.
Out: whole answers and chunks of streams.
Imports: the root of `deploy`, the files of `api`, `api/schema`, `api/parsers`, `api/openai`.
Start with: `routes.py`.
"""
