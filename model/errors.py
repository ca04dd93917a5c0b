"""What can be wrong with a model directory, a chat template or a download. Each message is shown to a user."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be used as asked. The message names the thing, what is wrong with it and what would be right."""


class CheckpointError(ModelError):
    """A checkpoint's files are missing, damaged, of an unsupported kind, or ask for code to be run."""


class DownloadError(ModelError):
    """A model is not on this machine and could not be fetched."""


class TemplateError(ModelError):
    """A chat template is missing, is not valid, refused the messages, or went over its limits."""
