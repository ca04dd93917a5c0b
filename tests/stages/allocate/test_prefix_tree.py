"""The tree of the prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from millrace.stages.allocate.prefix_tree import prefix_tree
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import scripted_engine

# block, predecessor, number: 1 - 2 - 3 - 4 and 3 - 5 - 6, and a root with a salt
ENTRIES = [(10, "", 1), (11, 1, 2), (12, 2, 3), (13, 3, 4), (14, 3, 5), (15, 5, 6), (20, b"s\xfead", 7)]
HELD = {0: np.array([10, 11, 12, 13]), 3: np.array([10, 11, 12, 14, 15]), 4: np.array([20, 99])}


def tree(most: int = 10) -> Any:
    return prefix_tree(ENTRIES, 16, HELD, most)


def test_blocks_without_a_branch_are_one_node():
    nodes = tree()["nodes"]
    assert {name: (node["parent"], node["num_blocks"], node["total_blocks"]) for name, node in nodes.items()} == {
        "1": (None, 3, 6),
        "4": ("1", 1, 1),
        "5": ("1", 2, 2),
        "7": (None, 1, 1),
    }
    assert nodes["1"]["num_tokens"] == 48 and tree()["num_blocks"] == 7 and tree()["num_nodes"] == 4


def test_a_node_names_the_slots_that_hold_its_blocks():
    nodes = tree()["nodes"]
    assert {name: node["slots"] for name, node in nodes.items()} == {"1": [0, 3], "4": [0], "5": [3], "7": [4]}


def test_a_salt_is_not_shown_and_an_adapter_is():
    nodes = tree()["nodes"]
    assert (nodes["1"]["is_salted"], nodes["1"]["adapter"]) == (False, "")
    assert (nodes["7"]["is_salted"], nodes["7"]["adapter"]) == (True, "ad")


def test_of_many_nodes_the_largest_are_shown_with_their_parents():
    nodes = tree(most=2)["nodes"]
    assert set(nodes) == {"1", "5"} and nodes["1"]["num_hidden"] == 1 and nodes["1"]["hidden_blocks"] == 1


def test_a_block_whose_predecessor_was_evicted_is_a_root():
    assert prefix_tree([(10, 77, 78)], 16, {})["nodes"]["78"]["parent"] is None
    assert prefix_tree([], 16, {})["nodes"] == {}


def test_the_tree_of_an_engine_has_the_shared_prompt_once():
    async def run() -> Any:
        async with scripted_engine() as engine:
            start = "s" * 64  # four blocks
            for end in "abc":
                async for _ in engine.generate(start + end * 40, SamplingParams(max_tokens=1)):
                    pass
            return await engine.prefix_tree()

    nodes = asyncio.run(run())["nodes"]
    (root,) = (name for name, node in nodes.items() if node["parent"] is None)
    assert nodes[root]["num_blocks"] == 4
    assert [node["num_blocks"] for node in nodes.values() if node["parent"] == root] == [2, 2, 2]
