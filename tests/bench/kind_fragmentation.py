"""Memory that slabs shared by a full and a window kind of KV blocks keep from the kind that needs it.

    python -m tests.bench.kind_fragmentation [--traces FOLDER] [--requests 270] [--slab-tokens 128,256]

A model of the pool, without tables, steps or a device. A slab is lent to one kind at a time and holds blocks of it. A
block is live, cached or free. A kind that lacks blocks takes, in this order, its own free ones, a free slab, its own
cached ones, and a slab of another kind without live blocks. So free and cached blocks in another kind's slabs that
hold a live block are *stuck*: the memory is there, and the kind that needs it cannot get it. The figure is the stuck
share of all bound slabs, at each block that could not be had and as a mean over all rounds without a free slab.

Requests come in phases of short, middle and long prompts, so that the ratio of the kinds shifts. With `--traces` the
phases have the lengths of real services; otherwise drawn ones like them. A round is one block of decoding for every
sequence. Blocks that a window has passed stay cached, as the oldest; those of ended sequences stay cached, too.

Two rules for a table that cannot grow into its next block are compared. *Packs*: it takes a place in the slab with most
live blocks, so that few slabs are bound. Otherwise it begins a whole slab, so that the blocks of a slab end together.
The target is at most 10 % at blocks that could not be had, with packed slabs of 256 tokens, or of fewer tokens where
the cache would have fewer than 256 slabs.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 16  # tokens a block
CHUNK = 2048  # tokens of a prompt in one step
TARGET, LEAST_SLABS = 0.10, 256
FULL, WINDOW = 0, 1
PHASES = ("sharegpt_lengths.csv", "azure_llm_2023_conv.csv", "mooncake_conversation.jsonl")  # short, middle, long
DRAWN = ((36, 1.6, 280), (1020, 0.8, 129), (6900, 1.0, 350))  # median prompt, spread of its logarithm, median answer


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers with a window and without, and the bytes of one token in one layer."""

    name: str
    num_full: int
    num_window: int
    window: int
    token_bytes: int  # keys and values
    max_model_len: int

    def block_bytes(self, kind: int) -> int:
        return BLOCK * self.token_bytes * (self.num_full if kind == FULL else self.num_window)


SHAPES = (
    Shape("Gemma 3 270M", 3, 15, 512, 2 * 256 * 2, 32_768),
    Shape("Gemma 3 4B", 5, 29, 1024, 2 * 4 * 256 * 2, 32_768),
    Shape("gpt-oss-20b", 12, 12, 128, 2 * 8 * 64 * 2, 32_768),
)


@dataclass(slots=True, eq=False)
class Served:
    """One request: its lengths in tokens, and the blocks of each kind that it holds, in order."""

    num_prompt: int
    num_answer: int
    num_tokens: int = 0
    blocks: tuple[deque[int], deque[int]] = field(default_factory=lambda: (deque(), deque()))


class Slabs:
    """The pool. A block's id is slab * blocks_per_slab + its place, in each kind."""

    def __init__(self, shape: Shape, num_bytes: int, slab_tokens: int, *, packs: bool) -> None:
        sizes = [shape.block_bytes(kind) for kind in (FULL, WINDOW)]
        self.slab_bytes = max(sizes) * slab_tokens // BLOCK
        self.block_bytes, self.per_slab = sizes, [self.slab_bytes // size for size in sizes]
        self.num_slabs = num_bytes // self.slab_bytes
        self.packs = packs
        self.owner = [-1] * self.num_slabs
        self.num_live = [0] * self.num_slabs
        self.holes: list[set[int]] = [set() for _ in range(self.num_slabs)]  # free places of a bound slab
        self.free = list(range(self.num_slabs))
        self.partly: list[set[int]] = [set(), set()]  # slabs with holes
        self.cached: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]  # oldest first
        self.cached_in: list[int] = [0] * self.num_slabs
        self.num_taken = self.num_adjacent = 0

    def take(self, kind: int, last: int) -> int | None:
        """A block for a table whose last block is `last`; -1: none. None if the kind cannot have one."""
        self.num_taken += 1
        slab, place = divmod(last + 1, self.per_slab[kind])
        if last >= 0 and place:
            if last + 1 in self.cached[kind]:
                self._evict(kind, last + 1)
            if place in self.holes[slab]:
                self.num_adjacent += 1
                return self._fill(kind, slab, place)
        found = self._packed(kind) if self.packs else self._clustered(kind)
        if found is None:
            return None
        return self._fill(kind, found, min(self.holes[found]))

    def _packed(self, kind: int) -> int | None:
        """A slab with a free place: as few slabs as possible are bound."""
        if self.partly[kind]:
            return max(self.partly[kind], key=lambda each: self.num_live[each])
        if self.free:
            return self._bind(kind)
        if self.cached[kind] and not self._prefers_other(kind):
            return self._evict(kind, next(iter(self.cached[kind])))
        if self._reclaim(1 - kind):
            return self._bind(kind)
        return self._evict(kind, next(iter(self.cached[kind]))) if self.cached[kind] else None

    def _clustered(self, kind: int) -> int | None:
        """A slab with a free place: whole ones first, so that what is in it ends at one time."""
        if self.free or self._reclaim(1 - kind if self._prefers_other(kind) else kind) or self._reclaim(1 - kind):
            return self._bind(kind)
        if self.partly[kind]:
            return max(self.partly[kind], key=lambda each: self.num_live[each])
        return self._evict(kind, next(iter(self.cached[kind]))) if self.cached[kind] else None

    def give_back(self, kind: int, blocks: Iterable[int], *, is_old: bool) -> None:
        """The blocks are cached from now on. `is_old`: evicted before all others."""
        for block in blocks:
            slab = block // self.per_slab[kind]
            self.num_live[slab] -= 1
            self.cached_in[slab] += 1
            self.cached[kind][block] = None
            if is_old:
                self.cached[kind].move_to_end(block, last=False)

    def stuck_bytes(self, kind: int) -> int:
        """Free and cached bytes in other kinds' slabs with a live block: `kind` cannot have them."""
        return sum(
            self.slab_bytes - self.num_live[slab] * self.block_bytes[other]
            for slab, other in enumerate(self.owner)
            if other not in (-1, kind) and self.num_live[slab]
        )

    def _prefers_other(self, kind: int) -> bool:
        """Whether the other kind caches more bytes, so that one of its slabs goes first."""
        other = 1 - kind
        return len(self.cached[other]) * self.block_bytes[other] > len(self.cached[kind]) * self.block_bytes[kind]

    def _bind(self, kind: int) -> int:
        slab = self.free.pop()
        self.owner[slab], self.holes[slab] = kind, set(range(self.per_slab[kind]))
        self.partly[kind].add(slab)
        return slab

    def _fill(self, kind: int, slab: int, place: int) -> int:
        self.holes[slab].remove(place)
        if not self.holes[slab]:
            self.partly[kind].discard(slab)
        self.num_live[slab] += 1
        return slab * self.per_slab[kind] + place

    def _evict(self, kind: int, block: int) -> int:
        """Frees one cached block; the slab stays bound. Returns the slab."""
        del self.cached[kind][block]
        slab, place = divmod(block, self.per_slab[kind])
        self.cached_in[slab] -= 1
        self.holes[slab].add(place)
        self.partly[kind].add(slab)
        return slab

    def _reclaim(self, kind: int) -> bool:
        """Frees a slab of `kind` without live blocks, the one with fewest cached; False: there is none."""
        empty = [slab for slab, owner in enumerate(self.owner) if owner == kind and not self.num_live[slab]]
        if not empty:
            return False
        slab = min(empty, key=lambda each: self.cached_in[each])
        n = self.per_slab[kind]
        for block in range(slab * n, slab * n + n):
            if block in self.cached[kind]:
                self._evict(kind, block)
        self.partly[kind].discard(slab)
        self.owner[slab], self.holes[slab] = -1, set()
        self.free.append(slab)
        return True


class Service:
    """Serves requests as they come, as many at once as there is room; the youngest gives way to the others."""

    def __init__(self, shape: Shape, slabs: Slabs, most_sequences: int) -> None:
        self.shape, self.slabs, self.most = shape, slabs, most_sequences
        self.running: list[Served] = []
        self.waiting: deque[Served] = deque()
        self.failures: list[float] = []  # stuck share at each block that could not be had
        self.rounds: list[float] = []  # the same at each round without a free slab, for the kind that fares worse
        self.num_preempted = 0

    def serve(self, requests: Iterator[Served]) -> None:
        has_more = True
        while has_more or self.running or self.waiting:
            while has_more and not self.waiting:
                request = next(requests, None)
                has_more = request is not None
                if request is not None:
                    self.waiting.append(request)
            self._admit(requests)
            for sequence in list(self.running):
                if sequence in self.running:
                    self._decode(sequence)
            if not self.slabs.free:
                stuck = max(self.slabs.stuck_bytes(kind) for kind in (FULL, WINDOW))
                self.rounds.append(stuck / (self.slabs.num_slabs * self.slabs.slab_bytes))

    def _admit(self, requests: Iterator[Served]) -> None:
        while len(self.running) < self.most:
            request = self.waiting.popleft() if self.waiting else next(requests, None)
            if request is None:
                return
            self.running.append(request)
            target = max(request.num_tokens, request.num_prompt)  # a preempted one computes its answer again
            request.num_tokens = 0
            while request.num_tokens < target:
                if not self._grow(request, min(CHUNK, target - request.num_tokens)):
                    self._leave(request)
                    request.num_tokens = target
                    self.waiting.appendleft(request)
                    return

    def _decode(self, sequence: Served) -> None:
        end = sequence.num_prompt + sequence.num_answer
        while not self._grow(sequence, min(BLOCK, end - sequence.num_tokens)):
            youngest = self.running[-1]
            self.num_preempted += 1
            self._leave(youngest)
            self.waiting.appendleft(youngest)
            if youngest is sequence:
                return
        if sequence.num_tokens >= end:
            self._leave(sequence)

    def _grow(self, sequence: Served, num_more: int) -> bool:
        end, first = sequence.num_tokens + num_more, sequence.num_tokens
        for kind in (FULL, WINDOW):
            blocks = sequence.blocks[kind]
            gone = 0 if kind == FULL else max(0, first - self.shape.window + 1) // BLOCK
            while gone + len(blocks) < -(-end // BLOCK):
                block = self.slabs.take(kind, blocks[-1] if blocks else -1)
                if block is None:
                    bound = self.slabs.num_slabs * self.slabs.slab_bytes
                    self.failures.append(self.slabs.stuck_bytes(kind) / bound)
                    return False
                blocks.append(block)
        sequence.num_tokens = end
        before, after = (max(0, at - self.shape.window + 1) // BLOCK for at in (first, end))
        window = sequence.blocks[WINDOW]
        self.slabs.give_back(WINDOW, [window.popleft() for _ in range(after - before)], is_old=True)
        return True

    def _leave(self, sequence: Served) -> None:
        self.running.remove(sequence)
        for kind in (FULL, WINDOW):
            blocks = sequence.blocks[kind]
            self.slabs.give_back(kind, reversed(blocks), is_old=False)
            blocks.clear()


def requests_of(folder: Path | None, num_requests: int, longest: int) -> Iterator[Served]:
    """Phases of short, middle and long prompts in turn, `num_requests` in all."""
    lengths = [
        _drawn(number, num_requests) if folder is None else _read(folder / name) for number, name in enumerate(PHASES)
    ]
    size = max(1, num_requests // 9)  # three times through the phases; fewer long ones, as each takes so much more
    for turn in range(9):
        which = turn % 3
        for num_prompt, num_answer in _some(lengths[which], turn // 3, size if which < 2 else size // 4):
            num_prompt = min(max(1, num_prompt), longest - 1)
            yield Served(num_prompt, min(max(1, num_answer), longest - num_prompt, 2000))


def _some(lengths: Sequence[tuple[int, int]], turn: int, count: int) -> Sequence[tuple[int, int]]:
    return lengths[turn * count : (turn + 1) * count]


def _drawn(phase: int, count: int) -> list[tuple[int, int]]:
    prompt, spread, answer = DRAWN[phase]
    random = np.random.default_rng(phase)
    prompts = random.lognormal(np.log(prompt), spread, count).astype(int)
    return list(zip(prompts.tolist(), random.lognormal(np.log(answer), 0.8, count).astype(int).tolist(), strict=True))


def _read(path: Path) -> list[tuple[int, int]]:
    if path.suffix == ".jsonl":
        values = (json.loads(line) for line in path.read_text().splitlines()[:5000])
        return [(each["input_length"], each["output_length"]) for each in values]
    with path.open(newline="") as lines:
        rows = csv.DictReader(lines)
        prompt, answer = (rows.fieldnames or ())[-2:]
        return [(int(row[prompt]), int(row[answer])) for row, _ in zip(rows, range(5000), strict=False)]


def figures(shape: Shape, slab_tokens: int, *, packs: bool, folder: Path | None, num_requests: int) -> dict[str, Any]:
    """One run."""
    live = 48 * 2048 * shape.token_bytes * shape.num_full + 48 * shape.window * shape.token_bytes * shape.num_window
    slabs = Slabs(shape, live, slab_tokens, packs=packs)  # room for 48 sequences of 2,048 tokens
    service = Service(shape, slabs, 128)
    service.serve(requests_of(folder, num_requests, shape.max_model_len))
    failures = np.array(service.failures or [0.0])
    return {
        "shape": shape.name,
        "slab": slab_tokens,
        "packs": packs,
        "slabs": slabs.num_slabs,
        "per slab": slabs.per_slab,
        "failures": len(service.failures),
        "preempted": service.num_preempted,
        "stuck at failures": float(failures.mean()),
        "p90": float(np.quantile(failures, 0.9)),
        "stuck in rounds": float(np.mean(service.rounds or [0.0])),
        "adjacent": slabs.num_adjacent / max(1, slabs.num_taken),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory that slabs keep from the kind of block that needs it.")
    parser.add_argument("--traces", type=Path, help="the folder of real lengths; drawn ones unless given")
    parser.add_argument("--requests", type=int, default=270)
    parser.add_argument("--slab-tokens", default="128,256", help="of the kind with most bytes a token")
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    options = parser.parse_args()
    print(
        f"{'shape':14}{'slab':>5}{'packs':>6}{'slabs':>6}{'failed':>8}{'stuck':>8}{'p90':>8}{'rounds':>8}{'adjacent':>9}"
    )
    worst = 0.0
    for shape in SHAPES:
        if options.shapes not in shape.name:
            continue
        for slab_tokens in map(int, options.slab_tokens.split(",")):
            for packs in (False, True):
                row = figures(shape, slab_tokens, packs=packs, folder=options.traces, num_requests=options.requests)
                print(
                    f"{row['shape']:14}{row['slab']:5}{row['packs']!s:>6}{row['slabs']:6}{row['failures']:8}"
                    f"{row['stuck at failures']:8.1%}{row['p90']:8.1%}{row['stuck in rounds']:8.1%}"
                    f"{row['adjacent']:9.1%}",
                    flush=True,
                )
                if packs and (row["slabs"] >= LEAST_SLABS or slab_tokens < 128):
                    worst = max(worst, row["stuck at failures"])
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
