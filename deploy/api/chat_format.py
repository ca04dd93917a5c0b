"""How the model that is served writes thoughts and calls of tools, and what a request makes of that.

Knows which parsers there are for the engine's model and whether a prompt ends among thoughts. What a body may ask for
is `openai/bodies.py`'s, and what is done with an answer's text `assistant_turn.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from ...model.errors import TemplateError
from ...stages.params import SamplingParams, ThinkingBudget
from ..config import ServerConfig
from ..errors import ApiError
from .assistant_turn import ReasoningCounter, Turn
from .parsers import registry
from .parsers.interface import ReasoningParser, ToolParser
from .parsers.json_calls import JsonArguments, JsonList

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine

PROBE = "What a user says."
NUM_PROBES = 256  # ways to set a template's variables whose prompts are remembered

MakeTurn = Callable[[], Turn]


def check_parsers(config: ServerConfig) -> None:
    """Raises `ConfigError` for a setting that names no parser, before a model is loaded for it."""
    registry.tool_parser(config.tool_call_parser, "")
    registry.reasoning_parser(config.reasoning_parser, "")


class Speech:
    """The model's side of one server. Made when the model is there; may be used from several threads."""

    def __init__(self, config: ServerConfig, engine: Engine) -> None:
        self._template = getattr(engine.encoder, "template", None)
        source = "" if self._template is None else self._template.source
        self.tool_parser = registry.tool_parser(config.tool_call_parser, source)
        self.reasoning_parser = registry.reasoning_parser(config.reasoning_parser, source)
        self._has_auto = config.enable_auto_tool_choice
        self._tokenizer = engine.tokenizer
        self._is_prompt_open = lru_cache(NUM_PROBES)(self._probe)

    def settle(self, body: Chat, params: SamplingParams) -> tuple[SamplingParams, MakeTurn | None]:
        """What the sampler has to know besides, and what makes the turn of a choice; None if that can be but words.
        `ApiError` 400 for what this model can not do."""
        calls = self._calls_of(body)
        thoughts = None if params.structured_outputs is not None else self._thoughts_of(body)
        if body.max_thinking_tokens is not None and params.structured_outputs is None:
            params = replace(params, thinking_budget=self._budget(body, body.max_thinking_tokens, thoughts))
        if thoughts is not None and thoughts.is_over:
            thoughts = None
        if (calls and calls.parser.needs_special_tokens) or (thoughts and thoughts.parser.needs_special_tokens):
            params = replace(params, skip_special_tokens=False)
        if calls is None and thoughts is None:
            return params, None
        return params, partial(self._make_turn, calls, thoughts, body)

    def _make_turn(self, calls: Calls | None, thoughts: Thoughts | None, body: Chat) -> Turn:
        return Turn(
            None if thoughts is None else thoughts.parser(thoughts.is_open),
            None if calls is None else calls.parser(calls.tool_names),
            new_call_id=(self.tool_parser or ToolParser).new_call_id,
            allows_parallel=body.parallel_tool_calls is not False,
            shows_reasoning=body.include_reasoning is not False,
            counter=None if thoughts is None else thoughts.counter(self._tokenizer.token_bytes),
        )

    def _calls_of(self, body: Chat) -> Calls | None:
        if not body.tool_names:
            return None
        if body.named_tool is not None:
            return Calls(JsonArguments, (body.named_tool,))
        if body.is_call_forced:
            return Calls(JsonList, body.tool_names)
        if self.tool_parser is None or not self._has_auto:
            flag = "--tool-call-parser" if self.tool_parser is None else "--enable-auto-tool-choice"
            message = f"tool_choice = 'auto' is switched off on this server ({flag}): name a function, or 'required'"
            raise ApiError("unsupported_parameter", message, param="tool_choice")
        return Calls(self.tool_parser, body.tool_names)

    # -- thoughts

    def _thoughts_of(self, body: Chat) -> Thoughts | None:
        parser = self.reasoning_parser
        if parser is None:
            return None
        is_open = self._is_turn_open(body)
        return Thoughts(parser, parser.thinks_unasked if is_open is None else is_open, is_over=is_open is False)

    def _budget(self, body: Chat, num_tokens: int, thoughts: Thoughts | None) -> ThinkingBudget | None:
        """None if the prompt itself has closed the thoughts."""
        markers = None if thoughts is None else thoughts.parser.markers
        if thoughts is None or markers is None:
            name = body.client_name("thinking_budget")
            message = f"{name}: this model marks no thoughts (see --reasoning-parser); leave it out"
            raise ApiError("unsupported_parameter", message, param=name)
        if thoughts.is_over:
            return None
        start, end = (tuple(self._tokenizer.encode(marker, add_special_tokens=False)) for marker in markers)
        return ThinkingBudget(num_tokens=num_tokens, start_ids=start, end_ids=end, is_open=thoughts.is_open)

    def _is_turn_open(self, body: Chat) -> bool | None:
        """Whether the answer begins among thoughts; None if the prompt marks none, False also if it has closed them."""
        if body.continued_text is not None:
            return self._last_mark(body.continued_text) or False
        kwargs: tuple[tuple[str, Any], ...] = tuple(sorted(body.template_kwargs.items()))
        return self._is_prompt_open(kwargs, body.add_generation_prompt)

    def _probe(self, kwargs: tuple[tuple[str, Any], ...], add_generation_prompt: bool) -> bool | None:
        """What the template puts behind a user's turn, when it is told `kwargs`."""
        if self._template is None:
            return None
        messages = [{"role": "user", "content": PROBE}]
        try:
            prompt = self._template.render(messages, add_generation_prompt=add_generation_prompt, kwargs=dict(kwargs))
        except TemplateError:
            return None  # the request itself will hear of it, if it fails as well
        return self._last_mark(prompt.text.rpartition(PROBE)[2])

    def _last_mark(self, text: str) -> bool | None:
        """True if the last mark in `text` opens thoughts, False if it closes them, None if there is none."""
        markers = None if self.reasoning_parser is None else self.reasoning_parser.markers
        if markers is None:
            return None
        opened, closed = (text.rfind(marker) for marker in markers)
        return None if opened == closed else opened > closed


class Chat(Protocol):
    """A body that asks for a chat, as far as it is read here."""

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Of the tools that may be called."""

    @property
    def named_tool(self) -> str | None:
        """The one that has to be called, if the body names it."""

    @property
    def is_call_forced(self) -> bool:
        """Whether the answer has to be calls."""

    @property
    def parallel_tool_calls(self) -> bool | None:
        """False: at most one call."""

    @property
    def include_reasoning(self) -> bool | None:
        """False: thoughts are not told."""

    @property
    def max_thinking_tokens(self) -> int | None:
        """The budget of thoughts."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the template is told."""

    @property
    def add_generation_prompt(self) -> bool:
        """Whether the template opens the answer's turn."""

    @property
    def continued_text(self) -> str | None:
        """The text that the answer goes on with; None if the answer is a turn of its own."""

    def client_name(self, param: str | None) -> str | None:
        """What its API calls a field of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class Calls:
    """How the calls in an answer are written."""

    parser: type[ToolParser]
    tool_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """What an answer has of them."""

    parser: type[ReasoningParser]
    is_open: bool  # it begins with some
    is_over: bool  # it has none: they were closed in the prompt

    def counter(self, token_bytes: Callable[[int], bytes]) -> ReasoningCounter | None:
        """What counts their tokens, if they are marked."""
        markers = self.parser.markers
        return None if markers is None else ReasoningCounter(markers, self.is_open, token_bytes)
