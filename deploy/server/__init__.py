"""The HTTP server: the routing table, middleware, pages, health and the log of requests.

Owns: the aiohttp application.
In: connections.
Out: every route of the server.
Imports: all of `deploy` but `cli`; no other room makes the routing table.
Start with: `server.py`, then `routes.py`.
"""
