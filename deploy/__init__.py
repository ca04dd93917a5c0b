"""What stands in front of a pipeline: the command line, the HTTP server and its metrics."""

from ..runtime.moved_modules import moved_modules

moved_modules.add(__name__, {"parsers": "api.parsers"})
