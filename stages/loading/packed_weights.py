"""What the matrices of a packed checkpoint become in the native library: the file's codes, or numbers. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...kernels.layout.grouped_codes import GroupedFormat
from ...kernels.native.grouped import num_columns, packable, why_not
from ...kernels.native.shape import NativeShape
from ...model.checkpoint.tensor_shapes import TensorSource
from ...model.grouped_matrix import GroupedMatrix
from ...runtime.env.log import get_logger

log = get_logger("millrace.stages")

TOGETHER = "q, k and v, or gate and up, are one product here, and are packed in different ways or orders of columns"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Which matrices keep their codes. `packing`: how the file is packed, as users know it; empty: it is not."""

    packing: str = ""
    matrices: Mapping[str, GroupedMatrix] = field(default_factory=dict)
    unpacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # why the others do not -> their names
    by_rows: Mapping[str, GroupedMatrix] = field(default_factory=dict)  # those of the others that are unpacked so

    @property
    def formats(self) -> dict[str, GroupedFormat]:
        return {name: matrix.format for name, matrix in self.matrices.items()}

    def tell(self, kept_as: str) -> None:
        """Logs what the weights become, with one line for each reason; `kept_as` is what the unpacked ones take."""
        if not self.packing:
            return
        if self.matrices:
            log.info("weights.packed", packing=self.packing, matrices=len(self.matrices), unpacked=self._num_unpacked)
        for reason, names in self.unpacked.items():
            log.warning("weights.unpacked", reason=reason, matrices=len(names), first=names[0], kept_as=kept_as)

    @property
    def _num_unpacked(self) -> int:
        return sum(map(len, self.unpacked.values()))


def packed_weights(
    source: TensorSource, names: Iterable[str], shape: NativeShape, quantization: str | None
) -> PackedWeights:
    """Decides for each matrix that the file has packed. `quantization`: as in `EngineConfig`."""
    if not source.packing:
        return PackedWeights()
    found = {name: matrix for name in names if (matrix := source.grouped(name)) is not None}
    if quantization not in (None, "auto"):
        unpacked = {_as_asked(quantization): tuple(found)} if found else {}
        return PackedWeights(source.packing, {}, unpacked, _by_rows(found))
    reasons = {name: reason for name, matrix in found.items() if (reason := _why_unpacked(matrix, shape, name))}
    matrices = {name: matrix for name, matrix in found.items() if isinstance(matrix, GroupedMatrix)}
    formats = {name: matrix.format for name, matrix in matrices.items() if name not in reasons}
    factors = {name: matrix.factor for name, matrix in matrices.items()}
    columns = {name: matrix.columns for name, matrix in matrices.items() if matrix.columns is not None}
    kept = packable(shape, formats, factors, columns)
    reasons |= dict.fromkeys(formats.keys() - kept.keys(), TOGETHER)
    unpacked = {}
    for name in found:
        if name in reasons:
            unpacked[reasons[name]] = (*unpacked.get(reasons[name], ()), name)
    others = {name: matrix for name, matrix in found.items() if name not in kept}
    return PackedWeights(source.packing, {name: matrices[name] for name in kept}, unpacked, _by_rows(others))


def _by_rows(found: Mapping[str, GroupedMatrix | str]) -> dict[str, GroupedMatrix]:
    """Those whose rows stand for the very numbers of the whole matrix, as those with a factor of all do not."""
    return {name: one for name, one in found.items() if isinstance(one, GroupedMatrix) and one.factor == 1.0}


def _why_unpacked(matrix: GroupedMatrix | str, shape: NativeShape, name: str) -> str | None:
    """Why products cannot use the codes; None: they can, unless those of its layer differ."""
    if isinstance(matrix, str):
        return matrix
    return why_not(matrix.format, num_columns(shape, name))


def _as_asked(quantization: str) -> str:
    return f"quantization = {quantization}" + ("" if quantization == "none" else ": they are packed anew")
