"""The dashboard over a recording: the data of each view at any time of it, and the viewers that go there.

Owns: each viewer's position and speed.
In: a loaded recording (`stages/recordings`).
Out: what `viewer.py` sends, in the format of a running engine's feed.
Imports: the root of `deploy`, `metrics`, `api/schema`, `websocket`, `dashboard`.
Start with: `data.py`, then `position.py`.
"""
