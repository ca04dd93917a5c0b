"""The timed run: all parts of the GPU's benchmark within a budget of seconds, the most valuable ones first.

`parts.py` has the table, `conductor.py` runs it, `worker.py` is a process that runs parts, `rows.py` the file that all
write to, `summary.py` what is made of that file. Only the worker imports torch.
"""
