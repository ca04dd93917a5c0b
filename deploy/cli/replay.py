"""`millrace replay FILE`: runs the stages on a recording again and compares each decision.

With `--dashboard` it plays the recording in the browser instead.
"""

from __future__ import annotations

import argparse
import sys
import time

from ...stages.config import EngineConfig
from ...stages.errors import ConfigError
from ...stages.recordings.reader import Recording, RecordingError
from ...stages.recordings.replay import Replay
from ...stages.schedule.policy import Policy, make_policy
from ..config import ServerConfig

DIFFERS, UNREADABLE = 1, 3


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 0 if all decisions are equal, 1 if one differs, 3 for a file that cannot be replayed."""
    if options.repeat < 1:
        raise ConfigError(f"--repeat {options.repeat}: must be at least 1")
    try:
        if options.dashboard:
            from .replay_dashboard import show

            return show(Recording(options.recording), _policy(options), server_config)
        hashes = set()
        for number in range(options.repeat):
            began_s = time.perf_counter()
            replay = _make(options).run()
            hashes.add(replay.decision_hash)
            if number == 0:
                _report(replay, time.perf_counter() - began_s)
    except RecordingError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return UNREADABLE
    if options.repeat > 1:
        same = "all with that hash" if len(hashes) == 1 else f"with {len(hashes)} different hashes"
        print(f"repeated: {options.repeat} times, {same}")
    return DIFFERS if replay.difference is not None or len(hashes) > 1 else 0


def _make(options: argparse.Namespace) -> Replay:
    return Replay(Recording(options.recording), _policy(options))


def _policy(options: argparse.Namespace) -> Policy | None:
    return None if options.policy is None else make_policy(EngineConfig(scheduler=options.policy))


def _report(replay: Replay, took_s: float) -> None:
    end = replay.recording.end
    print(f"decisions: {replay.num_decisions} in {replay.num_calls} calls")
    print(f"time: {replay.time_s:.3f} s recorded, {took_s:.3f} s to replay")
    print(f"decision hash: {replay.decision_hash}")
    if replay.difference is not None:
        print(f"first difference: {replay.difference}")
        return
    print("difference: none")
    if end != "closed":
        print(f"the recording ended early: {end or 'its last line is truncated or missing'}")
