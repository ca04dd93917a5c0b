"""The engine: a model, the seven stages around it, and their Python API.

Owns: the running pipeline, and its start and stop.
In: requests, as text, chat messages or token ids.
Out: deltas of answers, whole answers, embeddings, scores.
Imports: `runtime`, `model`, and all of `stages` except `backends`, `insight`, `split`, `testing`.
Start with: `engine.py`, and `core.py` for what differs by where the step loop runs; `wiring.py` joins the stages;
`engine_status.py` is what observers read; `llm.py` blocks.
"""
