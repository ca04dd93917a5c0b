"""Layouts that host and device share: sampling rows, step state, attention work lists.

Owns: the order, type and meaning of every field that a kernel reads.
In: sizes and plain arrays.
Out: structured views of buffers, and lists of work.
Imports: torch and numpy; no other part of the package.
Start with: `work_lists.py`.
"""
