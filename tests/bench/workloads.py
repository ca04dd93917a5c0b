"""What the engines are asked: the workloads W1 to W4, the same for each of them.

The lengths of a workload are always the same; of W2 and W4 4,753 tokens in and 2,587 out. Its token ids differ from run
to run, so that no engine finds in a prefix cache what an earlier run left there. Ids are drawn from a part of the
vocabulary that every shape of `shapes.py` has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Asked = tuple[list[int], int]  # (token ids of the prompt, tokens of the answer)


def w1(run: int) -> list[Asked]:
    """Latency: one request, 128 in, 128 out."""
    return [(_ids(random.Random(f"w1-{run}"), 128), 128)]


def w2(run: int) -> list[Asked]:
    """Throughput: 32 requests at once, prompts uniform 32..256, answers uniform 32..128."""
    return _mixed(random.Random(f"w2-{run}"))


def w3(run: int) -> list[Asked]:
    """Sharing: 16 requests at once with 512 tokens in common, 32 of their own and 32 to come."""
    ids = random.Random(f"w3-{run}")
    common = _ids(ids, 512)
    return [(common + _ids(ids, 32), 32) for _ in range(16)]


def w4(run: int) -> list[Asked]:
    """Serving: W2's lengths with ids of their own; 16 are in flight."""
    return _mixed(random.Random(f"w4-{run}"))


WORKLOADS: dict[str, Callable[[int], list[Asked]]] = {"w1": w1, "w2": w2, "w3": w3, "w4": w4}
IN_FLIGHT = {"w1": 1, "w2": None, "w3": None, "w4": 16}  # None: all at once


def num_tokens(asked: Sequence[Asked]) -> dict[str, int]:
    """Of all prompts, and of all answers."""
    return {"in": sum(len(ids) for ids, _ in asked), "out": sum(num_answer for _, num_answer in asked)}


def _mixed(ids: random.Random) -> list[Asked]:
    lengths = random.Random("w2-0")  # NOTE: with another seed more or less of W2 is prompts, and ratios are others
    shape = [(lengths.randint(32, 256), lengths.randint(32, 128)) for _ in range(32)]
    return [(_ids(ids, num_prompt), num_answer) for num_prompt, num_answer in shape]


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(300, 15_000) for _ in range(count)]
