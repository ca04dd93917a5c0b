"""The reason why a model cannot be served through transformers."""

from __future__ import annotations


class UnservableError(Exception):
    """The model would give wrong tokens on a paged cache, or none; the message says what of it does not fit."""
