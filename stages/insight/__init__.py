"""What the trace says of a request and of the pipeline, in figures and in words.

Owns: nothing; it reads.
In: records of the trace.
Out: waterfalls, causes of latency, the limiting stage.
Imports: `runtime/trace` and the root of `stages`.
Start with: `waterfall.py`.
"""
