"""Answers about all models of a server, where fronts have different ones: what they do by labels, and their health."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from ...stages.traffic.traffic_rules import TrafficRules
from ..errors import ApiError, wrong_field
from ..http.body_reader import read_ahead
from ..http.json_limits import INLINE_BYTES, JsonLimits, parse_object, too_large
from ..http.responses import answer
from .models import ModelFronts
from .other_fronts import OtherFronts

HEALTH_S = 2.0  # for the health of a model, as one of its fronts has it
Health: TypeAlias = tuple[int, dict[str, Any]]  # status and body of an answer
GROUP_OF = {"split": "labelled", "shadow": "shadow"}  # field of the body -> the engines that its label selects


class AllModels:
    """Asks a front of each model, so that all fronts answer the same."""

    def __init__(self, fronts: OtherFronts) -> None:
        self._fronts = fronts

    @property
    def _models(self) -> ModelFronts:
        return self._fronts.models

    # -- traffic

    async def traffic(self, request: web.Request) -> web.Response:
        """What each model does by labels. POST changes it for the model that the body names, or all: all or none."""
        if request.method != "POST":
            return answer({"models": await self._states(request)})
        data = await read_ahead(request, self._fronts.config)
        if len(data) > INLINE_BYTES:
            raise too_large(INLINE_BYTES)
        body = parse_object(data, JsonLimits(num_bytes=INLINE_BYTES))
        named, is_dry_run = body.get("model"), body.get("dry_run", False)
        if named is not None and not isinstance(named, str):
            raise wrong_field("model", "must be a string", code="invalid_type")
        if not isinstance(is_dry_run, bool):
            raise wrong_field("dry_run", "must be true or false", code="invalid_type")
        wanted = self._models.names
        if named is not None:
            wanted = [self._models.name_of(self._models.group_of(named)[0])]
        states = await self._states(request)
        if named is None:
            _require_alike(states)
        planned = {name: await self._planned(request, name, body) for name in wanted}
        if named is None:
            _require_alike(planned)  # they may have changed since
            _require_labels(body, planned)
        if not is_dry_run:
            self._change(planned, None if named is None else wanted[0])
        return answer({"models": states | planned})

    async def _states(self, request: web.Request) -> dict[str, Any]:
        """What each model does now, of those that have a front that takes requests."""
        found: dict[str, Any] = {}
        for name in self._models.names:
            for front in self._ready(name)[:1]:
                status, body = await self._fronts.answer_of(request, front, method="GET")
                found |= {name: body} if status == 200 else {}
        return found

    async def _planned(self, request: web.Request, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What a model would do. `ApiError`: why it cannot be."""
        front = self._models.ready(self._models.group_of(name), name)[0]
        asked = orjson.dumps(dict(body) | {"model": name, "dry_run": True})
        status, found = await self._fronts.answer_of(request, front, body=asked)
        if status != 200:
            error = found["error"]
            raise ApiError(error["code"], f"model {name}: {error['message']}", param=error.get("param"))
        return dict(found)

    def _change(self, planned: Mapping[str, Mapping[str, Any]], model: str | None) -> None:
        """All fronts of a model follow what was planned for it, alike for all; None: of all models."""
        one = next(iter(planned.values()))
        rules = TrafficRules.parse(one["split"], one["shadow"])
        if self._models.name_of(self._fronts.number) in planned:
            self._fronts.member.follow(rules)
        self._fronts.member.tell_traffic(rules, model)

    # -- health

    async def health(self, request: web.Request, own: Health) -> Health:
        """The server takes requests if those for one of its models are taken. `own`: what this front says of itself."""
        names = self._models.names
        found = await asyncio.gather(*(self._health_of(request, name, own) for name in names))
        bodies = {name: body for name, (_, body) in zip(names, found, strict=True)}
        states = {name: {key: body.get(key) for key in ("status", "reason")} for name, body in bodies.items()}
        missing = [name for name, (status, _) in zip(names, found, strict=True) if status != 200]
        worse = [f"model {name} is {one['status']}: {one['reason']}" for name, one in states.items() if one["reason"]]
        body = {"models": states, "reason": "; ".join(worse) or None}
        if len(missing) == len(names):
            first = {"stage": None} | found[0][1]
            return 503, {key: first[key] for key in ("status", "stage", "progress") if key in first} | body
        is_whole = all(one["status"] == "ready" for one in states.values())
        return 200, {"status": "ready" if is_whole else "degraded", "missing_models": missing} | body

    async def _health_of(self, request: web.Request, name: str, own: Health) -> Health:
        """What the first of a model's fronts says that serves; else why none does.

        All but this one are asked at once, also those that start: they know why they wait, and how far they are.
        """
        group = self._models.group_of(name)
        is_own = self._fronts.number in group
        if is_own and own[0] == 200:
            return own
        others = [front for front in group if front != self._fronts.number]
        tasks = [asyncio.ensure_future(self._said_by(request, front)) for front in others]
        try:
            for said in asyncio.as_completed(tasks):
                if (found := await said)[0] == 200:
                    return found
        finally:
            for task in tasks:
                task.cancel()
        if is_own:
            return own
        answers = [task.result() for task in tasks]
        return next((found for found in answers if "stage" in found[1]), answers[0])  # a front's own word first

    async def _said_by(self, request: web.Request, front: int) -> Health:
        """What another front says of itself, or the supervisor if that one does not answer."""
        status, body = await self._fronts.answer_of(request, front, method="GET", limit_s=HEALTH_S)
        if "status" in body:
            return status, body
        state = self._fronts.member.state_of(front)
        reason = state.reason if state is not None else None
        return status, {"status": "loading", "reason": reason or body["error"]["message"]}

    def _ready(self, name: str) -> Sequence[int]:
        try:
            return self._models.ready(self._models.group_of(name), name)
        except ApiError:
            return ()


def _require_alike(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `ApiError` if the models do not follow the same rules now: they would not afterwards."""
    rules = {name: f"split {one['split']}, shadow {one['shadow']}" for name, one in states.items()}
    if len(set(rules.values())) > 1:
        raise _unnamed("; ".join(f"{name} has {text}" for name, text in rules.items()))


def _require_labels(body: Mapping[str, Any], planned: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `ApiError` if engines of some models have a label, and of others none."""
    for field, group in GROUP_OF.items():
        having = [name for name, one in planned.items() if one["engines"][group]]
        if body.get(field) is not None and 0 < len(having) < len(planned):
            raise _unnamed(f"{field} {body[field]}: only engines of {', '.join(having)} have this label")


def _unnamed(why: str) -> ApiError:
    return wrong_field("model", f"name it, as this server has several ({why})", code="missing_required_parameter")
