"""The Grafana dashboard, the alert rules and the scrape config: every query names a metric that is exported.

With Prometheus installed (Debian's package), promtool checks them. With MILLRACE_FULL=1, a Prometheus scrapes a server
and evaluates each query of the dashboard.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import millrace.deploy
from millrace.deploy.metrics.families import engines
from tests.counts import FULL
from tests.deploy.running import RunningServer, free_port
from tests.deploy.server.test_health import served

FOLDER = Path(millrace.deploy.__file__).parent / "monitoring"
HAS_PROMTOOL = shutil.which("promtool") is not None
HAS_PROMETHEUS = shutil.which("prometheus") is not None and FULL
NAMES = re.compile(r"\b(?:vllm|millrace):[a-z0-9_]+|\bup\b")
NO_DATA_WHEN_ALL_IS_WELL = ("> 0", "prefix_cache")  # comparisons that hold only on errors; 0 / 0


def dashboard_queries() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def alert_queries() -> list[str]:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


class OneEngine:
    """What a server adds that has several."""

    def collect(self) -> Iterator[Metric]:
        figures = ("index", "num_requests", "num_deaths", "num_expected_cached_tokens")
        return engines([{"state": "ready", "address": None, "labels": {}} | dict.fromkeys(figures, 0)])


@pytest.fixture(scope="module")
def exposition() -> str:
    """The metrics of a server that has answered a request, and those of an engine of several."""

    async def run() -> str:
        async with served() as client:
            await client.post({"prompt": "abc", "max_tokens": 5, "n": 2})
            async with client.session.get("/metrics") as response:
                return await response.text()

    fleet = CollectorRegistry()
    fleet.register(OneEngine())
    return asyncio.run(run()) + generate_latest(fleet).decode()


def exported(exposition: str) -> set[str]:
    """Names of samples, including suffixes such as `_bucket`."""
    return {sample.name for family in text_string_to_metric_families(exposition) for sample in family.samples}


def test_every_query_names_an_exported_metric(exposition: str):
    names, queries = exported(exposition) | {"up"}, [*dashboard_queries(), *alert_queries()]
    assert len(queries) > 40
    for query in queries:
        used = NAMES.findall(query)
        assert used and set(used) <= names, (query, set(used) - names)


def test_labels_in_queries_are_labels_of_their_metrics(exposition: str):
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for query in [*dashboard_queries(), *alert_queries()]:
        for name, selector in re.findall(r"((?:vllm|millrace):[a-z0-9_]+)\{([^}]*)\}", query):
            asked = set(re.findall(r"(\w+)\s*=", selector)) - {"instance", "job"}
            assert asked <= labels[name], query
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        assert grouped - {"instance"} <= set().union(*(labels.get(name, set()) for name in NAMES.findall(query))), query


def test_panels_have_titles_units_and_places_of_their_own():
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


@pytest.mark.skipif(not HAS_PROMTOOL, reason="promtool is not installed: apt install prometheus")
def test_promtool_accepts_rules_config_and_exposition(exposition: str):
    def check(*arguments: str, text: str | None = None) -> str:
        done = subprocess.run(["promtool", "check", *arguments], input=text, capture_output=True, text=True, cwd=FOLDER)
        assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: style hints on names, which are vLLM's
        return done.stdout + done.stderr

    assert f"{len(alert_queries())} rules found" in check("rules", "alerts.yml")
    assert "SUCCESS" in check("config", "prometheus.yml")
    hints = check("metrics", text=exposition).splitlines()
    assert all("vllm:" in hint or "should not contain ':'" in hint for hint in hints if hint), hints


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[str, RunningServer]]:
    """A Prometheus that scrapes a server every half second, with the shipped configuration."""
    port = free_port()
    with RunningServer(step_s=0.002, script={"eos_probability": 0.0}) as server:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield f"http://127.0.0.1:{port}", server
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_PROMETHEUS, reason="needs MILLRACE_FULL=1 and prometheus: apt install prometheus")
def test_every_query_of_the_dashboard_returns_data_from_a_prometheus_that_scrapes(
    prometheus: tuple[str, RunningServer],
):
    url, server = prometheus
    for _ in range(8):  # half a minute of load
        server.post("/v1/completions", {"prompt": "abc" * 30, "max_tokens": 200, "n": 4})
        server.post("/v1/completions", {"prompt": "abc" * 30, "max_tokens": -1})
        time.sleep(1)
    deadline = time.monotonic() + 60
    for query in dashboard_queries():
        while not (found := _ask(url, query)) and not any(part in query for part in NO_DATA_WHEN_ALL_IS_WELL):
            assert time.monotonic() < deadline, f"no data for {query}"
            time.sleep(0.5)
        assert found or any(part in query for part in NO_DATA_WHEN_ALL_IS_WELL)
    assert not [alert for alert in _get(url, "/api/v1/alerts")["alerts"] if alert["state"] == "firing"]
    assert all(rule["health"] == "ok" for group in _get(url, "/api/v1/rules")["groups"] for rule in group["rules"])


def _ask(url: str, query: str) -> list[Any]:
    query = query.replace('instance=~"$instance"', 'instance=~".*"').replace("$__rate_interval", "30s")
    result: list[Any] = _get(url, "/api/v1/query?" + urllib.parse.urlencode({"query": query}))["result"]
    return result


def _get(url: str, path: str) -> Any:
    for _ in range(100):
        try:
            with urllib.request.urlopen(url + path, timeout=60) as response:
                return json.loads(response.read())["data"]
        except (ConnectionError, urllib.error.URLError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                raise
            time.sleep(0.2)
    raise AssertionError("Prometheus does not answer")
