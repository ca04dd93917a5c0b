"""Errors of model directories, chat templates and downloads. Each message is shown to a user."""

from __future__ import annotations

SHOWN_CHARS = 100  # of a name or value that a file holds


def shown(name: str) -> str:
    """A name in a file, for a message: as it is if it is short and printable, else cut and escaped."""
    cut = name if len(name) <= SHOWN_CHARS else name[: SHOWN_CHARS - 3] + "..."
    return cut if cut.isprintable() else ascii(cut)


def quoted(value: object) -> str:
    """A value in a file as Python writes it, cut, for a message."""
    try:
        return shown(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} of many levels"


class ModelError(Exception):
    """The model cannot be used as requested. The message names the cause, what is wrong, and what would be right."""


class CheckpointError(ModelError):
    """A checkpoint's files are missing, damaged, of an unsupported kind, or require code to be run."""


class UnbuiltError(CheckpointError):
    """A checkpoint of a family here sets a key to a value that its decoder does not compute. Transformers may."""


class AdapterError(ModelError):
    """The files of a LoRA adapter are damaged or missing, fit another model, or ask for what is not computed."""


class DownloadError(ModelError):
    """A model is not on this machine and cannot be fetched."""


class HubUnreachable(DownloadError):
    """The Hub did not answer, so the same download may succeed later."""


class TemplateError(ModelError):
    """A chat template is missing or invalid, rejects the messages, or exceeds its limits."""

    def __init__(self, problem: str, param: str = "messages", field: str = "") -> None:
        super().__init__(field + problem)
        self.param = param  # the field of a request that the error is about
        self.field = field  # the path of a field that the text begins with, apart from the `problem` behind it
        self.problem = problem
