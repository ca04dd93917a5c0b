"""`millrace doctor`: checks the machine, the installation and a model, and says what to do about each problem.

Owns: nothing.
In: the settings of `serve`, and the environment.
Out: a row for each check, ok, warn or fail; exit code 1 if one failed.
Imports: the root of `deploy`, `http`, `api`; `stages`, `model`, `kernels`, `runtime`.
Start with: `findings.py`; `machine.py`, `installation.py` and `service.py` have the checks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator

from ....runtime.env.log import has_colours
from ....stages.config import EngineConfig
from ...config import ServerConfig
from .findings import Finding, fail, to_text
from .installation import check_installation
from .machine import check_machine
from .service import check_service


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if a check failed."""
    found: list[Finding] = []
    for finding in examine(engine_config, server_config):
        found.append(finding)
        if not options.json:
            print(to_text(finding, has_colours=sys.stdout.isatty() and has_colours(1)), flush=True)
    counts = {status: sum(finding.status == status for finding in found) for status in ("ok", "warn", "fail")}
    if options.json:
        print(json.dumps({**counts, "checks": [finding.to_json() for finding in found]}, indent=1))
    else:
        print(f"\n{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failed")
    return 1 if counts["fail"] else 0


def examine(engine_config: EngineConfig, server_config: ServerConfig) -> Iterator[Finding]:
    """All findings, in order. A check that breaks is a finding too."""
    for check in (check_machine, check_installation, check_service):
        yield from _guarded(check, engine_config, server_config)


def _guarded(
    check: Callable[[EngineConfig, ServerConfig], Iterator[Finding]],
    engine_config: EngineConfig,
    server_config: ServerConfig,
) -> Iterator[Finding]:
    try:
        yield from check(engine_config, server_config)
    except Exception as error:
        text = f"{check.__name__} broke: {type(error).__name__}: {error}"
        yield fail("doctor", text, "report this with the output of millrace collect-env")
