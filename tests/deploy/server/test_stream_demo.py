"""The JavaScript client and the page that uses it, in a real browser."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.running import ROOT, RunningServer

CHROMIUM = Path("/usr/bin/chromium")
STATIC = ROOT / "deploy" / "static"


def test_the_client_is_short_and_all_files_are_packaged_and_served(server: RunningServer):
    assert len((STATIC / "stream.js").read_text().splitlines()) < 150
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "static/*" in package_data["millrace.deploy"]
    types = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
    for path in STATIC.glob("stream*"):
        answer = server.get(f"/static/{path.name}")
        assert answer.body == path.read_bytes()
        assert answer.headers["content-type"].startswith(types[path.suffix[1:]])
        assert not re.search(rb"https?://", answer.body), "nothing comes from elsewhere"
    assert server.get("/stream-demo").body == (STATIC / "stream.html").read_bytes()


@pytest.mark.parametrize("name", ["", "none.js", "..%2fserver.py", "%2e%2e/server.py", "%00", "stream.js/"])
def test_no_other_file_is_served(server: RunningServer, name: str):
    assert server.get(f"/static/{name}").status == 404


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    options: dict[str, Any] = {"server": {"api_key": ["sesame"]}, "script": {"eos_probability": 0.0}, "step_s": 0.01}
    with RunningServer(**options, engine={"max_unread_tokens": 16}) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.slow
def test_answers_stream_pause_and_survive_a_cut(keyed: RunningServer, browser: Any, tmp_path: Path):
    page = browser.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.goto(keyed.url + "/stream-demo")
    page.fill("#key", "sesame")
    page.fill("#tokens", "160")
    page.click("text=Send")
    cards = page.locator("article")
    cards.nth(2).locator("output", has_text="chunks").wait_for()
    paused = cards.nth(0)
    paused.locator("text=Pause").click()
    cards.nth(1).locator("output", has_text=re.compile(r"[3-9]\d chunks")).wait_for()
    page.click("#cut")
    page.locator("#state", has_text="reconnected").wait_for()
    for place in (1, 2):
        cards.nth(place).locator("output", has_text="160 tokens").wait_for()
        assert len(cards.nth(place).locator("p").text_content().encode()) > 150
    assert len(paused.locator("p").text_content()) < 150
    page.screenshot(path=str(tmp_path / "stream-demo.png"))  # to look at: pytest keeps it for a while
    paused.locator("text=Continue").click()
    paused.locator("output", has_text="160 tokens").wait_for()
    texts = sorted(cards.nth(place).locator("p").text_content() for place in range(3))

    def whole(seed: int) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 160, "temperature": 0.8, "seed": seed}
        answer = keyed.post("/v1/completions", body, {"Authorization": "Bearer sesame"})
        return str(answer.json["choices"][0]["text"])

    with ThreadPoolExecutor(3) as pool:
        assert texts == sorted(pool.map(whole, (1, 2, 3)))
    assert not complaints
    page.close()
    keyed.wait_until_idle()


@pytest.mark.slow
def test_a_wrong_key_is_told(keyed: RunningServer, browser: Any):
    page = browser.new_page()
    page.goto(keyed.url + "/stream-demo")
    page.fill("#key", "wrong")
    page.click("text=Send")
    page.locator("#state", has_text="cut").wait_for()
    assert page.locator("#state").text_content() in ("cut", "closed"), "it is not open, and says so"
    assert not page.locator("article p").first.text_content() and keyed.stats()["live"] == 0
    page.close()
