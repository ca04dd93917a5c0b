"""Errors of the native step."""

from __future__ import annotations


class NativeUnavailableError(RuntimeError):
    """The native step cannot run here; the message says why and what to do."""


class UnsupportedModelError(ValueError):
    """The native step does not support the model; the message says what it lacks."""


class NonFiniteError(ValueError):
    """A tensor holds NaN or infinity in the dtype in which it is stored."""
