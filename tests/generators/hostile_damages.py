"""Damages of a checkpoint's folder: one file each, drawn at random. After each, no start may serve the folder."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG, GENERATION, WHOLE, INDEX = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (CONFIG, GENERATION, WHOLE, TOKENIZER, TOKENIZER_CONFIG, INDEX)
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


Damage = Callable[[random.Random, Path], str]  # returns what it did


# -- files


def not_a_file(rng: random.Random, root: Path) -> str:
    file = root / rng.choice(FILES[:5])
    file.unlink()
    kind = rng.choice(["itself", "circle", "nowhere", "outside", "device", "fifo", "folder"])
    if kind == "itself":
        file.symlink_to(file.name)
    elif kind == "circle":
        (root / "circle").symlink_to(file.name)
        file.symlink_to("circle")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"nowhere": "/no/such/file", "outside": "/etc/passwd", "device": "/dev/zero"}[kind])
    return f"{file.name} is {kind}"


def no_text(rng: random.Random, root: Path) -> str:
    name = rng.choice([CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG])
    contents = [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b"\0" * 64,
        b"\xff\xfe{}",
        b"[" * 10**5,
        b'{"a":' * 10**5,
        b'"' + b"a" * 99,
        b"9" * 5000,
    ]
    at = rng.randrange(len(contents))
    (root / name).write_bytes(contents[at])
    return f"{name} is {contents[at][:12]!r}"


def long_text(rng: random.Random, root: Path) -> str:
    name = rng.choice([CONFIG, GENERATION, TOKENIZER_CONFIG, TOKENIZER])
    piece = rng.choice(["[],", "{},", '"abc",', "1.5,"])
    (root / name).write_text('{"a": [' + piece * (rng.randint(9, 40) * 10**6 // len(piece)) + "0]}")
    return f"{name} of {piece}"


def cut(rng: random.Random, root: Path) -> str:
    name = rng.choice([CONFIG, WHOLE, TOKENIZER])
    content = (root / name).read_bytes()
    size = rng.randrange(len(content) - 2)
    (root / name).write_bytes(content[:size])
    return f"{name} of {size} bytes"


# -- config.json


def _set(root: Path, name: str, **keys: Any) -> str:
    values = json.loads((root / name).read_text())
    (root / name).write_text(json.dumps({**values, **keys}))
    return f"{name} {str(keys)[:99]}"


def size(rng: random.Random, root: Path) -> str:
    values = [
        0,
        -1,
        10**9,
        2**31 - 1,
        2**31,
        2**63,
        10**400,
        1.5,
        1e308,
        "64",
        True,
        [64],
        {"a": 1},
        rng.randint(10**3, 10**9),
    ]
    return _set(root, CONFIG, **{rng.choice(SIZES): rng.choice(values)})


def positions(rng: random.Random, root: Path) -> str:
    return _set(
        root, CONFIG, max_position_embeddings=rng.choice([2**31 - 1, 10**9, rng.randint(10**9, 2**31 - 1), 10**30, -5])
    )


def number(rng: random.Random, root: Path) -> str:
    key = rng.choice(["rms_norm_eps", "rope_theta"])
    values = [1e308, -1, "x", [1], float("nan"), float("inf"), 10**400] + [0] * (key == "rope_theta")
    if key == "rope_theta":
        return _set(root, CONFIG, rope_parameters=None, rope_theta=rng.choice(values))
    return _set(root, CONFIG, **{key: rng.choice(values)})


def rope(rng: random.Random, root: Path) -> str:
    kind = rng.choice(["linear", "dynamic", "yarn", "llama3"])
    values = {
        "rope_type": kind,
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    wrong = rng.choice(
        [
            ("factor", 1e308),
            ("factor", 0),
            ("factor", -2),
            ("factor", "4"),
            ("factor", [4]),
            ("factor", 10**400),
            ("factor", float("nan")),
            ("rope_theta", 1e308),
            ("rope_theta", 0),
            ("rope_type", "x"),
            ("rope_type", ["yarn"]),
            ("rope_type", None),
            ("rope_type", {"a": 1}),
        ]
    )
    return _set(root, CONFIG, rope_parameters={**values, wrong[0]: wrong[1]})


def form(rng: random.Random, root: Path) -> str:
    wrong = [
        {"model_type": rng.choice(["gpt2", None, 5, ["llama"], "llama\n" * 9])},
        {"architectures": rng.choice([5, "x", {"a": 1}, ["X" * 10**5], [[["a"]]]])},
        {"rope_parameters": rng.choice([5, "x", [1], [[]]])},
        {"layer_types": rng.choice([5, "x", ["full_attention"] * 999, [None], [["x"]]])},
        {"tie_word_embeddings": rng.choice(["x", 2, [1]])},
        {"hidden_act": rng.choice(["gelu", ["silu"], 5, {"a": 1}])},
        {"dtype": rng.choice(["int8", 5, ["float32"], {"a": 1}, "x" * 10**5])},
        {"eos_token_id": rng.choice(["x", [["x"]], 1.5, {"a": 1}, True])},
        {"quantization_config": rng.choice([{"quant_method": "awq"}, 5, ["x"], {"a": "b" * 10**5}])},
        {"auto_map": {"AutoConfig": "x.Y"}},
        {"a": {"b": [{"auto_map": {"AutoConfig": "x.Y"}}]}},
    ]
    return _set(root, CONFIG, **rng.choice(wrong))


def generation(rng: random.Random, root: Path) -> str:
    wrong = [
        {"eos_token_id": rng.choice(["x", 1.5, [[1]], {"a": 1}, True])},
        {"temperature": rng.choice(["hot", -1, [1], float("nan"), 1e308, 10**400])},
        {"top_p": rng.choice([1.5, -1, "x", [1]])},
        {"top_k": rng.choice([-2, "x", [1], 1e308])},
        {"min_p": rng.choice([1.5, -1, "x"])},
        {"repetition_penalty": rng.choice([-1, "x", float("inf")])},
        {"max_new_tokens": rng.choice([0, -1, 1.5, "x", 10**30])},
    ]
    return _set(root, GENERATION, do_sample=True, **rng.choice(wrong))


# -- weights


def _rewrite(root: Path, change: Callable[[dict[str, Any]], Any], data: bytes | None = None) -> None:
    content = (root / WHOLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    new = change(header)
    text = new if isinstance(new, bytes) else json.dumps(header).encode()
    (root / WHOLE).write_bytes(
        len(text).to_bytes(8, "little") + text + (content[8 + length :] if data is None else data)
    )


def header_length(rng: random.Random, root: Path) -> str:
    content = (root / WHOLE).read_bytes()
    length = rng.choice([0, 1, 2**63, 2**64 - 1, 10**8, len(content), rng.randint(9 << 20, 2**40)])
    (root / WHOLE).write_bytes(length.to_bytes(8, "little") + content[8:])
    return str(length)


def header(rng: random.Random, root: Path) -> str:
    texts = [
        b"",
        b"{",
        b"[]",
        b"5",
        b"[" * 10**5,
        b'{"a":' * 10**5,
        b'{"\xff": 1}',
        b"{}",
        b'{"a": 1, "a": 2}',
        b'{"a": 5}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "data_offsets": [0, 8]}}',
        b'{"' + b"a" * 10**6 + b'": {}}',
        b"{" + b'"a\\n":[],' * 10**5 + b'"b":1}',
    ]
    text = rng.choice(texts)
    _rewrite(root, lambda _: text)
    return repr(text[:20])


def tensor(rng: random.Random, root: Path) -> str:
    names = [name for name in json.loads(_header_text(root)) if name != "__metadata__"]
    name = rng.choice(names)
    wrong = [
        lambda t: t.update(shape=[2**62, 2**62]),
        lambda t: t.update(shape=[-1, -1]),
        lambda t: t.update(shape="x"),
        lambda t: t.update(shape=[1] * 10**5),
        lambda t: t.update(shape=[10**300] * 60),
        lambda t: t.update(shape=[*t["shape"], 1]),
        lambda t: t.update(dtype=rng.choice(["F7", None, 5, "I8", "BOOL", ["F32"], "x\ny"])),
        lambda t: t.update(data_offsets=[offset + 64 for offset in t["data_offsets"]]),
        lambda t: t.update(data_offsets=[offset - 64 for offset in t["data_offsets"]]),
        lambda t: t["data_offsets"].reverse(),
        lambda t: t.update(
            data_offsets=rng.choice([5, "x", [0], [0, 1, 2], [0, 2**64], [0, 1e9], [None, None], [0, 10**400]])
        ),
        lambda t: t.clear(),
    ]
    change = rng.choice(wrong)
    _rewrite(root, lambda header: change(header[name]))
    return name


def names(rng: random.Random, root: Path) -> str:
    tensors = [name for name in json.loads(_header_text(root)) if name != "__metadata__"]
    name = rng.choice(tensors)
    other = rng.choice(
        ["x\ny", "a" * 10**5, "model.layers.999999999.x", "model.layers.7777.x.weight", "\u202e", "model.extra.weight"]
    )
    _rewrite(root, lambda header: header.__setitem__(other, header.pop(name)))
    return f"{name} is {other[:30]!r}"


def sparse(rng: random.Random, root: Path) -> str:
    """A file of holes, larger than the memory, with a header and a configuration that agree with it."""
    rows = rng.choice([2**30, 2**31 - 1, rng.randint(2**28, 2**31 - 1)])
    config = json.loads((root / CONFIG).read_text())
    shapes: dict[str, Any] = json.loads(_header_text(root))
    shapes.pop("__metadata__", None)
    position, columns = 0, config["hidden_size"]
    for name, entry in shapes.items():
        if "embed_tokens" in name or "lm_head" in name:
            entry["shape"] = [rows, columns]
        count = 1
        for axis in entry["shape"]:
            count *= axis
        num_bytes = count * {"F32": 4, "BF16": 2, "F16": 2}[entry["dtype"]]
        entry["data_offsets"] = [position, position + num_bytes]
        position += num_bytes
    text = json.dumps(shapes).encode()
    with (root / WHOLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return _set(root, CONFIG, vocab_size=rows)


def values(rng: random.Random, root: Path) -> str:
    content = bytearray((root / WHOLE).read_bytes())
    length = int.from_bytes(content[:8], "little")
    at = 8 + length + rng.randrange((len(content) - length) // 64 - 8) * 64
    content[at : at + 4] = rng.choice([b"\x80\x7f\x80\x7f", b"\x80\xff\x80\xff", b"\xff\xff\xff\xff"])
    (root / WHOLE).write_bytes(content)
    return f"not a number at byte {at}"


def index(rng: random.Random, root: Path) -> str:
    (root / WHOLE).rename(root / "x.safetensors")
    name = rng.choice(
        [
            "../x.safetensors",
            "/etc/passwd",
            "a\0.safetensors",
            "x.bin",
            5,
            None,
            ["x.safetensors"],
            "a" * 10**4 + ".safetensors",
            "gone.safetensors",
            "x.safetensors/x.safetensors",
            "./x.safetensors",
            "config.json",
            "\n.safetensors",
        ]
    )
    whole = rng.choice(
        [{"weight_map": {"a": name}}, {"weight_map": [name]}, {"weight_map": {}}, {}, [], {"weight_map": name}]
    )
    (root / INDEX).write_text(json.dumps(whole))
    return str(whole)[:99]


# -- the tokenizer


def added_tokens(rng: random.Random, root: Path) -> str:
    tokenizer = json.loads((root / TOKENIZER).read_text())
    count = rng.choice([3 * 10**4, 10**5, 10**6])
    flags = '"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}'
    tokenizer["added_tokens"] = ["HERE"]
    tokens = ",".join(f'{{"id":{5000 + at},"content":"<{at}>",{flags}' for at in range(count))
    (root / TOKENIZER).write_text(json.dumps(tokenizer).replace('"HERE"', tokens))
    return f"{count} added tokens"


def vocabulary(rng: random.Random, root: Path) -> str:
    tokenizer = json.loads((root / TOKENIZER).read_text())
    vocab = tokenizer["model"]["vocab"]
    kind = rng.choice(["far", "many", "text", "gone", "number"])
    if kind == "far":
        vocab["zzzz"] = rng.choice([10**6, 2**31, 2**32 - 1])
    elif kind == "many":
        tokenizer["model"]["vocab"] |= {f"z{at}": 10**5 + at for at in range(rng.choice([10**5, 5 * 10**5]))}
    elif kind == "gone":
        tokenizer["model"].pop("vocab")
    else:
        tokenizer["model"]["vocab"] = {"text": "x", "number": 5}[kind]
    (root / TOKENIZER).write_text(json.dumps(tokenizer))
    return kind


def tokenizer_form(rng: random.Random, root: Path) -> str:
    wrong = [
        {"chat_template": rng.choice([5, [5], [["x"]], [{"name": "x"}], {"a": 1}, "{{", "{% for %}"])},
        {"added_tokens_decoder": rng.choice([5, ["x"], {"x": 5}, {"1": 5}, {"x": {"content": "y"}}, {"1": {}}])},
        {"eos_token": rng.choice([5, ["x"], {"a": 1}])},
        {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
    ]
    return _set(root, TOKENIZER_CONFIG, **rng.choice(wrong))


def _header_text(root: Path) -> bytes:
    content = (root / WHOLE).read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


DAMAGES: tuple[Damage, ...] = (
    not_a_file, no_text, long_text, cut, size, positions, number, rope, form, generation, header_length, header, tensor,
    names, sparse, values, index, added_tokens, vocabulary, tokenizer_form,
)  # fmt: skip
