"""The tree of the last prompts' prefixes, and which engine has how much of each."""

from __future__ import annotations

from random import Random

from millrace.stages.routing.policies import POLICIES
from millrace.stages.routing.recent_prefixes import MAX_NODES, MAX_PROMPTS, RecentPrefixes
from millrace.stages.routing.router import RoutedRequest, Router

BLOCK = 4


def chain(text: str) -> list[bytes]:
    """Keys of a prompt whose blocks are letters: each stands for its block and all before."""
    return [text[: end + 1].encode() for end in range(len(text))]


def tree(*prompts: str) -> dict[str, tuple[str | None, int, int]]:
    """Each node by its prefix: (the one before it, blocks of its own, prompts)."""
    recent = RecentPrefixes()
    for prompt in prompts:
        recent.note(chain(prompt))
    return {
        node.key.decode(): (node.parent and node.parent.decode(), node.num_blocks - node.first_block, node.num_prompts)
        for node in recent.nodes()
    }


def test_prompts_branch_where_they_differ_and_where_one_ends() -> None:
    assert tree() == {} and tree("") == {}
    assert tree("ab") == {"ab": (None, 2, 1)}
    assert tree("abcd", "abxy", "ab") == {"ab": (None, 2, 3), "abcd": ("ab", 2, 1), "abxy": ("ab", 2, 1)}
    assert tree("abc", "abc") == {"abc": (None, 3, 2)}
    assert tree("abc", "xbc") == {"abc": (None, 3, 1), "xbc": (None, 3, 1)}


def test_of_any_prompts_the_nodes_add_up_to_all_blocks_that_differ() -> None:
    dice = Random(5)
    for _ in range(50):
        prompts = ["".join(dice.choices("ab", k=dice.randrange(7))) for _ in range(dice.randrange(9))]
        found = tree(*prompts)
        assert sum(blocks for _, blocks, _ in found.values()) == len({key for text in prompts for key in chain(text)})
        for prefix, (parent, blocks, count) in found.items():
            assert count == sum(text.startswith(prefix) for text in prompts)
            assert len(prefix) - blocks == len(parent or "") and prefix.startswith(parent or "")


def test_only_the_last_prompts_and_the_largest_nodes_are_kept_with_all_before_them() -> None:
    recent = RecentPrefixes()
    for number in range(3 * MAX_PROMPTS):
        recent.note(chain("shared" + chr(200 + number) * (1 + number % 5)))
    nodes = {node.key: node for node in recent.nodes()}
    assert nodes[b"shared"].num_prompts == MAX_PROMPTS and MAX_NODES <= len(nodes) <= MAX_NODES + 1
    assert all(node.parent is None or node.parent in nodes for node in nodes.values())


def test_each_engine_is_as_warm_as_it_has_told_not_as_is_expected_of_it() -> None:
    router = Router(POLICIES["soonest"](), BLOCK)
    for engine in (0, 1):
        router.view(engine)
    request = RoutedRequest(17, chain("abcd"))
    router.note_sent(0, request, 0.0)
    router.note_keys(1, chain("abcd")[:3], [])
    ((node, warm),) = router.warm_prefixes((0, 1))
    assert (node.num_blocks, warm) == (4, {0: 0, 1: 3 * BLOCK})
    router.note_keys(0, chain("abcd"), [])
    router.note_keys(1, [], chain("abcd")[:1])
    assert [warm for _, warm in router.warm_prefixes((0, 1))] == [{0: 4 * BLOCK, 1: 0}]
