"""Schemathesis over the OpenAPI document of a scripted server: every phase and every check.

In CI (`conforms`) each operation gets 12 cases and more: the bounds of all its fields, one by one, and random ones.
Where the bounds are many by themselves (51 to 535 for sixteen operations) random ones fill up, two at least; all
others get 12. Those below /api, whose fields become those of a chat, get a part of theirs. Operations that read the
same body share its bounds, and the largest have a quarter of theirs tried, as `hooks.py` says. An operation that
deletes takes the ids that others were given, each once, and ends with the last.
MILLRACE_FULL=1 draws 200 for all, gives each all of its bounds, and follows links too. What a check asks beside its
case is not counted.

No check is switched off. Four things are said to it that the document alone cannot say: bodies are made acceptable
where only a compiler or the model can judge them (`tamed.py`), pairs of fields that no schema describes are kept apart
(`relations.py`), five operations may answer what `EXPECTED` lists, and 413 is a refusal as good as any.

    python -m tests.generators.api --cases 10000 [any option of schemathesis run, as --seed 1]

Runs the server with keys, so that refusals for want of one are among what is checked. Exits with Schemathesis' status.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.counts import FULL, first_seed
from tests.deploy.running import ROOT, RunningServer
from tests.security.oracle import ADMIN_KEY, KEY
from tests.security.watch import warm_up

CONTEXT = 64  # short: bodies at the bound of max_tokens are many, and so are searches 64 wide
OPTIONS = {
    "server": {
        "api_key": [KEY],
        "admin_key": [ADMIN_KEY],
        "log_format": "json",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
    },
    "engine": {"max_model_len": CONTEXT, "max_num_seqs": 64},
    "script": {"eos_probability": 0.2},
}
# A body may be wrong in more than one way: a list of too many of the longest texts is refused for its length in bytes,
# before cases are counted. HTTP alone opens no WebSocket: their operations answer 426 to it, however well asked. And
# how a response was made, in the background or with events, decides what can be asked of it: that is 400.
EXPECTED = """[checks]
negative_data_rejection.expected-statuses = [
    "400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429", "5xx"
]

[[operations]]
include-operation-id = ["streamSocket", "responsesSocket", "dashboardFeed"]
checks.positive_data_acceptance.expected-statuses = ["101", "426", "401"]

[[operations]]
include-operation-id = ["cancelResponse", "getResponse", "listInputItems"]
checks.positive_data_acceptance.expected-statuses = ["200", "400", "401", "404"]
"""
# How many random cases fill up where the bounds of an operation's fields are many by themselves. A random chat
# takes a third of a second to draw.
RANDOM_CASES = {
    2: (
        *("createChatCompletion", "renderChatCompletion", "createCompletion", "renderCompletion", "createMessage"),
        *("countMessageTokens", "createResponse", "generate", "inferenceGenerate", "tokenize", "createEmbeddings"),
        *("rerank", "rerankV1", "rerankV2", "score", "scoreV1"),
        *("ollamaChat", "ollamaGenerate", "ollamaEmbed", "ollamaEmbeddings", "ollamaPull", "ollamaShow"),
        *("ollamaTags", "ollamaPs", "ollamaVersion", "generateStream"),
    ),
}
PATIENT = 'suppress-health-check = ["too_slow"]\n'  # of drawing: 30 s, which a machine may stand still
AUTHORIZATION = f"""
[auth.openapi.key]
bearer = "{KEY}"
[auth.openapi.keyHeader]
api_key = "{KEY}"
[auth.openapi.adminKey]
bearer = "{ADMIN_KEY}"
[auth.openapi.adminKeyHeader]
api_key = "{ADMIN_KEY}"
{EXPECTED}"""
CASES = 200 if FULL else 5
PHASES = "examples,coverage,fuzzing,stateful" if FULL else "coverage,fuzzing"  # a case costs 5 ms, 15 ms or 70 ms
OF_ITSELF = (
    r"^/($|admin|dashboard|docs|health($|/)|load|metrics|openapi|server_info|static|stream|version)|^/v1/(models|st)"
)
# the same handlers under other names, and refusals of any body, which MILLRACE_FULL=1 alone tries
ALIASES = r"^/(healthz|livez|ping|readyz|v2/health|api/(blobs|copy|create|delete|push))"
NUM_ALIASES = 11
FEW = """
[[operations]]
include-operation-id = {names}
generation.max-examples = {cases}
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    status: int
    output: str | None  # None if it was not piped
    num_requests: dict[str, int]  # by operation, as "GET /health"


def run(cases: int, *more: str, fills_up: bool = False, **pipes: Any) -> Outcome:
    """Schemathesis, with so many random cases an operation, or what `RANDOM_CASES` says to fill up. Takes its options.
    Raises AssertionError if the server did what no request may cause."""
    key = {"Authorization": f"Bearer {KEY}"}
    with RunningServer(**OPTIONS, audit=True) as server, tempfile.TemporaryDirectory() as folder:
        warm_up(server, key, fully=True)
        config = Path(folder) / "schemathesis.toml"
        few = [FEW.format(names=json.dumps(names), cases=count) for count, names in RANDOM_CASES.items() if fills_up]
        config.write_text(f'hooks = "tests.generators.hooks"\n{PATIENT}{AUTHORIZATION}{"".join(few)}')
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
        document = Path(folder) / "openapi.json"  # which needs a key itself
        document.write_bytes(server.get("/openapi.json", key).body)
        command += [str(document), "--url", server.url, "--checks", "all", "--max-examples", str(cases)]
        command += ["--phases", "examples,coverage,fuzzing,stateful", "--no-color", "--request-timeout", "120"]
        folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        counts = Path(folder) / "counts.json"
        told = {"MILLRACE_TEST_CONTEXT": str(CONTEXT), "MILLRACE_TEST_COUNTS": str(counts), "PYTHONPATH": folders}
        told |= {"MILLRACE_TEST_SHARES": "1"} if fills_up else {}
        done = subprocess.run([*command, *more], cwd=folder, env=os.environ | told, text=True, check=False, **pipes)
        assert server.ask("audit") == {"seen": [], "num_restarts": 0, "is_ready": True}
        return Outcome(done.returncode, done.stdout, json.loads(counts.read_text()) if counts.exists() else {})


def conforms(which: str, *, num_operations: int) -> None:
    """Raises AssertionError unless all is well with what `OF_ITSELF` names ("include") or with all else ("exclude")."""
    named = OF_ITSELF if which == "include" and not FULL else f"{OF_ITSELF}|{ALIASES}"
    options = (f"--{which}-path-regex", named, "--phases", PHASES, "--seed", str(first_seed()))
    done = run(CASES, *options, fills_up=not FULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.status == 0, (done.output or "")[-20_000:]
    counts = done.num_requests
    assert len(counts) == num_operations + (NUM_ALIASES if which == "include" and FULL else 0), counts
    assert (
        min(count for name, count in counts.items() if not name.startswith("DELETE") and " /api/" not in name) >= CASES
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="for each operation")
    options, more = parser.parse_known_args()
    return run(options.cases, *more).status


if __name__ == "__main__":
    sys.exit(main())
