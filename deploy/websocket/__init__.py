"""Many requests over one WebSocket, with flow control and resumption after a disconnect.

Owns: open sockets, their streams, and the sent messages that a client has not acknowledged.
In: messages from clients.
Out: orders to the services of the APIs; answers as messages to clients.
Imports: the root of `deploy`, `http`, `metrics`, `api`, `api/schema`, `api/openai`, `api/chat`,
`api/completions`, `api/responses`.
Start with: `hub.py`, then `session.py`; sessions share `context.py` and `stream_registry.py`.
"""
