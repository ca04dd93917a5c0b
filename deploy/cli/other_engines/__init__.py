"""Flags of other engines on the command line of `millrace`: accepted, refused with the next step, or recognised.

Owns: tables of flags, as data.
In: the arguments of a command, before they are parsed.
Out: the same arguments with millrace's flags, and a note for each flag that was accepted.
Imports: nothing of millrace.
Start with: `vllm_flags.py`, the table; `translation.py` applies it.
"""
