"""The feed of the dashboard: what the engine does, as plain data, to whoever looks.

Owns: its viewers, and what they share.
In: the engine's state and trace, or a recording.
Out: updates of the topics that a viewer has subscribed to.
Imports: the root of `deploy`, `http`, `metrics`, `api`, `api/schema`, `websocket`, `inspect`.
Start with: `feed.py`, then `live.py`.
"""
