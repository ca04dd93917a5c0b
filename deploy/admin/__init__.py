"""Routes that change the server for all clients, behind the admin key.

Owns: the running profile of torch's profiler.
In: admin requests.
Out: JSON about the change, traces and profiles.
Imports: the root of `deploy`, `http`, `api`, `api/schema`.
Start with: `routes.py`.
"""
