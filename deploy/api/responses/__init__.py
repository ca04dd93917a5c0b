"""OpenAI's Responses API, with responses that are kept.

Owns: the store of responses.
In: bodies and input items.
Out: responses and their events.
Imports: the root of `deploy`, `api/adapter` and below.
Start with: `service.py`; `routes.py` is its HTTP side.
"""
