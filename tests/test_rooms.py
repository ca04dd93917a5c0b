"""Which room may import which, and that no module imports itself by way of others.

A room is a folder. All imports count: those for type checkers and those inside functions, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_layout import PARTS, ROOT, trees

# room -> the rooms of its part that it imports, and no others. Which part imports which: test_layout.py
BELOW = {
    "runtime/device_streams": "",
    "runtime/workers": "",
    "runtime/env": "runtime/device_streams runtime/workers",
    "runtime/simulation": "runtime/workers runtime/env",
    "runtime/startup": "",
    "runtime/trace": "runtime/env",
    "runtime": "runtime/env runtime/trace",
    "runtime/health": "runtime/trace runtime",
    "runtime/processes": "runtime/workers runtime/env runtime",
    "kernels/layout": "kernels/tilings",
    "kernels/native": "kernels/layout",
    "kernels/reference": "kernels/layout",
    "kernels/tilings": "",
    "kernels/triton": "kernels/layout kernels/reference kernels/tilings",
    "kernels/triton/experts": "kernels/layout kernels/tilings kernels/triton",
    "kernels/triton/latents": "kernels/layout kernels/reference kernels/triton",
    "kernels/triton/lora": "kernels/layout kernels/triton",
    "kernels/triton/recurrent": "kernels/reference kernels/triton",
    "kernels/checks": (
        "kernels/layout kernels/reference kernels/tilings kernels/triton kernels/triton/experts kernels/triton/lora "
        "kernels/triton/latents kernels/triton/recurrent"
    ),
    "kernels": (
        "kernels/layout kernels/reference kernels/triton kernels/triton/experts kernels/triton/lora "
        "kernels/triton/latents kernels/triton/recurrent"
    ),
    "model": "",
    "model/demo": "",
    "model/families": "model model/quantized",
    "model/families/experts": "model model/families",
    "model/families/gpt": "model model/families",
    "model/families/recurrent": "model model/families model/families/experts",
    "model/quantized": "model",
    "model/gguf": "model",
    "model/checkpoint": "model model/families model/gguf model/quantized",
    "model/schema": "",
    "model/text": "model model/schema",
    "model/demo/making": "model/demo",
    "model/decoder": "model model/families model/checkpoint model/lora model/quantized model/sharding",
    "model/sharding": "model model/families model/checkpoint model/lora",
    "model/lora": "model model/families model/checkpoint",
    "model/fallback": "model model/checkpoint model/decoder",
    "model/encoder": "model model/checkpoint",
    "stages": "",
    "stages/insight": "",
    "stages/adapters": "stages",
    "stages/allocate/tiers": "stages",
    "stages/allocate": "stages stages/allocate/tiers",
    "stages/detokenize": "stages",
    "stages/device": "stages",
    "stages/encode": "stages stages/device",
    "stages/exit": "stages",
    "stages/grammar": "stages",
    "stages/intake": "stages",
    "stages/schedule/step_timing": "stages",
    "stages/schedule": "stages stages/schedule/step_timing",
    "stages/routing": "stages/allocate stages/schedule stages/schedule/step_timing",
    "stages/tokenize": "stages",
    "stages/traffic": "stages",
    "stages/execute": "stages stages/device",
    "stages/executor": "stages",
    "stages/sample": "stages stages/device stages/grammar",
    "stages/recordings": "stages stages/allocate stages/allocate/tiers stages/intake stages/routing stages/schedule "
    "stages/schedule/step_timing",
    "stages/recordings/fleet": "stages/allocate stages/routing stages/recordings",
    "stages/beam_search": "stages stages/detokenize stages/exit stages/tokenize",
    "stages/backends/cuda": "stages stages/device stages/grammar stages/execute stages/sample",
    "stages/backends": "stages stages/device stages/execute stages/sample stages/backends/cuda",
    "stages/backends/native": "stages stages/device stages/grammar stages/execute stages/sample stages/backends",
    "stages/backends/torch": "stages stages/device stages/execute stages/executor stages/sample stages/backends/cuda "
    "stages/backends",
    "stages/loading": "stages stages/device stages/encode stages/grammar stages/tokenize stages/execute "
    "stages/sample stages/backends/cuda stages/backends stages/backends/native "
    "stages/backends/torch",
    "stages/engine": "stages stages/adapters stages/allocate stages/allocate/tiers stages/detokenize stages/device "
    "stages/encode stages/exit stages/grammar stages/intake stages/schedule stages/tokenize stages/execute "
    "stages/sample stages/recordings stages/beam_search stages/loading stages/traffic",
    "stages/evaluation": "stages stages/device stages/execute stages/loading",
    "stages/split": "stages stages/adapters stages/allocate stages/device stages/exit stages/grammar stages/schedule "
    "stages/schedule/step_timing stages/routing stages/executor stages/sample stages/recordings stages/beam_search "
    "stages/loading stages/engine stages/traffic",
    "stages/fleet/traffic": "stages stages/exit stages/split stages/traffic",
    "stages/fleet": "stages stages/allocate stages/engine stages/executor stages/exit stages/grammar stages/intake "
    "stages/routing stages/split stages/traffic stages/fleet/traffic",
    "stages/machines": "stages stages/device stages/engine stages/executor stages/fleet stages/routing stages/split "
    "stages/traffic",
    "stages/testing/scripted": "stages stages/allocate stages/allocate/tiers stages/device stages/grammar "
    "stages/schedule stages/sample stages/backends/cuda stages/engine",
    "stages/testing": "stages/testing/scripted",
    "deploy": "",
    "deploy/settings": "deploy",
    "deploy/http": "deploy",
    "deploy/package": "",
    "deploy/metrics": "deploy deploy/http",
    "deploy/api/schema": "deploy",
    "deploy/api/parsers": "",
    "deploy/api": "deploy deploy/metrics deploy/api/schema deploy/api/parsers",
    "deploy/api/openai": "deploy deploy/http deploy/metrics deploy/api/schema deploy/api",
    "deploy/api/chat": "deploy deploy/api/schema deploy/api/parsers deploy/api deploy/api/openai",
    "deploy/api/completions": "deploy deploy/api/schema deploy/api/openai",
    "deploy/api/token_ids": "deploy deploy/api/schema deploy/api/openai deploy/api/completions",
    "deploy/api/embeddings": "deploy deploy/http deploy/api/schema deploy/api/openai",
    "deploy/api/tokenize": "deploy deploy/http deploy/api/schema deploy/api/openai",
    "deploy/api/adapter": "deploy/api/schema deploy/api/parsers deploy/api deploy/api/openai deploy/api/chat",
    "deploy/api/responses": "deploy deploy/http deploy/api/schema deploy/api/parsers deploy/api deploy/api/openai "
    "deploy/api/adapter",
    "deploy/api/messages": "deploy deploy/http deploy/api/schema deploy/api/parsers deploy/api deploy/api/openai "
    "deploy/api/adapter",
    "deploy/api/dialects": "deploy deploy/http deploy/api/schema deploy/api/openai deploy/api/completions "
    "deploy/api/token_ids deploy/api/adapter",
    "deploy/api/ollama": "deploy deploy/http deploy/api/schema deploy/api/parsers deploy/api deploy/api/openai "
    "deploy/api/completions deploy/api/embeddings deploy/api/adapter",
    "deploy/api/routes": "deploy/api/openai deploy/api/chat deploy/api/completions deploy/api/token_ids "
    "deploy/api/embeddings deploy/api/tokenize deploy/api/responses deploy/api/messages "
    "deploy/api/dialects deploy/api/ollama",
    "deploy/websocket": "deploy deploy/http deploy/metrics deploy/api/schema deploy/api deploy/api/openai "
    "deploy/api/chat deploy/api/completions deploy/api/responses",
    "deploy/inspect": "deploy deploy/settings deploy/http deploy/api/schema deploy/api",
    "deploy/admin": "deploy deploy/http deploy/api/schema deploy/api",
    "deploy/dashboard": "deploy deploy/settings deploy/http deploy/metrics deploy/api/schema deploy/api "
    "deploy/websocket deploy/inspect",
    "deploy/openapi/shapes": "deploy/api/schema",
    "deploy/openapi/operations": "deploy/metrics deploy/api/schema deploy/api/routes deploy/inspect deploy/admin "
    "deploy/openapi/shapes",
    "deploy/openapi": "deploy deploy/settings deploy/http deploy/api/schema deploy/api deploy/openapi/operations",
    "deploy/server": "deploy deploy/http deploy/metrics deploy/api deploy/api/openai deploy/api/responses "
    "deploy/api/messages deploy/api/dialects deploy/api/ollama deploy/api/routes "
    "deploy/websocket deploy/inspect deploy/admin deploy/dashboard deploy/openapi",
    "deploy/ray": "deploy deploy/settings deploy/server",
    "deploy/cli/bench": "deploy",
    "deploy/cli/doctor": "deploy deploy/http deploy/api",
    "deploy/cli/other_engines": "",
    "deploy/cli/options": "deploy deploy/settings deploy/http deploy/cli/other_engines",
    "deploy/cli/simulate": "deploy deploy/settings",
    "deploy/cli/chaos": "deploy",
    "deploy/dashboard/playback": "deploy deploy/metrics deploy/api/schema deploy/websocket deploy/dashboard",
    "deploy/cli": "deploy deploy/settings deploy/http deploy/websocket deploy/dashboard deploy/server "
    "deploy/ray deploy/cli/options deploy/dashboard/playback",
    "deploy/cli/machines": "deploy deploy/http deploy/metrics deploy/cli",
    "deploy/front_processes": "deploy deploy/http deploy/metrics deploy/api deploy/websocket",
    "deploy/cli/fronts": "deploy deploy/http deploy/server deploy/front_processes deploy/cli deploy/cli/machines",
}
ENTRIES = {"deploy/__main__.py", "stages/__init__.py"}  # they only lead to other rooms: may import any
ROOMS = {name: set(below.split()) for name, below in BELOW.items()}
PARTS_WITH_ROOMS = sorted({room.partition("/")[0] for room in ROOMS})

Trees = Mapping[Path, ast.Module]
Imports = Mapping[Path, set[Path]]


def test_rooms_import_only_the_rooms_below_them() -> None:
    wrong = forbidden_imports(product_imports(), ROOMS)
    assert not wrong, wrong


@pytest.mark.parametrize("part", PARTS_WITH_ROOMS)
def test_the_table_has_every_room_and_no_import_that_is_gone(part: str) -> None:
    found: dict[str, set[str]] = {room(path): set() for path in trees() if path.parts[0] == part}
    for path, targets in product_imports().items():
        if path.parts[0] == part and path.as_posix() not in ENTRIES:
            found[room(path)] |= {room(target) for target in targets if target.parts[0] == part} - {room(path)}
    assert {name: below for name, below in ROOMS.items() if name.partition("/")[0] == part} == found


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_room_holds_at_most_20_files(name: str) -> None:
    assert sum(room(path) == name for path in trees()) <= 20


def test_no_room_is_below_itself() -> None:
    assert cycle_in(ROOMS) is None


@pytest.mark.parametrize("part", PARTS)
def test_no_module_imports_itself_by_way_of_others(part: str) -> None:
    imports = {path: targets for path, targets in product_imports().items() if path.parts[0] == part}
    found = cycle_in(
        {path.as_posix(): {target.as_posix() for target in imports[path] if target in imports} for path in imports}
    )
    assert found is None, " imports ".join(found)


CARD = ("Owns:", "In:", "Out:", "Imports:", "Start with:")


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_every_room_has_a_card(name: str) -> None:
    path = Path(name) / "__init__.py"
    if path not in trees():  # kernels is no package
        assert (ROOT / name / "README.md").exists()
        return
    card = ast.get_docstring(trees()[path]) or ""
    assert [line for line in CARD if line not in card] == [], card


# -- how they are checked


def imports_of(trees: Trees) -> dict[Path, set[Path]]:
    """File -> the files among `trees` that it imports."""
    files = {_module(path): path for path in trees}
    modules = set(files)
    return {path: {files[name] for name in _imported(path, tree, modules)} for path, tree in trees.items()}


@cache
def product_imports() -> Imports:
    """`imports_of` the product."""
    return imports_of(trees())


def forbidden_imports(imports: Imports, rooms: Mapping[str, set[str]]) -> list[str]:
    """What files of `rooms` import from rooms of their part that they may not import."""
    return [
        f"{path} imports {target}"
        for path, targets in imports.items()
        if room(path) in rooms and path.as_posix() not in ENTRIES
        for target in sorted(targets)
        if target.parts[0] == path.parts[0] and room(target) not in rooms[room(path)] | {room(path)}
    ]


def cycle_in(graph: Mapping[str, set[str]]) -> list[str] | None:
    """One circle of `graph`, from a node to itself; None if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1][::-1]  # it lists who is imported before who imports
        return found
    return None


def room(path: Path) -> str:
    return path.parent.as_posix()


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """A name that is no module is one of the module that it is imported from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parts[: len(path.parts) - node.level]
            source = ".".join([*folder, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if name in modules or source in modules:
                    yield name if name in modules else source


# -- and that the checks notice


def parsed(**sources: str) -> dict[Path, ast.Module]:
    """Files by their paths, with `__` for a `/`."""
    return {Path(name.replace("__", "/") + ".py"): ast.parse(source) for name, source in sources.items()}


WAYS = (
    "from ..api.service import Service",
    "from ..api import service",
    "if TYPE_CHECKING:\n    from ..api.service import Service",
    "def run():\n    from ..api.service import Service",
)


@pytest.mark.parametrize("source", WAYS)
def test_an_import_from_a_room_above_is_noticed(source: str) -> None:
    imports = imports_of(parsed(deploy__http__tls=source, deploy__api__service=""))
    assert forbidden_imports(imports, ROOMS) == ["deploy/http/tls.py imports deploy/api/service.py"]
    imports = imports_of(parsed(deploy__admin__tls=source, deploy__api__service=""))
    assert forbidden_imports(imports, ROOMS) == []


@pytest.mark.parametrize("source", WAYS)
def test_a_circle_of_modules_is_noticed(source: str) -> None:
    files = parsed(deploy__http__a=source, deploy__api__service="from . import b", deploy__api__b="")
    graph = {path.name: {target.name for target in targets} for path, targets in imports_of(files).items()}
    assert graph == {"a.py": {"service.py"}, "service.py": {"b.py"}, "b.py": set()}
    assert cycle_in(graph) is None
    circle = cycle_in(graph | {"b.py": {"a.py"}})
    assert circle is not None and circle[0] == circle[-1] and set(circle) == set(graph)
    assert "a.py imports service.py imports b.py" in " imports ".join(circle + circle[1:])
