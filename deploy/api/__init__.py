"""The APIs: OpenAI, Responses, Messages, and what they share.

Owns: the `Service` that handlers share, and how its model writes thoughts and calls.
In: bodies as plain data.
Out: requests to the engine, and answers in each API's form.
Imports: the files here, the root of `deploy`, `metrics` and `api/parsers`; the handlers' folders stand on them:
`schema`, `parsers` <- the files here <- `openai` <- `adapter` <- `responses`, `messages`.
Start with: `service.py`, then `openai/generation.py`.
"""
