"""The ways to give a chat template: each is used, or refused with the file and the line."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from millrace.model.errors import CheckpointError, ModelError, TemplateError
from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.tokenizer import Tokenizer
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.loading.model import load_text
from tests.model.tiny_tokenizers import VOCAB_SIZE, make_tokenizer

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
SHOWS = "{% for m in messages %}{{ m.content }}{% endfor %}"
BAD = "{% for m in messages %}\n{{ m.content }}\n{% endfo %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("chatml")
    make_tokenizer("chatml", path, VOCAB_SIZE)
    (path / "chat_template.jinja").unlink()
    return path


@pytest.fixture
def root(tmp_path: Path, made: Path) -> Path:
    """A checkpoint without a template."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def write(root: Path, name: str, text: str) -> str:
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def beside(root: Path, text: str) -> None:
    write(root, "chat_template.jinja", text)


def link(root: Path, name: str) -> str:
    (root / name).symlink_to(name)
    return str(root / name)


def configure(root: Path, template: Any) -> None:
    path = root / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def read(root: Path, wanted: str | None = None) -> ChatTemplate:
    template = ChatTemplate.read(root, Tokenizer.read(root), wanted)
    assert template is not None
    return template


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in templates.items()]


# what is given -> the prompt of "Hi", and where the log says that the template is from
GIVEN: dict[str, tuple[Callable[[Path], str | None], str, str]] = {
    "a file": (lambda root: write(root, "t.jinja", SHOWS + "!\n"), "Hi!", "file .*t.jinja"),
    "a text": (lambda root: SHOWS + "?", "Hi?", "text of the setting chat_template"),
    "a file of the checkpoint": (lambda root: beside(root, SHOWS), "Hi", "^chat_template.jinja"),
    "tokenizer_config.json": (lambda root: configure(root, SHOWS), "Hi", "^tokenizer_config.json"),
    "chat_template.json": (
        lambda root: write(root, "chat_template.json", json.dumps({"chat_template": SHOWS})) and None,
        "Hi",
        "^chat_template.json",
    ),
    "a list of names": (lambda root: configure(root, named(tool_use="no", default=SHOWS)), "Hi", "^tokenizer_config"),
    "a file beside tokenizer_config.json": (
        lambda root: configure(root, "no") or beside(root, SHOWS),
        "Hi",
        "^chat_template.jinja",
    ),
    "a flag beside the checkpoint's": (
        lambda root: beside(root, "no") or SHOWS + "!",
        "Hi!",
        "text of the setting chat_template",
    ),
    "a name": (
        lambda root: configure(root, named(rag=SHOWS + "+", default="no")) or "rag",
        "Hi+",
        "rag of tokenizer_config.json .*setting",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("give", "prompt", "origin"), GIVEN.values(), ids=GIVEN)
def test_a_template_is_used_and_named_wherever_it_is_given(
    root: Path, give: Callable[[Path], str | None], prompt: str, origin: str
) -> None:
    template = read(root, give(root))
    assert template.render(USER).text == prompt
    assert re.search(origin, template.origin), template.origin


REFUSED: dict[str, tuple[Callable[[Path], str | None], str]] = {
    "a missing file": (lambda root: "./no.jinja", "chat_template = './no.jinja': no such file, and not the text"),
    "a word": (lambda root: "chatml", "no such file"),
    "an empty flag": (lambda root: " ", "is empty; give the path"),
    "an empty file": (lambda root: write(root, "t.jinja", "\n"), "t.jinja': the file is empty"),
    "a folder": (lambda root: str(root), "is a folder"),
    "bad Jinja in a file": (lambda root: write(root, "t.jinja", BAD), r"t.jinja .*line 3: not valid: .*endfo"),
    "bad Jinja in a text": (lambda root: BAD, "text of the setting chat_template, line 3: not valid"),
    "bad Jinja in chat_template.jinja": (
        lambda root: beside(root, BAD),
        r"chat_template.jinja \(.*, line 3: not valid",
    ),
    "bad Jinja in a list": (
        lambda root: configure(root, named(default=SHOWS, tool_use=BAD)),
        r"tokenizer_config.json \(.*, line 3: not valid",
    ),
    "a file of another kind": (lambda root: str(root / "tokenizer_config.json"), "never reads `messages`"),
    "bytes that are no text": (
        lambda root: (root / "t.jinja").write_bytes(b"{{ \xff }}") and str(root / "t.jinja"),
        "not valid UTF-8: invalid start byte at byte 3",
    ),
    "a number": (lambda root: configure(root, 5), r"tokenizer_config.json \(.*chat_template: must be a text, .* not 5"),
    "a list of texts": (lambda root: configure(root, ["x"]), r"must be a text, .* not \['x'\]"),
    "a name of nothing": (lambda root: configure(root, [{"name": "default"}]), r"must be a text, .* not \[\{'name"),
    "an unknown name": (
        lambda root: configure(root, named(rag=SHOWS, default=SHOWS)) or "rga",
        r"nor a template of the checkpoint \(default, rag\)",
    ),
    "a link to itself": (lambda root: link(root, "t.jinja"), "t.jinja': cannot be read: Too many levels"),
}  # fmt: skip


@pytest.mark.parametrize(("give", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_template_that_cannot_be_used_is_refused_with_file_and_line(
    root: Path, give: Callable[[Path], str | None], problem: str
) -> None:
    with pytest.raises((TemplateError, CheckpointError), match=problem):
        read(root, give(root))


def test_a_checkpoint_without_a_template_has_none(root: Path) -> None:
    assert ChatTemplate.read(root, Tokenizer.read(root)) is None
    write(root, "chat_template.jinja", "")
    assert ChatTemplate.read(root, Tokenizer.read(root)) is None


def in_a_list(root: Path, **templates: str) -> None:
    configure(root, named(**templates))


def in_a_mapping(root: Path, **templates: str) -> None:
    configure(root, templates)


def in_files(root: Path, default: str = "", **templates: str) -> None:
    configure(root, "the files come before this one")
    if default:
        write(root, "chat_template.jinja", default)
    for name, text in templates.items():
        write(root, f"additional_chat_templates/{name}.jinja", text)


@pytest.mark.parametrize("store", [in_a_list, in_a_mapping, in_files])
def test_named_templates_are_chosen_as_by_transformers(root: Path, store: Callable[..., None]) -> None:
    store(root, default=SHOWS, tool_use=SHOWS + "{{ tools | tojson }}", rag="rag")
    theirs = AutoTokenizer.from_pretrained(root)
    template = read(root)
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template(USER, tools=tools, tokenize=False, add_generation_prompt=True)
        assert template.render(USER, tools=tools).text == expected
    assert "tool_use" not in template.origin and template.for_tools is not template


def test_a_chat_for_which_no_named_template_is_meant_is_refused(root: Path) -> None:
    in_files(root, tool_use=SHOWS + "!", rag="rag")
    template = read(root)
    assert template.render(USER, tools=[TOOL]).text == "Hi!"
    with pytest.raises(TemplateError, match="no default chat template; .* one of: rag, tool_use"):
        template.render(USER)


def test_an_engine_with_an_unusable_template_does_not_start(tmp_path: Path) -> None:
    for wanted in ("./template.jinja", write(tmp_path, "t.jinja", BAD)):
        with pytest.raises(ModelError, match=r"no such file|t.jinja .*line 3"):
            load_text(EngineConfig(chat_template=wanted), Phases(time.perf_counter))
