"""Models of all answers, for the OpenAPI document and for tests; handlers make answers as plain data.

Owns: nothing.
In: nothing.
Out: a model of each answer, part of an answer and event.
Imports: the root of `deploy`.
Start with: `openai.py`.
"""
