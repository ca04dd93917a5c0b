"""Requests of other APIs converted to chat bodies, and their answers as parts.

Owns: nothing.
In: bodies of the Responses and Messages APIs.
Out: chat bodies, and answers as text, reasoning and calls.
Imports: the files of `api`, `api/schema`, `api/parsers`, `api/openai`, `api/chat`.
Start with: `chat_adapter.py`.
"""
