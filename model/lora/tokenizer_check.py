"""Whether the tokenizer in an adapter's folder is the model's: the model's is used, so another one would mislead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import AdapterError, CheckpointError
from ..files import JSON_BYTES, read_bytes, read_json

TOKENIZER, ADDED = "tokenizer.json", "added_tokens.json"
MAX_SHOWN = 3  # tokens in a message


def check_tokenizer(root: Path, name: str, base: Path, tokens: Callable[[], Sequence[str | None]]) -> None:
    """Raises AdapterError if a tokenizer in the adapter's folder `root` has a token that the model's has not.

    `base` is the model's folder; `tokens` returns the model's tokens by id, and is called only where the files differ.
    Folders without a tokenizer pass.
    """
    try:
        raw = read_bytes(root, TOKENIZER)
        if raw is not None and raw == _of_base(base):
            return
        wrong = _other_tokens(root, tokens) if raw is not None or (root / ADDED).exists() else []
    except CheckpointError as error:
        raise AdapterError(f"adapter '{name}': {error}") from None
    if wrong:
        shown = ", ".join(repr(token[:40]) for token, _ in wrong[:MAX_SHOWN])
        what = f"adds {len(wrong)} token{'s' if len(wrong) > 1 else ''} to the model's tokenizer ({shown}"
        raise AdapterError(
            f"adapter '{name}' {what}{', …' if len(wrong) > MAX_SHOWN else ''}), which is used without them; serve a "
            f"model with these tokens, or remove {TOKENIZER} and {ADDED} from the folder if they do not matter"
        )


def _of_base(base: Path) -> bytes | None:
    try:
        return read_bytes(base, TOKENIZER)
    except CheckpointError:  # its tokenizer is in another file
        return None


def _other_tokens(root: Path, tokens: Callable[[], Sequence[str | None]]) -> list[tuple[str, int]]:
    known = tokens()
    own = [*_tokens_of(root), *(read_json(root, ADDED) or {}).items()]
    found = {(token, id_): None for token, id_ in own if isinstance(token, str) and type(id_) is int}
    return [(token, id_) for token, id_ in found if not (0 <= id_ < len(known) and known[id_] == token)]


def _tokens_of(root: Path) -> Iterator[tuple[Any, Any]]:
    """(token, id) of a folder's tokenizer.json. One too large for Python objects is read by the tokenizers library."""
    raw = read_bytes(root, TOKENIZER)
    if raw is None or len(raw) <= JSON_BYTES:
        return _vocabulary(read_json(root, TOKENIZER) or {})
    from tokenizers import Tokenizer

    try:
        return iter(Tokenizer.from_buffer(raw).get_vocab(with_added_tokens=True).items())
    except BaseException as error:  # the bindings raise Exception itself, and a panic is not even one
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise CheckpointError(f"{TOKENIZER} ({root}): not a tokenizer: {str(error)[:200]}") from None


def _vocabulary(values: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(token, id) of a tokenizer.json, as far as it has the usual form."""
    model, added = values.get("model"), values.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):  # of unigrams, with their scores
        yield from ((entry[0], place) for place, entry in enumerate(vocabulary) if isinstance(entry, list) and entry)
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            yield entry.get("content"), entry.get("id")
