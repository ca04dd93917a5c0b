"""Embeddings, scores and reranking: handlers, bodies, operations and the shapes of answers.

Owns: nothing.
In: bodies of `POST /v1/embeddings`, `/score` and `/rerank`.
Out: vectors, scores and ranks.
Imports: the root of `deploy`, `http`, `api/schema`, `api/openai`.
Start with: `routes.py`.
"""
