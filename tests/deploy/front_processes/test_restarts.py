from __future__ import annotations

import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.check import check
from millrace.deploy.front_processes.restarts import EngineRestarts, FrontRestarts
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError


def test_a_front_is_given_up_at_the_fifth_end_within_two_minutes() -> None:
    restarts = FrontRestarts()
    pauses = [restarts.note_end(now_s) for now_s in (0.0, 1.0, 2.0, 119.0, 119.9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, None]
    assert restarts.describe() == "it has ended 5 times in 2 minutes"


def test_ends_of_a_front_that_lie_two_minutes_apart_do_not_count() -> None:
    restarts = FrontRestarts()
    pauses = [restarts.note_end(30.0 * number) for number in range(12)]
    assert pauses == [0.1, 0.2, 0.4, *[0.8] * 9]


def test_an_engine_that_serves_between_its_ends_is_never_given_up() -> None:
    restarts = EngineRestarts()
    for _ in range(20):
        assert restarts.note_end(0.0) == 0.1
        restarts.note_ready()
    assert [restarts.note_end(0.0) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.6, None]


@pytest.mark.parametrize(
    ("engine", "server", "name"),
    [
        ({}, {"uds": "/tmp/a.sock"}, "uds = /tmp/a.sock"),
        ({}, {"mode": "inline"}, "mode = inline"),
        ({"enable_lora": True}, {}, "enable_lora = True"),
        ({"logits_processor": ("a.b:C",)}, {}, "logits_processor ="),
        ({"executor": "ray"}, {}, "executor = ray"),
    ],
)
def test_settings_of_one_front_are_refused_by_name_with_the_next_step(
    engine: dict[str, object], server: dict[str, object], name: str
) -> None:
    config = ServerConfig(front_processes=2, **server)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="front_processes|front-processes") as raised:
        check(EngineConfig(**engine), config, has_engines=False)  # type: ignore[arg-type]
    assert str(raised.value).startswith(name)
    assert any(word in str(raised.value) for word in ("set ", "leave ", "start "))


@pytest.mark.parametrize("count", [0, -1, 33])
def test_the_number_of_fronts_is_bounded(count: int) -> None:
    with pytest.raises(ConfigError, match=f"front_processes = {count}: must be from 1 to 32"):
        ServerConfig(front_processes=count)
