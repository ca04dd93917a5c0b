"""`millrace top`: the dashboard's first view in a terminal, from the same feed of a running server.

Needs rich: `pip install -e '.[top]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson

from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ..config import ServerConfig
from ..dashboard.trace_log import StepRow
from ..server_url import server_url, why_no_answer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WINDOW_S = 5.0  # period of shares and rates
NUM_REQUESTS = 12  # listed at once
WAIT_S = 10.0  # for the server to accept the connection
TOPICS = {"overview": {}, "pipeline": {}, "steps": {}, "requests": {"limit": NUM_REQUESTS}}
BAR_CELLS = 24
SPARKS = "▁▂▃▄▅▆▇█"


class DashboardUnavailable(Exception):
    """The server has no feed for this client; the message says why."""


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 after `--once`, 1 if the feed cannot be read."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise ConfigError("top needs rich, which is not installed: pip install -e '.[top]'") from None
    key = server_config.api_key[0] if server_config.api_key else None
    try:
        asyncio.run(_show(server_url("--url", options.url), key, is_once=options.once))
    except DashboardUnavailable as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 1
    return 0


async def _show(url: str, key: str | None, *, is_once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console, readings = Console(), DashboardState()
    if is_once:
        async for update in watch(url, key):
            readings.take(update)
            if readings.num_taken >= 2 or not readings.has_pipeline:
                break
        console.print(draw(readings))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        async for update in watch(url, key):
            readings.take(update)
            live.update(draw(readings), refresh=True)


async def watch(url: str, key: str | None) -> AsyncIterator[dict[str, Any]]:
    """Yields updates of the feed of the server at `url`, and ends with `DashboardUnavailable`, which says why."""
    import aiohttp

    address = url + "/dashboard/feed"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=WAIT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.ws_connect(address) as socket:
            await socket.send_str(orjson.dumps({"type": "hello", "key": key}).decode())
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                update = orjson.loads(message.data)
                if update["type"] == "error":
                    raise DashboardUnavailable(f"{url}: {update['error']['message']}")
                if update["type"] == "hello":
                    await socket.send_str(orjson.dumps({"type": "subscribe", "topics": TOPICS}).decode())
                else:
                    yield update
    except (aiohttp.ClientError, OSError) as error:
        raise DashboardUnavailable(f"{url} cannot be reached: {why_no_answer(error)}") from None
    raise DashboardUnavailable(f"{url} closed the connection")


class DashboardState:
    """The state from the feed: the newest data of each topic, and the counters of the last seconds."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.steps: deque[StepRow] = deque(maxlen=600)
        self.num_taken = 0
        self._history: deque[tuple[float, Mapping[str, Any]]] = deque()

    @property
    def has_pipeline(self) -> bool:
        """Whether the server has an engine."""
        return "pipeline" in self.data

    def take(self, update: Mapping[str, Any]) -> None:
        """Applies one update of the feed."""
        self.num_taken += 1
        topics = update["full"] | update["patch"]
        if "steps" in topics:
            self.steps.extend(StepRow(*row) for row in topics["steps"]["rows"])
        self.data |= {name: data for name, data in update["full"].items() if name != "steps"}
        for name, patch in update["patch"].items():
            if name != "steps":
                self.data[name] = merged(self.data[name], patch)
        if update["now_s"] is not None and self.has_pipeline:
            self._history.append((update["now_s"], self.data["pipeline"]))
            while len(self._history) > 2 and self._history[1][0] < update["now_s"] - WINDOW_S:
                self._history.popleft()

    def shares(self, stage: str) -> tuple[float, float]:
        """(busy, blocked) shares of the last seconds, as the server has measured them."""
        told = self.data["pipeline"]["stages"][stage]
        return told["busy"], told["blocked"]

    def rate(self, field: str) -> float:
        """The sum of a `StepRow` field over the last `WINDOW_S` seconds, per second."""
        if not self._history:
            return 0.0
        since_us = 1e6 * (self._history[-1][0] - WINDOW_S)
        total: int = sum(getattr(row, field) for row in self.steps if row.ended_us >= since_us)
        return total / WINDOW_S

    @property
    def now_s(self) -> float:
        """The engine's clock at the last update."""
        return self._history[-1][0] if self._history else 0.0


def merged(target: Any, patch: Any) -> Any:
    """`target` with a JSON merge patch (RFC 7386) applied, as new data."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


# -- drawing


def draw(readings: DashboardState) -> RenderableType:
    """The whole screen."""
    from rich.console import Group
    from rich.markup import escape

    overview = readings.data.get("overview", {"health": {"state": "unknown", "reason": None}})
    parts: list[RenderableType] = [_headline(readings, overview)]
    if (bottleneck := overview.get("bottleneck")) is not None:
        parts.append(escape(bottleneck["sentence"]))
    if readings.has_pipeline:
        parts += ["", _stages(readings), ""]
    if readings.steps:
        parts += [_strip(readings), ""]
    if "requests" in readings.data:
        parts.append(_requests(readings))
    return Group(*parts)


def _headline(readings: DashboardState, overview: Mapping[str, Any]) -> str:
    from rich.markup import escape

    health = overview["health"]
    tone = "green" if health["state"] == "ready" else "red"
    reason = f" {escape(health['reason'])}" if health.get("reason") else ""
    words = [f"[bold {tone}]{health['state']}[/]{reason}"]
    if "num_running" in overview:
        blocks = overview["blocks"]
        words += [
            f"[bold]{overview['num_running']}[/] running of {overview['max_num_seqs']}",
            f"[bold]{overview['num_waiting']}[/] waiting",
            f"[bold]{readings.rate('num_decode_tokens'):,.0f}[/] tokens/s decoded",
            f"[bold]{readings.rate('num_prefill_tokens'):,.0f}[/] prefilled",
            f"KV [bold]{blocks['in_use'] / blocks['num_blocks']:.0%}[/] of {blocks['num_blocks']:,} blocks",
            f"[bold]{overview['num_preemptions']}[/] preemptions",
        ]
    return "   ".join(words)


def _stages(readings: DashboardState) -> Table:
    table = _table("stage", "", ">busy", ">blocked", ">waiting", ">peak", ">sent", "to")
    edges = readings.data["pipeline"]["edges"]
    for name in readings.data["pipeline"]["stages"]:
        shares = readings.shares(name)
        incoming = [edge for edge in edges.values() if edge["target"] == name]
        outgoing = [edge for edge in edges.values() if edge["source"] == name]
        table.add_row(
            f"[bold]{name}[/]",
            _bar(shares),
            f"{shares[0]:.0%}",
            f"{shares[1]:.0%}",
            str(sum(edge["depth"] for edge in incoming)),
            str(max((edge["high_water"] for edge in incoming), default=0)),
            f"{max((edge['num_sent'] for edge in outgoing), default=0):,}",
            ", ".join(f"{edge['target']} {edge['depth']}/{edge['capacity']}" for edge in outgoing),
        )
    return table


def _bar(shares: tuple[float, float]) -> str:
    busy, blocked = shares
    num_busy, num_blocked = round(BAR_CELLS * busy), round(BAR_CELLS * blocked)
    num_idle = max(0, BAR_CELLS - num_busy - num_blocked)
    return f"[cyan]{'█' * num_busy}[/][yellow]{'█' * num_blocked}[/][bright_black]{'░' * num_idle}[/]"


def _strip(readings: DashboardState) -> str:
    rows = list(readings.steps)[-72:]
    longest = max(1, *(row.duration_us for row in rows))
    sparks = (
        f"[{'red' if row.is_void else 'yellow' if row.num_prefill_tokens else 'cyan'}]"
        f"{SPARKS[min(len(SPARKS) - 1, len(SPARKS) * row.duration_us // (longest + 1))]}[/]"
        for row in rows
    )
    return f"steps {''.join(sparks)} [bright_black]to {longest / 1e3:,.1f} ms; yellow: with prefill[/]"


def _requests(readings: DashboardState) -> Table:
    from rich.markup import escape

    table = _table("request", "state", ">age", ">prompt", ">answer", ">blocks", ">preempted")
    listed = readings.data["requests"]
    for row in listed["rows"]:
        age_s = max(0.0, readings.now_s - row["arrival_s"])
        cached = f" (-{row['num_cached_tokens']})" if row["num_cached_tokens"] else ""
        counts = (f"{age_s:.1f} s", f"{row['num_prompt_tokens']}{cached}", str(row["num_generated_tokens"]))
        table.add_row(escape(row["id"]), row["state"], *counts, str(row["num_blocks"]), str(row["num_preempted"]))
    if listed["num_live"] > len(listed["rows"]):
        table.caption = f"and {listed['num_live'] - len(listed['rows']):,} more"
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black", caption_justify="left")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table
