"""The Responses API, OpenAI's, with stored responses.

Owns: the store of responses.
In: bodies and input items.
Out: responses and their events.
Imports: the root of `deploy`, `http`, `api/adapter` and what that imports.
Start with: `service.py`; `routes.py` has the HTTP handlers.
"""
