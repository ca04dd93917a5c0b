"""The deployment layer in front of a pipeline: command line, HTTP server, metrics and dashboard.

Owns: the process of `millrace` commands, and the HTTP server.
In: the command line, the environment, a configuration file, HTTP.
Out: requests to an engine, and their answers.
Imports: `stages`, `model`, `kernels`, `runtime`; no other package imports `deploy`.
Start with: `README.md`, which lists the rooms.
"""

from ..runtime.moved_modules import moved_modules

moved_modules.add(__name__, {"parsers": "api.parsers"})
