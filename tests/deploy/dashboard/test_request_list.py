"""The list of requests: its order, its filters and its shown part."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.deploy.dashboard.messages import RequestWindow
from millrace.deploy.dashboard.request_list import KEYS, arranged, choices_of, page_of
from tests.deploy.dashboard.test_dashboard_feed import complete, looking
from tests.deploy.sockets import ENDLESS, on_loop, serving, until


def row(id: str, arrival_s: float = 0.0, **more: Any) -> dict[str, Any]:
    zero = dict.fromkeys(("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_blocks"), 0)
    rest = {"state": "running", "ttft_s": None, "priority": 0, "num_preempted": 0}
    return {"id": id, "arrival_s": arrival_s} | zero | rest | more


ROWS = [
    row("a", 1, priority=5, num_blocks=3, state="waiting"),
    row("b", 2, priority=0, num_blocks=9, ttft_s=0.2, adapter="tuned"),
    row("c", 3, priority=5, num_blocks=3, ttft_s=0.1),
]


def ids(**window: Any) -> str:
    return "".join(each["id"] for each in arranged(ROWS, RequestWindow(**window)))


def test_equal_requests_stay_in_order_of_arrival():
    assert ids() == "abc" and ids(newest_first=True) == ids(descending=True) == "cba"
    assert ids(sort="blocks") == "acb" and ids(sort="blocks", descending=True) == "bac"
    assert ids(sort="ttft") == "cba"  # no token yet: last
    assert ids(sort="priority") == "bac" and ids(sort="state") == "bca"


def test_every_field_of_the_sort_has_a_key_and_every_key_a_field():
    fields = RequestWindow.model_json_schema()["properties"]["sort"]["enum"]
    assert set(fields) == set(KEYS)
    for field in fields:
        assert len(arranged(ROWS, RequestWindow(sort=field))) == 3


def test_filters_keep_what_agrees_with_all_of_them():
    assert ids(state="running") == "bc" and ids(priority=5) == "ac" and ids(state="running", priority=5) == "c"
    assert ids(adapter="tuned") == "b" and ids(adapter="") == "ac"
    assert ids(search="tun") == "b" and ids(search="c") == "c"


def test_a_page_counts_what_was_found_and_what_there_is():
    page = page_of(ROWS, RequestWindow(state="running", offset=1, limit=1))
    assert (page["num_live"], page["total"], [each["id"] for each in page["rows"]]) == (2, 3, ["c"])
    assert page["states"] == {"running": 2, "waiting": 1} and page["priorities"] == {"0": 1, "5": 2}
    assert choices_of([]) == {"total": 0, "states": {}, "adapters": {}, "priorities": {}}


@on_loop
async def test_a_viewer_sorts_and_filters_the_requests_of_a_running_engine():
    async with serving(step_s=0.005, script=ENDLESS) as running:
        asking = [asyncio.create_task(complete(running, "x" * (1 + i), 300)) for i in range(20)]
        scheduler = running.engine.scheduler
        await until(lambda: len(scheduler.sequences) == 20 and scheduler.num_running == 16)
        async with looking(running) as viewer:
            window = {"sort": "prompt", "descending": True, "state": "running", "limit": 5}
            await viewer.say("subscribe", topics={"requests": window})
            await viewer.update()
            told = viewer.data["requests"]
            assert (told["num_live"], told["total"]) == (16, 20) and told["states"] == {"running": 16, "waiting": 4}
            sizes = [each["num_prompt_tokens"] for each in told["rows"]]
            assert len(sizes) == 5 and sizes == sorted(sizes, reverse=True)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await running.check_quiet()


@pytest.mark.parametrize("window", [{"sort": "price"}, {"priority": "high"}, {"limit": 201}, {"state": "s" * 30}])
def test_a_wrong_window_is_refused(window: dict[str, Any]):
    with pytest.raises(ValueError):
        RequestWindow(**window)
