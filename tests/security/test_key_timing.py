"""The time to refuse a wrong key reveals nothing about the right one."""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import random
import time
from pathlib import Path

from multidict import CIMultiDict

from millrace.deploy.config import ServerConfig
from millrace.deploy.errors import ApiError
from millrace.deploy.http import api_keys
from millrace.deploy.http.api_keys import ApiKeys
from millrace.deploy.server.server import Server
from tests.counts import count

RIGHT = "sk-0123456789abcdef0123456789abcdef"


class Request:
    def __init__(self, key: str) -> None:
        self.headers = CIMultiDict({"Authorization": f"Bearer {key}"})


def seconds(checker: ApiKeys, request: Request) -> float:
    began = time.perf_counter_ns()
    with contextlib.suppress(ApiError):
        checker.check(request)  # type: ignore[arg-type]
    return time.perf_counter_ns() - began


def test_keys_are_compared_as_digests_by_compare_digest_only():
    tree = ast.parse(inspect.getsource(api_keys))
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert calls.count("hmac.compare_digest") == 1
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert not any("digest" in ast.unparse(node) for node in compared)


def test_no_other_file_compares_keys():
    paths = list(Path(inspect.getfile(api_keys)).parents[1].rglob("*.py"))
    assert len({path.parent for path in paths}) > 3
    texts = {path: path.read_text() for path in paths}
    for path in (path for path, text in texts.items() if "api_key" in text or "admin_key" in text):
        compared = [node for node in ast.walk(ast.parse(texts[path])) if isinstance(node, ast.Compare)]
        parts = [part for node in compared for part in ast.walk(node) if isinstance(part, ast.Attribute)]
        assert not [part.attr for part in parts if part.attr in ("api_key", "admin_key")], path.name


def test_the_admins_routes_are_checked_as_all_others():
    config = ServerConfig(api_key=(RIGHT,), admin_key=("another",))
    app = Server(config)._make_app()
    (check,) = [middleware for middleware in app.middlewares if "check_keys" in middleware.__qualname__]
    checkers = inspect.getclosurevars(check).nonlocals
    assert type(checkers["keys"]) is ApiKeys and {type(other) for other in checkers["others"].values()} == {ApiKeys}


def test_a_key_that_begins_right_takes_no_longer_than_one_that_does_not():
    """A difference that is there shows in every round; where a text lies in memory makes one that comes and goes."""
    found = []
    for seed in range(3):
        found.append(welch_t(*timings(random.Random(seed))))
        if abs(found[-1]) < 4.5:
            return
    raise AssertionError(f"t = {found} in three rounds")


def timings(order: random.Random) -> tuple[list[float], list[float]]:
    """Nanoseconds of checks of keys that begin right, and of others, in a random order."""
    checker = ApiKeys([RIGHT, "another-key"])
    taken: tuple[list[float], list[float]] = ([], [])
    requests = [
        (wrong, Request("x" * len(RIGHT) if wrong else RIGHT[:-1] + "x")) for wrong in order.choices((0, 1), k=400)
    ]
    for _ in range(count(20_000, full=100_000)):
        wrong, request = order.choice(requests)
        taken[wrong].append(seconds(checker, request))
    return taken


def welch_t(*samples: list[float]) -> float:
    """Of the means of two samples, each less its slowest tenth, which was interrupted."""
    first, second = (sorted(values)[: int(len(values) * 0.9)] for values in samples)
    mean_1, mean_2 = sum(first) / len(first), sum(second) / len(second)
    var_1 = sum((value - mean_1) ** 2 for value in first) / (len(first) - 1)
    var_2 = sum((value - mean_2) ** 2 for value in second) / (len(second) - 1)
    return (mean_1 - mean_2) / math.sqrt(var_1 / len(first) + var_2 / len(second))
