"""Errors of model directories, chat templates and downloads. Each message is shown to a user."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be used as requested. The message names the cause, what is wrong, and what would be right."""


class CheckpointError(ModelError):
    """A checkpoint's files are missing, damaged, of an unsupported kind, or require code to be run."""


class DownloadError(ModelError):
    """A model is not on this machine and cannot be fetched."""


class TemplateError(ModelError):
    """A chat template is missing or invalid, rejects the messages, or exceeds its limits."""
