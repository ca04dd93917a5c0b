"""Step updates (diffs): a grant as one i32 buffer.

The layout is in `kernels/layout/step_state.py`. Plain numpy on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....kernels.layout import step_state
from ....kernels.layout.sampling_fields import draws_of
from ....kernels.layout.sampling_rows import DRAW_WIDTH, draw_words
from ...messages import NO_INTS, Ints, Started, StepGrant

ROW_NUMBERS = 4  # numbers per row in the diff, plus one for all rows
MAX_DIFF_ITEMS = 8192  # known tokens, and new blocks, that fit one diff of a real device
NO_ROWS: Ints = np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True)
class EndRules:
    """The ends that apply to all sequences, besides those of their own parameters, and where rotary tables change."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int
    short_length: int = 0  # rows of the rotary tables before those of long sequences; see `ModelInfo`

    def ids_of(self, started: Started) -> list[int]:
        """All token ids that end this sequence, EOS first."""
        eos: Collection[int] = () if started.params.ignore_eos else self.eos_token_ids
        return list(dict.fromkeys([*eos, *started.params.stop_token_ids]))


def diff_size(max_num_seqs: int, num_entries: int, num_tokens: int) -> int:
    """The size of a diff of `max_num_seqs` new rows.

    It has room for `num_entries` block table entries and `num_tokens` known tokens. A step with more is sent in several
    parts.
    """
    rows = ROW_NUMBERS * max_num_seqs + 1
    started = (1 + step_state.STATE_WIDTH + 3) * max_num_seqs
    return step_state.HEADER + rows + started + 3 * num_entries + num_tokens


def state_row(started: Started, ends: EndRules) -> Ints:
    """[STATE_WIDTH] the state of a slot when a sequence starts or resumes there."""
    params, num_prompt = started.params, started.num_prompt
    row = np.zeros(step_state.STATE_WIDTH, np.int32)
    row[step_state.TOKENS], row[step_state.PROMPT] = len(started.token_ids), num_prompt
    row[step_state.LIMIT] = min(num_prompt + (params.max_tokens or ends.max_model_len), ends.max_model_len)
    row[step_state.LEAST] = min(num_prompt + params.min_tokens, ends.max_model_len)
    row[step_state.DRAW : step_state.DRAW + DRAW_WIDTH] = draw_words(started.seed, draws_of(params))
    row[step_state.ROPE_OFFSET] = ends.short_length if started.is_long else 0
    row[step_state.ADAPTER] = started.adapter_slot
    stops = ends.ids_of(started)[: step_state.MAX_STOPS]
    row[step_state.STOPS :] = -1
    row[step_state.STOPS : step_state.STOPS + len(stops)] = stops
    return row


def row_order(grant: StepGrant) -> Ints:
    """[R] the rows in the device's order: rows with one token first, else the grant's order."""
    if grant.is_decode:
        return np.arange(len(grant.slots), dtype=np.int32)
    return np.argsort(grant.num_tokens != 1, kind="stable").astype(np.int32)


def write(grant: StepGrant, ends: EndRules, buffers: Iterator[Ints], num_slots: int = 0) -> Iterator[tuple[int, bool]]:
    """Writes the diff of a grant into the next of `buffers`, or into several.

    `num_slots` is the device's, for blocks of several kinds. Drafts are sent as known tokens of their sequences; later
    tokens overwrite those that are not accepted. Yields (numbers written, whether it was the last) after each: upload
    it before the next iteration. The rows are in the last part; the others hold only new sequences, blocks and known
    tokens.
    """
    states = [np.concatenate([[started.slot], state_row(started, ends)]) for started in grant.started]
    started = np.concatenate([NO_INTS, *states]).astype(np.int32)
    runs = [*((one.slot, 0, one.token_ids) for one in grant.started), *_draft_runs(grant)]
    entries = _entries(grant, num_slots)
    rows = _rows(grant)
    is_last = False
    while not is_last:
        buffer = next(buffers)
        num_left = len(buffer) - step_state.HEADER - len(started) - len(rows)
        assert num_left > 3, f"a step of {len(grant.slots)} rows does not fit {len(buffer)} numbers"
        num_entries = min(entries.shape[1], num_left // 3)
        part, runs = _split(runs, num_left - 3 * num_entries)
        is_last = num_entries == entries.shape[1] and not runs
        counts = (len(grant.slots), grant.num_computed, num_logits(grant)) if is_last else (0, 0, 0)
        size = _put(buffer, counts, entries[:, :num_entries], started, part, rows if is_last else NO_ROWS)
        buffer[step_state.HAS_DRAFTS] = is_last and grant.drafts is not None
        entries, started = entries[:, num_entries:], NO_INTS
        yield size, is_last


def _entries(grant: StepGrant, num_slots: int) -> Ints:
    """[3, E] new entries of block tables: their rows, places and blocks."""
    found = [np.stack([grant.table_slots, grant.table_places, grant.table_blocks])]
    for entries in grant.more_tables:
        assert num_slots, "blocks of several kinds, and the device has tables of one"
        found.append(np.stack([entries.kind * num_slots + entries.slots, entries.places, entries.blocks]))
    return np.concatenate(found, axis=1).astype(np.int32)


_Run = tuple[int, int, Ints]


def _rows(grant: StepGrant) -> Ints:
    order = row_order(grant)
    count = len(order)
    rows = np.zeros(ROW_NUMBERS * count + 1, np.int32)
    rows[:count] = grant.slots[order]
    rows[count : 2 * count] = grant.starts[order]
    if grant.is_decode:
        rows[2 * count : 3 * count + 1] = np.arange(count + 1)
    else:
        np.cumsum(grant.num_tokens[order], out=rows[2 * count + 1 : 3 * count + 1])
    num_each = _num_logits_each(grant)
    places = np.where(grant.is_sampled, np.cumsum(num_each) - num_each, -1)
    rows[3 * count + 1 :] = places[order]
    return rows


def num_logits(grant: StepGrant) -> int:
    """Rows of logits of a step."""
    return grant.num_sampled if grant.drafts is None else int(_num_logits_each(grant).sum())


def _num_logits_each(grant: StepGrant) -> Ints:
    """[R] rows of logits: with drafts, one for each token of a sampled row."""
    if grant.drafts is None:
        return grant.is_sampled.astype(np.int32)
    num_each: Ints = np.where(grant.is_sampled, 1 + grant.drafts.counts, 0).astype(np.int32)
    assert (num_each[grant.is_sampled] == grant.num_tokens[grant.is_sampled]).all(), "drafts beside a prompt"
    return num_each


def _draft_runs(grant: StepGrant) -> Iterator[_Run]:
    if grant.drafts is None:
        return
    at = 0
    for row in np.flatnonzero(grant.drafts.counts).tolist():
        count = int(grant.drafts.counts[row])
        first = int(grant.starts[row] + grant.num_tokens[row]) - count
        yield int(grant.slots[row]), first, grant.drafts.token_ids[at : at + count].astype(np.int32)
        at += count


def _split(runs: Sequence[_Run], num_left: int) -> tuple[list[_Run], list[_Run]]:
    """Splits `runs` into those that fit `num_left` numbers and the rest.

    A run takes three numbers besides its tokens.
    """
    fitting: list[_Run] = []
    for index, (slot, start, tokens) in enumerate(runs):
        count = min(len(tokens), num_left - 3)
        if count <= 0:
            return fitting, list(runs[index:])
        fitting.append((slot, start, tokens[:count]))
        num_left -= 3 + count
        if count < len(tokens):
            return fitting, [(slot, start + count, tokens[count:]), *runs[index + 1 :]]
    return fitting, []


def _put(
    buffer: Ints, counts: tuple[int, int, int], entries: Ints, started: Ints, runs: Sequence[_Run], rows: Ints
) -> int:
    """Writes one part of a diff. Returns the count of numbers written."""
    header = buffer[: step_state.HEADER]
    header[:] = 0
    header[step_state.NUM_ROWS], header[step_state.NUM_TOKENS], header[step_state.NUM_LOGITS] = counts
    header[step_state.NUM_ENTRIES] = entries.shape[1]
    header[step_state.NUM_STARTED] = len(started) // (1 + step_state.STATE_WIDTH)
    header[step_state.NUM_RUNS] = len(runs)
    at = step_state.HEADER
    for section, numbers in (
        (step_state.ROWS_AT, rows),
        (step_state.ENTRIES_AT, entries.reshape(-1)),
        (step_state.STARTED_AT, started),
    ):
        header[section] = at
        buffer[at : at + len(numbers)] = numbers
        at += len(numbers)
    header[step_state.RUNS_AT] = at
    count, end = len(runs), at + 3 * len(runs)
    for index, (slot, start, tokens) in enumerate(runs):
        buffer[end : end + len(tokens)] = tokens
        end += len(tokens)
        buffer[at + index], buffer[at + count + index], buffer[at + 2 * count + index] = slot, start, end
    header[step_state.SIZE] = end
    return end
