"""Where things are and what may import what, read from the syntax trees: rules that no type checker holds."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("runtime", "kernels", "model", "stages", "deploy")
MAY_IMPORT = {
    "runtime": {"runtime"},
    "kernels": {"kernels"},
    "model": {"model", "kernels"},
    "stages": {"stages", "model", "kernels", "runtime"},
    "deploy": {"deploy", "stages", "model", "kernels", "runtime"},
}
ROOT_PACKAGE = Path("deploy/package")  # the package `millrace`: its files import by full names
STAGES = {"intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize", "encode", "exit"}
STAGE_FILES_WITH_TORCH = {
    "stages/backends/cuda/build.py",
    "stages/backends/cuda/cuda_probe.py",
    "stages/backends/cuda/cuda_streams.py",
    "stages/backends/cuda/device_work.py",
    "stages/backends/cuda/triton_chooser.py",
    "stages/backends/torch/fitted_runner.py",
    "stages/backends/torch/kv_dtype.py",
    "stages/backends/torch/layer_leader.py",
    "stages/backends/torch/leading.py",
    "stages/backends/torch/loading.py",
    "stages/backends/torch/rank.py",
    "stages/backends/torch/ranks.py",
    "stages/backends/torch/share.py",
    "stages/backends/torch/share_leader.py",
    "stages/backends/torch/tilings.py",
    "stages/backends/torch/through_transformers.py",
    "stages/device/torch_arrays.py",
    "stages/encode/encoder_runner.py",
    "stages/loading/encoder.py",
}  # what a real start runs where torch is needed
OUTSIDE_THE_ENV = {
    "stages/engine/llm.py": {"threading", "concurrent"},  # an event loop of its own, for callers that have none
    "stages/executor/thread_executor.py": {"threading"},  # a rank is a thread
    "stages/loading/early.py": {"threading"},  # it begins before there is an env
    "stages/testing/scripted/device.py": {"time"},  # it takes real time
}
COOKBOOK = Path("deploy/cookbook")  # packages of their own, which import millrace as a user's do
NOT_IN_THE_WHEEL = {Path("kernels/checks"), Path("model/demo/making")}  # what only developers run
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "_pickle"}
FORBIDDEN_CALLS = {"eval", "exec", "hash", "__import__"}  # builtin hash differs from process to process
FORBIDDEN_METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("os", "popen")}


@cache
def trees() -> dict[Path, ast.Module]:
    """Every file of the package, by its path from the root."""
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    own = [path for path in files if not path.is_relative_to(ROOT / COOKBOOK)]
    return {path.relative_to(ROOT): ast.parse(path.read_text("utf-8"), str(path)) for path in own}


@cache
def imports(tree: ast.AST) -> tuple[tuple[int, str], ...]:
    """(level, dotted name) of each import; `from . import a` is (1, "a")."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, node.module)] if node.module else [(node.level, alias.name) for alias in node.names]
    return tuple(found)


def name_of(node: ast.expr) -> str:
    """`a` or `a.b`; of anything longer nothing, which takes a tenth of the time of `ast.unparse`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported_at_load(tree: ast.Module) -> set[str]:
    """Top-level packages that loading the file imports: not those of functions, nor those for type checkers."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found |= {name.split(".")[0] for level, name in imports(node) if level == 0}
    return found


def own_imports(path: Path, tree: ast.AST) -> Iterator[str]:
    """The files of the package that a file imports, as `part.module`."""
    for level, name in imports(tree):
        if level:
            base = (*path.parts[:-1],)[: len(path.parts) - level]
            yield ".".join([*base, name])
        elif name.split(".")[0] == "millrace":
            yield name.partition(".")[2]


def test_the_packages_in_pyproject_are_the_folders_with_code() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in trees()} - NOT_IN_THE_WHEEL
    packages = {f"millrace.{folder.as_posix().replace('/', '.')}": folder.as_posix() for folder in folders}
    packages["millrace"] = packages.pop("millrace.deploy.package")
    assert sorted(setuptools["packages"]) == sorted(packages)
    assert setuptools["package-dir"] == packages


def test_every_folder_is_a_package_but_kernels_and_the_root() -> None:
    """transformers imports a PyPI package called kernels when the repository's root is on sys.path."""
    without = {path.parent.as_posix() for path in trees()} - {
        path.parent.as_posix() for path in trees() if path.name == "__init__.py"
    }
    assert without == {"kernels"}
    assert not (ROOT / "__init__.py").exists() and not (ROOT / "millrace").exists()


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        for name in own_imports(path, tree)
        if name.split(".")[0] not in MAY_IMPORT[path.parts[0]]
    ]
    assert not wrong, wrong


def test_imports_inside_the_package_are_relative() -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        for level, name in imports(tree)
        if level == 0 and name.split(".")[0] in {"millrace", *PARTS} and path.parent != ROOT_PACKAGE
    ]
    assert not wrong, wrong


def test_no_stage_imports_another() -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        if path.parts[0] == "stages" and path.parts[1] in STAGES
        for name in own_imports(path, tree)
        if name.startswith("stages.") and name.split(".")[1] in STAGES - {path.parts[1]}
    ]
    assert not wrong, wrong


def test_every_stage_is_in_a_folder_of_its_name() -> None:
    for stage in STAGES - {"exit"}:
        tree = trees()[Path(f"stages/{stage}/stage.py")]
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert stage.capitalize() in classes, f"stages/{stage}/stage.py has the classes {classes}"


def test_only_the_device_side_of_stages_imports_torch_and_runtime_does_not() -> None:
    with_torch = {
        path for path, tree in trees().items() if imported_at_load(tree) & {"torch", "triton", "transformers"}
    }
    assert {path.as_posix() for path in with_torch if path.parts[0] == "stages"} <= STAGE_FILES_WITH_TORCH
    assert not [path for path in with_torch if path.parts[0] in ("runtime", "deploy")]


def test_only_deploy_imports_aiohttp() -> None:
    wrong = [
        str(path)
        for path, tree in trees().items()
        if path.parts[0] != "deploy" and any(name.split(".")[0] == "aiohttp" for _, name in imports(tree))
    ]
    assert not wrong, wrong


def test_stages_reach_time_randomness_and_threads_through_the_env_only() -> None:
    gated = {"time", "random", "threading", "concurrent", "multiprocessing", "secrets", "datetime", "uuid"}
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees().items()
        if path.parts[0] == "stages"
        for _, name in imports(tree)
        if name.split(".")[0] in gated - OUTSIDE_THE_ENV.get(path.as_posix(), set())
    ]
    methods = {"run_in_executor", "to_thread", "getrandbits", "urandom"}
    for path, tree in trees().items():
        if path.parts[0] != "stages":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            if node.attr in methods and "env.random" not in ast.unparse(node.value):
                wrong.append(f"{path}:{node.lineno} uses {ast.unparse(node)}")
            if name_of(node).startswith(("np.random", "torch.rand")):
                wrong.append(f"{path}:{node.lineno} uses {name_of(node)}")
    assert not wrong, wrong


@pytest.mark.security
def test_nothing_unpickles_evaluates_or_trusts_remote_code() -> None:
    wrong: list[str] = []
    for path, tree in trees().items():
        wrong += [f"{path} imports {name}" for _, name in imports(tree) if name.split(".")[0] in FORBIDDEN_MODULES]
        for node in ast.walk(tree):
            complaint = _forbidden(node)
            if complaint:
                wrong.append(f"{path}:{getattr(node, 'lineno', 0)} {complaint}")
    assert not wrong, wrong


def _forbidden(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name) and called.id in FORBIDDEN_CALLS:
            return f"calls {called.id}"
        if tuple(name_of(called).split(".")) in FORBIDDEN_METHODS:
            return f"calls {name_of(called)}"
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("shell", "trust_remote_code") and not is_off:
                return f"passes {keyword.arg} = {ast.unparse(keyword.value)}"
    return None


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "torch.load(f)",
        "yaml.load(f)",
        "run('ls', shell=True)",
        "load(x, trust_remote_code=flag)",
        "hash(key)",
    ],
)
def test_the_scan_notices(code: str) -> None:
    assert any(_forbidden(node) for node in ast.walk(ast.parse(code)))
    assert not any(_forbidden(node) for node in ast.walk(ast.parse("load(x, trust_remote_code=False)")))


FILE_NAME = re.compile(r"`([a-z0-9_./]+\.py)`")  # capitals stand for any name


def test_a_docstring_names_no_file_that_is_gone() -> None:
    known = {path.as_posix() for path in trees()}
    known |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    names = {name for path in known for name in (path, *(path[at.end() :] for at in re.finditer("/", path)))}
    gone = [
        f"{path}: {name}"
        for path, tree in trees().items()
        for name in FILE_NAME.findall(ast.get_docstring(tree) or "")
        if name.lstrip("./") not in names
    ]
    assert gone == []
