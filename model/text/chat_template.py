"""Chat messages to one prompt, by the checkpoint's own Jinja template, run in a sandbox with bounded work.

Special tokens spelled in a message must reach the model as ordinary text. The template sees each message as it was
sent; if one could spell a special token, the render keeps the origin of every character (see `traced_text.py`). Marks
are put into the finished prompt, inside each string that looks like a special token but is from the request.
`Tokenizer.encode_chat` removes them: a marked string is text, an unmarked one is from the template. The ids of a
request that spells no special token are those of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

import jinja2

from ..errors import TemplateError
from ..files import read_json
from .jinja_sandbox import BUDGET, VALUE_SIZE, WORK, RenderBudget, TemplateSandbox
from .special_tokens import NAMED_TOKENS
from .template_files import DEFAULT, TOOL_USE, TemplateSource, find_templates, template_in_file
from .template_traits import TemplateTraits
from .tokenizer import Tokenizer
from .traced_text import request_runs, strings, traced

PROMPT_CHARS = 1 << 20  # longest prompt that a template may render, unless the context is longer
PROBE_WORK = WORK >> 3  # of a render that finds out what the template reads
NUM_KWARGS = 64  # most keys in chat_template_kwargs
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", *NAMED_TOKENS)
# variables that clients send to any model; a template that does not read one of them is not changed by it
COMMON_KWARGS = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string"})
CHECKED_ROLES = frozenset({"system", "developer", "tool"})  # that a template may leave out without a word
ContentFormat = Literal["auto", "string", "openai"]
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning in templates
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


class NamedTokens(Protocol):
    """The tokens that a template needs of a tokenizer."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids by text."""

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts by name, such as bos_token."""


@dataclass(frozen=True, slots=True)
class _NoTokens:
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    named_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat. Its ids are `tokenizer.encode_chat(marked, mark)`."""

    text: str  # the prompt
    marked: str  # the prompt with a mark in each string that looks like a special token but is not one
    mark: str | None = None  # None: `marked` has none


class ChatTemplate:
    """A compiled chat template. Several threads may render it at once."""

    def __init__(
        self,
        source: str,
        tokenizer: NamedTokens,
        now: Callable[[], datetime] = datetime.now,
        origin: str = "",
        tool_use: ChatTemplate | None = None,
    ) -> None:
        """Raises TemplateError if the template is not valid Jinja.

        `now` is the clock of `strftime_now`, `tool_use` the template of chats with tools, if that is another one.
        """
        self.source = source
        self._max_chars = PROMPT_CHARS
        self._defaults: Mapping[str, Any] = {}
        self._content_format: ContentFormat = "auto"
        self.origin = origin
        self.for_tools = tool_use or self
        sandbox = TemplateSandbox(now)
        where = f"chat template, {origin}" if origin else "chat template"
        try:
            self._template = sandbox.from_string(source)
            tree = sandbox.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{where}, line {error.lineno}: not valid: {error.message}") from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"{where}: not valid: {error}") from None
        self._marker = _Marker(tuple(tokenizer.special_tokens))
        self._names = tokenizer.named_tokens
        self.traits = TemplateTraits(source, tree, self._probe)
        self._readable = self.traits.variables - {*RESERVED, *sandbox.globals}

    @classmethod
    def read(cls, root: Path, tokenizer: Tokenizer, wanted: str | None = None) -> ChatTemplate | None:
        """The template of the checkpoint in `root`; None if it has none (see `missing_template`).

        `wanted` replaces it: see `find_templates`.
        """
        template = cls._chosen(find_templates(root, tokenizer.config, wanted), tokenizer)
        if template is not None and wanted is not None:
            template._check_chosen()
        return template

    @classmethod
    def read_beside(cls, root: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template in `root`, a folder beside that of the model whose tokenizer it is; None if it has none."""
        template = cls._chosen(find_templates(root, read_json(root, "tokenizer_config.json") or {}, None), tokenizer)
        if template is not None:
            template._check_chosen()
        return template

    @classmethod
    def _chosen(cls, found: Mapping[str, TemplateSource], tokenizer: Tokenizer) -> ChatTemplate | None:
        if not found:
            return None
        tool_use = found.get(TOOL_USE)
        tools = None if tool_use is None else cls(tool_use.text, tokenizer, origin=tool_use.origin)
        default = found.get(DEFAULT) or _no_default(found)
        return cls(default.text, tokenizer, origin=default.origin, tool_use=tools)

    def _check_chosen(self) -> None:
        if "messages" not in self.traits.variables:
            raise TemplateError(
                f"chat_template, {self.origin}: never reads `messages`, so every chat would get the same prompt; "
                "give a Jinja chat template"
            )

    @property
    def readable(self) -> frozenset[str]:
        """The variables that a client may set: those that the template reads, none that it trusts."""
        return self._readable | self.for_tools._readable | COMMON_KWARGS

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

        A message with `tool_calls` needs no content. Their arguments may be JSON text or a mapping. The template gets
        content, arguments and a developer's role in the form that it shows.

        With `continue_final_message` the prompt ends inside the last message, which the model continues. Raises
        TemplateError if the template rejects or leaves out a message, or if a render exceeds its limits.
        """
        variables = {"documents": documents, "tools": tools, **self._checked_kwargs(kwargs or {})}
        template = self.for_tools if tools else self
        return template._rendered(messages, variables, add_generation_prompt, continue_final_message)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: dict[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> RenderedChat:
        if continue_final_message and (add_generation_prompt or not messages):
            raise TemplateError(
                "continue_final_message: needs a message to continue, and add_generation_prompt = false with it"
            )
        if continue_final_message and not messages[-1].get("content"):
            raise TemplateError("continue_final_message: the last message has no text to continue")
        shaped = [self._message(index, message) for index, message in enumerate(messages)]
        variables = {"messages": shaped, **variables}
        tag = None
        if continue_final_message:
            tag = _unused_word([self.source, *strings(variables)])
            _append_tag(shaped[-1], tag)
        is_traced = self._marker.is_needed(strings(variables))
        if is_traced:
            variables = {name: traced(value) for name, value in variables.items()}
        variables |= {"add_generation_prompt": add_generation_prompt}
        work = WORK * -(-self._max_chars // PROMPT_CHARS)
        text = self._render(variables, RenderBudget(work, is_traced, max(VALUE_SIZE, self._max_chars)))
        if tag is not None:
            text = _cut_at_tag(text, tag)
        return self._marker.marked(text)

    def configure(self, content_format: ContentFormat, defaults: Mapping[str, Any]) -> None:
        """Sets how the template gets content, and variables for chats that do not set them. Call it before any render.

        Raises TemplateError for a variable that the template does not read.
        """
        self._content_format, self._defaults = content_format, self._checked_kwargs(defaults)
        if self.for_tools is not self:
            self.for_tools.configure(content_format, defaults)

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The variables of chats that do not set them."""
        return self._defaults

    def allow(self, num_chars: int) -> None:
        """Lets prompts have so many characters, as a long context holds. Call it before the first render."""
        self._max_chars = max(PROMPT_CHARS, num_chars)
        if self.for_tools is not self:
            self.for_tools.allow(num_chars)

    def _render(self, variables: Mapping[str, Any], budget: RenderBudget) -> str:
        """The prompt; a `TracedText` if the budget says so."""
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**self._names, **self._defaults, **variables, BUDGET: budget}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise TemplateError(f"chat template: the prompt is longer than {self._max_chars} characters")
        except RENDER_ERRORS as error:
            raise TemplateError(f"chat template: {str(error)[:300]}") from None
        return TemplateSandbox.concat(pieces)

    def _probe(self, variables: Mapping[str, Any]) -> str | None:
        try:
            return self._render(
                {"documents": None, "add_generation_prompt": True, **variables}, RenderBudget(PROBE_WORK)
            )
        except TemplateError:
            return None

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Checks chat_template_kwargs: plain values of variables that the template reads."""
        if len(kwargs) > NUM_KWARGS:
            raise _wrong_kwargs(f"{len(kwargs)} keys, and at most {NUM_KWARGS} are taken")
        for name, value in kwargs.items():
            if name not in self.readable:
                known = ", ".join(sorted(self.readable)[:NUM_KWARGS])
                raise _wrong_kwargs(f"{name[:64]!r} is not read by this model's chat template; it reads {known}")
            if not isinstance(value, str | int | float | bool | None):
                raise _wrong_kwargs(f"{name[:64]!r} must be a string, a number, true, false or null")
        return dict(kwargs)

    # -- messages

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the message in the form that the template shows."""
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [self._called(call) for call in message["tool_calls"]]
        reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if message.get("role") == "developer":
            message["role"] = self.traits.developer
        if "content" in message or message.get("tool_calls"):
            message["content"] = self._content(index, message)
        return message

    def _content(self, index: int, message: Mapping[str, Any]) -> Any:
        role, content = str(message.get("role")), message.get("content")
        has_calls = bool(message.get("tool_calls"))
        if role == "assistant" and (content is None or (has_calls and not content)):
            return self.traits.empty_content(content, has_calls)
        if content is None:
            return None
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise TemplateError(": this model takes text parts only", field=f"messages[{index}].content")
            content = [dict(part) for part in content]
        if role in CHECKED_ROLES and content and not self.traits.shows(role):
            raise TemplateError(
                f" = {role!r}: this model's chat template leaves out such messages; put the text into a user message",
                field=f"messages[{index}].role",
            )
        return self._shaped(role, content)

    def _shaped(self, role: str, content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
        """The content as one string or in parts, as the template shows it, or as the operator wants it."""
        if self._content_format == "openai":
            return [{"type": "text", "text": content}] if isinstance(content, str) else content
        if self._content_format == "string":
            return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        if isinstance(content, str):
            is_shown = self.traits.shows_text(role) is not False or not self.traits.num_parts(role)
            return content if is_shown else [{"type": "text", "text": content}]
        if self.traits.num_parts(role) > 1:
            return content
        text = "\n".join(part["text"] for part in content)
        return [{"type": "text", "text": text}] if self.traits.num_parts(role) else text

    def _called(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping) and not self.traits.takes_mapping:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and self.traits.takes_mapping:
            with suppress(ValueError, RecursionError):
                read = json.loads(arguments)
                function["arguments"] = read if isinstance(read, dict) else arguments
        return {**call, "function": function}


def check_chat_template(root: Path | None, wanted: str) -> None:
    """Raises as `ChatTemplate.read` does for the operator's template, before a tokenizer or weights are read.

    Without the folder of a checkpoint only a file is checked: another text may be the name of a template in it.
    """
    config = {} if root is None else read_json(root, "tokenizer_config.json") or {}
    source = template_in_file(wanted) if root is None else find_templates(root, config, wanted)[DEFAULT]
    if source is not None:
        ChatTemplate(source.text, _NoTokens(), origin=source.origin)._check_chosen()


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
        self._begun = re.compile("|".join(map(re.escape, sorted({token[:2] for token in self.tokens}))) or "(?!)")
        self._with_start: dict[str, dict[int, set[str]]] = {}  # tokens by first two characters and by length
        for token in self.tokens:
            self._with_start.setdefault(token[:2], {}).setdefault(len(token), set()).add(token)

    def is_needed(self, texts: Iterable[str]) -> bool:
        """Whether a text holds the first two characters of a special token, or an end of one."""
        return any(self._begun.search(text) or any(self._edges(text.strip())) for text in texts)

    def marked(self, text: str) -> RenderedChat:
        """The prompt with marks in what is from the request."""
        runs = list(request_runs(text))
        text = str.__str__(text)
        if not runs:
            return RenderedChat(text, text)
        mark = next((character for character in NONCHARACTERS if character not in text), None)
        if mark is None:
            problem = ": the text is full of Unicode noncharacters (U+FDD0 to U+FDEF); remove them"
            raise TemplateError(problem, field="messages")
        pieces: list[str] = []
        end = 0
        for begin, run_end in runs:
            pieces += [text[end:begin], self._marked(text[begin:run_end], mark)]
            end = run_end
        return RenderedChat(text, "".join([*pieces, text[end:]]), mark)

    def _spelled(self, text: str) -> list[str]:
        """The special tokens in a text, the longest first; a search for each of Gemma's 6,000 would take too long."""
        found: set[str] = set()
        match = self._begun.search(text)
        while match:
            begin = match.start()
            for length, tokens in self._with_start[match.group()].items():
                if (spelled := text[begin : begin + length]) in tokens:
                    found.add(spelled)
            match = self._begun.search(text, begin + 1)
        return sorted(found, key=lambda token: (-len(token), token))

    def _edges(self, text: str) -> tuple[bool, bool]:
        """Whether the text starts with the end of a special token, and whether it ends with the start of one."""
        lengths = range(1, min(self.longest, len(text) + 1))
        return any(text[:n] in self.ends for n in lengths), any(text[-n:] in self.starts for n in lengths)

    def _marked(self, text: str, mark: str) -> str:
        stripped = text.strip()  # special tokens may absorb the white space around them, so marks go inside it
        at_start, at_end = self._edges(stripped)
        marked = stripped
        for token in self._spelled(stripped):
            marked = marked.replace(token, token[0] + mark + token[1:])
        marked = (mark if at_start else "") + marked + (mark if at_end else "")
        head, _, tail = text.partition(stripped) if stripped else (text, "", "")
        return head + marked + tail


def _no_default(found: Mapping[str, TemplateSource]) -> TemplateSource:
    """A template that refuses every chat, for a checkpoint whose named templates have no default."""
    names = ", ".join(sorted(found))
    problem = f"this model has no default chat template; start the server with chat_template set to one of: {names}"
    return TemplateSource("{{ raise_exception(" + json.dumps(problem) + ") }}", next(iter(found.values())).origin)


def _wrong_kwargs(problem: str) -> TemplateError:
    return TemplateError(f": {problem}", param="chat_template_kwargs", field="chat_template_kwargs")


def _unused_word(texts: Sequence[str]) -> str:
    """A word that is in none of the texts. Letters and digits only, as a template may print it in JSON."""
    words = (f"CONTINUED{number}" for number in count())
    return next(word for word in words if not any(word in text for text in texts))


def _append_tag(message: dict[str, Any], tag: str) -> None:
    """Marks the end of the message's text: the tag, then a space that shows whether the template trims it."""
    if isinstance(message["content"], str):
        message["content"] += tag + " "
    else:
        message["content"][-1]["text"] += tag + " "


def _cut_at_tag(text: str, tag: str) -> str:
    """The prompt up to the end of the last message's text, trimmed if the template trims messages."""
    before, found, after = text.rpartition(tag)
    if not found:
        raise TemplateError("continue_final_message: the chat template leaves out the last message's text")
    before = before if after.startswith(" ") else before.rstrip()
    return before.replace(tag + " ", "").replace(tag, "")  # the template may show the message more than once
