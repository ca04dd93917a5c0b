"""The HTTP server: routing table, middleware, pages, health and the request log.

Owns: the aiohttp application, its threads and its listening socket.
In: HTTP requests; the engine, once it is attached.
Out: responses of all routes.
Imports: all of `deploy` except `cli`; only this room builds the routing table.
Start with: `server.py`, then `routes.py`.
"""
