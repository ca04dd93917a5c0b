"""Makes the pictures of deploy/docs/dashboard.md: python -m tests.deploy.dashboard.pictures

The bundled model serves a load that shares prompts, with little memory. Needs Chromium.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deploy.browser import opened, show, until, wait_for_updates
from tests.deploy.dashboard.interactions import DATA
from tests.deploy.running import RunningServer

PICTURES = Path(__file__).resolve().parents[3] / "deploy/docs/pictures"
WIDTH, HEIGHT = 1200, 700  # of the window
SERVE = [
    sys.executable,
    "-m",
    "millrace.deploy",
    "serve",
    "--port",
    "0",
    "--log-level",
    "warning",
    "--admin-key",
    "boss",
]
LITTLE = ["--num-gpu-blocks", "300", "--max-num-seqs", "24"]
LOAD_S = 60


def load(page: Any, tokens: int = 200) -> None:
    """A load from the page itself."""
    show(page, "load")
    values = {"Requests at a time": 40, "Seconds": LOAD_S, "Characters of a prompt": 400, "Tokens of an answer": tokens}
    for label, value in values.items():
        page.get_by_role("spinbutton", name=label).fill(str(value))
    page.click("text=Start the load")
    time.sleep(8)


def chat(page: Any) -> None:
    show(page, "playground")
    page.get_by_label("Max tokens").fill("60")
    page.fill("#chat-draft", "Once upon a time, a mill stood by the river")
    page.keyboard.press("Control+Enter")
    page.locator("[data-turn=assistant]").first.wait_for()
    page.get_by_text("Probability", exact=True).click()
    time.sleep(4)


def waterfall(page: Any) -> None:
    show(page, "requests")
    page.locator("tr[data-request] a").first.click()
    page.locator(".waterfall .sentence", has_text="The request").wait_for()


def past(page: Any) -> None:
    show(page, "steps")
    page.locator(".history .track").focus()
    page.keyboard.press("ArrowLeft")
    until(page, "millraceDashboard.feed.isPast")
    wait_for_updates(page, 1)


def back(page: Any) -> None:
    page.keyboard.press("End")
    until(page, "!millraceDashboard.feed.isPast")


def view(name: str, wait: str = "true") -> Callable[[Any], None]:
    def shown(page: Any) -> None:
        show(page, name)
        wait_for_updates(page, 4)
        until(page, wait)

    return shown


SCENES: dict[str, tuple[Callable[[Any], None], str]] = {  # name -> (how to get there, theme)
    "pipeline": (view("pipeline", f"{DATA}.overview.bottleneck !== null"), "light"),
    "requests": (view("requests"), "light"),
    "blocks": (view("blocks"), "dark"),
    "prefixes": (view("prefixes", f"{DATA}.prefixes?.nodes !== undefined"), "light"),
    "latency": (view("latency"), "light"),
    "wall": (view("wall"), "dark"),
    "past": (past, "light"),
    "waterfall": (waterfall, "light"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the pictures of the dashboard's page.")
    parser.add_argument("--only", choices=[*SCENES, "chat"], action="append", help="only this one")
    parser.add_argument("--out", type=Path, default=PICTURES)
    options = parser.parse_args()
    wanted = options.only or [*SCENES, "chat"]
    with RunningServer(command=[*SERVE, *LITTLE]) as server:
        script = "sessionStorage.setItem('millrace.admin_key', 'boss')"
        with opened(server.url + "/dashboard", script) as page:
            page.locator("[data-figure=state]", has_text="ready").wait_for()
            page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            if "chat" in wanted:
                chat(page)
                page.screenshot(path=str(options.out / "chat.png"))
            if any(name in SCENES for name in wanted):
                load(page)
            for name, (go, theme) in SCENES.items():
                if name not in wanted:
                    continue
                page.emulate_media(color_scheme=theme)
                go(page)
                page.mouse.move(0, 0)
                page.screenshot(path=str(options.out / f"{name}.png"))
                print(f"{name}.png: {(options.out / f'{name}.png').stat().st_size // 1024} KiB", flush=True)
                if name == "past":
                    back(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
