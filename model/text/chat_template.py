"""Chat messages to one prompt, by the checkpoint's own Jinja template, run in a sandbox with bounded work.

Special tokens spelled in a message must reach the model as ordinary text. So before rendering, a mark is put inside
each of them: a Unicode noncharacter that occurs nowhere in the request. `Tokenizer.encode_chat` removes the marks: a
marked string is text, an unmarked one is from the template. A request that spells no special token is rendered
unchanged, and gets the same ids as from transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from ..errors import TemplateError
from ..files import read_json, read_text
from .jinja_sandbox import BUDGET, RenderBudget, TemplateSandbox
from .special_tokens import NAMED_TOKENS
from .tokenizer import Tokenizer

PROMPT_CHARS = 1 << 20  # longest prompt that a template may render
NUM_KWARGS = 64  # most keys in chat_template_kwargs
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", *NAMED_TOKENS)
NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))  # never assigned, so not in ordinary text
RENDER_ERRORS = (  # errors that a template's expressions can raise
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat. Its ids are `tokenizer.encode_chat(text, mark)`."""

    text: str
    mark: str | None = None  # inside each string in `text` that looks like a special token but is not one


class ChatTemplate:
    """A compiled chat template. Several threads may render it at once."""

    def __init__(self, source: str, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        """Raises TemplateError if the template is not valid Jinja. `now` is the clock of `strftime_now`."""
        self.source = source
        sandbox = TemplateSandbox(now)
        try:
            self._template = sandbox.from_string(source)
            self._takes_parts = _takes_parts(sandbox.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"chat template: not valid: {error}") from None
        self._joins_arguments = _joins_arguments(sandbox.parse(source))
        self._marker = _Marker(tuple(tokenizer.special_tokens))
        self._names = tokenizer.named_tokens

    @classmethod
    def read(cls, root: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of the checkpoint in `root`; None if it has none (see `missing_template`)."""
        source = read_text(root, "chat_template.jinja") or tokenizer.config.get("chat_template")
        if not source:
            source = (read_json(root, "chat_template.json") or {}).get("chat_template")
        if isinstance(source, list):  # named templates
            by_name = {entry["name"]: entry["template"] for entry in source}
            source = by_name.get("default")
        return cls(source, tokenizer) if source else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt for `messages`, each a role and a content: a string, or a list of `{"type": "text", "text": ...}`.

        A message with `tool_calls` needs no content. Their arguments may be JSON text or a mapping; the template gets
        the form that it can render.

        With `continue_final_message` the prompt ends inside the last message, which the model continues. Raises
        TemplateError if the template rejects the messages, or if a render exceeds its limits.
        """
        if continue_final_message and (add_generation_prompt or not messages):
            raise TemplateError(
                "continue_final_message: needs a message to continue, and add_generation_prompt = false with it"
            )
        variables: dict[str, Any] = {
            "messages": [self._message(index, message) for index, message in enumerate(messages)],
            "documents": documents,
            "tools": tools,
            **_checked_kwargs(kwargs or {}),
        }
        variables, mark, tag = self._marker.mark(variables, self.source)
        if continue_final_message:
            _append_tag(variables["messages"], tag)
        text = self._render({**self._names, **variables, "add_generation_prompt": add_generation_prompt})
        if continue_final_message:
            text = _cut_at_tag(text, tag)
        return RenderedChat(text, mark)

    def _render(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, BUDGET: RenderBudget()}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > PROMPT_CHARS:
                    raise TemplateError(f"chat template: the prompt is longer than {PROMPT_CHARS} characters")
        except RENDER_ERRORS as error:
            raise TemplateError(f"chat template: {str(error)[:300]}") from None
        return "".join(pieces)

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the message in the form that the template expects.

        Content is a string unless the template loops over parts. Missing content is "" unless the template tests for
        none. Arguments of calls are a mapping unless the template adds them to a string.
        """
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [self._called(call) for call in message["tool_calls"]]
        content = message.get("content")
        if content is None and message.get("tool_calls") and not _ASKS_FOR_NONE.search(self.source):
            return message | {"content": ""}
        if not isinstance(content, list):
            return message
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise TemplateError(f"messages[{index}].content: this model takes text parts only")
        if self._takes_parts:
            return {**message, "content": [dict(part) for part in content]}
        return {**message, "content": "\n".join(part["text"] for part in content)}

    def _called(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if self._joins_arguments and isinstance(arguments, Mapping):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not self._joins_arguments and isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                read = json.loads(arguments)
                function["arguments"] = read if isinstance(read, dict) else arguments
        return {**call, "function": function}


def missing_template(model: str) -> TemplateError:
    """The error for a client that sends messages to a model without a template."""
    return TemplateError(
        f"{model} has no chat template: start the server with --chat-template FILE, or send a prompt to /v1/completions"
    )


class _Marker:
    """Puts marks into strings that spell special tokens, or could form one together with adjacent text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self.starts = {token[:length] for token in self.tokens for length in range(1, len(token))}
        self.ends = {token[length:] for token in self.tokens for length in range(1, len(token))}
        self.longest = len(self.tokens[0]) if self.tokens else 0

    def mark(self, variables: dict[str, Any], template: str) -> tuple[dict[str, Any], str | None, str]:
        """The variables with marks, the mark (None if none is needed), and a second character that occurs nowhere."""
        texts = [template, *_strings(variables)]
        unused = [character for character in NONCHARACTERS if not any(character in text for text in texts)]
        if len(unused) < 2:
            raise TemplateError("messages: the text is full of Unicode noncharacters (U+FDD0 to U+FDEF); remove them")
        mark, tag = unused[:2]
        if not any(map(self._needs_mark, texts[1:])):
            return variables, None, tag
        marked = {name: _map_strings(value, lambda text: self._marked(text, mark)) for name, value in variables.items()}
        return marked, mark, tag

    def _needs_mark(self, text: str) -> bool:
        text = text.strip()
        return any(self._edges(text)) or any(token in text for token in self.tokens)

    def _edges(self, text: str) -> tuple[bool, bool]:
        """Whether the text starts with the end of a special token, and whether it ends with the start of one."""
        lengths = range(1, min(self.longest, len(text) + 1))
        return any(text[:n] in self.ends for n in lengths), any(text[-n:] in self.starts for n in lengths)

    def _marked(self, text: str, mark: str) -> str:
        stripped = text.strip()  # marks go inside the whitespace, so that a template can still trim it
        at_start, at_end = self._edges(stripped)
        marked = stripped
        for token in self.tokens:
            marked = marked.replace(token, token[0] + mark + token[1:])
        marked = (mark if at_start else "") + marked + (mark if at_end else "")
        head, _, tail = text.partition(stripped) if stripped else (text, "", "")
        return head + marked + tail


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and mappings with every string changed, keys included, as templates render tools' keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(child, change) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(child, change) for child in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for child in value.values():
            yield from _strings(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _strings(child)


def _checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Checks chat_template_kwargs: plain values under names that are not reserved."""
    if len(kwargs) > NUM_KWARGS:
        raise TemplateError(f"chat_template_kwargs: {len(kwargs)} keys, and at most {NUM_KWARGS} are taken")
    for name, value in kwargs.items():
        if name in RESERVED or not name.isidentifier():
            raise TemplateError(f"chat_template_kwargs: {name[:64]!r} cannot be set there")
        if not isinstance(value, str | int | float | bool | None):
            raise TemplateError(f"chat_template_kwargs: {name[:64]!r} must be a string, a number, true, false or null")
    return dict(kwargs)


def _append_tag(messages: list[dict[str, Any]], tag: str) -> None:
    """Marks the end of the last message's text: the tag, then a space that shows whether the template trims it."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + tag + " "
    elif isinstance(content, list) and content:
        content[-1]["text"] += tag + " "
    else:
        raise TemplateError("continue_final_message: the last message has no text to continue")


def _cut_at_tag(text: str, tag: str) -> str:
    """The prompt up to the end of the last message's text, trimmed if the template trims messages."""
    before, found, after = text.rpartition(tag)
    if not found:
        raise TemplateError("continue_final_message: the chat template leaves out the last message's text")
    return before if after.startswith(" ") else before.rstrip()


_ASKS_FOR_NONE = re.compile(r"content['\"\]]*\s+is\s+none", re.IGNORECASE)


def _joins_arguments(template: nodes.Template) -> bool:
    """Whether the template adds a call's `arguments` to a string, so that they must be a string."""
    for node in template.find_all(nodes.Add):
        for part in (node.left, node.right):
            if isinstance(part, nodes.Getattr) and part.attr == "arguments":
                return True
            if isinstance(part, nodes.Getitem) and isinstance(part.arg, nodes.Const) and part.arg.value == "arguments":
                return True
    return False


def _takes_parts(template: nodes.Template) -> bool:
    """Whether the template loops over a message's `content`, so that it supports content in parts."""
    for loop in template.find_all(nodes.For):
        for node in [loop.iter, *loop.iter.find_all(nodes.Expr)]:
            if isinstance(node, nodes.Getattr) and node.attr == "content":
                return True
            if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content":
                return True
            if isinstance(node, nodes.Name) and node.name == "content":
                return True
    return False
