"""The trace: 32-byte records of a pipeline's events, in a memory-mapped ring per thread.

Owns: the rings, the record format, and the readers of both.
In: events from stages, channels, the watch and the device.
Out: tables, spans, and Chrome trace-event JSON for Perfetto.
Imports: `runtime/env`.
Start with: `tracer.py`; `format.py` defines the records.
"""
