"""The command line: each command is one module, imported when it runs.

Owns: nothing.
In: arguments, environment and configuration file.
Out: an exit code.
Imports: all of `deploy`.
Start with: `main.py`.
"""
