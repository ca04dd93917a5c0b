"""Engines on a Ray cluster: actors in place of child processes. Ray finds nodes for them and notices their end.

Owns: the placement group of a fleet and its actors; the application for Ray Serve.
In: settings of an engine. Out: hosts of engine processes, as `stages/executor/engine_host.py` says; tokens and control
messages go over links and never through Ray. Under Serve, the server's answers.
Imports: ray, only when it is asked for, and `pip install 'millrace-engine[ray]'` brings it; `server`, `stages`.
Start with: `ray_engine.py`, then `ray_executor.py`; or `app.py`, then `asgi_bridge.py`. `placement.py` and `scaling.py`
have the decisions, without Ray.
"""
