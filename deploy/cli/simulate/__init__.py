"""`millrace simulate`: a trace with other settings, and over several engines.

Owns: the processes that simulate a fleet side by side.
In: a trace and a cost model.
Out: a table, JSON, a plot.
Imports: `deploy/settings`, the recordings of `stages`.
Start with: `sweeps.py`.
"""

from .sweeps import run as run
