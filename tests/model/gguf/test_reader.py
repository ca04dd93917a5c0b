"""Headers of GGUF files: read as the `gguf` package reads them, and refused in words where they are wrong."""

from __future__ import annotations

import os
import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.model.errors import CheckpointError
from millrace.model.gguf.blocks import matrix
from millrace.model.gguf.choice import choose
from millrace.model.gguf.reader import GgufFile, open_files

NUM_MUTATIONS = 10_000 if os.environ.get("MILLRACE_FULL") else 400


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def string(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def listed(key: str, values: list[str]) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def tensor(name: str, axes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)


PAIRS = [
    string("general.architecture", "llama"),
    number("llama.block_count", 1),
    listed("tokenizer.ggml.tokens", ["a", "b", "\u2581c"]),
    text("llama.rope.freq_base") + struct.pack("<If", 6, 1e4),
    text("tokenizer.ggml.add_bos_token") + struct.pack("<IB", 7, 1),
    text("tokenizer.ggml.scores") + struct.pack("<IIQ3f", 9, 6, 3, 0.0, -1.0, -2.0),
]
TENSORS = [tensor("token_embd.weight", (32, 3), 8, 0), tensor("output_norm.weight", (32,), 0, 128)]


def whole(
    pairs: list[bytes] = PAIRS, tensors: list[bytes] = TENSORS, data: bytes = bytes(256), version: int = 3
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def opened(raw: bytes, tmp_path: Path, name: str = "m.gguf") -> GgufFile:
    (tmp_path / name).write_bytes(raw)
    return GgufFile(tmp_path / name)


def refusal(raw: bytes, tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(raw, tmp_path)
    return str(caught.value)


def test_a_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="not installed: gguf")
    ours = opened(whole(), tmp_path)
    theirs = gguf.GGUFReader(tmp_path / "m.gguf")
    values = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    lists = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in ours.metadata.items()}
    assert lists == values and ours.metadata["tokenizer.ggml.scores"].dtype == np.float32
    for other in theirs.tensors:
        mine = ours.tensors[other.name]
        assert (mine.type, mine.shape, mine.begin) == (
            other.tensor_type.name,
            tuple(map(int, reversed(other.shape))),
            other.data_offset,
        )
        assert np.array_equal(ours.packed(other.name), np.asarray(other.data).reshape(-1).view(np.uint8))


WRONG: list[tuple[bytes, str]] = [
    (b"GGUF", "too short"),
    (b"NOPE" + bytes(60), "does not begin with GGUF"),
    (whole(version=1), "version 1"),
    (whole(version=0x03000000), "big-endian"),
    (whole([*PAIRS, PAIRS[0]]), "general.architecture twice"),
    (whole([text("a") + struct.pack("<I", 99)]), "unknown type 99"),
    (whole([text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(99)]), "an array of the type 9"),
    (whole([text("a") + struct.pack("<IIQ", 9, 8, 2**40)]), "claims 1099511627776 items"),
    (whole([text("a") + struct.pack("<IQ", 8, 2**62)]), "claims a text of 4611686018427387904 bytes"),
    (whole([text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"]), "not valid UTF-8"),
    (whole(tensors=[TENSORS[0], TENSORS[0]]), "token_embd.weight twice"),
    (whole(tensors=[tensor("a", (), 0, 0)]), "0 axes"),
    (whole(tensors=[tensor("a", (1, 1, 1, 1, 1), 0, 0)]), "5 axes"),
    (whole(tensors=[tensor("a", (31,), 8, 0)]), "is not whole blocks of 32"),
    (whole(tensors=[tensor("a", (0,), 0, 0)]), "is not whole blocks"),
    (whole(tensors=[tensor("a", (256,), 16, 0)]), "its type IQ2_XXS is not read"),
    (whole(tensors=[tensor("a", (256,), 77, 0)]), "its type number 77 is not read"),
    (whole(tensors=[tensor("a", (32,), 0, 4)]), "begins at 4"),
    (whole(tensors=[TENSORS[0], tensor("a", (32,), 0, 64)]), "inside another"),
    (whole(tensors=[tensor("a", (2**40,), 0, 0)]), "the file is cut"),
    (whole(tensors=[tensor("a", (2**63, 2**63), 0, 0)]), "the file is cut"),
    (whole(data=bytes(200)), "the file is cut"),
    (whole([*PAIRS, number("general.alignment", 24)]), "a power of two"),
    (whole()[:-262], "the file is cut"),
]


@pytest.mark.parametrize(("raw", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_header_is_refused_with_what_is_wrong(raw: bytes, message: str, tmp_path: Path) -> None:
    told = refusal(raw, tmp_path)
    assert message in told and told.startswith("m.gguf: ") and told.isprintable()


def test_mutated_headers_are_refused_in_words_or_read_as_they_are(tmp_path: Path) -> None:
    dice, raw = random.Random(7), whole()
    for _ in range(NUM_MUTATIONS):
        changed = bytearray(raw)
        for _ in range(dice.choice((1, 1, 2, 5))):
            place = dice.randrange(len(raw) - 256)
            changed[place] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        cut = changed if dice.random() < 0.8 else changed[: dice.randrange(len(changed))]
        try:
            file = opened(bytes(cut), tmp_path)
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 600
            continue
        assert all(place.begin + place.num_bytes <= len(cut) for place in file.tensors.values())


def test_rows_that_were_packed_leave_the_memory_of_the_file(tmp_path: Path) -> None:
    rows, columns = 4096, 1024  # 4.5 MiB
    raw = whole(tensors=[tensor("a.weight", (columns, rows), 8, 0)], data=bytes(rows * columns // 32 * 34))
    file = opened(raw, tmp_path)
    found = matrix("Q8_0", file.packed("a.weight"), (rows, columns), partial(file.forget, "a.weight"))
    assert found is not None

    def resident() -> int:
        parts = Path("/proc/self/smaps").read_text().split(str(file.path))
        return sum(int(part.split("Rss:")[1].split()[0]) for part in parts[1:])

    assert found.rows(0, rows).num_rows == rows and resident() >= 4096  # KiB
    found.forget(0, rows // 2)
    assert resident() <= 2300
    found.forget(rows // 2, rows)
    assert resident() <= 128


def parts(tmp_path: Path, told: list[int], names: list[str]) -> list[Path]:
    paths = []
    for index, (count, name) in enumerate(zip(told, names, strict=True)):
        path = tmp_path / f"m-0000{index + 1}-of-0000{len(names)}.gguf"
        path.write_bytes(whole([*PAIRS, number("split.count", count)], [tensor(name, (32,), 0, 0)]))
        paths.append(path)
    return paths


def test_a_model_in_several_files_is_opened_by_any_of_them(tmp_path: Path) -> None:
    for path in parts(tmp_path, [2, 2], ["a.weight", "b.weight"]):
        assert [sorted(file.tensors) for file in open_files(path)] == [["a.weight"], ["b.weight"]]


SPLITS: list[tuple[Any, ...]] = [([2, 3], ["a", "b"], "split.count = 3"), ([2, 2], ["a", "a"], "is in another part")]


@pytest.mark.parametrize(("told", "names", "message"), SPLITS)
def test_parts_that_do_not_fit_together_are_refused(
    told: list[int], names: list[str], message: str, tmp_path: Path
) -> None:
    first, _ = parts(tmp_path, told, names)
    with pytest.raises(CheckpointError, match=message):
        open_files(first)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = parts(tmp_path, [2, 2], ["a", "b"])
    second.unlink()
    with pytest.raises(CheckpointError, match="1 are missing: m-00002-of-00002.gguf"):
        open_files(first)


NAMES = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "big/m-Q6_K-00001-of-00002.gguf", "big/m-Q6_K-00002-of-00002.gguf"]


def test_a_file_is_chosen_by_a_word_of_its_name() -> None:
    assert choose(NAMES, None, "r") == ["m-Q4_K_M.gguf"]
    assert choose(NAMES, "q8_0", "r") == ["m-Q8_0.gguf"]
    assert choose(NAMES, "Q6_K", "r") == NAMES[2:]
    assert choose(["only-F16.gguf", "mmproj-F16.gguf"], None, "r") == ["only-F16.gguf"]
    assert choose(["config.json"], None, "r") is None


def test_a_choice_that_fits_no_file_or_several_lists_them() -> None:
    with pytest.raises(CheckpointError, match=r"r: no file is Q5_0; choose .*m-Q8_0.gguf"):
        choose(NAMES, "Q5_0", "r")
    with pytest.raises(CheckpointError, match="2 files are F16"):
        choose(["a-F16.gguf", "b-F16.gguf"], "F16", "r")
