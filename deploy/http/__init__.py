"""HTTP itself: connections, bodies, limits, keys, origins, event streams, TLS. Knows no API.

Owns: open connections and their limits.
In: bytes from clients.
Out: plain data within limits, or a refusal.
Imports: the root of `deploy`, aiohttp.
Start with: `body_reader.py`; `sse.py` is the way out of a stream.
"""
