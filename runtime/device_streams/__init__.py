"""Streams of a device: ordered work, events, copies between host and device.

Owns: the interface that a device backend implements, and a simulated device.
In: submitted work: copies, launches, event records.
Out: events that report when work is done.
Imports: numpy only.
Start with: `interface.py`; `simulated.py` is a device that runs asynchronously, for tests.
"""
