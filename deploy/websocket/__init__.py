"""Many requests over one WebSocket, with flow control, and resumed after a cut.

Owns: open sockets, their streams, and the messages that were sent and may be asked for again.
In: messages of clients.
Out: orders to the API's handlers, and their answers as messages.
Imports: the root of `deploy`, `http`, `metrics`, `api`, `api/schema`, `api/openai`, `api/responses`.
Start with: `hub.py`, then `session.py`; what sessions share is `context.py` and `stream_registry.py`.
"""
