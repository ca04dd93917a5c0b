"""The APIs: OpenAI, Responses, Messages, and what they share.

Owns: the `Service` that handlers share.
In: bodies as plain data.
Out: requests to the engine, and answers in each API's form.
Imports: the root of `deploy`, `http`, `metrics`.
Start with: `service.py`, then `openai/generation.py`.
"""
