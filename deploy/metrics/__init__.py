"""Metrics, telemetry and the watchdog: numbers for Prometheus and OpenTelemetry.

Owns: histograms of requests, and the loop's meter.
In: finished requests, and the engine's counters.
Out: `GET /metrics`, OTLP spans, log lines.
Imports: the root of `deploy`, `http`.
Start with: `metrics.py`.
"""
