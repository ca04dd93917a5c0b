"""The OpenAPI 3.1 document, made from the table of operations and the models of bodies and answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ...stages.config import EngineConfig
from ..api.schema.hints import ModelLimits, Schema, fill_in_limits
from ..api.schema.shapes import Error
from ..config import ServerConfig
from ..http.body_reader import MAX_CHUNKS
from ..settings.fields import Kind, fields_of
from .docstrings import add_descriptions
from .operations import Content, Operation, all_operations

RUNTIME_LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # with API keys, if `enable_runtime_lora`
REF = "#/components/schemas/{model}"
SECURITY_SCHEMES: dict[str, Schema] = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key"},
    "keyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key"},
    "adminKey": {"type": "http", "scheme": "bearer", "description": "An admin key"},
    "adminKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An admin key"},
}
SECURITY: dict[str, list[dict[str, list[str]]]] = {
    "open": [],
    "key": [{"key": []}, {"keyHeader": []}],
    "admin": [{"adminKey": []}, {"adminKeyHeader": []}],
}


def served(config: ServerConfig) -> tuple[Operation, ...]:
    """The operations of a server with this configuration."""
    operations: Iterable[Operation] = all_operations()
    if config.has_open_runtime_lora:
        operations = [replace(each, access="key") if each.path in RUNTIME_LORA else each for each in operations]
    left_out = {"/openapi.json", "/docs"} if config.disable_docs else set()
    return tuple(
        operation
        for operation in operations
        if operation.path not in left_out and (config.admin_key or operation.access != "admin")
    )


def openapi(config: ServerConfig, version: str, limits: ModelLimits | None) -> dict[str, Any]:
    """The document of a server with this configuration.

    `limits` is None while no model is loaded; bounds that depend on the model are then missing.
    """
    has_keys = bool(config.api_key)
    operations = served(config)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _operation(operation, config)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "millrace",
            "version": version,
            "description": "An LLM serving engine with OpenAI's API. "
            + (
                "Unknown fields are rejected with 400 (strict_fields)."
                if config.strict_fields
                else "Unknown fields are ignored, logged once, and listed in the header X-Ignored-Fields."
            ),
        },
        "paths": paths,
        "components": {"schemas": _schemas(operations, config), "securitySchemes": _schemes(operations, has_keys)},
    }
    filled_in: dict[str, Any] = fill_in_limits(document, limits)
    return filled_in


# -- one operation


def _operation(operation: Operation, config: ServerConfig) -> dict[str, Any]:
    has_keys = bool(config.api_key)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.group],
        "parameters": _parameters(operation),
        "responses": _responses(operation, has_keys),
        "security": SECURITY[operation.access] if has_keys or operation.access == "admin" else [],
    }
    if operation.body is not None:
        described["requestBody"] = {
            "description": f"At most {config.max_body_bytes} bytes in at most {MAX_CHUNKS} chunks, uncompressed",
            "required": True,
            "content": {"application/json": {"schema": _ref(operation.body)}},
        }
    return described


_REQUEST_ID: Schema = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Request id of up to 128 letters, digits and _.:/-; any other is replaced",
    "schema": {"type": "string"},
}


def _parameters(operation: Operation) -> list[Schema]:
    in_path = [_path_parameter(name, what) for name, what in operation.parameters.items()]
    in_query = [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    return [*in_path, *in_query, _REQUEST_ID]


def _path_parameter(name: str, what: str) -> Schema:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": what, "schema": schema}


def _responses(operation: Operation, has_keys: bool) -> dict[str, Any]:
    responses = {
        str(status): _response(HTTPStatus(status).phrase, contents, operation)
        for status, contents in operation.answers.items()
    }
    if operation.links:
        responses["200"]["links"] = {name: dict(link) for name, link in operation.links.items()}
    if operation.body is not None:
        responses["200"]["headers"] |= _IGNORED_FIELDS | _ATTEMPTS
    for status, codes in operation.codes_by_status(has_keys).items():
        error = _response("One of: " + ", ".join(codes), (Content(operation.error),), operation)
        if status in (429, 503):
            error["headers"] |= _RETRY_AFTER
        if str(status) in responses:
            error["content"]["application/json"]["schema"] = {
                "anyOf": [responses[str(status)]["content"]["application/json"]["schema"], _ref(operation.error)]
            }
        responses[str(status)] = error
    return responses


def _response(description: str, contents: Iterable[Content], operation: Operation) -> dict[str, Any]:
    return {
        "description": description,
        "headers": dict(_ALWAYS),
        "content": {content.content_type: {"schema": _content(content, operation)} for content in contents},
    }


def _content(content: Content, operation: Operation) -> Schema:
    if content.shape is not None:
        return _ref(content.shape)
    if content.line is not None:
        one = {"anyOf": [_ref(content.line), _ref(operation.error)]}
        lines = {
            "description": "JSON objects, one a line",
            "contentMediaType": "application/json",
            "contentSchema": one,
        }
        return {"type": "string"} | lines
    if content.event is None:
        return {"type": "string"}
    data = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(content.event), _ref(operation.error)]},
    }
    if content.is_named:
        return {
            "type": "object",
            "description": "One server-sent event; its name is the type of its data",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"} | data},
            "required": ["event", "data"],
        }
    data = {"type": "string", "if": {"const": "[DONE]"}, "else": data}
    return {
        "type": "object",
        "description": "One server-sent event; the data of the last one is the text [DONE]",
        "properties": {"data": data},
        "required": ["data"],
    }


_ALWAYS: Schema = {"X-Request-Id": {"description": "The id of the request", "schema": {"type": "string"}}}
_IGNORED_FIELDS: Schema = {
    "X-Ignored-Fields": {
        "description": "Names of unknown fields, which are ignored: the first 32",
        "schema": {"type": "string"},
    }
}
_ATTEMPTS: Schema = {
    "X-Millrace-Attempts": {
        "description": "How often the request was sent to an engine, until these headers were; with several engines",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_RETRY_AFTER: Schema = {
    "Retry-After": {"description": "Seconds to wait before a retry", "schema": {"type": "integer", "minimum": 1}},
    "X-Queue-Position": {
        "description": "Requests that wait before this one; with 429",
        "schema": {"type": "integer", "minimum": 0},
    },
}


# -- components


def _schemas(operations: Iterable[Operation], config: ServerConfig) -> dict[str, Schema]:
    models: dict[type[BaseModel], None] = {Error: None}
    for operation in operations:
        models[operation.error] = None
        contents = [content for answer in operation.answers.values() for content in answer]
        found = [operation.body, *(content.shape for content in contents), *(content.event for content in contents)]
        found += [content.line for content in contents]
        models |= dict.fromkeys(model for model in found if model is not None)
    _, generated = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas: dict[str, Schema] = generated["$defs"]
    add_descriptions(schemas)
    for side, kind in (("engine", EngineConfig), ("server", type(config))):
        schemas["Configuration"]["properties"][side]["properties"] = _settings(kind)
    if config.strict_fields:
        for operation in operations:
            if operation.body is not None:
                schema = schemas[operation.body.__name__]
                for part in (schema, schema["properties"].get("sampling_params", {})):
                    part["additionalProperties"] = False
    return schemas


def _settings(kind: Kind) -> Schema:
    """Meaning and unit of each setting in the answer of /server_info."""
    return {
        name: {"description": field.info.help} | ({"x-unit": field.info.unit} if field.info.unit else {})
        for name, field in fields_of(kind).items()
    }


def _schemes(operations: Iterable[Operation], has_keys: bool) -> dict[str, Schema]:
    needed = {"admin"} & {operation.access for operation in operations} | ({"key"} if has_keys else set())
    names = [name for access in sorted(needed) for scheme in SECURITY[access] for name in scheme]
    return {name: SECURITY_SCHEMES[name] for name in names}


def _ref(model: type[BaseModel]) -> Schema:
    return {"$ref": REF.format(model=model.__name__)}
