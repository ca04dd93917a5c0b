"""The dashboard in a real browser, at a server under load: every view, its figures, and what it costs the page."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.counts import count
from tests.deploy.browser import (
    VIEWS,
    accessibility,
    check_that_it_stayed_at_home,
    opened,
    show,
    until,
    wait_for_updates,
    watched,
)
from tests.deploy.dashboard import interactions
from tests.deploy.running import RunningServer

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_BLOCKS = 2_000, 100_000
SHARED_FIGURES = """() => [...document.querySelectorAll('[data-stage], [data-edge]')].map((row) => [
  row.dataset.stage ?? row.dataset.edge,
  Object.fromEntries([...row.querySelectorAll('[data-value]')].map(({ dataset: d }) => [d.figure, +d.value])),
])"""

CUT_TEXTS = """() => [...document.querySelectorAll('.vitals dt, .figures dt, .bars text')].filter((text) => {
  const [own, around] = [text.getBoundingClientRect(), text.closest('svg')?.getBoundingClientRect()];
  return around ? own.left < around.left - 1 || own.right > around.right + 1 : text.scrollWidth > text.clientWidth;
}).map((text) => text.textContent)"""


class Load:
    """So many endless requests over one socket, from a thread, until it is left."""

    def __init__(self, url: str, count: int) -> None:
        self._url, self._count = url.replace("http", "ws") + "/v1/stream", count
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._stop = threading.Event()

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as http, http.ws_connect(self._url) as socket:
            for i in range(self._count):
                body = {"prompt": f"Tell me story {i} " + "of the mill " * (i % 7), "max_tokens": 400, "temperature": 0}
                await socket.send_json({"type": "create", "id": f"r{i}", "endpoint": "completions", "body": body})
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await socket.receive(timeout=0.1)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of flight files."""
    return tmp_path_factory.mktemp("flights")


@pytest.fixture(scope="module")
def loaded(flights: Path) -> Iterator[RunningServer]:
    engine = {
        "num_gpu_blocks": NUM_BLOCKS,
        "max_num_seqs": 32,
        "max_admitted_requests": 2 * NUM_REQUESTS,
        "max_waiting_requests": 2 * NUM_REQUESTS,
    }
    server: dict[str, Any] = {"admin_key": ["boss"], "ws_max_streams": NUM_REQUESTS, "log_level": "warning"}
    server["flight_recorder_dir"] = str(flights)
    options: dict[str, Any] = {"server": server, "engine": engine, "script": {"eos_probability": 0.0}, "step_s": 0.05}
    with RunningServer(**options) as running:
        yield running


@pytest.fixture(scope="module")
def load(loaded: RunningServer) -> Iterator[Load]:
    with Load(loaded.url, NUM_REQUESTS) as load:
        yield load


@pytest.fixture(scope="module")
def page(loaded: RunningServer) -> Iterator[Any]:
    """The dashboard with the admin key."""
    with opened(loaded.url + "/dashboard", "sessionStorage.setItem('millrace.admin_key', 'boss')") as page:
        page.locator("[data-figure=state]", has_text="ready").wait_for()
        yield page


def metrics(server: RunningServer, name: str) -> dict[str, float]:
    """label values -> value of a metric."""
    found = {}
    for line in server.get("/metrics").body.decode().splitlines():
        if match := re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line):
            found[",".join(re.findall(r'"([^"]*)"', match[1]))] = float(match[2])
    return found


def test_figures_of_an_idle_server_are_those_of_its_metrics(loaded: RunningServer, page: Any):
    for i in range(3):
        loaded.post("/v1/completions", {"prompt": f"Hello {i}", "max_tokens": 8})
    loaded.wait_until_idle()
    show(page, "pipeline")
    wait_for_updates(page, 3)
    shown = dict(page.evaluate(SHARED_FIGURES))
    sent, full = (
        metrics(loaded, "millrace:channel_items_total"),
        metrics(loaded, "millrace:channel_blocked_seconds_total"),
    )
    seconds = metrics(loaded, "millrace:stage_seconds_total")
    assert {edge for edge in shown if "." in edge} == set(sent)
    for edge in sent:
        assert shown[edge]["num_sent"] == sent[edge] and shown[edge]["depth"] == 0
        assert shown[edge]["seconds_full"] == pytest.approx(full[edge], abs=1e-6)
    for labels, value in seconds.items():
        stage, state = labels.split(",")
        assert shown[stage][f"{state}_s"] == pytest.approx(value, abs=5.0 if state == "idle" else 1e-6), labels
    assert sent["execute.out->sample.in"] > 0
    told = {edge["name"]: edge for edge in loaded.get("/v1/stages").json["edges"]}
    for edge, row in shown.items():
        if edge in told:
            names = (("num_sent", "sent"), ("depth", "depth"), ("capacity", "capacity"), ("high_water", "high_water"))
            assert all(row[name] == told[edge][theirs] for name, theirs in names), edge


def test_a_hand_on_an_idle_server_finds_what_it_asks_for(loaded: RunningServer, page: Any, flights: Path):
    interactions.check_load(loaded, page)
    check_waterfall(page)
    interactions.check_prefix_tree(loaded, page)
    interactions.check_recorder(page, flights)
    interactions.check_shortcuts(page)
    interactions.check_drawing(page)
    assert page.complaints == []


def test_an_update_costs_the_page_at_most_50_ms_with_2000_requests_and_100000_blocks(load: Load, page: Any):
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_s() -> float:
        return next(m["value"] for m in client.send("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration")

    show(page, "requests")
    page.locator("[data-figure=num_live]", has_text=re.compile(r"^(1,9|2,0)\d\d")).wait_for()
    for view in ("requests", "blocks", "pipeline", "steps"):
        show(page, view)
        wait_for_updates(page, 1)
        began = busy_s(), page.evaluate("millraceDashboard.feed.numUpdates")
        wait_for_updates(page, count(3, full=12))
        spent, num_updates = busy_s() - began[0], page.evaluate("millraceDashboard.feed.numUpdates") - began[1]
        print(f"{view}: {1e3 * spent / num_updates:.1f} ms of the main thread an update, {num_updates} updates")
        assert spent / num_updates < 0.05, view
        assert page.locator("tr[data-request]").count() <= 70  # however many there are


def test_every_view_shows_a_loaded_server_to_everybody_and_stays_at_home(
    load: Load, loaded: RunningServer, page: Any, tmp_path: Path
):
    check_access = accessibility(page)
    page.locator("[data-figure=num_waiting]", has_text=re.compile(r"^[1-9]\d")).wait_for()
    looks = itertools.cycle(itertools.product((1280, 390), ("light", "dark")))
    for view, (width, scheme) in zip(VIEWS, looks, strict=False):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        show(page, view)
        wait_for_updates(page, 1)
        assert page.locator("main > *").count() >= 3, view
        check_access(f"{view}, {width} pixels, {scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{view} is wider than {width} pixels"
        assert page.evaluate(CUT_TEXTS) == [], f"{view}, {width} pixels"
        page.screenshot(path=str(tmp_path / f"{view}.png"))  # to look at: pytest keeps it for a while
    check_narrow_latencies(page)
    page.set_viewport_size({"width": 1280, "height": 900})
    check_bottleneck(loaded, page)
    check_blocks(page)
    check_cancel(page)
    check_that_it_stayed_at_home(page)


def check_bottleneck(loaded: RunningServer, page: Any) -> None:
    """The sentence and the shares equal those of /v1/stages, which is read a moment later."""
    show(page, "pipeline")
    until(page, "millraceDashboard.feed.data.overview.bottleneck !== null")
    shown, told = page.evaluate("millraceDashboard.feed.data.overview.bottleneck"), loaded.get("/v1/stages").json
    assert (shown["situation"], shown["stage"]) == (told["bottleneck"]["situation"], told["bottleneck"]["stage"])
    assert page.locator("[data-figure=bottleneck]").text_content().startswith(shown["sentence"][:20])
    for stage in told["stages"]:
        assert shown["busy"].get(stage["name"], 0.0) == pytest.approx(stage["busy"], abs=0.25), stage


def check_narrow_latencies(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    show(page, "latency")
    page.locator(".bars text").first.wait_for()
    assert page.evaluate(CUT_TEXTS) == []


def check_waterfall(page: Any) -> None:
    """Of a request that runs: bars of its stages, and why it takes so long."""
    page.evaluate(
        """() => { fetch('/v1/completions', { method: 'POST', headers: { 'Content-Type': 'application/json',
          'X-Request-Id': 'fresh' }, body: '{"prompt": "Hello", "max_tokens": 60}' }).catch(() => 0); }"""
    )
    show(page, "waterfall")
    page.locator("th a", has_text="cmpl-fresh").click()
    page.locator(".waterfall .sentence", has_text="The request").wait_for()
    until(page, "document.querySelectorAll('[data-service]').length >= 3")
    explained = page.evaluate("millraceDashboard.feed.data.request.explained")
    assert sum(row["total_us"] for row in explained["rows"]) == pytest.approx(explained["total_us"], abs=1_000)


def check_blocks(page: Any) -> None:
    """The map that is drawn says what the counters say, which were read in the same moment."""
    show(page, "blocks")
    wait_for_updates(page, 2)
    free, told, total = page.evaluate(
        """() => {
          const { blocks: map, overview } = millraceDashboard.feed.data;
          return [map.cells.filter((cell) => cell === 0).length, overview.blocks.free, map.cells.length];
        }"""
    )
    assert free == told and total == NUM_BLOCKS


def check_cancel(page: Any) -> None:
    show(page, "requests")
    row = page.locator("tr[data-request]").first
    name = row.get_attribute("data-request")
    row.locator("text=Cancel").click()
    page.locator(f"tr[data-request='{name}']").wait_for(state="detached")


def test_the_admin_key_is_entered_at_any_time(loaded: RunningServer, page: Any):
    other = watched(page.context.browser, loaded.url)
    other.locator("[data-figure=state]", has_text="ready").wait_for()
    for view in ("requests", "recorder"):
        show(other, view)
        other.locator("main button", has_text="enter the admin key").first.wait_for()
    other.locator("footer button", has_text="Keys").click()
    other.fill("#admin-key", "wrong")
    other.click("text=Open the dashboard")
    other.locator("[role=alert]", has_text="the admin key is wrong").wait_for()
    assert other.locator("h1").text_content() == "Keys"  # this server needs none
    other.fill("#admin-key", "boss")
    other.click("text=Open the dashboard")
    other.locator("button", has_text="Download the trace").wait_for()
    show(other, "requests")
    assert other.locator("[role=alert]").count() == 0  # the complaint about the wrong key is over
    assert other.complaints == []
    other.close()


def test_a_hand_on_a_busy_server_finds_what_it_asks_for(load: Load, page: Any):
    interactions.check_flow(page)
    interactions.check_requests(page)
    interactions.check_tiles(page)
    interactions.check_history(page)
    assert page.complaints == []


def test_views_and_blocks_are_reached_by_keyboard(load: Load, page: Any):
    show(page, "pipeline")
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("nav a", has_text="KV blocks").focus()
    page.keyboard.press("Enter")
    page.get_by_text("By block id").click()
    page.locator(".map[role=slider]").focus()
    page.keyboard.press("ArrowRight")
    page.locator(".detail-line", has_text="Blocks 128 to 255:").wait_for()  # 100,000 blocks in at most 1,024 cells
    page.keyboard.press("Enter")
    page.locator("[data-figure=shown_blocks]", has_text="128 of 100,000").wait_for()
    page.locator("[role=slider][aria-label=Block]").focus()
    page.keyboard.press("ArrowRight")
    page.locator(".detail-line", has_text="Block 129:").wait_for()
