"""What a hand does in the views of the dashboard, and what they must show then. Called with the page of a test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.deploy.browser import accessibility, show, until, wait_for_updates
from tests.deploy.running import RunningServer

DATA = "millraceDashboard.feed.data"
DRAWN = """() => { const canvas = document.querySelector('canvas.flow');
  return canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((byte) => byte > 0); }"""


def check_load(server: RunningServer, page: Any) -> None:
    """A load from the page says so, runs for its time, and ends by itself."""
    show(page, "load")
    for label, value in (("Requests at a time", "3"), ("Seconds", "1"), ("Tokens of an answer", "4")):
        page.get_by_role("spinbutton", name=label).fill(value)
    page.click("text=Start the load")
    page.locator(".load-banner", has_text="Synthetic load").wait_for()
    until(page, "document.querySelector('.load-banner') === null")
    sent, done = (int(page.locator(f"[data-figure='load.{name}']").text_content()) for name in ("sent", "done"))
    assert sent >= 3 and sent - 3 <= done <= sent
    server.wait_until_idle()  # what still ran is cancelled
    show(page, "waterfall")
    page.locator("th a[href*=synthetic]").first.wait_for()


def check_prefix_tree(server: RunningServer, page: Any) -> None:
    """Two prompts with one start: a node with the start, and below it the two ends."""
    start = "p" * 320  # twenty blocks
    for end in "ab":
        server.post("/v1/completions", {"prompt": start + end * 64, "max_tokens": 1})
    show(page, "prefixes")
    until(page, f"Object.values({DATA}.prefixes?.nodes ?? {{}}).some((node) => node.num_blocks === 20)")
    nodes = page.evaluate(f"{DATA}.prefixes.nodes")
    root = next(name for name, node in nodes.items() if node["num_blocks"] == 20)
    below = [name for name, node in nodes.items() if node["parent"] == root]
    assert len(below) == 2
    rows = page.locator("tr[data-node]")
    shown = rows.count()
    page.locator(f"tr[data-node='{root}'] button.fold").click()
    until(page, f"document.querySelectorAll('tr[data-node]').length === {shown - 2}")
    assert "p" * 8 not in page.content()  # no prompt


def check_recorder(page: Any, folder: Path) -> None:
    """A flight file and a trace, written and fetched."""
    show(page, "recorder")
    page.click("text=Write one now")
    row = page.locator("tr[data-file^='flight-']").first
    row.wait_for()
    with page.expect_download() as fetched:
        row.locator("text=Fetch").click()
    name = fetched.value.suggested_filename
    assert Path(fetched.value.path()).read_bytes() == (folder / name).read_bytes()
    page.get_by_role("button", name="Start", exact=True).first.click()
    with page.expect_download() as fetched:
        page.click("text=Stop and save")
    assert "traceEvents" in json.loads(Path(fetched.value.path()).read_bytes())


def check_shortcuts(page: Any) -> None:
    """Keys change the view, and do nothing while one types."""
    show(page, "pipeline")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.locator("dialog.help kbd", has_text="w").wait_for()
    accessibility(page)("shortcuts")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('dialog') === null")
    page.keyboard.press("2")
    until(page, "millraceDashboard.view === 'steps'")
    page.keyboard.press("/")
    until(page, "document.activeElement.id === 'find'")
    page.keyboard.type("w2")
    assert page.evaluate("millraceDashboard.view") == "requests" and page.input_value("#find") == "w2"
    page.click("text=Show all")
    page.keyboard.press("w")
    page.locator("[data-wall='tokens/s']").wait_for()
    assert page.locator("nav").count() == 0
    accessibility(page)("wall")
    page.keyboard.press("w")
    until(page, "millraceDashboard.view === 'pipeline'")


def check_drawing(page: Any) -> None:
    """Tiles fill their area and overlap nowhere; the ticks of axes are round."""
    load = "import('/static/dashboard/{}.js').then((module) => module.{})"
    boxes = page.evaluate(load.format("block_tiles", "squarified([50, 25, 15, 6, 4], 20, 5)"))
    assert sum(box["w"] * box["h"] for box in boxes) - 100 < 1e-6
    for i, one in enumerate(boxes):
        assert one["x"] >= -1e-9 and one["x"] + one["w"] <= 20 + 1e-9 and one["y"] + one["h"] <= 5 + 1e-9
        for other in boxes[:i]:
            across = min(one["x"] + one["w"], other["x"] + other["w"]) - max(one["x"], other["x"])
            down = min(one["y"] + one["h"], other["y"] + other["h"]) - max(one["y"], other["y"])
            assert across < 1e-9 or down < 1e-9
    assert page.evaluate(load.format("steps_strip", "ticks(57, 3)")) == [20, 40]
    assert page.evaluate(load.format("flow", "perDot(5)")) == 1
    assert page.evaluate(load.format("flow", "perDot(61)")) == 100


# -- under load


def check_history(page: Any) -> None:
    """Back by keys and by a click: all views show that time, and Live returns."""
    show(page, "requests")
    until(page, f"{DATA}.history.last_frame_s - {DATA}.history.first_frame_s > 1")
    track = page.locator(".history .track")
    track.focus()
    page.keyboard.press("Home")
    until(page, "millraceDashboard.feed.isPast")
    first_s = page.evaluate(f"{DATA}.history.first_frame_s")
    assert page.evaluate("millraceDashboard.feed.updateS") <= first_s + 2  # frames over 15 minutes old are dropped
    page.locator(".history.past", has_text=" ago").wait_for()
    assert page.locator("tr[data-request] button").count() == 0  # nothing of the past can be cancelled
    for view, topic in (("blocks", "blocks"), ("steps", "steps"), ("latency", "latency"), ("health", "loop")):
        show(page, view)
        until(page, f"millraceDashboard.feed.isPast && {DATA}.{topic} !== undefined")
    accessibility(page)("the past")
    page.keyboard.press("]")
    until(page, f"millraceDashboard.feed.updateS > {first_s}")
    page.click("button.live")
    until(page, "!millraceDashboard.feed.isPast")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("[")
    until(page, "millraceDashboard.feed.isPast")
    page.keyboard.press("l")
    until(page, "!millraceDashboard.feed.isPast")


def check_requests(page: Any) -> None:
    """Sorted by a heading, filtered by state, found by id; further rows come as the page scrolls."""
    show(page, "requests")
    page.click("th button:has-text('prompt')")
    sizes = f"{DATA}.requests.rows.map((row) => row.num_prompt_tokens)"
    until(page, f"(({sizes}).length > 9 && ({sizes}).every((n, i, all) => i === 0 || n <= all[i - 1]))")
    assert page.locator("th[aria-sort=descending]").text_content().startswith("prompt")
    page.locator(".filters select").first.select_option("=running")
    until(page, f"{DATA}.requests.rows.every((row) => row.state === 'running') && {DATA}.requests.num_live <= 32")
    page.locator("[data-figure=num_live]", has_text=re.compile(r"^\d+ of [\d,]+ requests")).wait_for()
    page.click("text=Show all")
    page.fill("#find", "r12")
    until(page, f"{DATA}.requests.rows.length > 0 && {DATA}.requests.rows.every((row) => row.id.includes('r12'))")
    page.fill("#find", "")
    page.click("th button:has-text('age')")
    until(page, f"{DATA}.requests.num_live > 1500")
    page.mouse.wheel(0, 20_000)
    until(
        page,
        f"{DATA}.requests.offset > 300 && document.querySelector('tr[data-request]').getBoundingClientRect().top < 50",
    )
    page.evaluate("scrollTo(0, 0)")
    until(page, f"{DATA}.requests.offset === 0")


def check_tiles(page: Any) -> None:
    """A tile leads to the blocks of its owner."""
    show(page, "blocks")
    tile = page.locator(".tile.owner").first
    tile.wait_for()
    tile.click()
    until(page, "/: [\\d,]+ of 100,000 blocks/.test(document.querySelector('[data-figure=shown_blocks]').textContent)")
    page.locator(".map[role=slider]").focus()
    page.keyboard.press("ArrowRight")
    page.locator(".detail-line", has_text="in use by").wait_for()
    page.click("text=all blocks")
    tile.wait_for()


def check_flow(page: Any) -> None:
    """The channels tell their rates, which dots follow unless motion is unwelcome."""
    show(page, "pipeline")
    wait_for_updates(page, 3)
    edge = page.evaluate(f"{DATA}.pipeline.edges['execute.out->sample.in']")
    rows = page.evaluate(f"{DATA}.steps.rows")
    steps = [row for row in rows if row[1] > rows[-1][1] - 3e6]
    assert 0.4 < edge["per_s"] / (len(steps) / 3) < 2.5
    assert 0.4 < edge["tokens_per_s"] / (sum(row[5] + row[6] for row in steps) / 3) < 2.5
    until(page, f"({DRAWN})()")
    page.emulate_media(reduced_motion="reduce")
    show(page, "steps")
    show(page, "pipeline")
    wait_for_updates(page, 2)
    until(page, f"!({DRAWN})()")  # a frame that was asked for before may be late
    page.emulate_media(reduced_motion="no-preference")
