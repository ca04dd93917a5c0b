"""Arrivals of a real service: two servers, one after the other, on the same requests at the same times.

    python -m tests.bench.cpu.arrivals --trace azure.csv --peer vllm=PYTHON [--model DIR] [--minutes 10]
        [--rate 0.3 | --first-rate 0.4] [--search-peers] [--json tests/bench/results/arrivals-NAME.json]

The trace (a CSV like Azure's conversation trace of 2023, or any other that `millrace simulate` reads) tells when
requests come and how long prompts and answers are; its gaps are all stretched by one factor, so that as many a second
come as are wanted. Prompts are random ids, the same for all servers; answers have the trace's length (`ignore_eos`) and
are greedy and streamed. No request waits for another's answer. Times count from when a request was due.

First the highest rate at which this engine's server keeps up is searched, in short probes: of the requests that came 30
s or more before a probe's end 95 % are finished at its end, and p99 TTFT is at most 20 s. Then each server gets the
minutes at that rate; a short probe sees no slow growth, so whether it kept up for all of them is told as well. `--rate`
takes one as it is; `--search-peers` searches the others' as well. `--from-minute` says where in the trace all of this
begins: Azure's first minutes are a service that fills up, at its 20th the rate is even and lengths are as in the whole
hour. Goodput: requests a second with TTFT within 5 s and a mean ITL within 100 ms. Each server runs alone, has the same
room for keys and values and is otherwise set as it is delivered, but for our drafts: they are off, as random weights
repeat themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from millrace.deploy.cli.bench.load import BenchRequest
from millrace.deploy.cli.bench.measures import RequestRecord
from millrace.deploy.cli.bench.serve import BenchClient
from millrace.stages.errors import ConfigError
from millrace.stages.recordings.reader import RecordingError
from millrace.stages.recordings.workloads import Workload, read_trace
from tests.bench.cpu.contenders import RunningServer, Served, start
from tests.bench.cpu.figures import machine, tell
from tests.bench.cpu.peers import OUR_SERVER, contenders_of, distribution_version, find_peers, our_contenders
from tests.bench.cpu.sustained import Bounds, Window, highest, summary, window
from tests.bench.shapes import SHAPES, make_checkpoint
from tests.bench.throughput import read_bandwidth_gb_s

NUM_WARM_UP = 8  # requests, all at once, that are not measured
UNFINISHED = "not finished when waiting was given up"


class Asks(Protocol):
    """The client of one request."""

    async def run_request(self, request: BenchRequest) -> RequestRecord: ...


async def drive(client: Asks, offered: Window, drain_s: float) -> list[RequestRecord]:
    """How each request went that was sent when it was due. Who has no whole answer `drain_s` after the last could have
    come is hung up on, and has failed."""
    clock = asyncio.get_running_loop().time
    began_s = clock()

    async def one(asked: BenchRequest, at_s: float) -> RequestRecord:
        await asyncio.sleep(began_s + at_s - clock())
        late_s = clock() - began_s - at_s
        try:
            async with asyncio.timeout_at(began_s + offered.duration_s + drain_s):
                record = await client.run_request(asked)
        except TimeoutError:
            return RequestRecord(error=UNFINISHED)
        return replace(record, ttft_s=record.ttft_s + late_s, e2el_s=record.e2el_s + late_s)

    return await asyncio.gather(*(one(*each) for each in zip(offered.asks, offered.times_s, strict=True)))


class Trial:
    """One server under the arrivals of a trace."""

    def __init__(self, server: RunningServer, trace: Workload, options: argparse.Namespace, bounds: Bounds) -> None:
        self.server = server
        self.probes: list[dict[str, Any]] = []
        self._trace = trace
        self._options = options
        self._bounds = bounds

    async def warm_up(self) -> None:
        """Raises RuntimeError for a server that does not answer what it will be asked."""
        offered = self._window(1.0, NUM_WARM_UP, "warm-up")
        found = await self._run(replace(offered, times_s=[0.0] * NUM_WARM_UP), 600.0)
        if found["finished"] < NUM_WARM_UP:
            raise RuntimeError(f"{self.server.label} answers {found['finished']} of {NUM_WARM_UP}: {found['errors']}")

    async def sustained(self, first: float) -> float | None:
        """The highest rate at which it keeps up, requests a second."""

        async def keeps_up(rate: float) -> bool:
            offered = self._window(rate, self._options.probe_s, f"probe-{len(self.probes)}")
            found = {"rate": rate} | await self._run(offered, self._options.probe_s)
            self.probes.append(found)
            return bool(found["keeps_up"])

        return await highest(keeps_up, first, self._options.probes)

    async def measure(self, rate: float) -> dict[str, Any]:
        """The minutes at a rate."""
        offered = self._window(rate, 60 * self._options.minutes, "measured")
        return await self._run(offered, self._options.drain_s)

    def _window(self, rate: float, duration_s: float, seed: str) -> Window:
        told = {"from_s": 60 * self._options.from_minute, "max_model_len": self._options.max_model_len}
        return window(self._trace, rate, duration_s, **told, seed=seed)

    async def _run(self, offered: Window, drain_s: float) -> dict[str, Any]:
        before = read_bandwidth_gb_s()
        cpu_s, began_s = self.server.cpu_s(), time.perf_counter()
        async with _client(self.server) as client:
            records = await drive(client, offered, drain_s)
        passed_s = time.perf_counter() - began_s
        found = summary(offered, records, self._bounds)
        found["busy_cores"] = (self.server.cpu_s() - cpu_s) / passed_s
        found["read_bandwidth_gb_s"] = [before, read_bandwidth_gb_s()]
        _say(f"{self.server.label}, {offered.duration_s:g} s: {_shown(found)}")
        return found


@asynccontextmanager
async def _client(server: RunningServer) -> AsyncIterator[BenchClient]:
    """A connection for each request: a kept one that the server is just closing would look like a failure of it."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with server.awake():
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            client = BenchClient(session, server.url, "/v1/completions")
            client.model, client.ignores_eos = await client.served_model(), True
            yield client


async def compare(
    servers: Sequence[Served], trace: Workload, options: argparse.Namespace, bounds: Bounds, logs: Path
) -> dict[str, Any]:
    """Each server in turn, ours first; the others are not there meanwhile. A peer that fails is left out."""
    rate: float | None = options.rate
    found: dict[str, Any] = {"versions": {}, "ready_s": {}, "peak_mib": {}, "sustained": {}, "engines": {}}
    for served in servers:
        try:
            rate, figures = await _turn(served, trace, options, bounds, rate, logs / f"{served.label}.log")
        except (RuntimeError, OSError, ConfigError) as error:
            if served.label == OUR_SERVER:
                raise
            _say(f"{served.label} is left out: {error}")
            continue
        for name, figure in figures.items():
            found[name][served.label] = figure
    return {"rate": rate} | found


async def _turn(
    served: Served, trace: Workload, options: argparse.Namespace, bounds: Bounds, rate: float | None, log: Path
) -> tuple[float, dict[str, Any]]:
    """The rate that was asked of a server, which it has to find where there is none yet, and what came of it."""
    server = await start(served, log)
    assert isinstance(server, RunningServer)
    figures: dict[str, Any] = {"versions": served.version, "ready_s": round(server.ready_s, 2)}
    try:
        _say(f"{served.label} {served.version}: ready after {server.ready_s:.1f} s")
        trial = Trial(server, trace, options, bounds)
        await trial.warm_up()
        if rate is None or (options.search_peers and served.label != OUR_SERVER):
            sustained = await trial.sustained(options.first_rate if rate is None else rate)
            figures["sustained"] = {"rate": sustained, "probes": trial.probes}
            rate = sustained if rate is None else rate
        if rate is None:
            raise SystemExit(f"{served.label} keeps up at none of the rates that were tried: lower --first-rate")
        figures["engines"] = await trial.measure(rate)
        figures["peak_mib"] = round(server.peak_mib())
    finally:
        await server.stop()
    return rate, figures


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, int | float))


def described(trace: Workload, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """What was asked in the minutes that were measured."""
    told = {"from_s": 60 * options.from_minute, "max_model_len": options.max_model_len}
    offered = window(trace, rate, 60 * options.minutes, **told, seed="measured")
    num_prompt = [len(asked.prompt or ()) for asked in offered.asks]
    num_answer = [asked.num_output for asked in offered.asks]
    return {
        "trace": options.trace.name,
        "from_minute": options.from_minute,
        "minutes": options.minutes,
        "stretched": offered.stretched,
        "requests": len(offered.asks),
        "mean_prompt": sum(num_prompt) / len(num_prompt),
        "mean_answer": sum(num_answer) / len(num_answer),
        "greatest_prompt": max(num_prompt),
        "cut": offered.num_cut,
        "max_model_len": options.max_model_len,
    }


def main() -> None:
    """Measures, prints, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.prog = "python -m tests.bench.cpu.arrivals"
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape; made there if it is not there yet")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[,MODEL]", help="see peers.py")
    parser.add_argument("--only", nargs="+", help="labels of the servers to run; for ours alone 'millrace server'")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--from-minute", type=float, default=20.0, help="of the trace; what comes before is left out")
    parser.add_argument("--max-model-len", type=int, default=8192, help="longer prompts are cut")
    parser.add_argument("--rate", type=float, help="requests a second; searched if it is not given")
    parser.add_argument("--first-rate", type=float, default=0.4, help="that the search begins with")
    parser.add_argument("--probes", type=int, default=4, help="at most, in a search")
    parser.add_argument("--probe-s", type=float, default=75.0)
    parser.add_argument("--search-peers", action="store_true", help="search the others' highest rates as well")
    parser.add_argument("--drain-s", type=float, default=300.0, help="that answers may take after the minutes")
    for name, value in asdict(Bounds()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value)
    parser.add_argument("--note", help="what else is to be known of this run; it goes into the JSON and its page")
    parser.add_argument("--logs", type=Path, help="a folder for what the servers print")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the servers are stopped, too
    bounds = Bounds(**{name: getattr(options, name) for name in asdict(Bounds())})
    try:
        trace = read_trace(options.trace)
        described(trace, options.rate or options.first_rate, options)
    except (RecordingError, ValueError) as error:
        parser.error(str(error))
    peers, _ = find_peers(options.peer, os.environ)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if not (model / "config.json").exists():
            make_checkpoint(options.shape, model)
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        version = distribution_version(sys.executable, "millrace")
        chosen = our_contenders(str(model), options.threads, version, options.max_model_len)
        for peer in peers:
            chosen += contenders_of(peer, str(model), options.threads, options.max_model_len)
        servers = [each for each in chosen if isinstance(each, Served)]
        servers = [each for each in servers if options.only is None or each.label in options.only]
        if not servers:
            parser.error(f"--only {' '.join(options.only)}: no server has that label")
        found = asyncio.run(compare(servers, trace, options, bounds, logs))
    results = {
        "shape": options.shape,
        "dtype": "bfloat16",
        "measured_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "note": options.note,
        **machine(options.threads),
        "asked": described(trace, found["rate"], options),
        "bounds": asdict(bounds),
    } | found
    tell(results, options.json)


if __name__ == "__main__":
    main()
