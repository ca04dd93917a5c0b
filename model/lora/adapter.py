"""A LoRA adapter for the run time: for each linear of each layer the rows that it changes, and by what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.whole_model import WholeModel
from ..families import names
from ..spec import DecoderSpec
from .matrices import WantedMatrix, read_matrices
from .weights import MAGNITUDE, A, AdaptedModule, AdapterFiles, B

MERGE = "merge it with --merge-adapter"
LinearName = Literal["qkv", "output", "gate_up", "down"]  # fields of `decoder.weights.LayerWeights`
LINEARS: Mapping[LinearName, tuple[str, ...]] = {  # the canonical tensors of each, whose rows lie one after another
    "qkv": (names.Q, names.K, names.V),
    "output": (names.OUTPUT,),
    "gate_up": (names.GATE, names.UP),
    "down": (names.DOWN,),
}


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSlice:
    """Rows of a linear that an adapter changes: y[row_start : row_start + num_rows] += B (A x).

    Gate and up lie one after another, as in the checkpoint; a backend that interleaves their rows does so with B's.
    """

    row_start: int
    a: NDArray[Any]  # [r, in]
    b: NDArray[Any]  # [num_rows, r]; the scale is in it

    @property
    def num_rows(self) -> int:
        return int(self.b.shape[0])

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, eq=False)
class Adapter:
    """What an adapter adds to the linears of a decoder. Its identity is `digest`; names are for people."""

    name: str
    parent: str | None  # the model that its file names
    dtype: str  # float32, bfloat16 or float16; numbers of bfloat16 have the dtype `safetensors.BFLOAT16`
    linears: Mapping[tuple[int, LinearName], tuple[AdapterSlice, ...]]  # (layer, linear) -> slices by row_start

    def slices(self) -> Iterator[tuple[int, LinearName, AdapterSlice]]:
        """Every slice with its layer and linear, in the order of both."""
        for layer, linear in sorted(self.linears):
            for one in self.linears[layer, linear]:
                yield layer, linear, one

    @cached_property
    def rank(self) -> int:
        """The largest rank of a slice."""
        return max(one.rank for _, _, one in self.slices())

    @cached_property
    def num_bytes(self) -> int:
        """Memory of all slices; an A that several slices share counts once."""
        arrays = {id(array): array.nbytes for _, _, one in self.slices() for array in (one.a, one.b)}
        return sum(arrays.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the adapter computes: equal for equal files under other names."""
        found = hashlib.sha256(self.dtype.encode())
        for layer, linear, one in self.slices():
            found.update(f"{layer} {linear} {one.row_start} {one.a.shape} {one.b.shape};".encode())
            found.update(one.a.data)
            found.update(one.b.data)
        return found.hexdigest()


class AdaptableModel:
    """What reading adapters needs to know of a decoder. Made once: it takes as long as reading a small adapter."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.whole = WholeModel(spec)
        self.places = _places(spec, self.whole)


def read_adapter(
    root: Path,
    model: DecoderSpec | AdaptableModel,
    dtype: str,
    *,
    name: str = "",
    max_rank: int | None = None,
    model_name: str = "",
) -> Adapter:
    """The adapter in the folder `root`, for the decoder `model`, in `dtype` (float32, bfloat16 or float16).

    `name` is that of the adapter (default: the folder's), `model_name` that of the served model; both are for
    messages. `max_rank`: of `--max-lora-rank`. Reads nothing outside the folder. Raises AdapterError, in one line, for
    files that are damaged, made for another model, or hold what a run-time adapter does not change.
    """
    model = model if isinstance(model, AdaptableModel) else AdaptableModel(model)
    files = AdapterFiles(root, model.whole, name or root.name, model_name=model_name)
    files.config.refuse_at_run_time()
    runs: dict[str, list[list[_LinearRows]]] = {}  # by path
    for module in files.modules.values():
        files.pause()
        _check_kinds(module, files)
        if max_rank is not None and (rank := files.shape(module, A)[0]) > max_rank:
            files.config.fail(
                f"has rank {rank}; this server takes up to {max_rank}: start it with --max-lora-rank {rank}"
            )
        runs[module.path] = _runs(_checked_places(module, files, model.places))
    modules = [(module, not all(map(_is_whole, runs[module.path]))) for module in files.modules.values()]
    wanted = [WantedMatrix(module, kind, is_copied) for module, is_copied in modules for kind in (A, B)]
    matrices = read_matrices(files, wanted, dtype)
    found: dict[tuple[int, LinearName], list[AdapterSlice]] = {}
    for module, is_copied in modules:
        files.pause()
        a, b = (matrices[module.tensors[kind]] for kind in (A, B))
        a = a.copy() if is_copied else a
        for run in runs[module.path]:
            part = b if _is_whole(run) else np.concatenate([b[_index(place)] for place in run])
            found.setdefault((run[0].layer, run[0].linear), []).append(AdapterSlice(run[0].row_start, a, part))
    linears = {key: tuple(sorted(slices, key=lambda one: one.row_start)) for key, slices in found.items()}
    return Adapter(files.config.name, files.config.parent, dtype, linears)


def adaptable_matrices(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """[out, in] of the stored matrices that an adapter may change at run time, by module path.

    Without those that are stored transposed.
    """
    whole = WholeModel(spec)
    found = {}
    for name, places in _places(spec, whole).items():
        if all(one.is_plain and not one.is_transposed for one in places):
            rows, columns = whole.shapes[name]
            found[name.removesuffix(".weight")] = (rows, columns)
    return found


@dataclass(frozen=True, slots=True)
class _LinearRows:
    """Rows of a stored matrix that become rows of a linear."""

    layer: int
    linear: LinearName
    row_start: int
    num_rows: int
    rows: Any  # of the stored matrix, an index; None = all
    is_transposed: bool
    is_plain: bool  # the linear's numbers are those that are stored


def _places(spec: DecoderSpec, whole: WholeModel) -> dict[str, list[_LinearRows]]:
    """By the name of a stored matrix the places that its rows have in linears."""
    found: dict[str, list[_LinearRows]] = {}
    for layer in range(spec.num_layers):
        for linear, stems in LINEARS.items():
            row_start = 0
            for target in (f"{stem.replace('*', str(layer))}.weight" for stem in stems):
                if target not in whole.sources.targets:  # a feed without a gate
                    continue
                parts = whole.sources.parts(target)
                for part in parts:
                    size = _num_rows(part, 1 if len(parts) > 1 else whole.sources.targets[target].shape[0])
                    is_plain = part.apply is None and part.shape is None
                    place = _LinearRows(layer, linear, row_start, size, part.rows, part.is_transposed, is_plain)
                    found.setdefault(part.stem, []).append(place)
                    row_start += size
    return found


def _num_rows(part: names.Rows, of_all: int) -> int:
    rows = part.rows
    return of_all if rows is None else rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _check_kinds(module: AdaptedModule, files: AdapterFiles) -> None:
    """Refuses a module that has something else than a matrix of rank r to add."""
    kinds = set(module.tensors)
    if MAGNITUDE in kinds:
        files.config.fail(f"{module.label} has a {MAGNITUDE}: use_dora is not served at run time; {MERGE}")
    if kinds != {A, B}:
        what = f"changes {module.label} by {', '.join(sorted(kinds - {A, B}))}"
        files.config.fail(f"{what}; run-time adapters change linear layers only; {MERGE}")


def _checked_places(
    module: AdaptedModule, files: AdapterFiles, places: Mapping[str, list[_LinearRows]]
) -> list[_LinearRows]:
    """Where a module's rows lie in linears. Refuses matrices that are not stored as adapters assume, or do not fit."""
    own = places.get(module.stored)
    if own is None:
        files.config.fail(
            f"changes {module.path}; run-time adapters change the linear layers of attention and feed only; {MERGE}"
        )
    if not all(place.is_plain and place.is_transposed >= files.config.is_transposed for place in own):
        files.config.fail(f"changes {module.label}, whose matrix is stored otherwise than the adapter assumes; {MERGE}")
    rows, columns = files.model.shapes[module.stored][:: -1 if own[0].is_transposed else 1]
    rank = files.shape(module, A)[0]
    files.check_shape(module, A, rank, columns)
    files.check_shape(module, B, rows, rank)
    return own


def _is_whole(run: list[_LinearRows]) -> bool:
    """Whether a run is all rows of a matrix, in their order."""
    return len(run) == 1 and run[0].rows is None


def _index(place: _LinearRows) -> Any:
    return slice(None) if place.rows is None else place.rows


def _runs(places: list[_LinearRows]) -> list[list[_LinearRows]]:
    """The places in groups whose rows follow each other in one linear."""
    runs: list[list[_LinearRows]] = []
    for place in places:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.layer, last.linear) == (place.layer, place.linear)
            and last.row_start + last.num_rows == place.row_start
        ):
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
