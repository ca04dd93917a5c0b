"""Schemathesis over the OpenAPI document, every check on; `api.py` says what it is told and how cases are counted.
Here all but what the server says of itself, which is in `test_api_of_itself.py`: two workers take half of the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.running import RunningServer
from tests.generators.api import OPTIONS, conforms
from tests.generators.relations import RELATIONS, with_whole_numbers
from tests.security.oracle import KEY, TEXT, base, check_error

pytestmark = [pytest.mark.slow, pytest.mark.security]


def test_the_server_does_what_its_document_says():
    conforms("exclude", num_operations=38)


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
