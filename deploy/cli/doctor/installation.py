"""Checks of the installation: packages and their versions, the native library."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from ....kernels.native import build, loading
from ....kernels.native.errors import NativeUnavailableError
from ....stages.config import EngineConfig
from ...config import ServerConfig
from ...http.package_version import DISTRIBUTION, package_version
from .findings import Finding, fail, ok, warn

OPTIONAL = {  # needed by some models only -> what they are
    "torch": "GPUs, encoders and models that the native library lacks",
    "triton": "GPUs",
    "transformers": "models of families that are not described here",
}


def check_installation(engine: EngineConfig, server: ServerConfig) -> Iterator[Finding]:
    yield ok("millrace", package_version())
    yield from packages()
    yield native_library()
    yield _event_loop()


def packages() -> Iterator[Finding]:
    """Each dependency that is missing or of another version than is asked for; one finding if all are right."""
    right = []
    for text in requires(DISTRIBUTION) or ():
        name, wanted, applies = _parse(text)
        if not applies:
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            if name in OPTIONAL:
                yield warn("packages", f"{name} is not installed: it is for {OPTIONAL[name]}", f"pip install {name}")
            else:
                yield fail("packages", f"{name} is not installed", f"pip install '{name}{wanted}'")
            continue
        if not _is_in(found, wanted):
            yield warn("packages", f"{name} {found}: must be {wanted}", f"pip install '{name}{wanted}'")
        else:
            right.append(f"{name} {found}")
    yield ok("packages", ", ".join(right))


def _parse(text: str) -> tuple[str, str, bool]:
    """Name, versions, and whether a requirement holds here and without an extra."""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return requirement.name, str(requirement.specifier), applies


def _is_in(found: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(found, prereleases=True)


def native_library() -> Finding:
    """The library for models on a CPU: its instruction set, and whether it is compiled."""
    try:
        name = loading.choose_instruction_set()
    except NativeUnavailableError as error:
        return warn("native library", str(error), "models on the CPU run on PyTorch instead, which is slower")
    if build.is_ready(name):
        return ok("native library", f"{name}, compiled")
    compiler = build.find_compiler()
    if compiler is None:
        step = "install a C++ compiler, as apt-get install g++, or install millrace from a wheel"
        return fail("native library", f"{name}, but it is not compiled and there is no compiler", step)
    return warn(
        "native library", f"{name}, not compiled yet", f"the first start compiles it with {compiler}, in a minute"
    )


def _event_loop() -> Finding:
    try:
        return ok("event loop", f"uvloop {version('uvloop')}")
    except PackageNotFoundError:
        return ok("event loop", "asyncio's; pip install uvloop for a faster one")
