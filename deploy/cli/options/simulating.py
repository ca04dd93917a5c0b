"""Options of `millrace replay`, `simulate` and `chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .shared_options import LOGGING, add_common, add_engine_flags, usage


def add_replay(commands: Any) -> None:
    text = "replay a recording and compare each decision"
    replay = commands.add_parser("replay", usage=usage("replay FILE"), help=text)
    replay.add_argument("recording", type=Path, metavar="FILE", help="recording made by millrace serve --record FILE")
    replay.add_argument("--repeat", type=int, metavar="N", default=1, help="number of replays (default: 1)")
    text = "package.module:Class of the recording's scheduling policy, if it is not built in"
    replay.add_argument("--policy", metavar="TEXT", help=text)
    text = "play the recording in the dashboard at http://127.0.0.1:PORT/dashboard"
    replay.add_argument("--dashboard", action="store_true", help=text)
    add_common(replay)
    add_engine_flags(replay, LOGGING | {"port"}, of_engine=frozenset())


def add_simulate(commands: Any) -> None:
    text = "simulate a trace with other settings, without the device"
    simulate = commands.add_parser("simulate", usage=usage("simulate --trace FILE --cost-model FILE"), help=text)
    files = "recording, or trace in the format of Azure (CSV) or Mooncake (JSON lines)"
    simulate.add_argument("--trace", type=Path, required=True, metavar="FILE", help=files)
    text = "cost model, recording to fit one to, or fit-from-recording: fit to --trace, which must be a recording"
    simulate.add_argument("--cost-model", required=True, metavar="FILE", help=text)
    text = "engine setting that replaces the recording's; may be repeated"
    simulate.add_argument("--set", action="append", metavar="NAME=VALUE", help=text)
    text = "values to try for a setting; may be repeated, to try all combinations"
    simulate.add_argument("--sweep", action="append", metavar="NAME=A,B,C", help=text)
    text = "simulate so many engines behind a router, with a row for each --policy"
    simulate.add_argument("--fleet", type=int, metavar="N", help=text)
    text = "rules of the router: soonest, least-work, round-robin, prefix-only; several with commas, or all"
    simulate.add_argument("--policy", metavar="LIST", default="soonest", help=text)
    text = "lose an engine of the fleet at that time; may be repeated"
    simulate.add_argument("--kill", action="append", metavar="ENGINE@SECONDS", help=text)
    text = "seconds until a lost engine takes requests again (default: 30)"
    simulate.add_argument("--restart-s", type=float, metavar="X", default=30.0, help=text)
    text = "rules for the number of engines, at most --fleet: fixed, queued-work, hpa; several with commas, or all"
    simulate.add_argument("--autoscale", metavar="LIST", default="fixed", help=text)
    text = "engines at the beginning, and at least (default: 1)"
    simulate.add_argument("--least-engines", type=int, metavar="N", default=1, help=text)
    text = "seconds until an engine that --autoscale adds takes requests (default: 60)"
    simulate.add_argument("--start-s", type=float, metavar="X", default=60.0, help=text)
    text = "seconds of work that may wait for each engine (default: 10)"
    simulate.add_argument("--target-work-s", type=float, metavar="X", default=10.0, help=text)
    text = "sequences that may run in each engine, for hpa (default: 0.8 of max_num_seqs)"
    simulate.add_argument("--target-running", type=float, metavar="X", help=text)
    text = "processes that simulate a fleet (default: one for each core, with 4 engines or more in each)"
    simulate.add_argument("--processes", type=int, metavar="N", help=text)
    simulate.add_argument("--max-requests", type=int, metavar="N", help="simulate only the first N requests")
    text = "factor for the time between arrivals (default: 1)"
    simulate.add_argument("--scale-times", type=float, metavar="X", default=1.0, help=text)
    text = "factor for the lengths of prompts and answers (default: 1)"
    simulate.add_argument("--scale-lengths", type=float, metavar="X", default=1.0, help=text)
    simulate.add_argument("--save-cost-model", type=Path, metavar="FILE", help="write the cost model to this JSON file")
    simulate.add_argument("--save-result", type=Path, metavar="FILE", help="write the results to this JSON file")
    text = "plot the results as PNG, SVG or PDF; needs pip install -e '.[plots]'"
    simulate.add_argument("--plot", type=Path, metavar="FILE", help=text)
    add_common(simulate)


def add_chaos(commands: Any) -> None:
    text = "run fronts and engines on this machine under faults, and check each answer: exit code 0 or 1"
    chaos = commands.add_parser("chaos", usage=usage("chaos --fleet FRONTSxENGINES"), help=text)
    chaos.add_argument("--fleet", metavar="FxE", default="2x3", help="fronts and engines to start (default: 2x3)")
    text = "what is asked and, without --plan, struck (default: 0)"
    chaos.add_argument("--seed", type=int, metavar="N", default=0, help=text)
    chaos.add_argument("--minutes", type=float, metavar="X", default=1.0, help="time of the faults (default: 1)")
    text = "YAML or JSON file of strikes, or one of upgrade, partition, clocks, versions (default: drawn)"
    chaos.add_argument("--plan", metavar="FILE", help=text)
    chaos.add_argument("--clients", type=int, metavar="N", default=32, help="clients (default: 32)")
    text = "requests a second of all clients, at most (default: 8)"
    chaos.add_argument("--rate", type=float, metavar="X", default=8.0, help=text)
    text = "folder for the logs of all processes (default: a temporary one, kept after a violation)"
    chaos.add_argument("--log-dir", type=Path, metavar="DIR", help=text)
    text = "write each request with the times of its pieces to this file, as JSON lines"
    chaos.add_argument("--save-history", type=Path, metavar="FILE", help=text)
    add_common(chaos)
