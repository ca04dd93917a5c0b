"""What every body checks, whatever else it checks by itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from millrace.deploy.api.dialects.sglang import SglangBody
from millrace.deploy.api.dialects.tgi import TgiBody
from millrace.deploy.api.schema.body import Body
from millrace.deploy.api.schema.relations import Relation
from millrace.deploy.server.routes import Routes
from millrace.kernels.layout.sampling_fields import FROM_CHECKPOINT


class Asked(Exception):
    """A relation was checked."""


def ask(body: Any) -> None:
    raise Asked


def bodies(kind: type[Body] = Body) -> list[type[Body]]:
    """All classes of bodies."""
    assert Routes  # whose module imports them
    own = kind.__module__.startswith("millrace.") and not inspect.isabstract(kind)
    return [kind] * own + [body for below in kind.__subclasses__() for body in bodies(below)]


@pytest.mark.parametrize("kind", sorted({*bodies()}, key=lambda kind: kind.__name__))
def test_a_body_checks_its_relations_whatever_else_it_checks(kind: type[Body], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "RELATIONS", (Relation(None, ask),))
    with pytest.raises(Asked):
        kind.model_construct().check()


@pytest.mark.parametrize("body", [SglangBody(text="x").completion()[0], TgiBody(inputs="x").completion(False)])
def test_a_dialect_with_defaults_of_its_own_takes_none_of_the_checkpoint(body: dict[str, Any]) -> None:
    given = {field.name: body[field.name] for field in FROM_CHECKPOINT}
    assert given["temperature"] in (0.0, 1.0)
    assert all(given[field.name] == field.default for field in FROM_CHECKPOINT if field.name != "temperature")
