"""Anthropic's Messages API.

Owns: nothing.
In: bodies of `POST /v1/messages`.
Out: messages and their events.
Imports: the root of `deploy`, `api/adapter` and below.
Start with: `routes.py`.
"""
