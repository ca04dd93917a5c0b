"""`/docs` in a real browser: opened with a key, searched, tried, on a phone and in the dark; never away from home."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.browser import accessibility, opened, until
from tests.deploy.running import RunningServer

pytestmark = pytest.mark.slow
KEY = "a key of the page"
HAS = "document.querySelector('#app')?.textContent.includes"
SIZES = ((1440, 900), (390, 844))
# Scalar finds out whether it may compile code, and goes on without: the one complaint that the policy makes.
PROBE = "eval"


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    with RunningServer(server={"api_key": [KEY], "served_model_name": ["demo"]}) as running:
        yield running


def test_the_page_wants_the_key_then_shows_and_tries_the_api(keyed: RunningServer):
    with opened(f"{keyed.url}/docs") as page:
        until(page, "!document.getElementById('key').hidden")
        check = accessibility(page)
        check("key form")
        page.fill("#key-field", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('told').textContent.includes('is wrong')")
        page.fill("#key-field", KEY)
        page.keyboard.press("Enter")
        until(page, f"{HAS}('/v1/chat/completions') && {HAS}('/api/chat')")
        assert page.locator("#key").is_hidden()

        page.keyboard.press("Control+k")
        page.keyboard.insert_text("rerank")  # at once: each letter draws the list anew
        until(page, "document.querySelector('[role=listbox]')?.textContent.includes('/v1/rerank')")
        page.keyboard.press("Escape")

        page.locator("button:has-text('Test Request')").first.click()  # of a chat, with the body and key filled in
        page.locator("button:has-text('Send')").first.click()
        until(page, "document.body.textContent.includes('200 OK')")
        page.keyboard.press("Escape")
        for width, height in SIZES:
            page.set_viewport_size({"width": width, "height": height})
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, scheme)
        assert {url.split("/")[2] for url in page.asked if not url.startswith("data:")} == {keyed.url.split("/")[2]}
        assert set(page.evaluate("globalThis.violations ?? []")) <= {PROBE}
