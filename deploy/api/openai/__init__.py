"""What the routes of chat, completions and other APIs share: from a body to the engine and back.

Owns: nothing.
In: bodies as plain data, and the engine's output.
Out: requests to the engine, whole answers and chunks of streams.
Imports: the root of `deploy`, `http`, `metrics`, the files of `api`, `api/schema`.
Start with: `generation.py`; `api_routes.py` says what a folder of routes offers.
"""
