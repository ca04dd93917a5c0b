"""The actor runtime: channels, stages, pipelines, time and threads.

It does not depend on LLMs, torch or HTTP.

Owns: the channels, tasks and live requests of a pipeline.
In: declared stages and edges; requests.
Out: a running pipeline; one terminal event per request.
Imports: the rooms `env` and `trace`.
Start with: `stage.py`, then `channel.py` and `pipeline.py`; `README.md` lists the rooms.
"""
