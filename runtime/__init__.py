"""The actor runtime: channels, stages, pipelines, time and threads. It knows nothing of LLMs, torch or HTTP."""
