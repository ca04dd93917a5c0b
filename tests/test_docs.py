"""The pages say what is the case: sizes, flags, links, paths, code, and what is generated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from millrace.deploy.config import ServerConfig
from millrace.stages.config import EngineConfig
from tests.docs import checks, other_engines
from tests.docs.generated import DOCS, GENERATED, ROOT

README = ROOT / "README.md"
PAGES = {str(path.relative_to(ROOT)): path for path in checks.pages()}
Check = Callable[[str, Path], Iterable[str]]

CHECKS: dict[str, Check] = {
    "flags": lambda page, _: checks.flags(page),
    "links": checks.links,
    "paths": checks.paths,
    "modules": lambda page, _: checks.modules(page),
    "python": lambda page, _: checks.python_blocks(page),
}
FENCE = "```"


def test_readme_is_short_and_begins_with_the_commands_that_ci_runs() -> None:
    readme = README.read_text("utf-8")
    assert [*checks.size(readme), *checks.first_blocks(readme)] == []


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_what_the_code_makes_of_it(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == GENERATED[name](), "run python -m tests.docs"


def test_the_flags_of_other_engines_are_those_that_the_command_line_knows() -> None:
    page = (DOCS / other_engines.PAGE).read_text("utf-8")
    assert page == other_engines.with_tables(page), "run python -m tests.docs"
    assert page.count("\n| `--") > 80


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_nothing_that_is_not_there(name: str, check: str) -> None:
    path = PAGES[name]
    assert list(CHECKS[check](path.read_text("utf-8"), path.parent)) == []


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    missing = [path.name for path in DOCS.glob("*.md") if path.name != "README.md" and f"({path.name})" not in index]
    assert missing == []


@pytest.mark.parametrize(
    ("check", "page"),
    [
        ("flags", "`millrace serve --no-such-flag`"),
        ("flags", "Set --max-num-seq to 8."),
        ("flags", "`millrace chat --rules 3`, which only a module of tests has"),
        ("flags", "`python -m tests.simulation.run --no-such-flag 3`"),
        ("flags", f"{FENCE}sh\npip install --no-such-flag x\n{FENCE}\n"),
        ("links", "[here](deploy/docs/no-such-page.md)"),
        ("links", "![picture](deploy/docs/pictures/no-such-picture.png)"),
        ("links", "[here](#no-such-heading)"),
        ("links", "[here](deploy/docs/api.md#no-such-heading)"),
        ("links", f"[here](#comment)\n{FENCE}sh\n# Comment\n{FENCE}\n"),
        ("paths", "see `stages/no_such_file.py`"),
        ("paths", "see `stages/no_such_room/`"),
        ("paths", "see `no_such_file.py`"),
        ("modules", "`python -m tests.no_such_module`"),
        ("modules", f"{FENCE}sh\npython -m millrace.no_such_module\n{FENCE}\n"),
        ("modules", "`millrace.stages.NoSuchName`"),
        ("python", f"{FENCE}python\ndef broken(:\n{FENCE}\n"),
        ("python", f"{FENCE}python\nfrom millrace.stages import NoSuchName\n{FENCE}\n"),
        ("python", f"{FENCE}python\nimport millrace.no_such_module\n{FENCE}\n"),
    ],
)
def test_a_check_notices_what_is_not_there(check: str, page: str) -> None:
    assert len(list(CHECKS[check](page, ROOT))) == 1


@pytest.mark.parametrize(
    ("check", "page"),
    [
        ("flags", "`--no-enable-prefix-caching`, `millrace top --once`, <!-- a comment --> and a table |---|---|"),
        ("flags", "`python -m tests.simulation.run --seeds 3`, `pip install torch --index-url https://x.y/--z`"),
        ("links", "# A heading: `code`, and more\n[here](#a-heading-code-and-more) [there](https://x.y/z#a)"),
        ("links", "[there](LICENSE)"),
        (
            "paths",
            "`stages/messages.py`, `application/json`, `/v1/models`, `config.json`, `my_package.my_module:Class`",
        ),
        ("modules", "`millrace.stages.Engine`, `python -m tests.docs`"),
        ("python", f"{FENCE}python\nfrom millrace.stages import Engine\nfrom openai import NoSuchName\n{FENCE}\n"),
    ],
)
def test_a_check_lets_pass_what_is_there(check: str, page: str) -> None:
    assert list(CHECKS[check](page, ROOT)) == []


def test_the_checks_of_readme_notice_its_growth_and_changed_commands() -> None:
    readme = README.read_text("utf-8")
    assert "251 lines" in next(iter(checks.size("\n" * 251)))
    assert "14337 bytes" in next(iter(checks.size("x" * 14_337)))
    first, second = checks.FIRST_BLOCKS
    assert len(list(checks.first_blocks(readme.replace(first, "millrace serve\n")))) == 1
    assert len(list(checks.first_blocks(readme.replace(second, second + "true\n")))) == 1
    assert len(list(checks.first_blocks(readme.replace("```sh", "```")))) == 2


def test_the_generated_pages_have_every_flag_and_every_setting() -> None:
    made = "".join(each() for each in GENERATED.values())
    named = checks.millrace_flags() - {"--help", "--version"}
    assert [flag for flag in sorted(named) if f"`{flag}`" not in made] == []
    fields = [field.name for kind in (EngineConfig, ServerConfig) for field in dataclasses.fields(kind)]
    assert [name for name in fields if f"| `{name}` |" not in made] == []
