"""An adapter as a backend keeps it: in the form that its device slots take, without the tensors that were read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from .adapter import Adapter

C = TypeVar("C")


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter(Generic[C]):
    """An adapter whose tensors were packed. Its memory is that of `contents` alone."""

    name: str
    parent: str | None  # the model that its file names
    digest: str
    rank: int  # the largest of a slice
    num_bytes: int
    contents: C

    @classmethod
    def of(cls, adapter: Adapter, contents: C, num_bytes: int) -> PreparedAdapter[C]:
        """The adapter in that form. Computes the digest, which needs the tensors that were read."""
        return cls(adapter.name, adapter.parent, adapter.digest, adapter.rank, num_bytes, contents)
