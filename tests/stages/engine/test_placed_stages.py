"""Stages that settings name: imported, made and placed before a model is loaded, in each kind of engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.runtime.stage import Context, Outlet, Stage
from millrace.stages import LLM, EngineConfig, PlacedStage, SamplingParams
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.fleet.fleet_engine import FleetEngine
from millrace.stages.messages import TokenRequest
from millrace.stages.plugins import find_plugin, parse_plugins
from millrace.stages.split.split_engine import SplitEngine
from millrace.stages.testing import scripted_engine
from tests.stages.engine.own_code import Clip, Mark

HERE = "tests.stages.engine.own_code"


async def answer(*settings: str | PlacedStage, prompt: str = "once upon") -> tuple[str, list[str]]:
    """The answer of a scripted engine, which repeats its prompt, and the names of its stages."""
    texts = tuple(one for one in settings if isinstance(one, str))
    others = [one for one in settings if not isinstance(one, str)]
    async with scripted_engine(answer=lambda text: f"<{text}>", stage=texts, stages=others) as engine:
        outputs = [output async for output in engine.generate(prompt, output_kind="final")]
        return outputs[-1].outputs[0].text, list(engine.pipeline.stages)


def refusal(*settings: str, kind: type[Engine] = Engine, **others: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        kind(EngineConfig(stage=settings, **others))
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text", "names"),
    [
        ([f"{HERE}:Clip@after=tokenize,limit=4"], "<upon>", ["clip"]),
        ([f"{HERE}:Clip@before=schedule,limit=4,name=cut"], "<upon>", ["cut"]),
        ([f"{HERE}:shout@after=detokenize"], "<ONCE UPON>", ["shout"]),
        ([f'{{"class": "{HERE}:Clip", "after": "tokenize", "arguments": {{"limit": 3}}}}'], "<pon>", ["clip"]),
    ],
)
def test_a_stage_of_the_settings_serves_under_its_name(settings: list[str], text: str, names: list[str]) -> None:
    found, stages = asyncio.run(answer(*settings))
    assert found == text and set(names) <= set(stages)


def test_stages_at_one_place_are_in_the_order_of_the_settings() -> None:
    marks = [f"{HERE}:Mark@after=detokenize,name=first,mark=x", f"{HERE}:shout@after=detokenize"]
    text, stages = asyncio.run(answer(*marks))
    assert stages[-4:] == ["detokenize", "first", "shout", "exit"] and "x" not in text and "X" in text
    _, stages = asyncio.run(answer(marks[0], PlacedStage(Mark(), before="exit"), marks[1]))
    assert stages[-5:] == ["detokenize", "first", "shout", "mark", "exit"]


def test_one_setting_may_make_several_stages_with_their_places() -> None:
    text, stages = asyncio.run(answer(f"{HERE}:pair,mark=*"))
    assert text.replace("*", "") == "<upon>" and "*" in text
    assert stages.index("clip") == 2 and stages.index("mark") == len(stages) - 2


def test_the_parts_of_an_environment_variable_are_joined_again() -> None:
    (first, second) = parse_plugins("stage", ["a:B@after=tokenize", "limit=3", 'mark="4"', "c:D@before=exit"])
    assert first.arguments == {"limit": 3, "mark": "4"} and second.before == "exit"


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("no_such_package.stages:Clip@after=tokenize", "no module no_such_package; install its package, or name its"),
        (f"{HERE}:Clipp@after=tokenize", f"{HERE} has no Clipp (did you mean Clip?)"),
        (f"{HERE}:Path@after=tokenize", f"{HERE} has no Path"),
        (f"{HERE}:MADE@after=detokenize", "MADE is one stage that was made already: name its class"),
        (f"{HERE}:PlacedStage@after=detokenize", "PlacedStage is not a stage: must be a subclass of millrace.Stage"),
        (f"{HERE}:nothing@after=detokenize", "nothing made a int: must make a stage, or a list of PlacedStage"),
        (f"{HERE}:pair@after=tokenize", "pair makes 2 stages with places of their own: leave out @ and name"),
        ("nobodys@after=tokenize", "no installed package has this name: "),
        (f"{HERE}:Clip@after=tokenize", "the argument limit is missing; add ,limit=VALUE"),
        (f"{HERE}:Clip@after=tokenize,limits=3", "unknown argument limits (did you mean limit?); it takes limit"),
        (f"{HERE}:Clip@after=tokenize,limit=0", "limit = 0: must be at least 1"),
        (f"{HERE}:Clip@after=tokenise,limit=3", "there is no stage tokenise (did you mean tokenize?)"),
        (f"{HERE}:Clip,limit=3", "has no place; add @after=STAGE: the stage fits after=tokenize; it takes TokenReq"),
        (f"{HERE}:Clip@after=detokenize,limit=3", "clip.in takes TokenRequest"),
        (f"{HERE}:Clip@after=detokenize,limit=3", "The stage fits after=tokenize; it takes TokenRequest and makes"),
        (f"{HERE}:Mark@before=intake", "The stage fits after=detokenize; it takes StepText"),
        (f"{HERE}:Mark@after=detokenize,name=exit", "there is a stage exit already; add ,name=NAME"),
        (f"{HERE}:Mark@after=detokenize,name=a-b", "name = 'a-b': must be letters, digits and _"),
        (f"{HERE}:Mark@behind=detokenize", "must be package.module:Class@after=STAGE[,key=value]"),
        (f"{HERE}:Mark@after=detokenize,mark", "'mark' must be key=value"),
        (f'{{"class": "{HERE}:Mark", "befor": "exit"}}', "unknown key befor (did you mean before?)"),
    ],
)
def test_a_setting_that_cannot_serve_is_refused_with_what_would_be_right(setting: str, complaint: str) -> None:
    assert complaint in refusal(setting)


def test_a_stage_of_the_step_loop_is_refused_where_that_is_another_process() -> None:
    message = refusal(f"{HERE}:Pass@after=execute", kind=SplitEngine)
    assert "mode = split: a stage after execute would be in the step loop, which is in another process" in message
    message = refusal(f"{HERE}:Pass@before=sample", kind=FleetEngine, data_parallel_size=2)
    assert "data_parallel_size = 2: a stage before sample" in message and "mode = inline" in message


def test_an_entry_point_names_a_stage_and_a_near_miss_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[millrace.stages]\nclip = {HERE}:Clip\nbroken = {HERE}.none:Clip\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_plugin("stage", "clip", "millrace.stages") is Clip
    assert asyncio.run(answer("clip@after=tokenize,limit=4"))[0] == "<upon>"
    assert "(did you mean clip?): installed are broken, clip" in refusal("clib@after=tokenize,limit=4")
    assert "cannot be imported: ModuleNotFoundError" in refusal("broken@after=tokenize,limit=4")


@pytest.mark.slow
def test_llm_takes_stages_of_the_settings_and_made_ones_alike() -> None:
    config = EngineConfig(max_num_seqs=4, threads=1, stage=(f"{HERE}:Clip@before=schedule,limit=3",))
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM(config=config, stages=[f"{HERE}:shout@after=detokenize", PlacedStage(Mark("~"), after="shout")]) as llm:
        (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    text = output.outputs[0].text
    assert output.num_prompt_tokens == 3 and "~" in text and text == text.upper() != text.lower()


def test_an_error_of_a_set_up_names_its_stage_and_prompts_say_if_they_are_the_engines_own() -> None:
    class Broken(Stage[TokenRequest, TokenRequest]):
        async def setup(self, context: Context) -> None:
            raise RuntimeError("no database")

        async def handle(self, batch: Sequence[TokenRequest], out: Outlet[TokenRequest]) -> None:
            raise AssertionError("not set up")

    engine = scripted_engine(stages=[PlacedStage(Broken(), after="tokenize")])
    with pytest.raises(RuntimeError, match="no database") as caught:
        asyncio.run(engine.start())
    assert caught.value.__notes__ == ["while the stage broken was set up"]
    of = partial(TokenRequest, prompt_index=0, token_ids=np.arange(2), params=SamplingParams(), first_sequence_id=0)
    assert of(request_id="warm-up").is_warm_up and not of(request_id="cmpl-1").is_warm_up
