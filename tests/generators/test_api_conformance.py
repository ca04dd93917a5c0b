"""B01: Schemathesis over the OpenAPI document, every check on; `api.py` says what it is told besides.

CI enumerates the bounds of every field of every operation, some 7,500 cases, and adds two random ones for each
operation; MILLRACE_FULL=1 makes these 200 and follows links too. For 10,000: `python -m tests.generators.api`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.counts import FULL, first_seed
from tests.deploy.running import RunningServer
from tests.generators.api import OPTIONS, run
from tests.generators.relations import RELATIONS, with_whole_numbers
from tests.security.oracle import KEY, TEXT, base, check_error

CASES = 200 if FULL else 2
PHASES = "examples,coverage,fuzzing,stateful" if FULL else "coverage,fuzzing"  # a case costs 5 ms, 40 ms or 70 ms

pytestmark = [pytest.mark.slow, pytest.mark.security]


def test_the_server_does_what_its_document_says():
    done = run(CASES, "--phases", PHASES, "--seed", str(first_seed()), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-20_000:]


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[RunningServer]:
    with RunningServer(**OPTIONS | {"engine": {}}) as running:
        yield running


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_what_no_schema_can_say_is_refused_by_name(keyed_server, relation):
    """What the generator leaves out is refused as it should be, so leaving it out hides nothing."""
    assert not relation.holds(relation.broken, 512)
    answer = keyed_server.post(relation.path, relation.broken, {"Authorization": f"Bearer {KEY}"})
    if relation.path == "/v1/messages":
        assert answer.status == 400 and "thinking.budget_tokens" in answer.json["error"]["message"]
        return
    check_error(answer, 400)
    assert base(answer.error["param"]) == relation.param


@pytest.mark.parametrize("prompt", [[97.0], [[97.0]]])
def test_a_whole_number_with_a_point_is_refused(keyed_server, prompt):
    body = {"prompt": prompt, "max_tokens": 1}
    check_error(keyed_server.post(TEXT, body, {"Authorization": f"Bearer {KEY}"}), 400)
    assert keyed_server.post(TEXT, with_whole_numbers(body), {"Authorization": f"Bearer {KEY}"}).status == 200
