"""OpenAI's chat: handler, body, operations and the shapes of answers.

Owns: nothing.
In: bodies of `POST /v1/chat/completions`.
Out: whole answers and chunks of streams.
Imports: the root of `deploy`, `api/schema`, `api/openai`.
Start with: `routes.py`.
"""
