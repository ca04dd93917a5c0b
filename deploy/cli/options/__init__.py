"""The flags and arguments of all commands.

Owns: nothing.
In: nothing; the settings of `stages` and `deploy` become flags.
Out: the parser of `millrace`.
Imports: the root of `stages`, the root of `deploy`, `settings`, `http`, `cli/other_engines`.
Start with: `parser.py`; `shared_options.py` has what several commands take.
"""
