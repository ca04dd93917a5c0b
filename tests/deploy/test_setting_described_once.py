"""A setting is described at its field only: all that shows settings finds a new one there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from millrace.deploy.cli import main as command_line
from millrace.deploy.cli.options import shared_options
from millrace.deploy.config import ServerConfig
from millrace.deploy.inspect.server_info import _shown
from millrace.deploy.openapi.document import openapi
from millrace.deploy.settings.fields import KINDS, fields_of
from millrace.deploy.settings.sources import build, resolve
from millrace.stages.setting import SettingGroup, settings_of
from tests.docs import generated

TEA = SettingGroup("tea")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeaConfig(ServerConfig):
    """A server with two settings more."""

    steeping_s: float | Literal["auto"] = TEA.setting(2.5, "seconds of steeping; 50% more for black tea")
    recipe: str | None = TEA.setting(None, "where the leaves are hidden", is_secret=True, has_flag=False)


@pytest.fixture(autouse=True)
def server_with_tea(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (command_line, shared_options, generated):
        monkeypatch.setattr(module, "ServerConfig", TeaConfig)
    monkeypatch.setenv("COLUMNS", "120")


def test_a_new_setting_has_a_flag_under_its_heading_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "\ntea:\n  --steeping-s X|auto" in shown
    assert "seconds of steeping; 50% more for black tea (default: 2.5)" in " ".join(shown.split())
    assert "recipe" not in shown


def test_a_new_setting_is_read_from_all_sources_and_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def printed(*arguments: str) -> list[str]:
        assert command_line.main(["serve", *arguments, "--print-config"]) == 0
        return capsys.readouterr().out.splitlines()

    file = tmp_path / "millrace.yaml"
    file.write_text("steeping-s: 3\nrecipe: under the stairs\n")
    assert "steeping_s: 2.5  # default" in printed()
    assert {f"steeping_s: 3.0  # file {file}", f"recipe: '***'  # file {file}"} <= {*printed("--config", str(file))}
    monkeypatch.setenv("MILLRACE_STEEPING_S", "auto")
    monkeypatch.setenv("MILLRACE_RECIPE", "behind the clock")
    shown = printed("--config", str(file))
    variables = ("STEEPING_S", "RECIPE")
    assert shown[-2:] == [
        f"{name}: {value}  # environment MILLRACE_{variable}"
        for name, value, variable in zip(("steeping_s", "recipe"), ("'auto'", "'***'"), variables, strict=True)
    ]
    assert "steeping_s: 4.0  # flag --steeping-s" in printed("--steeping-s", "4", "--config", str(file))


def test_a_new_setting_is_on_the_pages() -> None:
    page = generated.configuration()
    assert "\n### Server: tea\n" in page
    assert (
        "| `steeping_s` | `--steeping-s` `X\\|auto` | `MILLRACE_STEEPING_S` | `2.5` | seconds of steeping; 50%" in page
    )
    assert "| `recipe` | - | `MILLRACE_RECIPE` | none | where the leaves are hidden |" in page
    assert "[tea](configuration.md#server-tea)" in generated.cli()


def test_a_new_secret_is_masked_in_what_the_server_shows() -> None:
    config = build(TeaConfig, resolve((TeaConfig,), {}, {"MILLRACE_RECIPE": "x"}, None))
    assert config.recipe == "x"
    assert _shown(TeaConfig, {"steeping_s": 1.0, "recipe": config.recipe}) == {"steeping_s": 1.0, "recipe": "***"}


def test_a_new_setting_is_in_the_openapi_document_with_its_unit() -> None:
    schemas = openapi(TeaConfig(), "1", None)["components"]["schemas"]
    shown = schemas["Configuration"]["properties"]["server"]["properties"]
    assert shown["steeping_s"] == {"description": "seconds of steeping; 50% more for black tea", "x-unit": "seconds"}
    assert [*shown] == [*fields_of(TeaConfig)]


def test_a_field_without_a_description_is_named() -> None:
    @dataclass(frozen=True)
    class Bare(ServerConfig):
        cups: int = 3

    with pytest.raises(TypeError, match=r"Bare\.cups: declare it as SettingGroup"):
        settings_of(Bare)


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_has_a_meaning_and_the_unit_that_its_name_ends_with(kind: type) -> None:
    units = {field.name: field.info.unit for field in fields_of(kind).values()}
    assert all(field.info.help and not field.info.help.endswith(".") for field in fields_of(kind).values())
    wanted = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_tokens": "tokens"}
    for name, unit in units.items():
        assert all(unit == its for suffix, its in wanted.items() if name.endswith(suffix)), name
