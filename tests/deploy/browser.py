"""Opens pages of the server in a real Chromium, and checks for tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.counts import FULL

CHROMIUM = Path("/usr/bin/chromium")
VIEWS = (
    *("pipeline", "steps", "requests", "waterfall", "blocks", "prefixes", "latency", "health", "playground"),
    *("load", "recorder", "config", "wall"),
)
CHECKED = "document" if FULL else "{ exclude: [['tr:nth-child(n+7):nth-last-child(n+7)']] }"  # by axe
WATCH = "addEventListener('securitypolicyviolation', (e) => (globalThis.violations ??= []).push(e.blockedURI));"


@contextmanager
def opened(url: str, script: str = "") -> Iterator[Any]:
    """A page in which `script` runs first. Skips the test if no browser is installed.

    `page.complaints` has the errors, `page.asked` the requested URLs.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield watched(browser, url, script)
        browser.close()


def watched(browser: Any, url: str, script: str = "") -> Any:
    """One more page of an opened browser, with its own storage: a thread can start only one Playwright at a time."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(90_000)  # a machine with other work takes long to draw
    page.complaints, page.asked = [], []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda line: page.complaints.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("websocket", lambda socket: page.asked.append(socket.url))
    page.add_init_script(WATCH + script)
    page.goto(url)
    return page


def check_that_it_stayed_at_home(page: Any) -> None:
    """Asserts that all requests went to one server, and that there were no errors."""
    (home,) = {url.split("/")[2] for url in page.asked}
    assert home.startswith("127.0.0.1:")
    assert page.evaluate("globalThis.violations ?? []") == []
    assert page.complaints == []


def until(page: Any, claim: str, timeout_s: float = 90.0) -> None:
    """Waits until `claim` holds in the page. Playwright's own wait uses `eval`, which the page's policy forbids."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(claim):
        assert time.monotonic() < deadline, f"{claim} does not become true"
        time.sleep(0.03)


def show(page: Any, view: str) -> None:
    page.evaluate(f"location.hash = '#/{view}'")
    until(page, f"millraceDashboard.view === '{view}' && document.querySelector('main h1') !== null")


def wait_for_updates(page: Any, count: int) -> None:
    goal = page.evaluate("millraceDashboard.feed.numUpdates") + count
    until(page, f"millraceDashboard.feed.numUpdates >= {goal}")


def accessibility(page: Any) -> Callable[[str], None]:
    """A check that axe-core finds no serious fault in the page. Skips the test if axe is not installed.

    Of a long table it looks at the first six rows and the last six, as of requests sorted by arrival the first ones run
    and the last ones wait; with MILLRACE_FULL=1 at all of them, which takes half of the time of a view.
    """
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())

    def check(where: str) -> None:
        found = page.evaluate(f"axe.run({CHECKED}, {{ resultTypes: ['violations'] }})")["violations"]
        serious = [rule for rule in found if rule["impact"] in ("serious", "critical")]
        told = [(rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in serious]
        assert not told, (where, json.dumps(told, indent=1))

    return check
