"""Shared by tests of the text stages: a readable tokenizer, messages, and small pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.runtime.graph import Port
from millrace.runtime.pipeline import Pipeline
from millrace.runtime.stage import Outlet, Stage
from millrace.stages.messages import (
    Begun,
    ChatPrompt,
    Finish,
    FinishReason,
    Prompt,
    Request,
    Started,
    StepText,
    StepTokens,
    TokenRequest,
    TopLogprobs,
)
from millrace.stages.params import SamplingParams

EOS = 256


class ByteText:
    """256 tokens, one a byte, and EOS. ASCII is plain; other bytes wait until their character is whole."""

    vocab_size = 257

    def __init__(self) -> None:
        self.texts = [chr(i) if i < 128 else "" for i in range(self.vocab_size)]
        self.is_plain = np.arange(self.vocab_size) < 128
        self.bytes = [bytes([i]) for i in range(256)] + [b"<eos>"]

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_words(self, text: str, param: str = "bad_words") -> list[int]:
        return self.encode_text(text)

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        return self.encode_text("".join(f"[{m['role']}]{m['content']}" for m in chat.messages) + "[assistant]")

    def decoder(self, params: SamplingParams, prompt: object = ()) -> ByteDecoder:
        return ByteDecoder()


class ByteDecoder:
    def __init__(self) -> None:
        self._bytes = b""

    @property
    def is_idle(self) -> bool:
        return not self._bytes

    def push(self, token_id: int) -> str:
        self._bytes += bytes([token_id]) if token_id < 256 else b""
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError:
            return ""
        self._bytes = b""
        return text

    def flush(self) -> str:
        text, self._bytes = self._bytes.decode("utf-8", "replace"), b""
        return text


def request(*texts: str, request_id: str = "r", **params: Any) -> Request:
    return Request(request_id, tuple(Prompt(text=text) for text in texts), SamplingParams(**params))


def started(slot: int, sequence_id: int, generated: Sequence[int] = (), **params: Any) -> Started:
    """A sequence with a prompt of three tokens, of request `r<sequence_id>`."""
    token_ids = np.array([1, 2, 3, *generated], np.int32)
    return Started(slot, sequence_id, f"r{sequence_id}", token_ids, 3, SamplingParams(**params), seed=0)


def step(
    number: int,
    *rows: tuple[int, int, int, int | str] | tuple[int, int, int, int | str, FinishReason],
    starts: Sequence[Started] = (),
    logprobs: dict[int, TopLogprobs] | None = None,
) -> StepTokens:
    """Rows are (slot, sequence id, place, token id or character[, finish])."""
    columns = list(zip(*[row[:4] for row in rows], strict=True)) or [(), (), (), ()]
    token_ids = [ord(token) if isinstance(token, str) else token for token in columns[3]]
    return StepTokens(
        step=number,
        slots=np.array(columns[0], np.intp),
        sequence_ids=np.array(columns[1], np.int64),
        places=np.array(columns[2], np.intp),
        token_ids=np.array(token_ids, np.intp),
        finishes=np.array([row[4] if len(row) > 4 else 0 for row in rows], np.int8),
        started=tuple(starts),
        logprobs=logprobs or {},
    )


def text_step(
    number: int, *rows: tuple[int, str, int], prompt_lengths: Mapping[int, int] | None = None, **columns: Any
) -> StepText:
    """Rows are (sequence id, text, token id). Those in `prompt_lengths`, by id, begin with a prompt of zeros."""
    ids, texts, token_ids = zip(*rows, strict=True) if rows else ((), (), ())
    begun = {id: Begun(np.zeros(length, np.int32)) for id, length in (prompt_lengths or {}).items()}
    return StepText(number, list(ids), list(texts), list(token_ids), begun=begun, **columns)


class Collected:
    """An outlet that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.failed: list[tuple[Any, BaseException]] = []

    def send(self, item: Any, port: str = "out") -> None:
        self.sent.append(item)

    async def flush(self) -> None:
        pass

    def fail(self, item: Any, error: BaseException) -> None:
        self.failed.append((item, error))

    def reply(self, item: Any) -> None:
        raise NotImplementedError


class Answer(Stage[TokenRequest, StepText]):
    """Stands in for all stages after tokenize: answers each choice with its prompt, one character per step."""

    async def handle(self, batch: Sequence[TokenRequest], out: Outlet[StepText]) -> None:
        for request in batch:
            ids = range(request.first_sequence_id, request.first_sequence_id + request.params.n)
            text = bytes(request.token_ids.tolist()).decode()[: request.params.max_tokens]
            for place, character in enumerate(text):
                is_last = place == len(text) - 1
                finishes = {row: Finish(FinishReason.LENGTH) for row in range(len(ids)) if is_last}
                rows = [(sequence_id, character, ord(character)) for sequence_id in ids]
                lengths = dict.fromkeys(ids, len(request.token_ids))
                out.send(text_step(place, *rows, finishes=finishes, prompt_lengths=lengths))


def join(*stages: Stage[Any, Any], capacity: int = 8) -> Pipeline:
    """A chain of stages; requests enter at the first."""
    pipeline = Pipeline()
    names = [pipeline.add(stage) for stage in stages]
    pipeline.entry = Port(names[0], "in")
    for source, target in zip(names, names[1:], strict=False):
        pipeline.connect(source, target, capacity=capacity, reason="a test")
    return pipeline
