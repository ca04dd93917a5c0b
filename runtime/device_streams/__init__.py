"""Streams of a device: work in order, events, copies between host and device.

Owns: the interface that a device backend implements, and a simulated device.
In: submitted work: copies, launches, event records.
Out: events that tell when work is done.
Imports: `runtime/workers`.
Start with: `interface.py`; `simulated.py` is a device that runs late, in virtual time.
"""
