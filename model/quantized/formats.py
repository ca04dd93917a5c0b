"""Which quantized format a checkpoint has, by its config.json; what is not read is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ..errors import CheckpointError, quoted
from ..files import read_json
from ..grouped_matrix import GroupedMatrix
from .codes import Floats
from .parts import Parts

READ = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt (FP8, NVFP4)", "bitsandbytes", "mxfp4")
INSTEAD = "serve the unquantized checkpoint, with quantization = int4 or int8 on a CPU, or a GGUF file of the model"


class WeightFormat(Protocol):
    """How the linear layers of a checkpoint are stored."""

    @property
    def name(self) -> str:
        """As users know it, with the bits: "awq, 4 bits"."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Suffixes behind a layer's name, any of which says that the layer is packed."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of all tensors that a packed layer has."""

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The shape [N, K] of the layer's weight."""

    def unpack(self, parts: Parts) -> Floats:
        """The weight [N, K]. Raises CheckpointError for parts that do not fit each other."""

    def grouped(self, parts: Parts) -> GroupedMatrix | str:
        """The weight as rows of codes, or why it is none. Raises as `unpack`; only scales and zeros are read."""


def format_of(root: Path) -> WeightFormat | None:
    """The format of the checkpoint in `root`; None: not quantized. Raises CheckpointError for one that is not read."""
    return read_format(read_json(root, "config.json") or {}, root)


def read_format(values: Mapping[str, Any], root: Path) -> WeightFormat | None:
    """As `format_of`, from the contents of config.json."""
    source, text = f"config.json ({root})", values.get("text_config")
    found = values.get("quantization_config") or values.get("compression_config")
    if not found and isinstance(text, dict):
        found = text.get("quantization_config")
    if not found and (older := read_json(root, "quantize_config.json")):
        found, source = {"quant_method": "gptq"} | older, f"quantize_config.json ({root})"
    if not found and (older := (read_json(root, "hf_quant_config.json") or {}).get("quantization")):
        found, source = {"quant_method": "modelopt"} | older, f"hf_quant_config.json ({root})"
    if not found:
        return None

    def fail(problem: str) -> NoReturn:
        raise CheckpointError(f"{source}: quantization_config: {problem}")

    if not isinstance(found, dict):
        fail(f"must be an object, not {quoted(found)}")
    from .compressed_tensors import CompressedTensors  # only now, as most checkpoints are not quantized
    from .fp4 import ModeloptFp4
    from .fp8 import Fp8
    from .grouped import Awq, Gptq
    from .mxfp4 import Mxfp4
    from .nf4 import BitsAndBytes

    method = str(found.get("quant_method", "compressed-tensors" if "config_groups" in found else ""))
    if method == "modelopt" and found.get("quant_algo") == "NVFP4":
        method = "modelopt_fp4"
    makers: dict[str, Callable[[dict[str, Any], Callable[[str], NoReturn]], WeightFormat]] = {
        "awq": Awq.read,
        "gptq": Gptq.read,
        "compressed-tensors": CompressedTensors.read,
        "fp8": Fp8.read,
        "fbgemm_fp8": Fp8.read,
        "modelopt": Fp8.read,
        "modelopt_fp4": ModeloptFp4.read,
        "bitsandbytes": BitsAndBytes.read,
        "mxfp4": Mxfp4.read,
    }

    def fail_in_format(problem: str) -> NoReturn:
        is_told = any(word in problem for word in ("serve", "the same model"))
        fail(problem if is_told else f"{problem}; {INSTEAD}")

    if method not in makers:
        fail(f"quant_method = {quoted(method)} is not read; read are {', '.join(READ)}; {INSTEAD}")
    try:
        return makers[method](found, fail_in_format)
    except (ValueError, TypeError, AttributeError) as error:
        fail(f"holds a value of another kind than {method} has: {error}")
