"""The tree of the prefix cache: its largest nodes, with who uses them. No tokens, no salts.

A node is a run of blocks without a branch. The tree is for inspection. It is read from the cache and the tables at one
moment, in a time that depends on the number of cached blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..messages import Ints

if TYPE_CHECKING:
    from .allocator import Allocator

MAX_NODES = 120
MAX_USERS = 8  # slots named for each node

Entry = tuple[
    int, int | str | bytes, int
]  # block, predecessor (number of a block, or the salt of a first block), number
ADAPTER = b"\xfe"  # in the salt, before an adapter's digest


def read_prefix_tree(allocator: Allocator) -> dict[str, Any] | None:
    """The tree of an allocator's cache now; None without a prefix cache."""
    cache, tables = allocator.cache, allocator.tables_of_prefixes
    if cache is None:
        return None
    held = {slot: tables.blocks[slot, : tables.num_blocks[slot]] for slot in np.flatnonzero(tables.num_blocks).tolist()}
    return prefix_tree(cache.known_blocks(), cache.block_size, held)


def prefix_tree(
    entries: Sequence[Entry], block_size: int, held: Mapping[int, Ints], most: int = MAX_NODES
) -> dict[str, Any]:
    """The `most` nodes with most blocks below them, parents before children.

    `held`: slot -> [n] its blocks in token order.
    """
    places = {number: place for place, (_, _, number) in enumerate(entries)}
    parents = [places.get(before, -1) if isinstance(before, int) else -1 for _, before, _ in entries]
    children: list[list[int]] = [[] for _ in entries]
    for place, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(place)
    runs, run_of, above = _runs(parents, children)
    totals = [len(run) for run in runs]
    for node in range(len(runs) - 1, -1, -1):
        if above[node] >= 0:
            totals[above[node]] += totals[node]
    users = _users([block for block, _, _ in entries], run_of, held)
    chosen = sorted(sorted(range(len(runs)), key=lambda node: -totals[node])[:most])  # a parent is before its children
    shown = set(chosen)
    nodes = {}
    for node in chosen:
        run = runs[node]
        hidden = [child for child in children[run[-1]] if run_of[child] not in shown]
        slots = sorted(users.get(node, ()))
        nodes[str(entries[run[0]][2])] = {
            "parent": None if above[node] < 0 else str(entries[runs[above[node]][0]][2]),
            "num_blocks": len(run),
            "num_tokens": len(run) * block_size,
            "total_blocks": totals[node],
            "num_users": len(slots),
            "slots": slots[:MAX_USERS],
            "num_hidden": len(hidden),
            "hidden_blocks": sum(totals[run_of[child]] for child in hidden),
        } | _root(entries[run[0]][1])
    return {"block_size": block_size, "num_blocks": len(entries), "num_nodes": len(runs), "nodes": nodes}


def _runs(parents: Sequence[int], children: Sequence[list[int]]) -> tuple[list[list[int]], list[int], list[int]]:
    """(the entries of each node, the node of each entry, the parent of each node); parents come first."""
    runs: list[list[int]] = []
    run_of, above = [-1] * len(parents), list[int]()
    begins = [(place, -1) for place, parent in enumerate(parents) if parent < 0]
    while begins:
        place, parent = begins.pop()
        run = [place]
        while len(children[place]) == 1:
            (place,) = children[place]
            run.append(place)
        for each in run:
            run_of[each] = len(runs)
        begins += [(child, len(runs)) for child in children[place]]
        runs.append(run)
        above.append(parent)
    return runs, run_of, above


def _users(blocks: Sequence[int], run_of: Sequence[int], held: Mapping[int, Ints]) -> dict[int, set[int]]:
    """node -> the slots that hold a block of it."""
    node_of = dict(zip(blocks, run_of, strict=True))
    users: dict[int, set[int]] = {}
    for slot, own in held.items():
        for block in own.tolist():
            if (node := node_of.get(block)) is not None:
                users.setdefault(node, set()).add(slot)
            else:
                break  # blocks after it are in no tree either
    return users


def _root(before: int | str | bytes) -> dict[str, Any]:
    """Of a first block: whether it has a salt, and its adapter."""
    if isinstance(before, int):
        return {}
    salt = before.encode() if isinstance(before, str) else before
    salt, _, adapter = salt.partition(ADAPTER)
    return {"is_salted": bool(salt.rstrip(b"\xff")), "adapter": adapter.decode()}
