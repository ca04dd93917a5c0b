"""The actor runtime: channels, stages, pipelines, time and threads.

It does not depend on LLMs, torch or HTTP.
"""
