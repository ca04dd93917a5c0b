"""Prometheus metrics, OpenTelemetry spans and the watchdog.

Owns: request counters and latency histograms, the event loop's lag histogram, and the span export queue.
In: started and ended requests, and the engine's counters.
Out: the text of `GET /metrics`, OTLP spans, log lines and flight recordings.
Imports: the root of `deploy`, `http`.
Start with: `metrics.py`.
"""
