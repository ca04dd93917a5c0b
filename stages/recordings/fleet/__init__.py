"""Simulation of several engines behind the router that serves.

Owns: the engines' comings and goings, in virtual time.
In: a trace, a cost model, a router's rule, and a rule for the number of engines.
Out: the figures of all engines together.
Imports: `recordings`, `routing`, `allocate`.
Start with: `fleet_simulation.py`.
"""
