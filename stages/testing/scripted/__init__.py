"""The scripted device: answers known beforehand, and grants checked as they come.

Owns: the script, and what was granted to whom.
In: grants.
Out: tokens of the script; AssertionError for a wrong grant.
Imports: all of `stages`.
Start with: `script.py`, then `device.py`.
"""
