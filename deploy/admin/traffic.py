"""The split of requests between versions of a model, read and changed while the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from aiohttp import web

from ...stages.errors import ConfigError
from ...stages.traffic.traffic_rules import Traffic, TrafficRules, TrafficShare
from ..api.schema.body import Body
from ..api.schema.validation import read_body
from ..api.service import Service
from ..errors import ApiError
from ..http.body_reader import read
from ..http.responses import answer

SHARES = ("split", "shadow")  # fields of the body, in the order of the rules


class TrafficBody(Body):
    """The body of `POST /admin/traffic`. A field that is left out stays as it is; null ends it."""

    split: str | None = None  # as --split
    shadow: str | None = None  # as --shadow
    model: str | None = None  # whose engines it is about, of several; None: all, which must then be alike in this
    dry_run: bool = False  # only says what would be


class TrafficRoutes:
    """The handlers of one server."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self.service = service
        self._threads = threads

    async def traffic(self, request: web.Request) -> web.Response:
        """`GET /admin/traffic`: what this front does by labels, and what became of the requests of each side."""
        return answer(self._require().to_json())

    async def change(self, request: web.Request) -> web.Response:
        """`POST /admin/traffic`: follows other shares from now on, at all fronts of this server."""
        traffic = self._require()
        body = await read(request, self.service.config, self._threads, self._body)
        self.service.require_model(body.model)
        rules = _changed(traffic.rules, body)
        if (problem := traffic.problem(rules)) is not None:
            raise ApiError("invalid_value", problem, param="split")
        if body.dry_run:
            texts = {name: None if one is None else str(one) for name, one in zip(SHARES, rules.shares, strict=True)}
            return answer(traffic.to_json() | texts | {"engines": traffic.num_engines(rules)})
        traffic.change(rules)
        if self.service.fronts is not None:
            self.service.fronts.tell_traffic(rules)
        return answer(traffic.to_json())

    def _require(self) -> Traffic:
        traffic = self.service.require_some_engine().traffic
        if traffic is None:
            raise ApiError("not_found", "this server has one engine; traffic is split by the labels of several")
        return traffic

    def _body(self, raw: Mapping[str, Any]) -> TrafficBody:
        return read_body(TrafficBody, raw, True)[0]  # a misspelt field would change nothing in silence


def _changed(rules: TrafficRules, body: TrafficBody) -> TrafficRules:
    shares: dict[str, TrafficShare | None] = {"split": rules.split, "shadow": rules.shadow}
    for name in body.model_fields_set & shares.keys():
        text = getattr(body, name)
        try:
            shares[name] = None if text is None else TrafficShare.parse(f"{name} =", text)
        except ConfigError as error:
            raise ApiError("invalid_value", str(error), param=name) from None
    try:
        return TrafficRules(**shares)
    except ConfigError as error:
        raise ApiError("invalid_value", str(error), param="split") from None
