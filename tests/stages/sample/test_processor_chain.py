"""Logits processors of settings: made, named, and applied only to the rows that ask for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from millrace.runtime.env.log import captured_logs
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.messages import Started
from millrace.stages.params import SamplingParams, has_plain_choice
from millrace.stages.sample.processor_chain import ProcessorChain, load_processors
from millrace.stages.split.split_engine import SplitEngine
from tests.stages.engine.own_code import Only, Shift

HERE = "tests.stages.engine.own_code"


def started(slot: int, **asked: Any) -> Started:
    params = SamplingParams(extra_args=asked)
    return Started(slot, slot, f"r{slot}", np.array([1], np.int32), 1, params, 0)


def test_each_processor_changes_its_own_rows_and_notes_their_tokens() -> None:
    torch = pytest.importorskip("torch")
    noted: list[tuple[str, list[int], list[int]]] = []

    class Noting(Only):
        def note(self, slots: Any, token_ids: Any) -> None:
            noted.append((self.name, slots.tolist(), token_ids.tolist()))

    class Other(Noting):
        pass

    chain = ProcessorChain([Noting(), Other(default=2)])
    assert not chain.always and not chain.start(started(3))
    assert chain.start(started(0, noting={})) and chain.start(started(1, other={}))
    assert chain.start(started(2, noting={"token_ids": [4, 5]}, other={"token_ids": [5]}))
    logits = torch.arange(32.0).reshape(4, 8)
    slots = np.array([1, 0, 3, 2])
    chain.process(slots, logits)
    finite = [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]
    assert finite == [[2], [5], list(range(8)), [5]]
    chain.note(slots, np.array([9, 8, 7, 6]))
    assert noted == [("noting", [0, 2], [8, 6]), ("other", [1, 2], [9, 6])]
    assert not chain.start(started(2))  # the slot's next sequence asks for nothing
    chain.process(np.array([2]), rest := torch.zeros(1, 8))
    assert not rest.any() and ProcessorChain([Only(), Shift()]).always


def test_a_request_that_names_a_processor_is_not_chosen_ahead_and_others_are() -> None:
    assert has_plain_choice(SamplingParams()) and not has_plain_choice(SamplingParams(extra_args={"only": {}}))
    assert Engine(logits_processor=Only()).config.speculation == "auto"
    assert Engine(logits_processor=[Only(), Shift()]).config.speculation == "off"
    assert Engine(logits_processor=f"{HERE}:Shift").config.speculation == "off"


def test_names_come_from_the_settings_the_entry_point_or_the_class() -> None:
    found = load_processors([f"{HERE}:Only", f"{HERE}:Only,name=other,default=3"])
    assert [(one.name, getattr(one, "default", 0)) for one in found] == [("only", 5), ("other", 3)]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ([f"{HERE}:Onli"], "has no Onli (did you mean Only?)"),
        ([f"{HERE}:NotOne"], "must be a subclass of millrace.LogitsProcessor"),
        ([f"{HERE}:Only,defalt=3"], "unknown argument defalt (did you mean default?)"),
        ([f"{HERE}:Only@after=sample"], "must be package.module:Class[,key=value]"),
        ([f"{HERE}:Only", f"{HERE}:Only"], "two are called only; add ,name=NAME to one of them"),
        (["nobodys"], "no package offers any in millrace.logits_processors"),
    ],
)
@pytest.mark.parametrize("kind", [Engine, SplitEngine])
def test_a_processor_that_cannot_serve_is_refused_at_the_start(
    kind: type[Engine], settings: Sequence[str], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(EngineConfig(logits_processor=tuple(settings)))
    assert complaint in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Engine, SplitEngine])
def test_one_engine_serves_those_that_ask_and_others_as_without_it(kind: type[Engine]) -> None:
    pytest.importorskip("torch")
    due = [[5] * 6, [9, 9, 9, 9, 9, 9]]

    async def main() -> None:
        config = EngineConfig(max_num_seqs=4, threads=2, logits_processor=(f"{HERE}:Only",), speculation="off")
        async with kind(config) as engine:

            async def ask(**asked: Any) -> list[int]:
                params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, extra_args=asked)
                outputs = [output async for output in engine.generate("Once upon", params, output_kind="final")]
                return outputs[-1].outputs[0].token_ids

            plain = await ask()
            found = await asyncio.gather(ask(only={}), ask(), ask(only={"token_ids": [9]}), ask())
            assert [list(ids) for ids in found[::2]] == due and found[1] == found[3] == plain
            assert not {5, 9} & set(plain)
            if kind is Engine:
                parts: Any = engine.core.stages
                ahead = getattr(parts.core.loaded.runner, "ahead", None)  # of the native runner
                before = 0 if ahead is None else ahead.num_handed_over
                for _ in range(50):  # a busy machine may be late with each of few steps
                    assert await ask() == plain
                    if ahead is None or ahead.num_handed_over > before:
                        break
                else:
                    raise AssertionError("no step of requests without a processor was handed over")

    asyncio.run(asyncio.wait_for(main(), 120))


def test_what_a_processor_raises_is_logged_with_its_name() -> None:
    class Broken(Only):
        def note(self, slots: Any, token_ids: Any) -> None:
            raise KeyError("a bug")

    chain = ProcessorChain([Only(), Broken()])
    assert chain.start(started(0, broken={}))
    with captured_logs() as lines, pytest.raises(KeyError):
        chain.note(np.array([0]), np.array([7]))
    (line,) = lines
    assert (line["event"], line["name"], line["error"]) == ("logits_processor.failed", "broken", "KeyError")
