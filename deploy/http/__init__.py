"""HTTP below the APIs: connections, bodies, limits, keys, origins, event streams and TLS.

Owns: open connections, their buffers, timers and limits.
In: bytes from clients.
Out: plain data within limits, or an `ApiError`.
Imports: the root of `deploy`, aiohttp.
Start with: `body_reader.py` for requests, `sse.py` for streamed answers.
"""
