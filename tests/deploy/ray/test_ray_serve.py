"""The application under a real Ray Serve: started as documented, used by the openai package, scaled up and down."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.clients.conftest import KEY, SETTINGS
from tests.deploy.ray.clusters import RayNodes, is_of_ray, resident_bytes
from tests.deploy.running import ROOT

ray = pytest.importorskip("ray", reason="needs pip install 'millrace-engine[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

OPTIONS = {"api_key": KEY, "threads": "1", "max_replicas": "2", "target_work_s": "0.5", "downscale_delay_s": "2"}
START_S, SCALE_S = 180.0, 90.0
MAX_BYTES = 2e9


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of the application, which `serve run` has started on a cluster of one node."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with RayNodes(nodes=0, head_cpus=2) as nodes:
        from ray import serve

        ray.init(address=nodes.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        command = ["-m", "ray.serve.scripts", "run", "--address", nodes.address, "millrace.deploy.ray.app:build_app"]
        command += [f"{name}={value}" for name, value in (OPTIONS | SETTINGS).items()]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL
        ) as running:
            try:
                until(lambda: answers(f"http://127.0.0.1:{port}/health/ready"), START_S)
                yield f"http://127.0.0.1:{port}"
            finally:
                running.terminate()
                running.wait()
                serve.shutdown()
                ray.shutdown()


def until(is_so: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, f"not so after {limit_s} s"
        time.sleep(0.1)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def page(address: str) -> str:
    asking = urllib.request.Request(address, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asking, timeout=10) as answer:
        return str(answer.read().decode())


def metric(url: str, name: str) -> float:
    lines = page(f"{url}/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def num_replicas() -> int:
    from ray import serve

    (deployment,) = (one for app in serve.status().applications.values() for one in app.deployments.values())
    return int(deployment.replica_states.get("RUNNING", 0))


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_the_openai_package_passes_its_suite_through_serve(url: str) -> None:
    suite = "tests/clients/test_openai_python.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", suite]
    environment = os.environ | {"MILLRACE_TEST_URL": url}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout[-3000:]


def test_a_wrong_key_is_refused_and_all_routes_are_there(url: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    assert "/v1/chat/completions" in json.loads(page(f"{url}/openapi.json"))["paths"]
    with pytest.raises(openai.BadRequestError):
        client(url).completions.create(model="demo", prompt="Once", temperature=9)


def test_events_come_one_by_one_and_a_client_that_leaves_cancels_its_request(url: str) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "Once", "stream": True, "extra_body": {"ignore_eos": True}}
    times = [time.monotonic() for _ in client(url).completions.create(max_tokens=200, **asked)]
    assert len(times) > 20 and times[-1] - times[0] > 0.05  # not all at once
    before = metric(url, "vllm:generation_tokens_total")
    with client(url).completions.create(max_tokens=1500, **asked) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
    until(lambda: metric(url, "vllm:num_requests_running") == 0, 10.0)
    assert metric(url, "vllm:generation_tokens_total") - before < 1000


def test_websockets_pass_through_serve(url: str) -> None:
    async def main() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(f"{url}/v1/responses") as ws:
            await ws.send_json({"type": "response.create", "model": "demo", "input": "Once", "max_output_tokens": 16})
            kinds = [(await ws.receive_json(timeout=30))["type"]]
            while kinds[-1] not in ("response.completed", "response.incomplete"):
                kinds.append((await ws.receive_json(timeout=30))["type"])
            assert kinds[0] == "response.created" and "response.output_text.delta" in kinds

    asyncio.run(main())


def test_replicas_come_with_the_work_that_waits_and_go_without_cutting_a_stream(url: str) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "extra_body": {"ignore_eos": True}}
    assert num_replicas() == 1
    ended, errors = threading.Event(), list[object]()

    def keep_asking(number: int, max_tokens: int, is_stream: bool, until_ended: threading.Event) -> None:
        with client(url) as one:
            while not until_ended.is_set():
                found = one.completions.create(prompt=f"{number}", max_tokens=max_tokens, stream=is_stream, **asked)
                events = list(found) if is_stream else [found]
                if (reason := [event.choices[0].finish_reason for event in events if event.choices][-1]) != "length":
                    errors.append(reason)

    def run(until_ended: threading.Event, count: int, *how: Any) -> list[threading.Thread]:
        threads = [threading.Thread(target=keep_asking, args=(one, *how, until_ended)) for one in range(count)]
        for thread in threads:
            thread.start()
        return threads

    few = run(ended, 1, 300, True)
    crowd_ended = threading.Event()
    crowd = run(crowd_ended, 24, 400, False)
    began_s = time.monotonic()
    try:
        until(lambda: num_replicas() == 2, SCALE_S)
        up_s, size = time.monotonic() - began_s, resident_bytes()
        crowd_ended.set()
        for thread in crowd:
            thread.join()
        began_s = time.monotonic()
        until(lambda: num_replicas() == 1, SCALE_S)
        down_s = time.monotonic() - began_s
    finally:
        ended.set()
        crowd_ended.set()
        for thread in [*few, *crowd]:
            thread.join()
    print({"up_s": round(up_s, 1), "down_s": round(down_s, 1), "resident_mb": round(size / 1e6)})
    assert errors == [] and size <= MAX_BYTES


def test_serve_build_writes_a_file_of_settings(url: str) -> None:
    command = [sys.executable, "-m", "ray.serve.scripts", "build", "millrace.deploy.ray.app:app"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "import_path: millrace.deploy.ray.app:app" in found.stdout and "name: Millrace" in found.stdout


def test_is_of_ray_knows_its_processes() -> None:
    assert is_of_ray("ray::ServeReplica:x") and not is_of_ray("python -m pytest tests/deploy/ray")
