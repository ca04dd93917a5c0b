"""Loads on a server process: many requests over time, more than it can serve, many at once, and none.

Each file is one load with its bounds; `python -m tests.load NAME` runs it with the full count, `test_load.py` a short
form. All but `soak --bundled` use the scripted engine, whose answers are known: a lost or wrong token is a complaint.
"""
