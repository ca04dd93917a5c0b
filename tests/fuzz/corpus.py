"""Inputs to begin with, by target. An input that crashed a target stays here, with what it found."""

from __future__ import annotations

import json
import struct
from typing import Any

from millrace.model.demo import WEIGHTS
from millrace.runtime.processes.frames import HELLO, ITEM, WORD, pack_frame
from millrace.runtime.processes.type_fields import describe
from millrace.stages.split.protocol import CODEC, StatusQuery


def _json(*values: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def _tensors(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _frames(*frames: tuple[int, bytes, Any]) -> bytes:
    return b"".join(b"".join(pack_frame(kind, 0, header, body)) for kind, header, body in frames)


_F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
_TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}
_TYPES = [["StageStatus", ["name", "last_progress_s"], ["name"]], ["StatusQuery", ["number", "what", "new"], []]]
_HEADER, _BUFFERS = CODEC.encode(StatusQuery(1, "books"))

CORPUS: dict[str, tuple[bytes, ...]] = {
    "body": _json(
        {"prompt": "a", "max_tokens": 2, "temperature": 0.5, "stop": ["b"], "logit_bias": {"5": 1}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [], "n": 2},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]},
        {"input": [{"type": "message", "role": "user", "content": "a"}], "text": {"format": {"type": "text"}}},
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "system": "s"},
    ),
    "safetensors": (
        _tensors({"a": _F32}, bytes(16)),
        _tensors({"a": _F32, "__metadata__": {"format": "pt"}}, bytes(16)),
        _tensors({"a": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}}, bytes(2)),
        _tensors({}),
    ),
    "tokenizer": (
        *_json(_TOKENIZER),
        b'{"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": ["a b"]}}',  # a panic of the library
        (WEIGHTS / "tokenizer.json").read_bytes()[:4096],
    ),
    "template": (
        b"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}",
        b"{%- if messages[0].role == 'system' -%}{{ raise_exception('no') }}{%- endif -%}{{ messages | tojson }}",
        b"{% macro f(x) %}{{ x ~ x }}{% endmacro %}{% set ns = namespace(a=1) %}{{ f(ns.a) }}{{ strftime_now('%d') }}",
    ),
    "grammar": (
        b'\0{"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}',
        b'\0{"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1}',
        b"\1^[a-c]{2,3}(x|y)?$",
        b'\2start: "a" NAME\nNAME: /[a-z]+/',
        b"\3yes\nno",
    ),
    "detokenizer": (bytes(range(40)), b"\xff\x80\x00\x01" * 8, "\u00e9\u2603".encode()),
    "wire": (_HEADER + b"\0" + b"".join(bytes(each) for each in _BUFFERS), b"[16,1]\0", b"[4,0,[3]]\0" + bytes(24)),
    "frames": (
        _frames((HELLO, json.dumps(_TYPES).encode(), []), (WORD, _HEADER, _BUFFERS)),
        _frames((HELLO, json.dumps(describe(CODEC)[:2]).encode(), []), (ITEM, b'[17,7,"a",0.5]', [])),
        _frames((WORD, _HEADER, _BUFFERS), (WORD, b"[4,0,3]", [bytes(24)])),
    ),
    "websocket": _json(
        {"type": "create", "id": "a", "endpoint": "completions", "body": {"prompt": "a"}, "credit": 3},
        {"type": "credit", "id": "a", "n": 5, "last": 3},
        {"type": "resume", "id": "a", "token": "t", "last": 0},
    ),
}
