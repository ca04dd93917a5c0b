"""Ollama's API: chats and prompts as lines of JSON, embeddings, and what its clients ask about models.

Owns: nothing.
In: bodies of `POST /api/chat`, `/api/generate`, `/api/embed` and others below `/api`.
Out: answers in Ollama's shape, whole or a line for each piece.
Imports: the root of `deploy`, `http`, `api/adapter` and what that imports.
Start with: `routes.py`.
"""
