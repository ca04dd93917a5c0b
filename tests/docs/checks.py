"""What holds for every page: each check takes a page's text and returns its complaints, a line each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tests.docs import other_engines
from tests.docs.generated import ROOT, parsers

MAX_LINES, MAX_BYTES = 250, 14 * 1024  # of README.md
TOP = ("deploy", "kernels", "model", "runtime", "stages", "tests")  # folders that path-like code spans begin with
SOURCE = (".py", ".h", ".cpp")  # a code span with such an ending names a file of the repository
IN_MANY_ROOMS = ("__init__.py", "stage.py", "bodies.py")  # file names that stand for one in each room
FOREIGN = {  # program -> flags of it that a page may name
    "docker": {"--build", "--build-arg", "--gpus", "--read-only", "--rm", "--tmpfs"},
    "helm": {"--reset-then-reuse-values", "--reuse-values", "--set", "--values"},
    "kubectl": {"--from-file", "--output", "--selector"},
    "pip": {"--editable", "--index-url", "--no-build-isolation", "--no-deps"},
    "npm": {"--prefix"},
    "systemctl": {"--now"},
    "pytest": {"--import-mode"},
    "ray start": {"--head", "--num-cpus"},
    "ruff": {"--check"},
    "Schemathesis": {"--phases", "--include-path"},
}
FIRST_BLOCKS = (  # of README.md: the commands of a user, and the test command, which .ci/run reads
    "python3 -m venv .venv && . .venv/bin/activate\npip install -e .\nmillrace serve\n",
    "python3 -m venv .venv && . .venv/bin/activate\npip install -e '.[test]'\npython -m pytest -n auto\n",
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
_MODULE = re.compile(r"python -m ((?:tests|millrace)(?:\.\w+)*)")
_NAME = re.compile(r"millrace\.(?:deploy|kernels|model|runtime|stages)(?:\.\w+)*")


def pages() -> list[Path]:
    """Every page but those of the bundled model's weights and of vendored code."""
    rooms = (path for top in TOP for path in (ROOT / top).rglob("README.md"))
    return [ROOT / "README.md", *sorted((ROOT / "deploy" / "docs").glob("*.md")), *sorted(rooms)]


def size(readme: str) -> Iterator[str]:
    """README.md stays short."""
    num_lines, num_bytes = len(readme.splitlines()), len(readme.encode())
    if num_lines > MAX_LINES:
        yield f"{num_lines} lines: at most {MAX_LINES}; move details to deploy/docs"
    if num_bytes > MAX_BYTES:
        yield f"{num_bytes} bytes: at most {MAX_BYTES}; move details to deploy/docs"


def first_blocks(readme: str) -> Iterator[str]:
    """README.md begins with the commands that users and .ci/run paste."""
    found = [body for language, body in _FENCE.findall(readme) if language == "sh"]
    for i, expected in enumerate(FIRST_BLOCKS):
        if found[i : i + 1] != [expected]:
            yield f"sh block {i + 1} is not:\n{expected}"


def flags(page: str) -> Iterator[str]:
    """Each flag exists: in a command of millrace, or, where the same paragraph, table row or line of a block names one,
    in a module of tests or another program."""
    for unit in _units(page):
        known = millrace_flags()
        if "python -m tests." in unit:
            known = known | test_flags()
        if page.startswith("# Coming from"):
            known = known | other_engines.flags()
        for program, its_flags in FOREIGN.items():
            if re.search(rf"\b{program}\b", unit):
                known = known | its_flags
        for flag in _FLAG.findall(re.sub(r"https?://\S+|<!--|-->", "", unit)):
            if flag not in known:
                yield f"{flag}: no command has it, in: {unit.strip()[:100]}"


def links(page: str, folder: Path) -> Iterator[str]:
    """Each relative link leads to a file or folder, and each anchor to a heading. `folder` is the page's."""
    for target in _LINK.findall(_without_fences(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name if name else None
        if path is not None and not path.exists():
            yield f"({target}): there is no {name}"
        elif anchor and anchor not in anchors(page if path is None else path.read_text("utf-8")):
            yield f"({target}): there is no heading #{anchor}"


def paths(page: str, folder: Path) -> Iterator[str]:
    """Each code span that looks like a file or folder of the repository is one, from the root or from the page."""
    for span in _spans(page):
        if not _PATH.fullmatch(span) or span in IN_MANY_ROOMS:
            continue
        is_path = "/" in span and span.partition("/")[0] in TOP
        if (is_path or span.endswith(SOURCE)) and not ((ROOT / span).exists() or (folder / span).exists()):
            yield f"`{span}`: there is no such file or folder"


def modules(page: str) -> Iterator[str]:
    """Each `python -m` of ours names a module, and each dotted name in a code span something that it has."""
    for name in _MODULE.findall(page):
        if not _is_module(name):
            yield f"python -m {name}: there is no such module"
    for span in _spans(page):
        if _NAME.fullmatch(span) and not _resolves(span):
            yield f"`{span}`: there is no such name"


def python_blocks(page: str) -> Iterator[str]:
    """Each python block parses, and what it imports from millrace is there."""
    for language, body in _FENCE.findall(page):
        if language != "python":
            continue
        try:
            tree = ast.parse(body)
        except SyntaxError as error:
            yield f"a python block does not parse: {error}"
            continue
        for name in _imported(tree):
            if not _resolves(name):
                yield f"a python block imports {name}: there is no such name"


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", _without_fences(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return set(found)


@cache
def millrace_flags() -> frozenset[str]:
    """What some `millrace ... --help` lists."""
    every = (name for parser in parsers().values() for option in parser._actions for name in option.option_strings)
    return frozenset(name for name in every if name.startswith("--"))


@cache
def test_flags() -> frozenset[str]:
    """The flags of the commands in tests/, read from their `add_argument` calls."""
    files = (path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    trees = (ast.parse(text) for text in files if "add_argument(" in text)
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    added = (call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument")
    texts = (arg.value for call in added for arg in call.args if isinstance(arg, ast.Constant))
    return frozenset(text for text in texts if isinstance(text, str) and text.startswith("--"))


def _units(page: str) -> Iterator[str]:
    """Paragraphs, rows of tables, and lines of blocks of code."""
    for _, body in _FENCE.findall(page):
        yield from body.splitlines()
    for paragraph in _without_fences(page).split("\n\n"):
        yield from paragraph.splitlines() if paragraph.lstrip().startswith("|") else [paragraph]


def _without_fences(page: str) -> str:
    return _FENCE.sub("", page)


def _spans(page: str) -> Iterable[str]:
    return _SPAN.findall(_without_fences(page))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "millrace")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "millrace":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    if _is_module(name):
        return True
    parent, _, attribute = name.rpartition(".")
    return bool(parent) and _is_module(parent) and hasattr(import_module(parent), attribute)
