"""Engines and fronts on several machines: one engine serves several fronts, and a front has engines elsewhere.

Owns: the links of an engine's fronts, whose number each has there, and how a front reaches engines that run already.
In: prompts of all fronts, each over its own link; the step loop's steps.
Out: to each front the tokens of its own requests, under the numbers that it gave them.
Imports: `runtime`, the root of `stages`, `device`, `engine`, `executor`, `fleet`, `routing`, `split`, `traffic`.
Start with: `engine_server.py`, then `front_link.py` (one front) and `connected_hosts.py` (the other end).
"""
