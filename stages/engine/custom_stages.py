"""The stages of the caller's own, kept until the pipeline is built that they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...runtime.graph import GraphError
from ...runtime.pipeline import Pipeline
from ...runtime.stage import Stage
from ..errors import ConfigError
from .core import Core, EngineSetup
from .placed_stages import PlacedStage, check_places, in_order, load_stages

BEFORE = {"sample": "execute", "detokenize": "sample"}  # the stage before another one


class CustomStages:
    """Stages that are inserted into the pipeline of one engine, or replace one of its own."""

    def __init__(self, setup: EngineSetup, core: Core) -> None:
        self._setup, self._core = setup, core
        self._edits: list[Callable[[Pipeline], object]] = []
        self._has_placed = False  # whether some are of the settings, or were given with their places

    def place(self, stages: Sequence[PlacedStage | str]) -> None:
        """Makes the stages of the settings, and inserts them before `stages`.

        Raises `ConfigError` for one that fits nowhere.
        """
        placed = load_stages(self._setup.config.stage)
        for one in stages:
            placed += load_stages([one]) if isinstance(one, str) else [one]
        self._has_placed = bool(placed)
        if not placed:
            return
        placed = [self._core.reachable(one) for one in placed]
        check_places(placed, self._core.sketches())
        for one in in_order(placed):
            self.insert(one.stage, one.after, one.before, one.title)

    def insert(self, stage: Stage[Any, Any], after: str | None, before: str | None, name: str | None) -> None:
        """As `Engine.insert`."""
        placed = self._core.reachable(PlacedStage(stage, after, before))
        after, before = placed.after, placed.before
        self._edit(lambda pipeline: pipeline.insert(stage, after, before=before, name=name))
        self._step_without_drafts(after or BEFORE.get(before or "", ""))

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """As `Engine.replace`."""
        self._core.check_replaced(name)
        self._edit(lambda pipeline: pipeline.replace(name, stage))
        self._step_without_drafts(name)

    def change(self, pipeline: Pipeline) -> None:
        """Changes the pipeline. Raises `ConfigError` for a stage of the settings that does not fit this model."""
        try:
            for edit in self._edits:
                edit(pipeline)
            if self._has_placed:
                pipeline.check()
        except GraphError as error:
            if self._has_placed:
                raise ConfigError(f"stage: {error}") from None
            raise

    def _edit(self, edit: Callable[[Pipeline], object]) -> None:
        if (state := self._setup.health().state) != "new":
            raise RuntimeError(f"the engine is {state}: change its stages before it starts")
        self._edits.append(edit)

    def _step_without_drafts(self, name: str) -> None:
        """Gives a custom stage next to the device steps with logits, and without drafts.

        Drafts stay if they are configured explicitly.
        """
        config = self._setup.config
        if name in ("execute", "sample"):
            speculation = "off" if config.speculation == "auto" else config.speculation
            self._setup.config = replace(config, speculation=speculation, async_scheduling=False)
