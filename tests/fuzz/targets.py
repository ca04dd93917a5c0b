"""Functions of bytes, one for each reader. Errors that a reader documents end in them, and others do not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.completions.body import CompletionBody
from millrace.deploy.api.messages.bodies import MessagesBody
from millrace.deploy.api.responses.bodies import ResponsesBody
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.errors import ApiError
from millrace.deploy.http.json_limits import JsonLimits, parse_object
from millrace.deploy.websocket.envelopes import parse, read_envelope
from millrace.model.checkpoint.safetensors import Checkpoint
from millrace.model.demo import WEIGHTS
from millrace.model.errors import CheckpointError, TemplateError
from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.detokenizer import IncrementalDecoder, TextTable
from millrace.model.text.grammar import GrammarCompiler, GrammarError, grammar_text
from millrace.model.text.tokenizer import Tokenizer
from millrace.model.text.vocabulary import Vocabulary
from millrace.runtime.processes.frames import HELLO, FrameReader, LinkError
from millrace.runtime.processes.type_fields import codec_for
from millrace.runtime.processes.wire import WireError
from millrace.stages.detokenize.stop_strings import StopMatcher
from millrace.stages.params import SamplingParams
from millrace.stages.split.protocol import CODEC

KINDS = ("json", "regex", "grammar", "choice")


def body(data: bytes) -> None:
    """A request's body, as each API that generates text reads it."""
    with suppress(ApiError):
        raw = parse_object(data, JsonLimits())
        for kind in (ChatBody, CompletionBody, ResponsesBody, MessagesBody):
            with suppress(ApiError):
                read, _ = read_body(kind, raw, strict_fields=False)
                if isinstance(read, ChatBody | CompletionBody):
                    read.sampling_params(SamplingParams())


def safetensors(data: bytes) -> None:
    """A file of weights: its header, and each tensor that it names."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(data)
        with suppress(CheckpointError):
            checkpoint = Checkpoint(Path(folder))
            for name in checkpoint.names:
                with suppress(CheckpointError):
                    checkpoint.array(name).sum()


def tokenizer(data: bytes) -> None:
    """A tokenizer.json, and the round trip of a short text through it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_bytes(data)
        with suppress(CheckpointError):
            read = Tokenizer.read(Path(folder))
            read.decode(read.encode("a b \u2603")[:100])


def template(data: bytes) -> None:
    """A chat template, and one render."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "<|user|> u"}]
    with suppress(TemplateError):
        ChatTemplate(data.decode("utf-8", "replace"), bundled()).render(messages)


def grammar(data: bytes) -> None:
    """A schema, regular expression, grammar or choice, compiled for the bundled model."""
    if not data:
        return
    kind, text = KINDS[data[0] % len(KINDS)], data[1:].decode("utf-8", "replace")
    with suppress(GrammarError):
        compiler().compile(grammar_text(kind, text.split("\n") if kind == "choice" else text))


def detokenizer(data: bytes) -> None:
    """Tokens to text, piece by piece: the pieces together are the whole text, and stop where a stop string first is."""
    ids = [value * 7 % len(table()) for value in data]
    decoder = IncrementalDecoder(table(), skip_special_tokens=False)
    pieces = [decoder.push(token_id) for token_id in ids]
    pieces.append(decoder.flush())
    text = "".join(pieces)
    assert text == bundled().decode(ids, skip_special_tokens=False), ids
    stops = [stop for stop in (text[3:6], text[5:7]) if stop]
    matcher, shown, found = StopMatcher(stops), "", None
    for piece in pieces:
        part, found = matcher.push(piece)
        shown += part
        if found is not None:
            break
    else:
        shown += matcher.flush()
    first = min((text.find(stop) + len(stop), text.find(stop)) for stop in stops) if stops else None
    assert shown == (text if first is None else text[: first[1]]), (text, stops)


def wire(data: bytes) -> None:
    """A message between the two processes of split mode: its header up to the first zero byte, and its body."""
    header, _, rest = data.partition(b"\0")
    with suppress(WireError):
        CODEC.decode(header, rest)


def frames(data: bytes) -> None:
    """What arrives over a link: a hello, from which the codec follows, and messages."""
    reader, codec = FrameReader(max_frame_bytes=1 << 16), CODEC
    reader.feed(data)
    with suppress(LinkError, WireError, orjson.JSONDecodeError):
        while (frame := reader.next()) is not None:
            kind, _, header, rest, _ = frame
            if kind == HELLO:
                codec = codec_for(CODEC, orjson.loads(header)).shifted(-0.5)
            else:
                codec.decode(header, rest)
    assert len(reader) <= len(data)


def websocket(data: bytes) -> None:
    """A client's message on the WebSocket."""
    with suppress(ApiError):
        read_envelope(parse(data, 1 << 20), strict_fields=True)


@cache
def bundled() -> Tokenizer:
    """The bundled model's tokenizer."""
    return Tokenizer.read(WEIGHTS)


@cache
def table() -> TextTable:
    """Its tokens' texts."""
    return TextTable(bundled())


@cache
def compiler() -> GrammarCompiler:
    """Its grammars."""
    size = len(table())
    return GrammarCompiler(Vocabulary(table().bytes, bundled().special_ids, (0,), size, bundled().to_json()))


TARGETS: dict[str, Callable[[bytes], Any]] = {
    target.__name__: target
    for target in (body, safetensors, tokenizer, template, grammar, detokenizer, wire, frames, websocket)
}
