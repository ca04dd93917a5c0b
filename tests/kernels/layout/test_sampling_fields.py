"""The table of sampling fields, and what derives from it."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.deploy.api.adapter.chat_adapter import EXTENSIONS
from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.completions.body import CompletionBody
from millrace.deploy.api.schema.unsupported import INSTEAD
from millrace.kernels.layout import sampling_rows, step_state
from millrace.kernels.layout.sampling_fields import (
    BY_NAME,
    CUTS,
    DRAWS,
    FIELDS,
    MAX_WHOLE,
    PENALTIES,
    Kind,
    Phase,
    SamplingField,
    Scope,
    draws_of,
)
from millrace.stages.backends.cuda.step_update import EndRules, state_row
from millrace.stages.beam_search.algorithm import NO_SAMPLING, refuse_sampling
from millrace.stages.errors import Refused
from millrace.stages.messages import TokenRequest
from millrace.stages.params import SamplingParams, has_plain_choice
from millrace.stages.recordings.format import add_fields
from millrace.stages.sample.slot_params import SlotParams
from tests.stages.grants import started

ROOT = Path(__file__).parents[3]
API_PAGE = ROOT / "deploy" / "docs" / "api.md"
ASKED: dict[str, Any] = {"top_k": 3, "top_n_sigma": 1.5, "typical_p": 0.5}  # else halfway to the end of the range


def asked(name: str) -> Any:
    """A value of a cut or a penalty that asks for something."""
    field = BY_NAME[name]
    return ASKED.get(name, (field.default + (field.least if field.default == field.most else field.most)) / 2)


def test_the_table_has_the_names_and_defaults_of_sampling_params() -> None:
    ours = {field.name: field.default for field in FIELDS}
    theirs = {
        each.name: each.default_factory() if each.default is MISSING else each.default  # type: ignore[misc]
        for each in fields(SamplingParams)
    }
    assert ours == theirs


@pytest.mark.parametrize("name", [field.name for field in FIELDS if field.most])
def test_values_outside_the_range_of_the_table_are_refused_by_name(name: str) -> None:
    field = BY_NAME[name]
    outside = [field.least - 1, field.most + 1, "x"] + [field.least] * field.excludes_least
    for value in outside:
        with pytest.raises(Refused, match=rf"^{name} = "):
            SamplingParams(**{name: value})
    SamplingParams(**{name: field.most, **({"max_tokens": None} if name == "min_tokens" else {})})


@pytest.mark.parametrize("field", [*CUTS, *PENALTIES], ids=lambda field: field.name)
def test_a_cut_or_penalty_is_in_every_place_that_derives_from_the_table(field: Any) -> None:
    value = asked(field.name)
    params = SamplingParams(**{field.name: value})
    bits = value if field.kind is Kind.WHOLE else np.float32(value).view(np.int32)

    one, table = started(1, **{field.name: value}), SlotParams(2, 100, 64, ())
    table.start(one)
    column = DRAWS.index(field) if field in DRAWS else PENALTIES.index(field)
    assert (table.draws if field in DRAWS else table.penalties)[1, column] == pytest.approx(value)
    assert table.is_truncated[1] == (field in CUTS) and table.is_penalised[1] == (field in PENALTIES)

    assert sampling_rows.pack(**table.row(1))[sampling_rows.AT[field.name]] == bits
    assert sampling_rows.pack(**{field.name: value})[sampling_rows.AT[field.name]] == bits
    if field in CUTS:
        assert state_row(one, EndRules((), 64))[step_state.DRAW + sampling_rows.AT[field.name]] == bits

    assert add_fields(asking(params), None, "") == add_fields(asking(SamplingParams()), None, "")
    with pytest.raises(Refused, match=rf"^{field.name} = .*not supported by a beam search"):
        refuse_sampling(SamplingParams(**{"temperature": 0.0, field.name: value}))
    assert has_plain_choice(params) == (field in CUTS)

    for body in (ChatBody, CompletionBody):
        schema = body.model_json_schema()["properties"][field.name]
        (form,) = (form for form in schema["anyOf"] if form["type"] == field.kind.value)
        assert (form.get("minimum", form.get("exclusiveMinimum")), form["maximum"]) == (field.least, field.most)
        assert schema["description"] == field.about
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], field.name: value})
    assert getattr(body.sampling_params(SamplingParams()), field.name) == value
    defaults = SamplingParams(**{field.name: value})
    unsaid = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]}).sampling_params(defaults)
    assert (getattr(unsaid, field.name) == value) == field.from_checkpoint


def asking(params: SamplingParams) -> TokenRequest:
    return TokenRequest("a", 0, np.arange(3, dtype=np.int32), params, 0)


def test_recordings_hold_the_fields_that_plans_depend_on() -> None:
    recorded = add_fields(asking(SamplingParams()), None, "")
    assert recorded.keys() & BY_NAME.keys() == {field.name for field in FIELDS if field.scope is Scope.PLAN}


def test_cuts_that_ask_for_nothing_have_one_value_in_a_row() -> None:
    assert draws_of(SamplingParams(top_k=-1)) == draws_of(SamplingParams())
    assert not has_plain_choice(SamplingParams(min_tokens=1)) and has_plain_choice(SamplingParams(top_k=4, seed=2))


def test_every_field_that_changes_a_choice_is_refused_by_beams_unless_they_apply_it() -> None:
    changing = {field.name for field in FIELDS if field.phase.value.split()[0] in ("penalises", "edits", "removes")}
    assert changing - NO_SAMPLING.keys() == {"min_tokens"}
    assert NO_SAMPLING["temperature"] == 0.0 and NO_SAMPLING["top_p"] == 1.0 and NO_SAMPLING["seed"] is None


def test_other_apis_and_other_servers_names_are_those_of_the_table() -> None:
    assert {"min_p", "seed", "logit_bias", "priority"} <= {*EXTENSIONS} and "top_k" not in EXTENSIONS
    assert INSTEAD["rep_pen"] == "repetition_penalty" and INSTEAD["n_predict"] == "max_tokens"
    names = [alias for field in FIELDS for alias in field.aliases]
    assert len(names) == len({*names} - BY_NAME.keys())


SIX_FILES = {  # of a cut
    "kernels/layout/sampling_fields.py",
    "kernels/native/source/sampling/sampling.cpp",
    "kernels/reference/sampling.py",
    "kernels/triton/thresholds.py",
    "stages/params.py",
    "stages/sample/sampling_math.py",
}
FOREIGN = ("deploy/api/ollama", "deploy/api/dialects")  # rooms that know other servers' fields by name


@pytest.mark.parametrize("name", ["top_n_sigma", "typical_p"])
def test_a_cut_is_named_in_six_files_of_the_product(name: str) -> None:
    parts = (ROOT / part for part in ("runtime", "kernels", "model", "stages", "deploy"))
    files = (path for part in parts for kind in ("*.py", "*.cpp", "*.h", "*.js") for path in part.rglob(kind))
    found = {path.relative_to(ROOT).as_posix() for path in files if name in path.read_text(encoding="utf-8")}
    assert {path for path in found if not path.startswith(FOREIGN)} == SIX_FILES


def test_a_row_on_the_device_begins_with_the_draw_and_fits() -> None:
    places = list(sampling_rows.AT.values())
    assert places == [*range(2, 2 + len(places))] and sampling_rows.END_POSITION < sampling_rows.WIDTH
    assert step_state.ROPE_OFFSET == step_state.DRAW + sampling_rows.DRAW_WIDTH
    assert [field.phase for field in DRAWS] == [Phase.DRAW] + [Phase.CUT] * len(CUTS)


def documented() -> str:
    """The table of the API page."""
    lines = ["| field | type | default | range | meaning |", "|---|---|---|---|---|"]
    for field in FIELDS:
        if field.name not in ("bad_words_token_ids", "extra_args"):  # not of the API
            cells = (f"`{field.name}`", field.kind.value, _default(field.default), _range(field), field.about)
            lines.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | float | int | str) else ""


def _range(field: SamplingField) -> str:
    if not field.most or field.name == "seed":
        return ""
    most = "2^31 - 1" if field.most == MAX_WHOLE else f"{field.most:g}"
    return f"{'above ' * field.excludes_least}{field.least:g} to {most}"


def test_the_api_page_has_the_table_of_fields() -> None:
    found = re.search(r"(?:^\| .*\n|^\|---.*\n)+", API_PAGE.read_text().split("## Sampling fields")[1], re.MULTILINE)
    assert found is not None and found[0] == documented(), f"write into {API_PAGE.name}:\n{documented()}"
