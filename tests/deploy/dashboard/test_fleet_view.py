"""The dashboard's view of engines and fronts, in a real browser at real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.deploy.browser import check_that_it_stayed_at_home, opened, show, until
from tests.deploy.running import RunningServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not os.environ.get("MILLRACE_FULL"), reason="MILLRACE_FULL"),
]
SETTINGS = ["--max-num-seqs", "16", "--threads", "1", "--dtype", "float32", "--num-gpu-blocks", "2048"]
PROMPT = "Once upon a time there was a mill by the river, and the miller had a cat. " * 4


@pytest.mark.parametrize("num_fronts", [1, 2])
def test_engines_fronts_and_the_scores_of_each_choice_are_shown(num_fronts: int) -> None:
    fleet = ["--data-parallel-size", "2", "--front-processes", str(num_fronts)]
    command = [sys.executable, "-m", "millrace.deploy", "serve", "--port", "0", *fleet, *SETTINGS]
    with RunningServer(command=command) as server:
        for number in range(8):
            body = {"prompt": PROMPT, "max_tokens": 4 + number, "ignore_eos": True}
            assert server.post("/v1/completions", body, {"X-Request-Id": f"asked-{number}"}).status == 200
        with opened(f"{server.url}/dashboard?front={num_fronts - 1}") as page:
            until(page, "document.querySelector('#fleet, a[href=\"#/fleet\"]') !== null")
            show(page, "fleet")
            until(page, "document.querySelectorAll('[data-engine]').length === 2")
            until(page, "document.querySelectorAll('[data-choice]').length > 0")
            cells = page.inner_text("[data-choice]")
            assert "cached" in cells and "asked-" in cells
            until(page, "document.querySelectorAll('[data-prefix]').length > 0")
            until(page, "[...document.querySelectorAll('[data-warm]')].some((cell) => Number(cell.dataset.warm) > 0)")
            if num_fronts > 1:
                assert page.inner_text("#front") == f"front {num_fronts - 1} of {num_fronts}"
                assert page.locator("[data-front]").count() == num_fronts
                page.click("[data-front='0'] a")
                until(page, "document.getElementById('front')?.textContent === 'front 0 of 2'")
                until(page, "document.querySelectorAll('[data-front]').length === 2")
            if folder := os.environ.get("MILLRACE_TEST_SCREENSHOTS"):
                page.screenshot(path=Path(folder) / f"fleet-{num_fronts}.png", full_page=True)
            check_that_it_stayed_at_home(page)
