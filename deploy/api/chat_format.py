"""The served model's output format (reasoning and tool calls), applied to a request.

Finds the parsers for the engine's model and whether a prompt ends inside reasoning. The fields of a body are defined in
`chat/body.py`; `assistant_turn.py` parses the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from ...model.errors import TemplateError
from ...runtime.env.log import get_logger
from ...stages.params import SamplingParams, ThinkingBudget
from ...stages.structured_outputs import ThinkingSection
from ..config import ServerConfig
from ..errors import wrong_field
from .assistant_turn import AssistantTurn, ReasoningCounter
from .parsers import registry
from .parsers.interface import ReasoningParser, ToolParser
from .parsers.json_calls import JsonArguments, JsonList

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

PROBE = "What a user says."
NUM_PROBES = 256  # cached probe results, one for each set of template variables

log = get_logger("millrace.deploy")

MakeTurn = Callable[[], AssistantTurn]


def check_parsers(config: ServerConfig) -> None:
    """Raises `ConfigError` for a setting that names no parser.

    Called before the model is loaded.
    """
    registry.tool_parser(config.tool_call_parser, "")
    registry.reasoning_parser(config.reasoning_parser, "")


class ChatFormat:
    """The chat format of the engine's model: its parsers and template. Thread-safe."""

    def __init__(self, config: ServerConfig, engine: Engine) -> None:
        self._template = getattr(engine.encoder, "template", None)
        source = "" if self._template is None else self._template.source
        with_tools = "" if self._template is None else self._template.for_tools.source
        self.tool_parser = registry.tool_parser(config.tool_call_parser, with_tools)
        self.reasoning_parser = registry.reasoning_parser(config.reasoning_parser, source)
        self._defaults: Mapping[str, Any] = {} if self._template is None else self._template.defaults
        self._has_auto = config.enable_auto_tool_choice
        self._tokenizer = engine.tokenizer
        self._is_prompt_open = lru_cache(NUM_PROBES)(self._probe)
        self._has_told_of_tools = False

    def unread(self, body: Chat) -> list[str]:
        """The fields of `body` that the model's template does not show: a client learns them from a header.

        Raises `ApiError` 400 if a call is forced, as the model would not see the tools.
        """
        if self._template is None:
            return []
        names = []
        if body.tool_names and not self.shows_tools(body.template_kwargs):
            if body.is_call_forced:
                problem = (
                    "this model's chat template shows no tools, so that no call can be forced; "
                    "leave out tools, or start the server with --chat-template FILE"
                )
                raise wrong_field("tool_choice", problem, code="unsupported_parameter")
            if not self._has_told_of_tools:
                self._has_told_of_tools = True
                log.warning("tools.ignored", reason="the chat template shows none")
            names.append("tools")
        if body.documents and "documents" not in self._template.traits.variables:
            names.append("documents")
        return names

    def shows_tools(self, template_kwargs: Mapping[str, Any]) -> bool:
        """Whether the template shows a request's tools, with its own variables; also without a template."""
        if self._template is None:
            return True
        return bool(self._template.for_tools.traits.shows_tools(tuple(sorted(template_kwargs.items()))))

    @property
    def has_auto_tools(self) -> bool:
        """Whether the model may decide by itself to call a tool."""
        return self.tool_parser is not None and self._has_auto

    @property
    def template_source(self) -> str:
        """The chat template; empty if there is none."""
        return "" if self._template is None else str(self._template.source)

    @property
    def has_thoughts(self) -> bool:
        """Whether the model marks its reasoning, so that a thinking budget can be kept."""
        return self.reasoning_parser is not None and self.reasoning_parser.markers is not None

    def apply(self, body: Chat, params: SamplingParams) -> tuple[SamplingParams, MakeTurn | None]:
        """The sampling parameters that `body` needs, and a factory for the `AssistantTurn` of a choice.

        The factory is None if an answer can only be plain text. Raises `ApiError` 400 for a field that this model does
        not support.
        """
        calls = self._calls_of(body)
        form, thoughts = params.structured_outputs, self._thoughts_of(body)
        if form is not None:
            thoughts, section = _before_form(body, thoughts, self._defaults)
            params = replace(params, structured_outputs=replace(form, after=section))
        if body.max_thinking_tokens is not None and (form is None or thoughts is not None):
            params = replace(params, thinking_budget=self._budget(body, body.max_thinking_tokens, thoughts))
        if thoughts is not None and thoughts.is_over:
            thoughts = None
        if (calls and calls.parser.needs_special_tokens) or (thoughts and thoughts.parser.needs_special_tokens):
            params = replace(params, skip_special_tokens=False)
        if calls is None and thoughts is None:
            return params, None
        return params, partial(self._make_turn, calls, thoughts, body)

    def _make_turn(self, calls: ToolCallFormat | None, thoughts: ReasoningFormat | None, body: Chat) -> AssistantTurn:
        return AssistantTurn(
            None if thoughts is None else thoughts.parser(thoughts.is_open),
            None if calls is None else calls.parser(calls.tool_names),
            new_call_id=(self.tool_parser or ToolParser).new_call_id,
            allows_parallel=body.parallel_tool_calls is not False,
            shows_reasoning=body.include_reasoning is not False,
            counter=None if thoughts is None else thoughts.counter(self._tokenizer.token_bytes),
        )

    def _calls_of(self, body: Chat) -> ToolCallFormat | None:
        if not body.tool_names:
            return None
        if body.named_tool is not None:
            return ToolCallFormat(JsonArguments, (body.named_tool,))
        if body.is_call_forced:
            return ToolCallFormat(JsonList, body.tool_names)
        if self.tool_parser is None or not self.has_auto_tools:
            flag = "--tool-call-parser" if self.tool_parser is None else "--enable-auto-tool-choice"
            problem = f"disabled on this server (see {flag}); name a function or send 'required'"
            raise wrong_field("tool_choice", problem, "'auto'", code="unsupported_parameter")
        return ToolCallFormat(self.tool_parser, body.tool_names)

    # -- reasoning

    def _thoughts_of(self, body: Chat) -> ReasoningFormat | None:
        parser = self.reasoning_parser
        if parser is None:
            return None
        is_open = self._is_turn_open(body)
        is_open_or_likely = parser.thinks_unasked if is_open is None else is_open
        return ReasoningFormat(parser, is_open_or_likely, is_over=is_open is False, is_marked=is_open is not None)

    def _budget(self, body: Chat, num_tokens: int, thoughts: ReasoningFormat | None) -> ThinkingBudget | None:
        """The thinking budget; None if the prompt has closed the reasoning already."""
        markers = None if thoughts is None else thoughts.parser.markers
        if thoughts is None or markers is None:
            problem = "this model does not mark its reasoning (see --reasoning-parser); leave it out"
            raise wrong_field(body.client_name("thinking_budget"), problem, code="unsupported_parameter")
        if thoughts.is_over:
            return None
        start, end = (tuple(self._tokenizer.encode(marker, add_special_tokens=False)) for marker in markers)
        return ThinkingBudget(num_tokens=num_tokens, start_ids=start, end_ids=end, is_open=thoughts.is_open)

    def _is_turn_open(self, body: Chat) -> bool | None:
        """Whether the answer begins inside reasoning.

        False if the prompt closed it, None if it has no markers.
        """
        if body.continued_text is not None:
            return self._last_mark(body.continued_text) or False
        kwargs: tuple[tuple[str, Any], ...] = tuple(sorted(body.template_kwargs.items()))
        return self._is_prompt_open(kwargs, body.add_generation_prompt)

    def _probe(self, kwargs: tuple[tuple[str, Any], ...], add_generation_prompt: bool) -> bool | None:
        """Whether the prompt of a probe chat with `kwargs` ends inside reasoning."""
        if self._template is None:
            return None
        messages = [{"role": "user", "content": PROBE}]
        try:
            prompt = self._template.render(messages, add_generation_prompt=add_generation_prompt, kwargs=dict(kwargs))
        except TemplateError:
            return None  # if the request's own prompt fails too, the request gets the error
        return self._last_mark(prompt.text.rpartition(PROBE)[2])

    def _last_mark(self, text: str) -> bool | None:
        """Whether the last marker in `text` opens reasoning; None if there is no marker."""
        markers = None if self.reasoning_parser is None else self.reasoning_parser.markers
        if markers is None:
            return None
        opened, closed = (text.rfind(marker) for marker in markers)
        return None if opened == closed else opened > closed


def _before_form(
    body: Chat, thoughts: ReasoningFormat | None, defaults: Mapping[str, Any]
) -> tuple[ReasoningFormat | None, ThinkingSection | None]:
    """The reasoning before an answer in a given form, and its section; None if the form comes at once.

    Reasoning that the prompt has opened must be closed first. Otherwise the request may switch it off.
    """
    if thoughts is None or thoughts.is_over or thoughts.parser.markers is None:
        return None, None
    variables = {**defaults, **body.template_kwargs}
    is_off = any(variables.get(name) is False for name in ("enable_thinking", "thinking"))
    if is_off and not thoughts.is_marked:
        return None, None
    start, end = thoughts.parser.markers
    return thoughts, ThinkingSection(start=start, end=end, is_open=thoughts.is_open)


class Chat(Protocol):
    """The properties of a chat body that are read here."""

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools that may be called."""

    @property
    def documents(self) -> Sequence[Mapping[str, str]] | None:
        """Documents for the chat template."""

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called, if the body names one."""

    @property
    def is_call_forced(self) -> bool:
        """Whether the answer must consist of calls."""

    @property
    def parallel_tool_calls(self) -> bool | None:
        """False: at most one call."""

    @property
    def include_reasoning(self) -> bool | None:
        """False: reasoning is left out of the answer."""

    @property
    def max_thinking_tokens(self) -> int | None:
        """The thinking budget, in tokens."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template."""

    @property
    def add_generation_prompt(self) -> bool:
        """Whether the template opens the answer's turn."""

    @property
    def continued_text(self) -> str | None:
        """The text that the answer continues; None if the answer is a new turn."""

    def client_name(self, param: str) -> str:
        """The name that the client's API has for a field of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """The parser of the calls in an answer, and the tools that may be called."""

    parser: type[ToolParser]
    tool_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The parser of the reasoning in an answer, and where the prompt left it."""

    parser: type[ReasoningParser]
    is_open: bool  # the answer begins inside reasoning
    is_over: bool  # the prompt closed the reasoning, so the answer has none
    is_marked: bool  # the prompt has a marker that opens or closes the reasoning

    def counter(self, token_bytes: Callable[[int], bytes]) -> ReasoningCounter | None:
        """A counter of reasoning tokens; None if the model family has no markers."""
        markers = self.parser.markers
        return None if markers is None else ReasoningCounter(markers, self.is_open, token_bytes)
