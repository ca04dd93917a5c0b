"""Where a part of the benchmark runs, how long it may, and where its results go.

A dry run shows that the code runs: on a CPU, with tiny shapes, Triton's kernels in their interpreter and streams that
are simulated. What it times says nothing of a GPU.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.bench.gpu.floors import H200, Device

if TYPE_CHECKING:
    import torch

DRY = "cpu, interpreter: no figure is a GPU's"
MOST_LETTERS = 300  # of what an error says

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
Item = TypeVar("Item")


def _ignore(kind: str, value: Any) -> None:
    """Where nothing but rows and complaints is wanted."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and what is wanted of a part there."""

    device: torch.device
    seed: int  # of fresh inputs
    tell: Callable[[dict[str, Any]], None]  # a row of figures
    complain: Callable[[str], None]  # something is wrong, in a sentence
    is_tiny: bool = False  # the smallest inputs only, as another program looks at each access
    note: Callable[[str, Any], None] = _ignore  # a row of another kind, see `timed_run/rows.py`
    tell_all: Callable[[Iterable[dict[str, Any]]], None] | None = None  # many rows at once
    end_s: float = float("inf")  # of the monotonic clock: nothing new is begun behind it
    only: tuple[str, ...] = ()  # cases whose name has one of these in it; none: all
    out: Path | None = None  # the folder of the run
    card: Device = H200  # what times are held against
    shared: dict[str, Any] = field(default_factory=dict)  # what parts of one process leave for each other

    @property
    def is_dry(self) -> bool:
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and caches; the interpreter cannot compute in bfloat16."""
        import torch

        return torch.float32 if self.is_dry else torch.bfloat16

    @property
    def name(self) -> str:
        import torch

        return DRY if self.is_dry else torch.cuda.get_device_name(self.device)

    @property
    def has_fp8(self) -> bool:
        """Whether the card has e4m3."""
        import torch

        return not self.is_dry and torch.cuda.get_device_capability(self.device) >= (8, 9)

    def is_chosen(self, name: str) -> bool:
        return not self.only or any(part in name for part in self.only)

    def in_time(self, items: Iterable[Item], least_s: float = 0.0) -> Iterator[Item]:
        """As many of them as can begin with `least_s` left; what was left for want of time is noted."""
        for item in items:
            if time.monotonic() + least_s > self.end_s:
                self.note("left_out", {"what": f"{item} and what follows", "why": "no time left"})
                return
            yield item

    @contextmanager
    def trying(self, what: object) -> Iterator[None]:
        """Notes what raises, and goes on; if that took the device along, nothing more can be tried here."""
        try:
            yield
        except Exception as error:
            self.note(kind_of(error, "left_out"), {"what": str(what), "why": why(error)})
            if is_device_lost():
                raise
            error.__traceback__ = None  # its frames hold tensors
            del error
            free_memory()


def why(error: BaseException) -> str:
    """What an error says, in one line."""
    text = " ".join(str(error).split())
    if len(text) > MOST_LETTERS:  # a compiler says where first, and what last
        text = f"{text[: MOST_LETTERS // 3]} ... {text[-2 * MOST_LETTERS // 3 :]}"
    return f"{type(error).__name__}: {text}"


def kind_of(error: BaseException, otherwise: str) -> str:
    """`oom` if it means that the device's memory is full."""
    return "oom" if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) else otherwise


def is_device_lost() -> bool:
    """Whether an error has left this process without its GPU, so that whatever comes fails too."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def free_memory() -> None:
    """Gives back what nothing refers to any more."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
