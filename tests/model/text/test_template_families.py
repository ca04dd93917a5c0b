"""Chat templates of many families against transformers' own rendering.

`MILLRACE_TEMPLATES=DIR` adds each `*.jinja` file of a folder, such as the templates of real checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from millrace.model.errors import TemplateError
from millrace.model.text.chat_template import ChatTemplate, RenderedChat
from millrace.model.text.tokenizer import Tokenizer
from tests.model.text.templates.conversations import CONVERSATIONS, Message, as_sent, disarmed
from tests.model.text.templates.families import FAMILIES
from tests.model.text.templates.more_families import MORE_FAMILIES
from tests.model.tiny_tokenizers import make_tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# in a prompt that shows Python or JSON data instead of a text
DATA = ("None", "null", "'type': 'text'", '"type": "text"', "{'place': '")
FOLDER = os.environ.get("MILLRACE_TEMPLATES")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
TEMPLATES = {**FAMILIES, **MORE_FAMILIES, **{path.stem: path.read_text(encoding="utf-8") for path in FILES}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    root: Path = tmp_path_factory.mktemp("chatml")
    make_tokenizer("chatml", root, 700)
    return Tokenizer.read(root)


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_each_conversation_is_rendered_as_by_transformers(source: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(source, tokenizer)
    wrong = [f"{name}: {problem}" for name in CONVERSATIONS for problem in problems(name, template, tokenizer)]
    assert not wrong, "\n".join(wrong)


def problems(name: str, template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[str]:
    """What is wrong with our prompt for a conversation."""
    messages, options = CONVERSATIONS[name]
    if "developer" not in template.source:
        messages = [message | {"role": message["role"].replace("developer", "system")} for message in messages]
    theirs = rendered_by_transformers(messages, options, template, tokenizer)
    try:
        ours = template.render(as_sent(messages), **options)
    except TemplateError as error:
        if theirs is not None and shows_all(theirs, messages, template):
            yield f"refused: {error}"
        return
    if theirs is not None and shows_all(theirs, messages, template):
        if ours.text != theirs:
            yield f"{ours.text!r}\nis not\n{theirs!r}"
    else:  # they leave something out, print it as Python data, or fail: then we give the messages in another form
        shaped = [template._message(index, message) for index, message in enumerate(as_sent(messages))]
        again = rendered_by_transformers(shaped, options, template, tokenizer)
        if ours.text != again:
            yield f"{ours.text!r}\nis not\n{again!r}"
        if not shows_all(ours.text, messages, template, roles=("system", "developer", "user", "tool")):
            yield f"lost something: {ours.text!r}"
    harmless = template.render(disarmed(as_sent(messages)), **disarmed(options))
    if special_ids(ours, tokenizer) != special_ids(harmless, tokenizer):
        yield f"other special tokens: {ours.marked!r}"


def rendered_by_transformers(
    messages: list[Message], options: dict[str, Any], template: ChatTemplate, tokenizer: Tokenizer
) -> str | None:
    options = {"add_generation_prompt": True, **options}
    variables = {**tokenizer.named_tokens, **options.pop("kwargs", {})}
    try:
        prompts, _ = render_jinja_template([messages], chat_template=template.source, **variables, **options)
    except Exception:
        return None
    return prompts[0]


def shows_all(prompt: str, messages: list[Message], template: ChatTemplate, roles: Sequence[str] = ROLES) -> bool:
    """Whether the texts of the messages are in the prompt, none of them as data."""
    given = [message for message in messages if message["role"] in roles]
    texts = texts_of(given, has_calls="tool_calls" in template.source)
    is_data = any(prompt.count(word) > template.source.count(word) for word in DATA)
    return not is_data and all(text in prompt for text in texts)


def texts_of(messages: list[Message], has_calls: bool) -> Iterator[str]:
    """The texts; of those that a template may shorten, the last words."""
    for message in messages:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        for text in texts:
            yield text.split("</think>")[-1].split("<|im_end|>")[-1].strip().split("\n")[-1].split('"')[-1]
        for called in message.get("tool_calls", ()) if has_calls else ():
            yield from map(str, called["function"]["arguments"].values())


def special_ids(rendered: RenderedChat, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode_chat(rendered.marked, rendered.mark)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.text
    return [token_id for token_id in ids if token_id in tokenizer.special_ids]
