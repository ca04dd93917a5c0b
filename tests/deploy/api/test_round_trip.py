"""Whatever an API answers is accepted back by it as the assistant's turn: whole answers and joined streams.

    MILLRACE_FULL=1 python -m pytest tests/deploy/api/test_round_trip.py

draws two thousand answers for each API.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.deploy.api.adapter.answer_parts import AnswerEnd, PartsReader, TokenUsage
from millrace.deploy.api.adapter.chat_adapter import read_adapted
from millrace.deploy.api.assistant_turn import AssistantTurn
from millrace.deploy.api.chat.answers import ChatAnswerBuilder
from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.messages.bodies import CountTokensBody, MessagesBody
from millrace.deploy.api.messages.events import MessageEvents
from millrace.deploy.api.openai.choice_state import ChoiceState
from millrace.deploy.api.parsers.interface import CallArguments, CallBegun, Event, Reasoning, Text, ToolParser
from millrace.deploy.api.responses.bodies import ResponsesBody
from millrace.deploy.api.responses.events import ResponseEvents, new_response
from millrace.deploy.api.responses.input_items import messages_of, read_items
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.api.tokenize.bodies import TokenizeBody
from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.tokenizer import Tokenizer
from millrace.stages.outputs import ChoiceDelta
from millrace.stages.params import SamplingParams
from tests.counts import count
from tests.model.tiny_tokenizers import STYLES, VOCAB_SIZE, make_tokenizer

USER = {"role": "user", "content": "Go on"}
USAGE = TokenUsage(num_prompt=7, num_cached=4, num_completion=5)

WORDS = st.text(max_size=6) | st.sampled_from(["", " ", "\n", "<think>", "</think>", "<|im_end|>", "[INST]", "\ufdd0"])
NAMES = st.sampled_from(["f", "get.weather", "a/b:c-d", "x" * 128, "été", "two words", ""]) | st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(WORDS, JSON, max_size=3).map(lambda value: orjson.dumps(value).decode())
CALLS = st.builds(lambda name, text: [CallBegun(name), CallArguments(text)], NAMES, ARGUMENTS | st.just(""))
TURNS = st.builds(  # thoughts, perhaps cut off, then text and calls in any order
    lambda thoughts, rest: [*thoughts, *(event for run in rest for event in run)],
    st.lists(st.builds(Reasoning, WORDS.filter(bool)), max_size=2),
    st.lists(st.lists(st.builds(Text, WORDS.filter(bool)), max_size=2) | CALLS, max_size=4),
)
FINISHES = st.sampled_from(["stop", "length", "abort"])


class DrawnEvents(ToolParser):
    """Gives the drawn events for the text "0", "1", ..., so that a stream has one at a time."""

    events: tuple[Event, ...] = ()

    def feed(self, text: str) -> list[Event]:
        return [self.events[ord(character)] for character in text]

    def finish(self) -> list[Event]:
        return []


@dataclass(frozen=True)
class Answer:
    """A drawn answer, as the engine gives it: one delta an event, and the parser that finds the event in it."""

    events: list[Event]
    finish: str

    def turn(self) -> AssistantTurn:
        parser = DrawnEvents()
        parser.events = tuple(self.events)
        return AssistantTurn(tools=parser)

    def deltas(self) -> Iterator[ChoiceDelta]:
        for index in range(len(self.events)):
            yield ChoiceDelta(0, chr(index), (index,))
        yield ChoiceDelta(0, "", (0,), finish_reason=self.finish)  # type: ignore[arg-type]


ANSWERS = st.builds(Answer, TURNS, FINISHES)


@cache
def templates() -> list[ChatTemplate]:
    """A template of each kind of model family; the last one wants roles to alternate, and knows no tools."""
    import tempfile
    from pathlib import Path

    made = []
    for style in STYLES:
        with tempfile.TemporaryDirectory() as folder:
            make_tokenizer(style, Path(folder), VOCAB_SIZE)
            tokenizer = Tokenizer.read(Path(folder))
            template = ChatTemplate.read(Path(folder), tokenizer)
        assert template is not None
        made.append(template)
    return made


def check(chat: dict[str, Any]) -> None:
    """Reads a chat body and renders it by each template."""
    body, _ = read_body(ChatBody, {name: value for name, value in chat.items() if value is not None}, False)
    body.sampling_params(SamplingParams())
    (prompt,) = body.prompts()
    assert prompt.chat is not None
    has_results = any(message["role"] == "tool" for message in prompt.chat.messages)
    for template in templates()[: -1 if has_results else None]:
        template.render(
            prompt.chat.messages,
            add_generation_prompt=prompt.chat.add_generation_prompt,
            continue_final_message=prompt.chat.continue_final_message,
        )


def results_of(call_ids: list[str], **more: Any) -> list[dict[str, Any]]:
    return [{"tool_call_id": call_id, "content": "ok", **more} for call_id in call_ids]


# -- chat


def whole_chat(answer: Answer) -> dict[str, Any]:
    """The message of the whole answer."""
    choice = ChoiceState(0, turn=answer.turn())
    for delta in answer.deltas():
        choice.add(delta, keep=True)
    choices = ChatAnswerBuilder("id", 0, "m", False, False).whole([choice], {})["choices"]
    message: dict[str, Any] = orjson.loads(orjson.dumps(choices[0]["message"]))
    return message


def streamed_chat(answer: Answer) -> dict[str, Any]:
    """The message that a client joins from the deltas of a stream."""
    builder, choice = ChatAnswerBuilder("id", 0, "m", False, False), ChoiceState(0, turn=answer.turn())
    chunks = builder.opening(1)
    for delta in answer.deltas():
        choice.add(delta, keep=False)
        chunks += builder.chunks(choice, delta)
    message: dict[str, Any] = {"refusal": None, "tool_calls": []}
    for chunk in chunks:
        for name, value in orjson.loads(chunk)["choices"][0]["delta"].items():
            if name == "tool_calls":
                join_calls(message["tool_calls"], value)
            else:
                message[name] = (message.get(name) or "") + value if name != "role" else value
    return message


def join_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    for piece in pieces:
        if piece["index"] == len(calls):
            calls.append(piece)
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


@pytest.mark.slow
@settings(max_examples=count(40, 2000), deadline=None)
@given(answer=ANSWERS)
def test_a_message_of_chat_is_accepted_as_a_turn(answer):
    for message in (whole_chat(answer), streamed_chat(answer)):
        called = [call["id"] for call in message.get("tool_calls") or []]
        filled_in = {"refusal": None, "annotations": None, "audio": None, "function_call": None} | message
        for turn in (message, filled_in, filled_in | {"tool_calls": message.get("tool_calls")}):
            check(
                {"messages": [USER, turn, *results_of(called, role="tool"), USER]}
                if not called
                else {"messages": [USER, turn, *results_of(called, role="tool")]}
            )
            read_body(TokenizeBody, {"messages": [USER, turn]}, False)


# -- responses


def told_response(answer: Answer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The response, and the items that a client keeps from its stream."""
    body, _ = read_body(ResponsesBody, {"input": "hi"}, False)
    built = ResponseEvents(new_response("resp_0", "m", body, SamplingParams()))
    events = built.begin()
    reader = PartsReader(answer.turn())
    for delta in answer.deltas():
        for part in reader.read(delta):
            events += built.add(part)
            if isinstance(part, AnswerEnd):
                events += built.end(part, USAGE)
    told = orjson.loads(orjson.dumps([built.response, events]))
    return told[0], [event["item"] for event in told[1] if event["type"] == "response.output_item.done"]


@pytest.mark.slow
@settings(max_examples=count(40, 2000), deadline=None)
@given(answer=ANSWERS)
def test_the_output_of_a_response_is_accepted_as_input(answer):
    response, streamed = told_response(answer)
    assert response["output"] == streamed
    called = [item["call_id"] for item in streamed if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call_id, "output": "ok"} for call_id in called]
    given_items = [USER, *streamed, *(outputs or [USER])]
    body, passed, ignored = read_adapted(ResponsesBody, {"input": given_items}, True)
    assert (passed, ignored) == ({}, [])
    items = read_items(body.input, "x")
    messages, _ = messages_of(items, [f"input[{i}]" for i in range(len(items))])
    check(body.chat(messages))
    kept = "".join(str(message) for message in messages)
    for event in answer.events:
        assert not isinstance(event, Reasoning) or repr(event.text)[1:-1] in kept or not event.text.strip()


# -- messages


def told_message(answer: Answer) -> dict[str, Any]:
    built = MessageEvents("msg_0", "m", ())
    built.begin(USAGE)
    reader = PartsReader(answer.turn())
    for delta in answer.deltas():
        for part in reader.read(delta):
            built.add(part)
            if isinstance(part, AnswerEnd):
                built.end(part, USAGE)
    message: dict[str, Any] = orjson.loads(orjson.dumps(built.message))
    return message


@pytest.mark.slow
@settings(max_examples=count(40, 2000), deadline=None)
@given(answer=ANSWERS)
def test_the_content_of_a_message_is_accepted_as_a_turn(answer):
    content = told_message(answer)["content"]
    called = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "ok"} for call_id in called]
    turn, user = {"role": "assistant", "content": content}, {"role": "user", "content": results or "Go on"}
    for kind, more in ((MessagesBody, {"max_tokens": 9}), (CountTokensBody, {})):
        for messages in ([USER, turn, user], [USER, turn]):  # answered, or continued
            body, _, _ = read_adapted(kind, {"messages": messages, **more}, False)
            chat, _ = body.chat()
            check(chat)
