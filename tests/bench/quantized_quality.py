"""What quantization costs a model: its perplexity on a text it was not trained on, in each way of keeping weights, keys
and values, beside bfloat16's.

    python -m tests.bench.quantized_quality --json results.json
    python -m tests.bench.quantized_quality --model PATH --text FILE

Without `--text` the text are held-out documents of the bundled model's grammar, each by itself; a file is cut into
pieces of `--context` tokens. Every token but the first of a piece is predicted from those before it. The native step
computes all of it, so int8 keys and values are read back as they were written. bfloat16's weights are as an engine has
them: in 12 bits a number where bf16 is multiplied as such.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import GROUP_SIZE, NativeModel
from millrace.kernels.native.shape import CacheDType, Quantization
from millrace.model.checkpoint.tensor_shapes import expected_shapes, open_source
from millrace.model.decoder.native_decoder import native_shape
from millrace.model.decoder.rope import rope_tables
from millrace.model.demo import WEIGHTS
from millrace.model.demo.making.corpus import documents
from millrace.model.families.registry import read_spec
from millrace.model.text.tokenizer import Tokenizer

SEED = 4  # of the documents; evaluation.json is made with another
BLOCK_SIZE = 16
CONTEXT = 1024  # tokens of a piece, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How weights, keys and values are kept."""

    quantization: Quantization | None = None
    group_size: int = GROUP_SIZE
    cache_dtype: CacheDType = "bfloat16"

    @property
    def label(self) -> str:
        groups = f" in groups of {self.group_size}" if self.quantization == "int4" else ""
        cache = ", int8 KV" if self.cache_dtype == "int8" else ""
        return f"{self.quantization or 'bfloat16'}{groups}{cache}"


PLAIN = Form()
FORMS = (
    PLAIN,
    Form(quantization="int8"),
    Form(cache_dtype="int8"),
    Form(quantization="int8", cache_dtype="int8"),
    *(Form(quantization="int4", group_size=size) for size in (16, 32, 64, 128)),
    Form(quantization="int4", cache_dtype="int8"),
)


def load(root: Path, form: Form) -> NativeModel:
    """The checkpoint in `root`, in bfloat16 but for what `form` says."""
    source, config = open_source(root, read_spec(root), "auto")
    model = NativeModel(
        native_shape(config),
        "bfloat16",
        [rope_tables(rope, CONTEXT) for rope in config.ropes],
        CONTEXT,
        quantization=form.quantization,
        group_size=form.group_size,
        cache_dtype=form.cache_dtype,
    )
    for name in expected_shapes(config):
        model.weights.set_tensor(name, source.array(name))
    model.weights.encode_bf16_12bit()  # as an engine does
    return model


def held_out(root: Path, num_documents: int) -> list[list[int]]:
    """Token ids of documents whose keys the bundled model was never trained on."""
    tokenizer = Tokenizer.read(root)
    texts = itertools.islice(documents(SEED, "held_out"), num_documents)
    return [tokenizer.encode(text)[:CONTEXT] for text in texts]


def pieces_of(root: Path, text: str, context: int) -> list[list[int]]:
    """Token ids of a text, cut into pieces."""
    ids = Tokenizer.read(root).encode(text)
    return [ids[begin : begin + context] for begin in range(0, len(ids) - 1, context)]


def mean_loss(model: NativeModel, pieces: Sequence[Sequence[int]]) -> float:
    """Mean of -log p(token) over all tokens but the first of each piece, nats."""
    cache = NativeCache.uniform(model.shape, -(-CONTEXT // BLOCK_SIZE), BLOCK_SIZE, model.cache_dtype)
    losses = [_losses(model, cache, np.array(piece, np.int64)) for piece in pieces]
    return float(np.concatenate(losses).mean())


def _losses(model: NativeModel, cache: NativeCache, ids: Any) -> Any:
    """[T - 1] of one piece, computed in one step."""
    count = len(ids)
    places = np.arange(count)
    logits = np.empty((count, model.shape.vocab_size), np.float32)
    model.step(
        cache,
        input_ids=ids,
        positions=places,
        slot_mapping=places,
        block_tables=np.arange(cache.num_blocks, dtype=np.int32)[None],
        query_starts=np.array([0, count], np.int32),
        lengths=np.array([count], np.int32),
        logits_rows=places,
        logits=logits,
    )
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return np.log(np.exp(wide).sum(1)) - wide[places[:-1], ids[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="folder of a checkpoint")
    parser.add_argument("--text", type=Path, help="file with a text that it was not trained on")
    parser.add_argument("--documents", type=int, default=300, help="without --text: so many of the grammar's")
    parser.add_argument("--context", type=int, default=512, help=f"tokens of a piece of that text, at most {CONTEXT}")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    if args.text is None:
        pieces = held_out(args.model, args.documents)
    else:
        pieces = pieces_of(args.model, args.text.read_text("utf-8"), min(args.context, CONTEXT))
    num_tokens = sum(len(piece) - 1 for piece in pieces)
    print(f"{num_tokens} tokens\n{'':32} perplexity  against bfloat16  weights MiB  bytes a token of KV")
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        model = load(args.model, form)
        perplexity = math.exp(mean_loss(model, pieces))
        increase = perplexity / (rows[0]["perplexity"] if rows else perplexity) - 1
        kv_bytes = model.shape.bytes_per_block(BLOCK_SIZE, model.cache_dtype) // BLOCK_SIZE
        weights_mib = model.weights.num_bytes / 2**20
        print(f"{form.label:32} {perplexity:10.4f} {increase:+16.3%} {weights_mib:12.2f} {kv_bytes:20}")
        rows.append(
            asdict(form)
            | {
                "perplexity": perplexity,
                "increase": increase,
                "weights_bytes": model.weights.num_bytes,
                "kv_bytes_per_token": kv_bytes,
            }
        )
    if args.json:
        args.json.write_text(json.dumps({"num_tokens": num_tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
