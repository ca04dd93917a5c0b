"""The shapes of answers, which handlers make as plain data: for the OpenAPI document, and for tests.

Owns: nothing.
In: nothing.
Out: a model for each answer, part of an answer and event.
Imports: the root of `deploy`.
Start with: `openai.py`.
"""
