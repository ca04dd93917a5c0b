"""`GET /openapi.json` and `GET /docs`, the same document as an HTML page in one file without scripts.

With API keys both routes need a key. The page refers to no other file, so curl can save it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from html import escape
from typing import Any

import orjson
from aiohttp import web

from ..api.schema.hints import ModelLimits, Schema
from ..api.service import Service

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em; color: #222; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: #f4f4f4; padding: .6em; overflow-x: auto; }
summary { cursor: pointer; padding: .3em 0; }
table { border-collapse: collapse; width: 100%; margin: .4em 0 1em; }
td, th { border-bottom: 1px solid #ddd; padding: .25em .8em .25em 0; text-align: left; vertical-align: top; }
.method { display: inline-block; min-width: 4.5em; font-weight: bold; color: #05548a; }
.required::after { content: " *"; color: #b00; }
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


class DocsRoutes:
    """The handlers of one server. Document and page are made on the first request."""

    def __init__(self, service: Service, threads: Executor, version: str) -> None:
        self.service = service
        self._threads = threads
        self._version = version
        self._made: tuple[ModelLimits | None, bytes, bytes] | None = None

    def table(self) -> list[web.RouteDef]:
        """All routes; none with `disable_docs`."""
        if self.service.config.disable_docs:
            return []
        return [web.get("/openapi.json", self.document), web.get("/docs", self.page)]

    async def document(self, request: web.Request) -> web.Response:
        """`GET /openapi.json`."""
        document, _ = await self._make()
        return web.Response(body=document, content_type="application/json")

    async def page(self, request: web.Request) -> web.Response:
        """`GET /docs`."""
        _, html = await self._make()
        return web.Response(body=html, content_type="text/html", charset="utf-8", headers=HEADERS)

    async def _make(self) -> tuple[bytes, bytes]:
        """(JSON, HTML) for the current model. Made in a thread, once, as it takes 0.2 s."""
        limits = self._limits()
        if self._made is None or self._made[0] != limits:
            loop = asyncio.get_running_loop()
            document, html = await loop.run_in_executor(self._threads, self._render, limits)
            self._made = limits, document, html
        return self._made[1], self._made[2]

    def _render(self, limits: ModelLimits | None) -> tuple[bytes, bytes]:
        from .document import openapi  # imports the models of all answers, which only the document needs

        document = openapi(self.service.config, self._version, limits)
        return orjson.dumps(document), render(document).encode()

    def _limits(self) -> ModelLimits | None:
        engine = self.service.engine
        if engine is None:
            return None
        info = engine.info
        return ModelLimits(
            info.vocab_size, info.max_model_len, (*self.service.model_names, *self.service.adapter_names)
        )


# -- the page


def render(document: dict[str, Any]) -> str:
    """The document as HTML."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(info['title'])}</title><style>{STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        "<p>The same as JSON: <a href='openapi.json'>openapi.json</a></p>",
    ]
    operations = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    for group in dict.fromkeys(operation[0] for operation in operations):
        parts.append(f"<h2>{escape(group)}</h2>")
        parts += [_operation(*operation[1:]) for operation in operations if operation[0] == group]
    parts.append("<h2>models</h2>")
    parts += [_model(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    keys = " or ".join(name for choice in operation["security"] for name in choice) or "none"
    parts = [
        f"<details id='{escape(operation['operationId'])}'><summary><span class=method>{method}</span> "
        f"<code>{escape(path)}</code> {escape(operation['summary'])}</summary><p>Key: {escape(keys)}</p>"
    ]
    parts += [
        _table([(parameter["name"], parameter["schema"], parameter.get("description", ""), parameter.get("required"))])
        for parameter in operation["parameters"]
    ]
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        description = escape(operation["requestBody"]["description"])
        parts.append(f"<p>Body: {_type(schema)}. {description}</p>")
    rows = []
    for status, response in operation["responses"].items():
        forms = "; ".join(
            f"{escape(kind)}: {_type(content['schema'])}" for kind, content in response["content"].items()
        )
        rows.append(f"<tr><td>{status}<td>{escape(response['description'])}<td>{forms}")
    return "".join([*parts, "<table>", *rows, "</table></details>"])


def _model(name: str, schema: Schema) -> str:
    required = schema.get("required", [])
    rows = [
        (field, part, part.get("description", ""), field in required)
        for field, part in schema.get("properties", {}).items()
    ]
    relations = "".join(f"<pre>{escape(orjson.dumps(part).decode())}</pre>" for part in schema.get("allOf", []))
    together = f"<p>And:</p>{relations}" if relations else ""
    description = escape(schema.get("description", ""))
    return (
        f"<details id='{name}'><summary><code>{name}</code> {description}</summary>{_table(rows)}{together}</details>"
    )


def _table(rows: list[tuple[str, Schema, str, Any]]) -> str:
    lines = [
        f"<tr><td><code{' class=required' if is_required else ''}>{escape(name)}</code><td>{_type(schema)}"
        f"<td>{escape(description)}"
        for name, schema, description, is_required in rows
    ]
    return "<table>" + "".join(lines) + "</table>"


def _type(schema: Schema) -> str:
    """A schema in a few words of HTML, with links to the models that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return " or ".join(
            f"<code>{escape(orjson.dumps(value).decode())}</code>"
            for value in schema.get("enum", [schema.get("const")])
        )
    kinds = schema.get("type", "anything")
    kind = " or ".join(kinds) if isinstance(kinds, list) else kinds
    if kind == "array":
        kind += f" of {_type(schema.get('items', {}))}"
    bounds = ", ".join(_bounds(schema))
    return f"{kind} ({bounds})" if bounds else kind


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "minLength": "minimum characters",
    "maxLength": "maximum characters",
    "minItems": "minimum items",
    "maxItems": "maximum items",
    "pattern": "pattern",
    "default": "default",
}


def _bounds(schema: Schema) -> Iterator[str]:
    for keyword, words in _BOUNDS.items():
        if schema.get(keyword) not in (None, 0 if keyword == "minItems" else None):
            yield f"{words} <code>{escape(str(schema[keyword]))}</code>"
