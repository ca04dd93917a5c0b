"""A request of another API as a chat, and its answer as parts.

Owns: nothing.
In: bodies of Responses and Messages.
Out: chat bodies; answers as text, reasoning and calls.
Imports: the root of `deploy`, the files of `api`, `api/schema`, `api/parsers`, `api/openai`.
Start with: `chat_adapter.py`.
"""
