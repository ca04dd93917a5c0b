"""The checkpoints of rows in a folder, and the answers of transformers to them, each made when first needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import logging

from tests.families.checkpoint import make_model, write
from tests.families.oracle import LENGTHS, NUM_NEW, Answer, answer, beams, prompts
from tests.families.row import Row
from tests.families.rows import ROWS


class Entry:
    """A row with its checkpoint and, once they are asked for, the answers of transformers."""

    def __init__(
        self,
        row: Row,
        folder: Path,
        num_new: int = NUM_NEW,
        lengths: tuple[int, ...] = LENGTHS,
        model: PreTrainedModel | None = None,
    ) -> None:
        self.row, self._num_new = row, num_new
        self._lengths = row.lengths[: len(lengths)] or lengths
        with quiet():
            self._model = make_model(row) if model is None else model
            self.folder = write(row, self._model, folder)

    @cached_property
    def answers(self) -> Sequence[Answer]:
        """The answers to each prompt."""
        with quiet():
            return [answer(self._model, prompt, self._num_new) for prompt in prompts(self._lengths)]

    @cached_property
    def beams(self) -> Sequence[list[list[int]]]:
        """The answers of a beam search behind each prompt."""
        with quiet():
            return [beams(self._model, prompt) for prompt in prompts(self._lengths)]


class Zoo:
    """Rows as checkpoints below a folder."""

    def __init__(self, root: Path, num_new: int = NUM_NEW, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.root, self.num_new, self.lengths = root, num_new, lengths
        self._made: dict[str, Entry] = {}

    def entry(self, row: Row) -> Entry:
        """The checkpoint and the answers of a row."""
        if row.name not in self._made:
            self._made[row.name] = Entry(row, self.root / row.name, self.num_new, self.lengths)
        return self._made[row.name]


def chosen(names: Iterable[str]) -> list[Row]:
    """The rows of these names or model types; all if there are none. Raises KeyError for a name of neither."""
    wanted = set(names)
    found = [row for row in ROWS if not wanted or {row.name, row.model_type} & wanted]
    if missing := wanted - {row.name for row in found} - {row.model_type for row in found}:
        raise KeyError(f"no row or model type {sorted(missing)}")
    return found


class quiet:
    """transformers neither warns nor shows bars."""

    def __enter__(self) -> None:
        self._level = logging.get_verbosity()
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *exc_info: object) -> None:
        logging.enable_progress_bar()
        logging.set_verbosity(self._level)
        self._warnings.__exit__(None, None, None)


def by_type(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Each model type with its rows, in the order of the first of each."""
    for model_type in dict.fromkeys(row.model_type for row in rows):
        yield model_type, [row for row in rows if row.model_type == model_type]
