"""The feed of the dashboard: the state of a running engine or of a recording, over a WebSocket.

Owns: the viewers, and what was sent to each.
In: the engine's counters and trace, or a recording.
Out: `GET /dashboard/feed`.
Imports: the root of `deploy`, `http`, `metrics`, `api`, `api/schema`, `websocket`, `inspect`.
Start with: `feed.py`, then `live.py`.
"""
