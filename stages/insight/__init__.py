"""Analysis of the trace: where a request's time went, and what limits the pipeline.

Owns: nothing; it reads.
In: records of the trace.
Out: waterfalls, causes of latency, the limiting stage, as figures and sentences.
Imports: `runtime/trace`.
Start with: `waterfall.py`.
"""
